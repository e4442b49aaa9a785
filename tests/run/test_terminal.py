"""What a run prints, on real terminals of several widths and to a pipe; and how soon it obeys a signal."""

import contextlib
import fcntl
import io
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import tarfile
import termios
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.core.errors import INTERRUPTED_EXIT_CODE
from tests.fork_server import Popen
from tests.job.processes import finish, start, wait_until

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


def tar_set(folder: Path) -> Path:
    """Write a shard of PNGs for training and one for validation."""
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for split in ("train", "val"):
        with tarfile.open(folder / f"{split}.tar", "w") as archive:
            for image in range(40):
                png = io.BytesIO()
                Image.fromarray(numbers.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(png, "PNG")
                for name, content in (("png", png.getvalue()), ("cls", b"%d" % (image % 2))):
                    entry = tarfile.TarInfo(f"{image}.{name}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    return folder


def start_on_tars(folder: Path, split: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a run whose threads soon wait, in the kernel, for a shard that is now a pipe without a writer."""
    output, data = folder / "out.txt", tar_set(folder / "set")
    words = ["--dataset", "tar", "--dataset-path", str(data), "--dataset-cache", "none", "--validation-cache", "none"]
    lengths = [
        "--image-size",
        "32",
        "--micro-batch-size",
        "4",
        "--num-epochs",
        "400",
        "--weight-updates-per-epoch",
        "10",
    ]
    log = ["--log-dir", str(folder), "--progress", "plain", "--lr-warmup-params", "none"]
    process = start([*TRAIN, *words, *lengths, *log], output)
    wait_until(process, lambda: "validation  epoch" in output.read_text())
    shard = data / f"{split}.tar"
    shard.unlink()
    os.mkfifo(shard)
    sizes = []
    while len(sizes) < 5 or sizes[-1] != sizes[-5]:  # until nothing is logged any more
        time.sleep(0.4)
        sizes.append(output.stat().st_size)
    return process, output


def test_a_signal_ends_a_run_that_waits_for_an_image(tmp_path: Path) -> None:
    process, output = start_on_tars(tmp_path, "train")
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert finish(process) == INTERRUPTED_EXIT_CODE, output.read_text()
    assert time.monotonic() - sent < 20, "without the images it takes a second"
    shown = output.read_text()
    step = re.search(r"SIGTERM: (?:saved|stopped) at step (\d+)", shown)
    assert step is not None, shown
    assert (tmp_path / "x" / "checkpoints" / f"step_{int(step[1]):08}").is_dir()
    assert shown.splitlines()[-1] == f"next        headrace resume {tmp_path / 'x'}"
    assert "Traceback" not in shown


def test_a_second_sigterm_ends_a_run_whatever_it_waits_for(tmp_path: Path) -> None:
    process, output = start_on_tars(tmp_path, "val")
    process.send_signal(signal.SIGTERM)
    time.sleep(6)
    assert process.poll() is None
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert finish(process) == 128 + signal.SIGTERM
    assert time.monotonic() - sent < 5
    last = ["headrace: SIGTERM: leaving at once", f"next        headrace resume {tmp_path / 'x'}"]
    assert output.read_text().splitlines()[-2:] == last


@pytest.mark.slow
def test_a_signal_ends_a_run_whatever_it_waits_for(tmp_path: Path) -> None:
    process, output = start_on_tars(tmp_path, "val")
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert finish(process) == INTERRUPTED_EXIT_CODE
    assert 20 < time.monotonic() - sent < 40
    assert output.read_text().splitlines()[-2:] == [
        "headrace: SIGINT: nothing has ended for 25 s; leaving with what the last checkpoint holds",
        f"next        headrace resume {tmp_path / 'x'}",
    ]
