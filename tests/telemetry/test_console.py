"""The console: plain lines in files, a live line on a (pretended) terminal."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
import types
from types import SimpleNamespace

import pytest

from headrace.core.errors import ConfigError
from headrace.telemetry.console import BarConsole, LineFormatter, PlainConsole, duration, live_line, make_console
from headrace.telemetry.line_file import Sink
from headrace.telemetry.records import CheckpointRecord, Note, Record, RunEnd, RunStart, TrainRecord, ValidationRecord


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


START = RunStart(
    step=0, time="t", model="cifar_resnet8", dataset="digits", num_epochs=20, total_steps=880, updates_per_epoch=44,
    global_batch_size=32, num_parameters=75290, device="cpu", num_replicas=2,
)  # fmt: skip


def train(step: int, elapsed: float, rate: float | None = 1234.4) -> TrainRecord:
    return TrainRecord(
        step=step, epoch=step / 44, loss=0.3121, accuracy=0.9125, learning_rate=0.0812, images_per_second=rate,
        step_seconds=None if rate is None else 0.05, elapsed_seconds=elapsed,
    )  # fmt: skip


def validation(top1: float, weights: str = "raw") -> ValidationRecord:
    return ValidationRecord(
        step=132, epoch=3.0, weights=weights, loss=0.1843, top1=top1, top5=0.9972, num_samples=1360, seconds=0.42
    )


END = RunEnd(
    step=880, time="t", outcome="finished", epoch=20.0, time_to_train=61.0, time_to_target=12.5, best_top1=0.9861,
    images_per_second=1234.4, verdict="The device was busy 97 % of the time.",
)  # fmt: skip


def test_plain_lines_read_as_documented() -> None:
    stream = io.StringIO()
    console = make_console("auto", stream=stream)
    records: list[Record] = [
        START, train(44, 10.0), train(132, 16.6), validation(0.958333), validation(0.9, "ema"),
        CheckpointRecord(step=132, epoch=3, name="step_00000132", num_bytes=10, seconds=1),
        Note(step=132, text="going on"), Note(step=132, level="warning", text="slow disk"), END,
    ]  # fmt: skip
    for record in records:
        console.write(record)
        console.advance(record.step)
    console.close()
    # 88 steps took 6.6 s, so the 748 steps left take 56.1 s; the first record has only its step time: 836 x 0.05 = 41.8
    assert stream.getvalue().splitlines() == [
        "train  cifar_resnet8 on digits, 75,290 parameters: 20 epochs of 44 steps, 32 images each on cpu (2 replicas)",
        "epoch 1.00/20  step 44/880  loss 0.3121  top-1 91.25 %  lr 0.0812  1,234 img/s  ETA 0:42",
        "epoch 3.00/20  step 132/880  loss 0.3121  top-1 91.25 %  lr 0.0812  1,234 img/s  ETA 0:56",
        "validation  epoch 3.00  top-1 95.83 %  top-5 99.72 %  loss 0.1843  (1,360 images, 0.4 s)  best so far",
        "validation (ema)  epoch 3.00  top-1 90.00 %  top-5 99.72 %  loss 0.1843  (1,360 images, 0.4 s)",
        "going on",
        "warning: slow disk",
        "finished at epoch 20.00, step 880  best top-1 98.61 %  time to train 1 min 01 s  time to target 12.5 s  "
        "1,234 img/s",
    ]
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_a_first_record_without_a_rate_shows_neither_rate_nor_eta() -> None:
    narrator = LineFormatter([START])
    assert narrator.line(train(44, 10.0, None)) == "epoch 1.00/20  step 44/880  loss 0.3121  top-1 91.25 %  lr 0.0812"


def test_not_a_number_is_never_the_best() -> None:
    narrator = LineFormatter()
    assert "best" not in narrator.line(validation(float("nan")))
    assert narrator.line(validation(0.1)).endswith("best so far")


def test_a_resumed_run_says_so_and_keeps_its_best_but_not_its_pace() -> None:
    narrator = LineFormatter([START, train(44, 1e6), validation(0.95)])
    assert narrator.line(validation(0.9)).endswith(")")
    resumed = RunStart(**{**START.__dict__, "step": 440})
    assert narrator.line(resumed).startswith("resume from step 440")
    assert narrator.line(train(484, 1e6 + 5)).endswith("ETA 0:20")  # 396 steps of 0.05 s


@pytest.mark.parametrize(
    ("mode", "stream", "kind"),
    [
        ("auto", io.StringIO(), PlainConsole),
        ("auto", Terminal(), BarConsole),
        ("plain", Terminal(), PlainConsole),
        ("bar", io.StringIO(), BarConsole),
        ("none", Terminal(), Sink),
    ],
)
def test_the_mode_follows_the_option_and_the_terminal(mode: str, stream: io.StringIO, kind: type, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert type(make_console(mode, stream=stream)) is kind


def test_lines_of_two_threads_do_not_mix() -> None:
    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            written = super().write(text)
            time.sleep(0.002)  # another thread has its turn
            return written

    stream = Slow()
    console = PlainConsole(stream)
    threads = [
        threading.Thread(target=lambda word=word: [console.write(Note(step=0, text=word)) for _ in range(20)])
        for word in ("one", "two")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(stream.getvalue().splitlines()) == 20 * ["one"] + 20 * ["two"]


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert type(make_console("auto", stream=Terminal())) is PlainConsole


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean plain"):
        make_console("plane")


def test_none_prints_nothing() -> None:
    stream = Terminal()
    console = make_console("none", stream=stream)
    for record in (START, train(44, 1.0), END):
        console.write(record)
    console.close()
    assert stream.getvalue() == ""


def test_a_terminal_shows_a_live_line_and_permanent_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    console = make_console("auto", stream=stream)
    console.write(START)
    now = iter((100.0, 100.5))  # half a second for 22 steps, so that the 836 which are left take 19
    monkeypatch.setattr("headrace.telemetry.console.time", SimpleNamespace(monotonic=lambda: next(now)))
    console.advance(22)
    console.write(train(44, 10.0))
    console.write(validation(0.958333))
    console.write(Note(step=44, text="a [bold]note[/bold] of 3"))
    console.write(END)
    console.close()
    console.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "compiling ..." in shown
    assert "epoch 1.00/20  step 44/880  loss 0.3121  1,234 img/s  epoch 0:00  run 0:19 left" in shown
    assert "validation  epoch 3.00  top-1 95.83 %" in shown
    assert "a [bold]note[/bold] of 3" in shown  # the user's brackets are no markup
    assert shown.rstrip().endswith("time to target 12.5 s  1,234 img/s")
    assert stream.getvalue().count("\x1b[?25h") >= 1  # the cursor is shown again


@pytest.mark.parametrize(("width", "wanted"), [
    (100, "epoch 35.23/100  step 1550/4400  loss 0.3121  1,234 img/s  epoch 0:01  run 1:02:03 left"),
    (80, "step 1550/4400  loss 0.3121  1,234 img/s  epoch 0:01  run 1:02:03 left"),
    (65, "step 1550/4400  loss 0.3121  1,234 img/s  run 1:02:03 left"),
    (50, "step 1550/4400  loss 0.3121  1,234 img/s"),
])  # fmt: skip
def test_the_live_line_shortens_to_the_width(width: int, wanted: str) -> None:
    """34 steps of 32 images are left of the epoch: 0.9 s at 1,234 images a second."""
    run = RunStart(**{**START.__dict__, "num_epochs": 100, "total_steps": 4400})
    line = live_line(run, 1550, (0.3121, 1234.4, 3723.0), width)
    assert line == wanted
    assert len(line) < width


def test_the_lines_of_an_epoch_stay_and_do_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    console = make_console("bar", stream=stream)
    console.write(START)
    console.write(train(22, 5.0))
    console.write(train(44, 10.0))
    console.write(validation(0.958333))
    console.close()
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n").splitlines()
    shown = [line.rstrip() for line in lines]
    assert (
        "epoch 1.00/20  step 44/880  loss 0.3121  top-1 91.25 %  1,234 img/s  ETA 3:10" in shown
    )  # 836 steps, 22 in 5 s
    assert not any(line.startswith("epoch 0.50/20") and "top-1" in line for line in shown), "within an epoch"
    assert "validation  epoch 3.00  top-1 95.83 %  top-5 99.72 %  loss 0.1843  best so far" in shown
    assert all(len(line) <= 80 for line in shown if not line.startswith("train  "))


CALLS = """
import sys, time
from headrace.telemetry.console import make_console
from headrace.telemetry.records import parse_record
console = make_console("auto")
console.write(parse_record(sys.argv[1]))
for step in (0, 11, 22):
    console.advance(step, 0.5 - step / 100 if step else None, 1000.0 * step)
    time.sleep(0.6)
