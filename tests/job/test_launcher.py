"""The launcher with real processes on this host: their output, their faults, signals, and mpirun where it is."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fork_server import Popen

from .processes import PATIENCE, SRC
from .test_control_join import PROGRAM, finish, last_line, wait_ready

HOST = socket.gethostname()
needs_mpirun = pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun (Debian: openmpi-bin) is not installed")


def start(options: list[str], program: list[str]) -> subprocess.Popen[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("HEADRACE_", "OMPI_"))}
    command = [sys.executable, "-m", "headrace", "launch", *options, "--", *program]
    environ |= {"PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu"}
    return Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def summing_program(folder: Path, num_sums: int = 100000, raises: str = "-") -> list[str]:
    return ["python", str(PROGRAM), str(folder), str(num_sums), raises]


def pid_of(folder: Path, number: int) -> int:
    return int((folder / f"ready-{number}").read_text())


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_job_with_its_output(tmp_path: Path) -> None:
    code, printed = finish(start(["--num-instances", "2", "--numa-aware", "1", "-v"], summing_program(tmp_path, 3)))
    assert code == 0, printed
    for number in range(2):
        assert printed.count(f"[{number}] sum 3.0\n") == 3  # 1 + 2
        assert f"[{number}] done\n" in printed
        assert re.search(
            rf"^HEADRACE_NUM_REPLICAS=2 HEADRACE_PROCESS={number} .*summing_program.py", printed, re.MULTILINE
        )
    assert "Gloo" not in printed


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_process_is_named_with_its_signal(tmp_path: Path, victim: int) -> None:
    job = start(["--num-instances", "2"], summing_program(tmp_path))
    wait_ready(tmp_path, 2)
    pid = pid_of(tmp_path, victim)
    os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    code, printed = finish(job)
    assert time.monotonic() - begin < 10
    assert code == 128 + signal.SIGKILL
    name = f"process {victim} (pid {pid}, host {HOST})"
    assert last_line(printed) == f"headrace launch: {name} died: signal 9 (SIGKILL)"
    assert f"[{1 - victim}] headrace: Process {1 - victim} ends, because {name} died" in printed
    assert "Traceback" not in printed
    assert "coordination_service" not in printed
    assert not is_running(pid_of(tmp_path, 1 - victim))


@pytest.mark.slow
def test_a_stopped_process_is_killed_and_named(tmp_path: Path) -> None:
    job = start(["--num-instances", "2", "--silence-seconds", "3"], summing_program(tmp_path))
    wait_ready(tmp_path, 2)
    pid = pid_of(tmp_path, 1)
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    code, printed = finish(job)
    assert time.monotonic() - begin < 3 + 3 + 2 + 4  # silence, process 0's grace, the launcher's, slow machines
    assert code != 0
    assert last_line(printed) == f"headrace launch: process 1 (pid {pid}, host {HOST}) hung and was killed"
    assert not is_running(pid)


@pytest.mark.slow
def test_a_failing_process_is_named_with_its_code(tmp_path: Path) -> None:
    code, printed = finish(start(["--num-instances", "2"], summing_program(tmp_path, raises="1")))
    assert code == 2, printed
    assert re.search(r"^\[1\] headrace: (process 1: )?No more of this\.$", printed, re.MULTILINE), printed[-2000:]
    assert "[0] headrace: Process 0 ends, because process 1 (pid" in printed
    assert re.fullmatch(r"headrace launch: process 1 \(pid \d+, host .*\) ended with exit code 2", last_line(printed))
    assert "Traceback" not in printed


@pytest.mark.slow
def test_processes_do_not_outlive_their_launcher(tmp_path: Path) -> None:
    job = start(["--num-instances", "2"], summing_program(tmp_path))
    wait_ready(tmp_path, 2)
    pids = [pid_of(tmp_path, number) for number in range(2)]
    job.kill()
    finish(job)
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_script_that_calls_python_is_ended_with_it(tmp_path: Path) -> None:
    script = tmp_path / "start.sh"
    script.write_text(f"set -e\n{sys.executable} {' '.join(summing_program(tmp_path)[1:])}\necho after\n")
    job = start(["--num-instances", "2", "--silence-seconds", "3"], ["bash", str(script)])
    wait_ready(tmp_path, 2)
    pids = [pid_of(tmp_path, number) for number in range(2)]
    os.kill(pids[1], signal.SIGSTOP)
    code, printed = finish(job)
    assert code != 0
    assert f"process 1 (pid {pids[1]}, host {HOST}) has not responded for 3 s" in printed
    assert not any(map(is_running, pids))


def test_a_program_that_is_not_there_is_refused() -> None:
    code, printed = finish(start(["--num-instances", "2"], ["./no_such_program"]))
    assert code == 2
    assert printed == "headrace: ./no_such_program cannot be started: No such file or directory.\n"


@needs_mpirun
def test_under_plain_mpirun(tmp_path: Path) -> None:
    """Every process finds its info by itself; two hosts are played by one."""
    environ = {**os.environ, "PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu"}
    line = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable]
    found = subprocess.run(
        [*line, *summing_program(tmp_path, 3)[1:]],
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("sum 3.0") == 6


@needs_mpirun
@pytest.mark.slow
def test_the_launcher_drives_mpirun(tmp_path: Path) -> None:
    """`--host localhost:2` as mpirun has it: one host that takes two."""
    options = ["--num-instances", "2", "--host", "localhost", "--driver", "mpirun"]
    code, printed = finish(start([*options, "--mpi-global-args=--allow-run-as-root"], summing_program(tmp_path, 3)))
    assert code == 0, printed
    for number in range(2):
        assert len(re.findall(rf"\[1,{number}\]<stdout>:\s*sum 3\.0", printed)) == 3


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fault_under_mpirun(tmp_path: Path, number: signal.Signals) -> None:
    options = ["--num-instances", "2", "--host", "localhost", "--driver", "mpirun", "--silence-seconds", "3"]
    job = start([*options, "--mpi-global-args=--allow-run-as-root"], summing_program(tmp_path))
    wait_ready(tmp_path, 2)
    pid = pid_of(tmp_path, 1)
    os.kill(pid, number)
    begin = time.monotonic()
    code, printed = finish(job)
    assert time.monotonic() - begin < 20
    assert code != 0
    assert f"process 1 (pid {pid}, host {HOST})" in printed or f"PID {pid}" in printed
    deadline = time.monotonic() + 20
    while is_running(pid_of(tmp_path, 0)) or is_running(pid):
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.1)
