"""Real processes for tests: of the command `headrace`, or of a program."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import headrace
from tests.fork_server import Popen

SRC = str(Path(headrace.__file__).parent.parent)
PATIENCE = 120  # seconds before a test gives a process up


HEADRACE = ("-m", "headrace")  # what Python runs


def start(
    words: Sequence[str | Path],
    output: Path,
    more: Mapping[str, str] | None = None,
    program: Sequence[str] = HEADRACE,
) -> subprocess.Popen[bytes]:
    """Start `headrace words...`; what it prints is appended to the file `output`. `more` goes into its environment."""
    environ = {**os.environ, "PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", **(more or {})}
    with output.open("ab") as file:
        command = [sys.executable, *program, *map(str, words)]
        return Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ)


def run(words: Sequence[str | Path], output: Path) -> int:
    """Run `headrace words...` to its end; return its exit code."""
    return finish(start(words, output))


def start_job(
    num_processes: int,
    words: Sequence[str | Path],
    folder: Path,
    differing: Sequence[Sequence[str | Path]] = (),
    program: Sequence[str] = HEADRACE,
) -> list[subprocess.Popen[bytes]]:
    """Start the processes of a job here; each prints into `folder/N.txt`; `differing[N]` are words of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for number in range(num_processes):
        info = {"PROCESS": str(number), "NUM_PROCESSES": str(num_processes), "COORDINATOR": f"127.0.0.1:{port}"}
        own = differing[number] if differing else ()
        environ = {f"HEADRACE_{name}": value for name, value in info.items()}
        started.append(start([*words, *own], folder / f"{number}.txt", environ, program))
    return started


def run_job(
    num_processes: int,
    words: Sequence[str | Path],
    folder: Path,
    differing: Sequence[Sequence[str | Path]] = (),
    program: Sequence[str] = HEADRACE,
) -> list[int]:
    """Run a job to its end; return the exit codes."""
    started = start_job(num_processes, words, folder, differing, program)
    return [finish(process, PATIENCE * num_processes) for process in started]


def finish(process: subprocess.Popen[bytes], patience: float = PATIENCE) -> int:
    """Wait for a process; return its exit code (minus the signal that ended it)."""
    try:
        return process.wait(patience)
    finally:
        process.kill()


def wait_until(process: subprocess.Popen[bytes], happened: Callable[[], bool]) -> bool:
    """Wait until something has happened; return False when the process ended before that."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.0005)
    return True


def size_of(path: Path) -> int:
    """Return a file's size, -1 when it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
