"""A part of the table of signals by phase and process (benchmarks/kill_table.py); the script plays all of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from .processes import SRC

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_table.py"
CASES = (
    "join:L:SIGKILL",
    "compile:0:SIGTERM",
    "training:1:SIGKILL",
    "checkpoint:0:SIGKILL",
    "validation:L:SIGHUP",
    "end:1:SIGSTOP",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_signal_ends_the_job_loses_nothing_and_leaves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SRC)
    command = [sys.executable, str(SCRIPT), "--silence-seconds", "3", "--only", *CASES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{len(CASES)} cases, {len(CASES)} as promised\n")
