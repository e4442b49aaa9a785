"""A power failure takes what was not synced: the run resumes with the same bits and records as an uninterrupted one."""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.job.processes import finish, run, start, wait_until

from .test_kill import COMPILED, WHEN_BEST_CHANGES, WHEN_METRICS_GROW, WHEN_NAMED, Wait, assert_same_run, words_for


class Disk:
    """What the disk has for certain: sizes of synced files, and the entries of synced directories, by inode."""

    def __init__(self, log: Path) -> None:
        self.sizes: dict[int, int] = {}
        self.entries: dict[int, set[int]] = {}
        for line in log.read_text().splitlines():
            kind, inode, *numbers = line.split()
            if kind == "file":
                self.sizes[int(inode)] = int(numbers[0])
            else:
                self.entries[int(inode)] = {int(number) for number in numbers}

    def lose_the_rest(self, directory: Path) -> list[str]:
        """Bring a directory to the state after a power failure; return what was lost."""
        lost: list[str] = []
        durable = self.entries.get(directory.stat().st_ino, set())
        for path in sorted(directory.iterdir()):
            inode = path.stat().st_ino
            if inode not in durable:
                lost.append(path.name)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.is_dir():
                lost += self.lose_the_rest(path)
            elif (size := self.sizes.get(inode, 0)) < path.stat().st_size:
                lost.append(f"{path.stat().st_size - size} bytes of {path.name}")
                os.truncate(path, size)
        return lost


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("shim") / "synced.so"
    source = Path(__file__).parent / "files" / "synced.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def cut_power(words: Sequence[str | Path], run_dir: Path, moment: Sequence[Wait], shim: Path) -> list[str]:
    """Run until the moment, kill, and lose what was not synced."""
    log, output = run_dir.parent.with_name("synced.txt"), run_dir.parent.with_name("cut.txt")
    happened = moment[0](run_dir)
    process = start(words, output, {"LD_PRELOAD": str(shim), "HEADRACE_SYNC_LOG": str(log)})
    for wait in moment[1:]:
        wait_until(process, happened)
        happened = wait(run_dir)
    wait_until(process, happened)
    process.send_signal(signal.SIGKILL)
    finish(process)
    return Disk(log).lose_the_rest(run_dir)


def test_a_power_failure_loses_no_record_before_the_checkpoint(tmp_path: Path, shim: Path) -> None:
    whole, cut, output = tmp_path / "runs" / "whole", tmp_path / "runs" / "cut", tmp_path / "whole.txt"
    lost = cut_power(words_for(cut, 3), cut, (COMPILED, WHEN_NAMED[1], WHEN_METRICS_GROW[1]), shim)
    lost += cut_power(["resume", cut], cut, (COMPILED, WHEN_BEST_CHANGES[1]), shim)
    assert any("log.txt" in each for each in lost), "nothing was lost: the test sees no difference"
    assert run(["resume", cut], tmp_path / "cut.txt") == 0, (tmp_path / "cut.txt").read_text()
    assert run(words_for(whole, 3), output) == 0, output.read_text()
    assert_same_run(whole, cut, 3)
