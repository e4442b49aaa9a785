"""This process: its memory, and who of its threads uses the devices."""

import gc
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import report
from headrace.core.interpreter import COLLECTION_THRESHOLDS, SWITCH_SECONDS
from headrace.core.process import tuned_interpreter
from headrace.core.session import session
from headrace.run.callbacks import Callback
from headrace.run.model import Model

FAULTS = """
import resource
import numpy as np
from headrace.core.process import keep_freed_memory

def faults():
    np.ones(8_000_000)  # 64 MB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(8_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory(keep=True)
kept = faults()
keep_freed_memory(keep=False)
print(kept, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator alone has the setting")
@pytest.mark.parametrize("chosen_by_the_user", [False, True])
def test_freed_memory_is_kept_until_it_is_not_or_as_the_user_chose(chosen_by_the_user):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environ |= {"MALLOC_MMAP_MAX_": "65536"} if chosen_by_the_user else {}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=environ, capture_output=True, text=True, check=True)
    kept, returned = map(int, done.stdout.split())
    assert returned > 10  # 15,625 pages of 4 KiB, or 30 huge ones
    assert (kept < returned // 2) != chosen_by_the_user


def test_a_wait_for_the_devices_that_is_interrupted_leaves_them_to_others(monkeypatch):
    def interrupted(ready):
        if not ready():
            raise KeyboardInterrupt

    monkeypatch.setattr(session().devices._changed, "wait_for", interrupted)
    with session().devices.transferring(), pytest.raises(KeyboardInterrupt), session().devices.exclusive():
        pytest.fail("a transfer is under way")
    monkeypatch.undo()
    began = threading.Event()

    def transfer():
        with session().devices.transferring():
            began.set()

    threading.Thread(target=transfer, daemon=True).start()
    assert began.wait(10)


def test_a_run_that_ends_does_not_wait_for_who_has_the_devices_to_itself():
    failures: list[str] = []

    def transfer():
        try:
            with session().devices.transferring():
                pass
        except RuntimeError as error:
            failures.append(str(error))

    def started():
        thread = threading.Thread(target=transfer, daemon=True)
        thread.start()
        return thread

    with session().devices.exclusive():
        waits = started()
        time.sleep(0.05)
        session().devices.leave()
        for thread in (waits, started()):  # also one that comes later
            thread.join(timeout=10)
            assert not thread.is_alive()
        assert failures == ["The run that wanted to transfer something has been interrupted."] * 2
        session().devices.leave(left=False)  # the next run of this process, which waits
        next_run = started()
        next_run.join(timeout=0.05)
        assert next_run.is_alive()
    next_run.join(timeout=10)
    assert len(failures) == 2
    session().devices.leave()  # nobody has them to itself
    transfer()
    assert len(failures) == 2


def test_a_process_knows_when_it_began():
    code = "import time; time.sleep(0.3); from headrace.core.process import process_began; print(process_began())"
    before = time.time()
    began = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert before - 0.1 < began < time.time() - 0.2  # it is counted in hundredths


@pytest.mark.parametrize(("longest", "counted"), [(10.0, True), (0.01, False)])
def test_the_command_of_a_process_began_with_it_unless_a_shell_became_it(longest: float, counted: bool):
    """A shell that has worked for an hour and then replaces itself by a command is not a command of an hour."""
    code = (
        "import time; time.sleep(0.3)\n"
        "from headrace.core import process\n"
        f"process._LONGEST_START = {longest}\n"
        "process.start_command()\n"
        "print(time.perf_counter() - process.take_command_began(), process.take_command_began())"
    )
    age, later = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split()
    assert (float(age) > 0.29) == counted
    assert later == "None", "the second run of a process begins when it is called"


LEFT = """
import atexit, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from headrace.core.process import leave_process

class Apart:
    def __del__(self, write=os.write):
        write(1, b"taken apart\\n")

kept = Apart()
atexit.register(print, "exit function")
ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.1), print("pool")))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
{before}
leave_process(3)
sys.exit(4)
"""


def left(before: str = "", **options: Any) -> tuple[int, list[str]]:
    words = [sys.executable, "-c", LEFT.format(before=before)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(words, check=False, stderr=subprocess.PIPE, text=True, env=environ, **options)
    return done.returncode, [*(done.stdout or "").splitlines(), *done.stderr.splitlines()]


def test_a_process_is_left_when_all_is_done_and_not_taken_apart():
    assert left(stdout=subprocess.PIPE) == (3, ["pool", "thread", "exit function"])


@pytest.mark.parametrize("looks_on", ["sys.setprofile(lambda *_: None)", "sys.settrace(lambda *_: None)"])
def test_a_process_that_somebody_looks_at_ends_as_python_ends_it(looks_on: str):
    code, said = left(looks_on, stdout=subprocess.PIPE)
    assert (code, sorted(said)) == (4, ["exit function", "pool", "taken apart", "thread"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_output_that_cannot_be_written_is_reported_by_python():
    with Path("/dev/full").open("w") as full:
        code, said = left(stdout=full)
    assert code == 120
    assert "No space left on device" in " ".join(said)


def settings() -> tuple[float, int]:
    return sys.getswitchinterval(), gc.get_threshold()[0]


def test_settings_of_blocks_that_overlap_end_with_the_last_of_them():
    before = settings()
    first, second, short = (tuned_interpreter(seconds) for seconds in (SWITCH_SECONDS, SWITCH_SECONDS, 0.0002))
    tuned = pytest.approx((SWITCH_SECONDS, COLLECTION_THRESHOLDS[0]), rel=0.01)
    first.__enter__()
    second.__enter__()
    assert settings() == tuned
    short.__enter__()
    assert settings()[0] == pytest.approx(0.0002, rel=0.01)
    first.__exit__(None, None, None)
    short.__exit__(None, None, None)
    assert settings() == tuned
    second.__exit__(None, None, None)
    assert settings() == before


def test_commands_and_python_run_under_the_same_settings(tmp_path):
    found = []

    class Look(Callback):
        def on_epoch_end(self, event):
            found.append(settings())

    before = settings()
    assert report(lambda: ["word"], lambda words: found.append(settings()) or len(words)) == 1
    model = Model("toy_model_bn", config="none", log_dir=str(tmp_path), progress="none")
    model.fit("digits", epochs=1, steps_per_epoch=1, batch_size=8, validation=False, callbacks=[Look()])
    assert found[0] == found[1] == pytest.approx((SWITCH_SECONDS, COLLECTION_THRESHOLDS[0]), rel=0.01)
    assert settings() == before
