"""Real `headrace` processes for the tests of kills and signals."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import headrace

SRC = str(Path(headrace.__file__).parent.parent)
PATIENCE = 120  # seconds before a test gives a process up


def start(words: Sequence[str | Path], output: Path) -> subprocess.Popen[bytes]:
    """Start `headrace words...`; what it prints is appended to the file `output`."""
    environ = {**os.environ, "PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    with output.open("ab") as file:
        command = [sys.executable, "-m", "headrace", *map(str, words)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ)


def run(words: Sequence[str | Path], output: Path) -> int:
    """Run `headrace words...` to its end; return its exit code."""
    return finish(start(words, output))


def finish(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; return its exit code (minus the signal that ended it)."""
    try:
        return process.wait(PATIENCE)
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
