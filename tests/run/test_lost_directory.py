"""A run whose directory is taken away, closed terminals and signals, in real processes."""

import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.core.errors import INTERRUPTED_EXIT_CODE, CheckpointError
from headrace.run.restored import Restored, refuse_changed_dataset
from headrace.telemetry.records import RunEnd, read_records
from tests.job.processes import SRC, finish, start, wait_until

OPTIONS = shlex.split("""
    --config none --dataset digits --model-name toy_model_bn --micro-batch-size 16 --weight-updates-per-epoch 4
    --logs-per-epoch 1 --ckpts-per-epoch 1 --no-validation --num-epochs 100000 --call-seconds 0.1
""")


def words_for(run: Path, *more: str) -> list[str]:
    return ["train", *OPTIONS, "--log-dir", str(run.parent), "--run-name", run.name, "--progress", "plain", *more]


def has_checkpoint(run: Path) -> Callable[[], bool]:
    return lambda: any((run / "checkpoints").glob("step_*"))


def started_run(run: Path, output: Path) -> subprocess.Popen[bytes]:
    process = start(words_for(run), output)
    assert wait_until(process, has_checkpoint(run)), output.read_text()
    return process


def test_a_removed_directory_ends_the_run_and_is_not_made_again(tmp_path: Path) -> None:
    run, output = tmp_path / "runs" / "gone", tmp_path / "output.txt"
    process = started_run(run, output)
    shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(run, ignore_errors=True)  # a checkpoint may have been renamed into it meanwhile
    assert finish(process) == CheckpointError.exit_code, output.read_text()
    assert f"{run}, or .lock in it, was removed, moved or replaced" in output.read_text()
    assert "Traceback" not in output.read_text()
    assert "finished" not in output.read_text()
    assert not run.exists()


def test_a_replaced_directory_is_not_written_to(tmp_path: Path) -> None:
    run, output = tmp_path / "runs" / "moved", tmp_path / "output.txt"
    process = started_run(run, output)
    run.rename(tmp_path / "runs" / "away")
    run.mkdir()
    assert finish(process) == CheckpointError.exit_code, output.read_text()
    assert "was removed, moved or replaced" in output.read_text()
    assert list(run.iterdir()) == []
    run.rmdir()
    (tmp_path / "runs" / "away").rename(run)
    resumed = start(["resume", run, "--progress", "plain"], output)
    assert wait_until(resumed, lambda: "resume from step" in output.read_text()), output.read_text()
    resumed.kill()
    resumed.wait()


def test_a_directory_that_becomes_read_only_ends_the_run(tmp_path: Path) -> None:
    run, output = tmp_path / "runs" / "closed", tmp_path / "output.txt"
    # root may write everywhere, unless it gives that right away
    limit = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    if limit and (not shutil.which("setpriv") or subprocess.run([*limit, "true"], check=False).returncode):
        pytest.skip("setpriv cannot take away root's right to write everywhere")
    environ = {**os.environ, "PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    with output.open("ab") as file:
        command = [*limit, sys.executable, "-m", "headrace", *words_for(run)]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environ)
    assert wait_until(process, has_checkpoint(run)), output.read_text()
    (run / "checkpoints").chmod(0o500)
    try:
        assert finish(process) == CheckpointError.exit_code, output.read_text()
    finally:
        (run / "checkpoints").chmod(0o700)
    assert "Permission denied" in output.read_text()
    assert "Traceback" not in output.read_text()
    last = read_records(run)[-1]
    assert isinstance(last, RunEnd)
    assert last.outcome == "failed"


