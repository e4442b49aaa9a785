"""Joining and losing processes, with real ones: who is missing, dies, hangs or fails is named, and the others end."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.job.process_info import ProcessInfo
from headrace.job.rendezvous import Channel, ChannelClosed
from tests.fork_server import Popen, run

from .processes import PATIENCE, SRC

PROGRAM = Path(__file__).with_name("summing_program.py")
LIMIT = 20  # seconds within which a job must have ended after a fault
LOST = 76  # another process was lost
HOST = socket.gethostname()
Job = list[subprocess.Popen[str]]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def start_job(
    folder: Path, numbers: list[int], num_processes: int, *, words: tuple[str, str] = ("100000", "-"), **more: str
) -> Job:
    """Start some of the processes of a job by hand, as one would on several hosts."""
    port = free_port()
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("HEADRACE_", "OMPI_"))}
    environ |= {"PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu", "HEADRACE_COORDINATOR": f"127.0.0.1:{port}"}
    environ |= {"HEADRACE_NUM_PROCESSES": str(num_processes), **more}
    return [
        Popen(
            [sys.executable, str(PROGRAM), str(folder), *words],
            env=environ | {"HEADRACE_PROCESS": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in numbers
    ]


def wait_ready(folder: Path, num_processes: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while not all((folder / f"ready-{number}").exists() for number in range(num_processes)):
        assert time.monotonic() < deadline, "the job did not start"
        time.sleep(0.05)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a process; return its code and what it printed last, without the words of XLA's C++ side."""
    try:
        printed, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, printed


def last_line(printed: str) -> str:
    return printed.rstrip().splitlines()[-1]


def test_a_job_sums_over_its_processes_and_leaves_together(tmp_path: Path) -> None:
    job = start_job(tmp_path, [0, 1, 2], 3, words=("20", "-"))
    for process in job:
        code, printed = finish(process)
        assert code == 0, printed
        assert printed.count("sum 6.0\n") == 20  # 1 + 2 + 3
        assert last_line(printed) == "done"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_job(tmp_path: Path, victim: int) -> None:
    job = start_job(tmp_path, [0, 1], 2)
    wait_ready(tmp_path, 2)
    job[victim].kill()
    begin = time.monotonic()
    code, printed = finish(job[1 - victim])
    assert time.monotonic() - begin < LIMIT / 2
    assert code == LOST
    name = f"process {victim} (pid {job[victim].pid}, host {HOST})"
    assert f"headrace: Process {1 - victim} ends, because {name} died" in printed
    assert "Traceback" not in printed
    assert finish(job[victim])[0] == -signal.SIGKILL


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stopped_process_ends_the_job(tmp_path: Path, victim: int) -> None:
    """`kill -STOP` is silence: nothing is closed, nothing answers."""
    job = start_job(tmp_path, [0, 1], 2, HEADRACE_SILENCE_SECONDS="3")
    wait_ready(tmp_path, 2)
    job[victim].send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    code, printed = finish(job[1 - victim])
    assert 2 < time.monotonic() - begin < 3 + 3 + 4
    assert code == LOST
    assert f"process {victim} (pid {job[victim].pid}, host {HOST}) has not responded for 3 s" in last_line(printed)
    # Woken up, it finds that the others have left, and leaves too.
    job[victim].send_signal(signal.SIGCONT)
    code, printed = finish(job[victim])
    assert code == LOST, printed


@pytest.mark.slow
def test_a_stopped_process_ends_the_job_within_twenty_seconds(tmp_path: Path) -> None:
    job = start_job(tmp_path, [0, 1, 2], 3)
    wait_ready(tmp_path, 3)
    job[1].send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    for process in (job[0], job[2]):
        code, printed = finish(process)
        assert code == LOST
        assert f"process 1 (pid {job[1].pid}, host {HOST}) has not responded for 10 s" in last_line(printed)
    assert time.monotonic() - begin < LIMIT
    job[1].kill()
    finish(job[1])


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_process_that_fails_ends_the_job(tmp_path: Path, culprit: int) -> None:
    job = start_job(tmp_path, [0, 1], 2, words=("100000", str(culprit)))
    codes, printed = zip(*map(finish, job), strict=True)
    assert codes[culprit] == 2
    assert re.fullmatch(r"headrace: (process \d: )?No more of this\.", last_line(printed[culprit]))
    assert codes[1 - culprit] == LOST
    name = f"process {culprit} (pid {job[culprit].pid}, host {HOST})"
    assert f"ends, because {name} failed: No more of this" in printed[1 - culprit]
    assert "Traceback" not in "".join(printed)


