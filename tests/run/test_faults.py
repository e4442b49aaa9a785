"""Real faults of training jobs: killed and hung processes, a full disk, a damaged checkpoint; and what comes after."""

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.checkpoint.store import list_checkpoints, newest_good
from headrace.core.errors import INTERRUPTED_EXIT_CODE
from headrace.telemetry.records import Note, RunEnd, TrainRecord, read_records
from tests.fork_server import Popen
from tests.job.processes import SRC
from tests.job.test_control_join import finish, last_line
from tests.job.test_launcher import is_running

from .conftest import assert_close, assert_same_bits, final_state

OPTIONS = shlex.split("""
    --config none --dataset digits --model-name toy_model_bn --micro-batch-size 8 --num-replicas 2
    --weight-updates-per-epoch 6 --logs-per-epoch 1 --ckpts-per-epoch 1 --validations-per-epoch 0 --ema-decay 0.9
    --optimizer-params '{"momentum": 0.9}' --lr-schedule-params '{"initial_learning_rate": 0.002}' --bn-momentum 0.9
    --progress plain --num-epochs 10
""")
LIMIT = 20


def start(words: list[str], folder: Path, launcher: list[str] | None) -> subprocess.Popen[str]:
    """Start `headrace words...` in this folder, or a job of it when there are words for the launcher."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("HEADRACE_", "OMPI_"))}
    environ |= {"PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    launched = ["launch", *launcher, "--"] if launcher is not None else []
    command = [sys.executable, "-m", "headrace", *launched, *words]
    return Popen(command, env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train_words(name: str, *more: str) -> list[str]:
    return ["train", *OPTIONS, "--compilation-cache-dir", "programs", "--run-name", name, *more]


def pids(job: subprocess.Popen[str]) -> dict[int, int]:
    """Return {process: pid} of a launcher's children, from what the kernel says of them."""
    found = {}
    for child in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
        said = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        (number,) = [int(row.split(b"=")[1]) for row in said if row.startswith(b"HEADRACE_PROCESS=")]
        found[number] = int(child)
    return found


def read_until(job: subprocess.Popen[str], text: str) -> str:
    assert job.stdout is not None
    printed = ""
    for line in job.stdout:
        printed += line
        if text in line:
            return printed
    raise AssertionError(printed)


def hurt(job: subprocess.Popen[str], victim: int, number: signal.Signals, when: str) -> tuple[int, str, float, int]:
    """Send a signal to one process when the job has printed something; return its code, last words, time, the pid."""
    printed = read_until(job, when)
    pid = pids(job)[victim]
    os.kill(pid, number)
    begin = time.monotonic()
    code, rest = finish(job)
    return code, printed + rest, time.monotonic() - begin, pid


def steps(run: Path) -> list[int]:
    return [record.step for record in read_records(run) if isinstance(record, TrainRecord)]


def test_a_killed_worker_loses_nothing_before_the_last_checkpoint(tmp_path: Path) -> None:
    """Of two processes one is killed; one process alone goes on to the end."""
    run = tmp_path / "runs" / "hurt"
    job = start(train_words("hurt"), tmp_path, ["--num-instances", "2"])
    code, printed, seconds, pid = hurt(job, 1, signal.SIGKILL, "epoch 3.00/10")
    assert code == 128 + signal.SIGKILL
    assert seconds < LIMIT / 2
    assert re.fullmatch(
        rf"headrace launch: process 1 \(pid {pid}, host .*\) died: signal 9 \(SIGKILL\)", last_line(printed)
    )
    assert "Traceback" not in printed
    assert any("process 1 (pid" in note.text for note in read_records(run) if isinstance(note, Note))
    newest = newest_good(run / "checkpoints")[0]
    assert newest is not None
    saved = int(newest.name.removeprefix("step_"))
    assert saved >= 2 * 6
    code, printed = finish(start(["resume", str(run)], tmp_path, None))
    assert code == 0, printed
    assert f"resume from step {saved} " in printed
    assert steps(run) == list(range(6, 61, 6))