def test_sigquit_prints_where_threads_are_and_sighup_saves(tmp_path: Path) -> None:
    run, output = tmp_path / "runs" / "hup", tmp_path / "output.txt"
    process = started_run(run, output)
    for times in range(1, 21):  # reading frames while their threads run would crash after some
        process.send_signal(signal.SIGQUIT)
        # the main thread comes last
        assert wait_until(process, lambda: output.read_text().count("thread MainThread:") >= times), output.read_text()  # noqa: B023
    assert 'run/fit.py", line' in output.read_text().rpartition("thread MainThread:")[2]
    assert "thread feed_0:" in output.read_text()
    process.send_signal(signal.SIGHUP)
    assert finish(process) == INTERRUPTED_EXIT_CODE, output.read_text()
    assert "SIGHUP: saved at step" in output.read_text() or "nothing is lost" in output.read_text()


@pytest.mark.parametrize("progress", ["bar", "plain"])
def test_a_closed_terminal_does_not_lose_the_run(tmp_path: Path, progress: str) -> None:
    run = tmp_path / "runs" / "terminal"
    environ = {**os.environ, "PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu", "TERM": "xterm"}
    command = [sys.executable, "-m", "headrace", *words_for(run, "--progress", progress)]
    terminal, inside = pty.openpty()
    # setsid makes it the controlling terminal, whose end sends SIGHUP
    process = subprocess.Popen(["setsid", "--ctty", *command], stdin=inside, stdout=inside, stderr=inside, env=environ)
    os.close(inside)
    while not has_checkpoint(run)():
        os.read(terminal, 4096)
    os.close(terminal)
    assert finish(process) == INTERRUPTED_EXIT_CODE
    last = read_records(run)[-1]
    assert isinstance(last, RunEnd)
    assert last.outcome == "interrupted"


@pytest.mark.parametrize("prefix", [[], ["nohup"]])
def test_a_closed_pipe_does_not_lose_the_run(tmp_path: Path, prefix: list[str]) -> None:
    run, errors = tmp_path / "runs" / "pipe", tmp_path / "errors.txt"
    environ = {**os.environ, "PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu"}
    command = [*prefix, sys.executable, "-m", "headrace", *words_for(run)]
    with errors.open("ab") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, env=environ)
    assert process.stdout is not None
    assert wait_until(process, has_checkpoint(run)), errors.read_text()
    process.stdout.close()  # as `headrace train | head` does
    if prefix:  # it ignores SIGHUP, and is meant to continue
        file, before = run / "metrics.jsonl", (run / "metrics.jsonl").read_bytes().count(b"\n")
        assert wait_until(process, lambda: file.read_bytes().count(b"\n") > before + 10)
        process.send_signal(signal.SIGTERM)
    assert finish(process) == INTERRUPTED_EXIT_CODE, errors.read_text()
    assert "the program that reads the output has ended" in errors.read_text()
    last = read_records(run)[-1]
    assert isinstance(last, RunEnd)
    assert last.outcome == "interrupted"


def test_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    run, output = tmp_path / "runs" / "nohup", tmp_path / "output.txt"
    with output.open("ab") as file:
        command = ["nohup", sys.executable, "-m", "headrace", *words_for(run)]
        environ = {**os.environ, "PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ)
    assert wait_until(process, has_checkpoint(run)), output.read_text()
    process.send_signal(signal.SIGHUP)
    file, before = run / "metrics.jsonl", (run / "metrics.jsonl").read_bytes().count(b"\n")
    assert wait_until(process, lambda: file.read_bytes().count(b"\n") > before + 3)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == INTERRUPTED_EXIT_CODE, output.read_text()
    assert "SIGHUP" not in output.read_text()


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({"images": 90, "labels": "b"}, "The training set has changed .*: 100 images then, 90 now"),
        ({"images": 100, "labels": "b"}, "its labels differ"),
    ],
)
def test_a_changed_dataset_is_refused(tmp_path: Path, now: dict[str, object], expected: str) -> None:
    before = {"images": 100, "labels": "a"}
    restored = Restored(directory=None, step=8, dataset={"training": before})  # pyright: ignore[reportArgumentType]
    refuse_changed_dataset(restored, {"training": before})
    with pytest.raises(CheckpointError, match=expected):
        refuse_changed_dataset(restored, {"training": now})