console.close()
"""


@pytest.mark.parametrize("width", [80, 50])
def test_a_terminal_of_a_set_width_gets_a_line_for_every_call(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLUMNS", raising=False)
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    with subprocess.Popen([sys.executable, "-c", CALLS, START.to_json()], stdin=follower, stdout=follower) as process:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal ends with its last process
            while part := os.read(leader, 65536):
                shown += part
    os.close(leader)
    assert process.returncode == 0
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()))
    assert all(len(line) <= width for line in lines if not line.startswith("train  "))
    assert any("step 11/880  loss 0.3900" in line for line in lines)
    assert any("step 22/880  loss 0.2800  22,000 img/s" in line for line in lines)


def test_durations_read_as_clocks() -> None:
    assert [duration(s) for s in (0, 0.4, 42, 59.6, 725, 3723, 90000)] == [
        "0:00", "0:00", "0:42", "1:00", "12:05", "1:02:03", "25:00:00"
    ]  # fmt: skip


def test_a_notebook_replaces_one_line_in_place_and_prints_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown.append(data["text/plain"])

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        shown.append(data["text/plain"])
        return Handle()

    shell = types.SimpleNamespace(kernel="a kernel")
    ipython = types.SimpleNamespace(get_ipython=lambda: shell, display=types.SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    console = make_console("auto")
    assert type(make_console("plain")) is PlainConsole
    console.write(START)
    for step in (10, 20):
        console.advance(step, 0.5, 100.0)
    console.write(Note(text="a remark"))
    console.close()
    console.advance(30, 0.5, 100.0)
    assert shown[0] == "compiling ..."
    assert [line.split("  ")[1].partition("/")[0] for line in shown[1:]] == ["step 10", "step 20"]
    assert out.getvalue().splitlines()[1:] == ["a remark"]
    shell = types.SimpleNamespace()  # IPython in a terminal
    assert type(make_console("auto")) is PlainConsole