@pytest.mark.slow
def test_another_number_of_processes_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Process 0 is killed, then a worker; with two processes, with one again; compared with an unhurt run of one."""
    run, two = tmp_path / "runs" / "hurt", ["--num-instances", "2"]
    for words, victim, when in ((train_words("hurt"), 0, "3.00/10"), (["resume", str(run)], 1, "6.00/10")):
        code, printed, seconds, pid = hurt(start(words, tmp_path, two), victim, signal.SIGKILL, f"epoch {when}")
        assert code == 128 + signal.SIGKILL
        assert seconds < LIMIT / 2
        assert last_line(printed).startswith(f"headrace launch: process {victim} (pid {pid}, ")
    for words in (["resume", str(run)], train_words("whole")):
        code, printed = finish(start(words, tmp_path, None))
        assert code == 0, printed
    assert steps(run) == list(range(6, 61, 6))
    assert_close(final_state(run), final_state(tmp_path / "runs" / "whole"))


@pytest.mark.slow
def test_the_same_processes_give_the_same_bits(tmp_path: Path) -> None:
    run, two = tmp_path / "runs" / "hurt", ["--num-instances", "2"]
    hurt(start(train_words("hurt"), tmp_path, two), 1, signal.SIGKILL, "epoch 3.00/10")
    for words in (["resume", str(run)], train_words("whole")):
        code, printed = finish(start(words, tmp_path, two))
        assert code == 0, printed
    assert_same_bits(final_state(run), final_state(tmp_path / "runs" / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_ends_training(tmp_path: Path, victim: int) -> None:
    """With the times as they come: 20 s."""
    job = start(train_words("hung", "--num-epochs", "2000"), tmp_path, ["--num-instances", "2"])
    code, printed, seconds, pid = hurt(job, victim, signal.SIGSTOP, "epoch 3.00/2000")
    assert code != 0
    assert seconds < LIMIT
    assert re.fullmatch(
        rf"headrace launch: process {victim} \(pid {pid}, host .*\) hung and was killed", last_line(printed)
    )
    assert not is_running(pid)
    code, printed = finish(start(["resume", "runs/hung", "--num-epochs", "5"], tmp_path, None))
    assert code == 0, printed


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["local", "mpirun"])
def test_ctrl_c_saves_once_and_goes_on(tmp_path: Path, driver: str) -> None:
    if driver == "mpirun":
        from shutil import which

        if not which("mpirun"):
            pytest.skip("mpirun (Debian: openmpi-bin) is not installed")
    launcher = ["--num-instances", "2", "--driver", driver, "--mpi-global-args=--allow-run-as-root --oversubscribe"]
    job = start(train_words("left", "--num-epochs", "2000", "--ckpts-per-epoch", "0.001"), tmp_path, launcher)
    printed = read_until(job, "epoch 3.00/2000")
    job.send_signal(signal.SIGINT)
    code, rest = finish(job)
    assert code == INTERRUPTED_EXIT_CODE, printed + rest
    run = tmp_path / "runs" / "left"
    (end,) = [record for record in read_records(run) if isinstance(record, RunEnd)]
    assert end.outcome == "interrupted"
    assert end.step >= 3 * 6
    (checkpoint,) = list_checkpoints(run / "checkpoints")
    assert checkpoint.name == f"step_{end.step:08d}"
    assert "next        headrace resume runs/left" in printed + rest
    code, printed = finish(start(["resume", "runs/left", "--num-epochs", str(end.step // 6 + 1)], tmp_path, None))
    assert code == 0, printed
    assert steps(run)[-1] == 6 * (end.step // 6 + 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 120 kB, where the tests may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no right to mount a small file system here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_while_saving(tmp_path: Path, small_disk: Path, processes: int) -> None:
    places = ["--checkpoint-dir", str(small_disk), "--max-ckpts-to-keep", "1000", "--num-epochs", "2000"]
    launcher = ["--num-instances", str(processes)]
    code, printed = finish(start(train_words("full", *places), tmp_path, launcher))
    assert code == 2, printed
    assert "No space left on device" in printed
    assert "Traceback" not in printed
    assert not list(small_disk.glob(".tmp-*")), "half a checkpoint is left"
    newest, damaged = newest_good(small_disk)
    assert newest is not None
    assert not damaged
    run = tmp_path / "runs" / "full"
    (end,) = [record for record in read_records(run) if isinstance(record, RunEnd)]
    assert end.outcome == "failed"
    # Once there is room again, the run goes on.
    for checkpoint in list_checkpoints(small_disk)[:-1]:
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    step = int(newest.name.removeprefix("step_"))
    code, printed = finish(start(["resume", str(run), "--num-epochs", str(step // 6 + 2)], tmp_path, launcher))
    assert code == 0, printed
    assert steps(run)[-1] == step + 12


@pytest.mark.slow
def test_a_limit_on_files_while_saving(tmp_path: Path) -> None:
    """Where nothing can be mounted: the kernel refuses to let a file grow (RLIMIT_FSIZE), as a quota does."""
    words = train_words("limited", "--model-name", "cifar_resnet8", "--weight-updates-per-epoch", "1")
    environ = {**os.environ, "PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu"}
    job = subprocess.Popen(
        [sys.executable, "-m", "headrace", *words, "--compilation-cache-dir", "none"],
        env=environ,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    resource.prlimit(job.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))  # a checkpoint has 600 kB
    code, printed = finish(job)
    assert code == 2, printed
    assert "File too large" in printed
    assert "Traceback" not in printed
    assert newest_good(tmp_path / "runs" / "limited" / "checkpoints") == (None, [])


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run, two = tmp_path / "runs" / "damaged", ["--num-instances", "2"]
    code, printed = finish(start(train_words("damaged", "--num-epochs", "3"), tmp_path, two))
    assert code == 0, printed
    newest = list_checkpoints(run / "checkpoints")[-1]
    assert newest.name == "step_00000018"
    (file,) = newest.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    code, printed = finish(start(["resume", str(run)], tmp_path, two))
    assert code == 0, printed
    assert "step_00000018" in printed
    assert re.search(r"\[0\] (warning|note).*step_00000018", printed)
    assert json.loads((run / "config.json").read_text())["values"]["num_replicas"] == 2
    assert steps(run) == [6, 12, 18]
    code, printed = finish(start(train_words("whole", "--num-epochs", "3"), tmp_path, two))
    assert code == 0, printed
    assert_same_bits(final_state(run), final_state(tmp_path / "runs" / "whole"))


@pytest.mark.slow
def test_a_process_that_raises_ends_training(tmp_path: Path) -> None:
    """One host has another dataset: the difference is found before the start, and every process ends."""
    words = shlex.join([sys.executable, "-m", "headrace", *train_words("other")])
    script = tmp_path / "start.sh"
    script.write_text(f'[ "$HEADRACE_PROCESS" = 1 ] && more="--seed 7"\nexec {words} $more\n')
    code, printed = finish(start(["bash", str(script)], tmp_path, ["--num-instances", "2"]))
    assert code == 2, printed
    assert "seed: 0 (process 0), 7 (process 1)" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "runs").exists()
