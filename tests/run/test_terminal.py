"""What a run prints, on real terminals of several widths and to a pipe; and how soon it obeys a signal."""

import contextlib
import fcntl
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from headrace.core.errors import INTERRUPTED_EXIT_CODE
from tests.fork_server import Popen
from tests.job.processes import start, wait_until

TRAIN = shlex.split("""
    train --config none --dataset digits --model-name toy_model_bn --micro-batch-size 32 --weight-updates-per-epoch 20
    --num-epochs 2 --logs-per-epoch 2 --ema-decay 0.9 --optimizer-params '{"momentum": 0.9}' --run-name x
""")


def on_terminal(width: int, cwd: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start a run whose output is a terminal of that width; return it and the terminal's other end."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm-256color"}
    cwd.mkdir()
    words = [sys.executable, "-m", "headrace", *TRAIN, "--compilation-cache-dir", str(cwd.parent / "programs")]
    process = Popen(words, stdin=follower, stdout=follower, stderr=follower, cwd=cwd, env=environ)
    os.close(follower)
    return process, leader


def lines_of(process: subprocess.Popen[bytes], leader: int) -> list[str]:
    shown = b""
    with contextlib.suppress(OSError):  # the terminal ends with its last process
        while part := os.read(leader, 65536):
            shown += part
    os.close(leader)
    assert process.wait() == 0, shown.decode()
    return [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()))]


@pytest.mark.parametrize("widths", [(50,), pytest.param((80, 100), marks=pytest.mark.slow)])
def test_nothing_that_a_run_prints_wraps(tmp_path: Path, widths: tuple[int, ...]) -> None:
    started = [on_terminal(width, tmp_path / str(width)) for width in widths]
    for width, lines in zip(widths, [lines_of(*one) for one in started], strict=True):
        # paths and commands are whole, to be copied
        assert [line for line in lines if len(line) > width and "runs/x" not in line] == []
        epochs = [line for line in lines if line.startswith("epoch ") and "top-1" in line]
        assert [line[:12] for line in epochs] == ["epoch 1.00/2", "epoch 2.00/2"]
        assert all("loss " in line for line in epochs)
        assert sum(line.startswith("validation") for line in lines if "top-1" in line) == 4
        assert any(line.startswith("finished at epoch 2.00, step 40") for line in lines)
        assert "best top-1" in " ".join(lines)
        assert any(line.endswith("runs/x") for line in lines)


@pytest.mark.slow
def test_a_signal_saves_within_three_seconds_of_the_call_and_a_log_has_a_line_per_interval(tmp_path: Path) -> None:
    """Both signals, each to a process in the middle of calls of half a second that logs every 20 steps."""
    more = ["--num-epochs", "500", "--weight-updates-per-epoch", "2000", "--logs-per-epoch", "100", "--no-validation"]
    signals = (signal.SIGINT, signal.SIGTERM)
    started = []
    for number in signals:
        places = ["--log-dir", str(tmp_path), "--run-name", number.name]
        words = [*TRAIN, *more, *places, "--call-seconds", "0.5", "--ckpts-per-epoch", "1"]
        started.append(start(words, tmp_path / f"{number.name}.txt"))
    for number, process in zip(signals, started, strict=True):
        output = tmp_path / f"{number.name}.txt"
        wait_until(process, lambda: output.read_text().count("loss") >= 3)  # noqa: B023
        sent = time.time()
        process.send_signal(number)
        assert process.wait(timeout=60) == INTERRUPTED_EXIT_CODE
        saved = max((tmp_path / number.name / "checkpoints").glob("step_*"))
        shown = output.read_text()
        assert saved.stat().st_mtime - sent < 0.5 + 3, shown
        steps = [int(re.split("[ /]+", line)[4]) for line in shown.splitlines() if line.startswith("epoch ")]
        assert steps == [20 * (n + 1) for n in range(len(steps))]
        assert not {"\x1b", "\r"} & set(shown)


def test_a_signal_while_programs_are_compiled_ends_the_run_at_once(tmp_path: Path) -> None:
    """The compilation takes many times as long."""
    output, words = tmp_path / "out.txt", ["--model-name", "efficientnet_b0", "--cpu-kernels", "off"]
    places = ["--log-dir", str(tmp_path), "--compilation-cache-dir", "none", "--progress", "plain"]
    process = start([*TRAIN, *words, *places], output)
    wait_until(process, lambda: output.is_file() and "run directory" in output.read_text())
    time.sleep(0.5)
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == INTERRUPTED_EXIT_CODE
    assert time.monotonic() - sent < 3
    shown = output.read_text()
    assert "SIGTERM: stopped at step 0, nothing is lost" in shown
    assert "training compiled" not in shown
    assert "Traceback" not in shown
    assert '"outcome": "interrupted"' in (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()[-1]
