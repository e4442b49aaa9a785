"""Ctrl-C while a command starts, works and ends: always a word and exit code 130, never a traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headrace

SRC = Path(headrace.__file__).parent.parent
SAID = "headrace: interrupted\n"


def start(*words: str) -> subprocess.Popen[str]:
    """Start Python: not a copy of a process that has imported everything, since imports are what is interrupted."""
    environ = {**os.environ, "PYTHONPATH": str(SRC), "JAX_PLATFORMS": "cpu"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *words], stdout=pipe, stderr=pipe, text=True, env=environ)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


CAUGHT = "import os, signal, sys, time\nfrom headrace.cli import ctrl_c\nctrl_c.catch_ctrl_c()\n"


def program(code: str, folder: Path) -> subprocess.Popen[str]:
    """Start a program that answers Ctrl-C as commands do, and can import the modules of a folder."""
    return start("-c", f"{CAUGHT}sys.path.insert(0, {str(folder)!r})\n{code}")


INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"


def test_an_import_is_left_at_once_also_one_that_would_swallow_the_interrupt(tmp_path: Path) -> None:
    swallows = f"import os, signal\ntry:\n    {INTERRUPT}\nexcept BaseException:\n    pass\n"
    (tmp_path / "swallows.py").write_text(swallows)
    process = program("import swallows\nprint('on')", tmp_path)
    assert end_of(process) == (130, "", SAID)


WORK = """
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(9)
except KeyboardInterrupt:
    print("cleaned up", flush=True)
ctrl_c._leave()
"""


def test_work_is_interrupted_and_can_clean_up(tmp_path: Path) -> None:
    assert end_of(program(WORK, tmp_path)) == (130, "cleaned up\n", SAID)


SWALLOWED = """
ctrl_c._PATIENCE_SECONDS = 0.3
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
"""


@pytest.mark.parametrize("then", [INTERRUPT, "time.sleep(60)"])
def test_a_swallowed_interrupt_ends_the_process_all_the_same(tmp_path: Path, then: str) -> None:
    """At once with a second Ctrl-C, else some time later."""
    began = time.monotonic()
    assert end_of(program(f"{SWALLOWED}{then}\ntime.sleep(60)", tmp_path)) == (130, "", SAID)
    assert time.monotonic() - began < 40


ENDS = """
class Last:
    def __del__(self, kill=os.kill, me=os.getpid()):
        kill(me, 2)

sys.last = Last()
sys.exit(5)
"""


def test_the_end_of_the_interpreter_is_not_interrupted(tmp_path: Path) -> None:
    """The command's exit code stays."""
    assert end_of(program(ENDS, tmp_path)) == (5, "", "")


def test_what_others_have_set_is_left_alone(tmp_path: Path) -> None:
    ignored = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{CAUGHT}{INTERRUPT}\nprint('on')"
    assert end_of(start("-c", ignored)) == (0, "on\n", "")


def processor_seconds(process: subprocess.Popen[str]) -> float:
    """Return how long a process has computed, which does not depend on what else the machine does."""
    return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) / 1e9


COMMANDS = {
    "help": ["-m", "headrace", "--help"],
    "plan": ["-m", "headrace", "plan"],
    "train": ["-m", "headrace", "train", "--dataset", "digits", "--model-name", "toy_model_bn", "--epochs", "1"],
    "script": [str(SRC.parent / "train.py"), "--help"],
    "poprun": ["-c", "from headrace.__main__ import poprun; poprun()", "--help"],
}


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not say how long it computed")
@pytest.mark.parametrize(
    ("command", "count"),
    [("help", 3), ("script", 2), ("poprun", 2), ("plan", 3), ("train", 3)]
    + [pytest.param(command, 60, marks=pytest.mark.slow) for command in ("help", "plan", "train")],
)
def test_ctrl_c_ends_a_command_at_any_moment_of_its_start(tmp_path: Path, command: str, count: int) -> None:
    """Equally spaced over the time that the command computes, from the moment when Python has started."""
    words = COMMANDS[command]
    places = ["--log-dir", str(tmp_path), "--compilation-cache-dir", str(tmp_path / "programs")] * (command == "train")
    whole = start(*words, *places)
    last = 0.0
    while whole.poll() is None:
        last = processor_seconds(whole)
        time.sleep(0.001)
    assert end_of(whole)[0] == 0
    for number in range(count):
        moment = 0.03 + (last - 0.03) * number / count
        process = start(*words, *places)
        while process.poll() is None and processor_seconds(process) < moment:
            time.sleep(0.0005)
        process.send_signal(signal.SIGINT)
        code, out, err = end_of(process)
        shown = f"{moment:.3f} s: {code}\n{out}\n{err}"
        assert "Traceback" not in err, shown
        assert "Exception ignored" not in err, shown
        # A run that has begun saves, and its end is that of a command that has done its work.
        assert (code == 130 and err.endswith(SAID)) or (code == 75 and "headrace: SIGINT" in err) or code == 0, shown
        if code == 0:
            assert moment > 0.6 * last, shown
