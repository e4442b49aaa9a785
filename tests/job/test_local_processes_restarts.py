"""A job that is started again after a loss: by itself, to the same bits; and what is not started again."""

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.checkpoint.store import list_checkpoints, load
from headrace.core.errors import ConfigError
from headrace.job.launch_request import LaunchRequest, parse_launch_options
from headrace.job.process_info import detect_restart
from headrace.job.restarts import JobEnd, fitting, run_with_restarts
from headrace.job.variables import BATCH_REPLICAS, RESTART
from headrace.telemetry.records import Note, TrainRecord, read_records
from tests.run.test_processes import TINY

from .processes import PATIENCE
from .test_control_join import finish
from .test_launcher import is_running, needs_mpirun, start

LOST = JobEnd(code=137, reason="process 1 (pid 7, host a) died: signal 9 (SIGKILL)")


def request(line: str = "--num-instances 4 --host a,b --max-restarts 2") -> LaunchRequest:
    return parse_launch_options([*shlex.split(line), "--", "train"])


def attempts(ends: list[JobEnd], wanted: LaunchRequest, up: str = "ab") -> tuple[int, list[tuple[int, dict[str, str]]]]:
    """Play a job whose attempts end so; return its exit code and the processes and variables of each attempt."""
    left, seen = list(ends), []

    def attempt(now: LaunchRequest, variables: Mapping[str, str]) -> JobEnd:
        seen.append((now.num_processes, dict(variables)))
        return left.pop(0)

    return run_with_restarts(wanted, attempt, answers=lambda host: host in up, first_seconds=0), seen


def test_a_lost_job_is_started_again_and_learns_why() -> None:
    code, seen = attempts([LOST, JobEnd(code=0)], request())
    assert (code, len(seen)) == (0, 2)
    assert seen[0] == (4, {RESTART: "0/2:"})
    assert seen[1] == (4, {RESTART: f"1/2:{LOST.reason}"})
    found = detect_restart(seen[1][1])
    assert found is not None
    assert found.note == f"restart 1 of 2 by the launcher: {LOST.reason}"


def test_all_restarts_used_is_the_last_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = attempts([LOST] * 3, request())
    assert (code, len(seen)) == (137, 3)
    assert capsys.readouterr().err.splitlines()[-1] == "headrace launch: gave up after 2 restarts"


@pytest.mark.parametrize("code", [0, 2, 3, 75, 130])
def test_what_a_restart_cannot_mend_ends_the_job(code: int) -> None:
    assert attempts([JobEnd(code=code, reason="x")], request()) == (code, [(4, {RESTART: "0/2:"})])


def test_nothing_is_restarted_after_a_signal_or_unasked() -> None:
    assert attempts([JobEnd(code=137, asked_to_stop=True)], request())[0] == 137
    assert attempts([LOST], request("--num-instances 4")) == (137, [(4, {})])


def test_a_host_that_is_gone_is_left_out_and_taken_back() -> None:
    wanted = request("--num-instances 4 --num-replicas 8 --host a,b --max-restarts 2 --min-instances 2")
    _, seen = attempts([LOST, JobEnd(code=0)], wanted, up="a")
    assert seen[1][0] == 2
    assert seen[1][1][BATCH_REPLICAS] == "8"
    assert "without b: 2 of 4 processes" in seen[1][1][RESTART]
    assert fitting(wanted, ["b"]).hosts == ("b",)
    assert fitting(wanted, ["b"]).num_replicas == 4
    assert fitting(wanted, ["a", "b"]) == wanted
    assert fitting(request("--num-instances 4 --host a,b --max-restarts 2 --min-instances 3"), ["a"]).num_processes == 4


