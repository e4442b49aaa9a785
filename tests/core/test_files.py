"""One process at a time writes into a run directory."""

import subprocess
import sys
from pathlib import Path

import pytest

import headrace.checkpoint
from headrace.core.directory_lock import lock_directory
from headrace.core.errors import CheckpointError

SOURCE = str(Path(headrace.checkpoint.__file__).parents[2])
HOLD = """
import sys, time
from headrace.core.directory_lock import lock_directory
with lock_directory(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_holder_is_refused_with_the_number_of_the_first(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": SOURCE}) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with (
            pytest.raises(CheckpointError, match=f"process \\(pid {other.pid}\\) is writing"),
            lock_directory(tmp_path),
        ):
            pass
        other.kill()  # a killed holder holds nothing
        other.wait()
        with lock_directory(tmp_path):
            pass


def test_the_lock_is_free_after_an_error_in_the_body(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lock_directory(tmp_path):
        _ = 1 / 0
    with lock_directory(tmp_path):
        pass


def test_a_directory_that_is_not_there_is_an_error_for_people(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Cannot write into"), lock_directory(tmp_path / "absent"):
        pass


def test_a_directory_that_was_moved_removed_or_replaced_is_noticed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with lock_directory(run) as lock:
        lock.check()
        run.rename(tmp_path / "moved")
        with pytest.raises(CheckpointError, match="was removed, moved or replaced"):
            lock.check()
        run.mkdir()
        with pytest.raises(CheckpointError, match="another run"):
            lock.check()
        run.rmdir()
        (tmp_path / "moved").rename(run)
        lock.check()  # it was moved back
    with lock_directory(run):
        pass


def test_a_lock_whose_file_was_removed_no_longer_counts(tmp_path: Path) -> None:
    with lock_directory(tmp_path) as lock:
        (tmp_path / ".lock").unlink()
        with lock_directory(tmp_path), pytest.raises(CheckpointError, match=r"or \.lock in it"):
            lock.check()