def test_a_process_that_never_starts_is_named(tmp_path: Path) -> None:
    begin = time.monotonic()
    job = start_job(tmp_path, [0, 2], 4, HEADRACE_JOIN_SECONDS="4")
    told = "Processes 1, 3 of 4 did not join within 4 s."
    for process, found in zip(job, map(finish, job), strict=True):
        assert found[0] == 3, found
        assert told in found[1]
        assert process.returncode == 3
    assert time.monotonic() - begin < LIMIT + 10  # of which Python's start takes some


def test_a_missing_first_process_is_named(tmp_path: Path) -> None:
    (process,) = start_job(tmp_path, [1], 2, HEADRACE_JOIN_SECONDS="2")
    code, printed = finish(process)
    assert code == 3
    assert re.search(r"Process 0 of 2 did not answer at 127\.0\.0\.1:\d+ within 2 s: Connection refused\.", printed)
    assert "Traceback" not in printed


def test_two_processes_with_one_number_are_refused(tmp_path: Path) -> None:
    job = start_job(tmp_path, [0, 1, 1], 3, HEADRACE_JOIN_SECONDS="60")
    for process in job:
        code, printed = finish(process)
        assert code == 2, printed
        assert "There are two processes 1: pid" in printed
        assert all(str(other.pid) in printed for other in job[1:])


def test_what_does_not_speak_our_language_is_hung_up_on() -> None:
    left, right = socket.socketpair(socket.AF_UNIX)
    with pytest.raises(OSError, match="not supported"):
        Channel(left)  # no TCP
    left.close()
    right.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = socket.create_connection(server.getsockname())
        line = Channel(server.accept()[0])
        line.send(beat=True)
        assert stranger.recv(100) == b'{"beat": true}\n'
        stranger.sendall(b'{"one": 1}\n{"half')
        assert line.receive() == [{"one": 1}]
        stranger.sendall(b'": 2}\nGET / HTTP/1.1\r\n')
        with pytest.raises(ChannelClosed):
            line.receive()
        stranger.close()
        with pytest.raises(ChannelClosed):
            line.receive()
        line.close()


def test_a_place_alone_needs_nobody() -> None:
    from headrace.job.join import current_monitor, join

    info = ProcessInfo(process=0, num_processes=1, coordinator="127.0.0.1:1", detected_by="test")
    assert join(info) == info
    assert current_monitor() is None


def test_a_run_without_progress_ends_and_shows_where_it_hangs() -> None:
    """The heartbeat goes on while the main thread waits for ever."""
    program = """
import os, time
from headrace.job.liveness import ProgressWatch
with ProgressWatch(os.environ, None) as watch:
    for _ in range(4):
        time.sleep(0.2)
        watch.moved()
    print("moved", flush=True)
    time.sleep(60)
"""
    environ = {**os.environ, "PYTHONPATH": SRC, "HEADRACE_HANG_SECONDS": "0.5"}
    command = [sys.executable, "-c", program]
    done = run(command, env=environ, timeout=40)
    assert done.returncode == 77
    assert done.stdout == "moved\n"  # longer than the limit in all, but never without progress
    assert "no progress for 0.5 s (HEADRACE_HANG_SECONDS); where its threads are:" in done.stderr
    assert 'File "<string>", line 9 in <module>' in done.stderr


def test_the_watch_of_progress_is_patient_at_the_start_and_off_by_default() -> None:
    from headrace.job.liveness import HANG_SECONDS_AT_START, ProgressWatch

    watch = ProgressWatch({"HEADRACE_HANG_SECONDS": "5"}, None)
    assert watch._limit == HANG_SECONDS_AT_START  # compiling may take long
    watch.moved()
    assert watch._limit == 5
    threads = threading.active_count()
    with ProgressWatch({}, None):
        assert threading.active_count() == threads
    with pytest.raises(ConfigError, match="HEADRACE_HANG_SECONDS is 'soon'"):
        ProgressWatch({"HEADRACE_HANG_SECONDS": "soon"}, None)