def test_processes_that_are_left_divide_those_of_before() -> None:
    wanted = request("--num-instances 4 --host a,b,c,d --max-restarts 1 --min-instances 1")
    assert fitting(wanted, ["a", "b", "d"]).hosts == ("a", "b")  # three would not share the batch


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--num-instances 2 --min-instances 1", "without --max-restarts"),
        ("--num-instances 2 --max-restarts 1 --min-instances 3", "more than the 2 processes"),
        ("--num-instances 2 --max-restarts 1 --min-instances 1", "on 1 hosts"),
        ("--num-instances 2 --max-restarts x", "at least 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        request(line)


# Real processes, real signals.


def line_for(folder: Path, **more: object) -> list[str]:
    options = TINY | {"log_dir": folder, "run_name": "run", "ckpts_per_epoch": 1, "validation": "false"} | more
    words = ["train"]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def workers(job: subprocess.Popen[str]) -> list[int]:
    """Return the processes of a launcher, by number."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if int((place / "stat").read_text().rpartition(")")[2].split()[1]) != job.pid:
                continue
            words = (place / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        for word in words:
            if word.startswith(b"HEADRACE_PROCESS="):
                found[int(word.partition(b"=")[2])] = int(place.name)
    return [found[number] for number in sorted(found)]


def wait_for_checkpoint(folder: Path, job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not list_checkpoints(folder / "run" / "checkpoints"):
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.005)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(record.step, record.loss) for record in read_records(folder / "run") if isinstance(record, TrainRecord)]


def restart_notes(folder: Path) -> list[str]:
    notes = [record.text for record in read_records(folder / "run") if isinstance(record, Note)]
    return [text for text in notes if text.startswith("restart")]


def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    line = line_for(tmp_path, num_replicas=1, num_epochs=10, call_seconds=0.01)
    job = start(["--num-instances", "1", "--max-restarts", "1"], line)
    wait_for_checkpoint(tmp_path, job)
    (pid,) = workers(job)
    os.kill(pid, signal.SIGKILL)
    code, printed = finish(job)
    assert code == 0, printed
    assert "headrace launch: restart 1 of 1 in 1 s" in printed
    (note,) = restart_notes(tmp_path)
    assert note.startswith(f"restart 1 of 1 by the launcher: process 0 (pid {pid}, ")
    assert [step for step, _ in losses(tmp_path)] == list(range(35, 351, 35))


@pytest.mark.slow
def test_a_killed_worker_does_not_end_the_run(tmp_path: Path) -> None:
    """The run that is hurt, restarted by itself, has the bits and losses of one that is not."""
    options = ["--num-instances", "2", "--num-replicas", "4"]
    unhurt = start(options, line_for(tmp_path / "unhurt", num_epochs=6))
    code, printed = finish(unhurt)
    assert code == 0, printed
    job = start([*options, "--max-restarts", "2"], line_for(tmp_path / "hurt", num_epochs=6, call_seconds=0.01))
    wait_for_checkpoint(tmp_path / "hurt", job)
    pids = workers(job)
    os.kill(pids[1], signal.SIGKILL)
    code, printed = finish(job)
    assert code == 0, printed
    assert f"headrace launch: process 1 (pid {pids[1]}" in printed
    assert "headrace launch: restart 1 of 2 in 1 s" in printed
    assert "Traceback" not in printed
    notes = [record.text for record in read_records(tmp_path / "hurt/run") if isinstance(record, Note)]
    (note,) = [text for text in notes if text.startswith("restart")]
    assert re.fullmatch(
        r"restart 1 of 2 by the launcher: process 1 \(pid \d+, host .+\) died: signal 9 \(SIGKILL\)", note
    )
    expected, found = (
        load(list_checkpoints(tmp_path / name / "run/checkpoints")[-1])[0] for name in ("unhurt", "hurt")
    )
    assert expected.keys() == found.keys()
    assert all(expected[name].tobytes() == found[name].tobytes() for name in expected)
    assert losses(tmp_path / "unhurt") == losses(tmp_path / "hurt")
    assert not any(map(is_running, pids))

    # The same command, typed again: with --resume auto it finds the finished run; without, it is refused.
    before = (tmp_path / "hurt/run/metrics.jsonl").read_bytes()
    again = line_for(tmp_path / "hurt", num_epochs=6, call_seconds=0.01)
    code, printed = finish(start(options, [*again, "--resume", "auto"]))
    assert code == 0, printed
    assert (tmp_path / "hurt/run/metrics.jsonl").read_bytes() == before


HANGING = """
import os, sys, threading
from headrace.cli.main import main
from headrace.data.feeding.feed import TrainFeed

deliver = TrainFeed.next

def hang(feed, *args):
    if os.environ["HEADRACE_RESTART"].startswith("0/") and feed.stats.images > 200:
        threading.Event().wait()
    return deliver(feed, *args)

TrainFeed.next = hang
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_that_hangs_is_started_again(tmp_path: Path, num_processes: int) -> None:
    """Its threads answer, but it gets no more images."""
    program = tmp_path / "hanging.py"
    program.write_text(HANGING)
    options = ["--num-instances", str(num_processes), "--hang-seconds", "4", "--max-restarts", "1"]
    line = line_for(tmp_path, num_replicas=2, num_epochs=10, call_seconds=0.01)
    code, printed = finish(start(options, ["python", str(program), *line]))
    assert code == 0, printed
    assert "no progress for 4 s (HEADRACE_HANG_SECONDS); where its threads are:" in printed
    (note,) = restart_notes(tmp_path)
    assert note.endswith("hung: it made no progress")
    assert losses(tmp_path)[-1][0] == 10 * losses(tmp_path)[0][0]


@pytest.mark.slow
def test_restarts_run_out_with_the_reason(tmp_path: Path) -> None:
    job = start(["--num-instances", "2", "--max-restarts", "1"], line_for(tmp_path, num_epochs=100000, num_replicas=2))
    wait_for_checkpoint(tmp_path, job)
    first = workers(job)
    os.kill(first[1], signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while set(workers(job)) & set(first) or len(workers(job)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(workers(job)[0], signal.SIGKILL)
    code, printed = finish(job)
    assert code == 128 + signal.SIGKILL, printed
    assert printed.splitlines()[-1] == "headrace launch: gave up after 1 restart"
    assert "process 0 (pid" in printed.splitlines()[-2]


@pytest.mark.slow
def test_ctrl_c_does_not_restart_and_the_same_command_goes_on(tmp_path: Path) -> None:
    options = ["--num-instances", "2", "--max-restarts", "3"]
    line = line_for(tmp_path, num_replicas=2, num_epochs=3000, resume="auto", call_seconds=0.05)
    job = start(options, line)
    wait_for_checkpoint(tmp_path, job)
    job.send_signal(signal.SIGINT)
    code, printed = finish(job)
    assert code == 75, printed
    assert "headrace launch: restart" not in printed
    stopped = load(list_checkpoints(tmp_path / "run/checkpoints")[-1])[1]["step"]
    job = start(options, line)
    time.sleep(1)
    deadline = time.monotonic() + PATIENCE
    while load(list_checkpoints(tmp_path / "run/checkpoints")[-1])[1]["step"] <= stopped:
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    code, printed = finish(job)
    assert code == 75
    assert f"resume from step {stopped}" in printed.replace(",", "")


def test_a_run_without_a_name_cannot_be_restarted(tmp_path: Path) -> None:
    words = [word for word in line_for(tmp_path) if word not in ("--run-name", "run")]
    code, printed = finish(start(["--num-instances", "1", "--max-restarts", "1"], words))
    assert code == 2
    assert "--max-restarts is given, but the run has no name." in printed


@needs_mpirun
@pytest.mark.slow
def test_a_host_that_is_gone_is_left_out_under_mpirun(tmp_path: Path) -> None:
    """mpirun cannot reach the second host; the restart runs on the first, with the batch of both."""
    options = "--num-instances 2 --host localhost,gone.invalid --driver mpirun --max-restarts 1 --min-instances 1"
    line = line_for(tmp_path, num_replicas=2, num_epochs=1)
    extra = ["--silence-seconds", "1", "--coordinator", "127.0.0.1:61999", "--mpi-global-args=--allow-run-as-root"]
    code, printed = finish(start([*options.split(), *extra], line))
    assert code == 0, printed
    assert "without gone.invalid: 1 of 2 processes" in printed
    start_record = read_records(tmp_path / "run")[0]
    assert start_record.global_batch_size == 4  # pyright: ignore[reportAttributeAccessIssue]
