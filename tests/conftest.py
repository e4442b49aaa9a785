"""What tests share: eight virtual CPU devices, strict JAX, one program cache, reproducible hypothesis, a tiny run."""

import atexit
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest
from hypothesis import HealthCheck, settings

from headrace.config.load import config_from
from headrace.config.schema import Config
from headrace.core.session import new_session
from headrace.engine import stored_programs
from headrace.engine.devices import use_compilation_cache
from tests.fork_server import load_few_dialects

# Most of the suite's time is XLA compiling small programs, so they are compiled plainly: a third of the processor time
# and the same answers to rounding. XLA_FLAGS from outside win: `XLA_FLAGS= make test` compiles as a user's run does.
PLAIN = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
PLAINER = f"{PLAIN} --xla_cpu_use_fusion_emitters=false"
ACCEPTED: dict[tuple[int, ...], str] = {(0, 10): PLAINER, (0, 11): PLAIN}  # by version of JAX; for others it is tried


def _accepts(flags: str) -> bool:
    """Try flags in another process: an unknown one ends it, and their names come and go between versions."""
    environ = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    code = "import jax; jax.devices()"
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=False).returncode == 0


def _in_memory(path: str = "/dev/shm", needed: int = 4 << 30) -> bool:
    """Tell whether files can be kept in memory: there is room for them, and libraries in them can be loaded."""
    if not os.access(path, os.W_OK):
        return False
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize >= needed and not found.f_flag & os.ST_NOEXEC


# Set once for the session, in the first process: the workers of pytest-xdist and what tests start inherit it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Tests write and sync tens of thousands of files. TMPDIR from outside wins: `TMPDIR=/tmp make test` takes a disk.
    if "TMPDIR" not in os.environ and _in_memory():
        os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
    # A test that forgets to say where must not write into the home of the person who runs the suite.
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="headrace-test-cache-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    # `nohup make test` ignores it for all processes below, and tests would wait in vain for runs that it ends.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what a script runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Without bytecode files each of hundreds of processes compiles the whole package again: half a second of each.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if "XLA_FLAGS" not in os.environ:
        tried = filter(_accepts, (PLAINER, PLAIN))
        os.environ["XLA_FLAGS"] = ACCEPTED.get(jax.__version_info__[:2]) or next(tried, "")

# Before any backend starts: afterwards these cannot be changed. The suite is for the CPU, also on a machine with a GPU.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
load_few_dialects()
use_compilation_cache(None)  # below XDG_CACHE_HOME: a program that several tests need is compiled once

settings.register_profile(
    "headrace", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("headrace")

# Thousands of cases are collected and live to the end: going through them again and again took a tenth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but none of what is there now, and less often: tracing makes many objects."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


# The package beside this one may be missing; then all tests but those about it pass.
HAS_REFERENCE = bool(find_spec("headrace_reference"))
collect_ignore = [] if HAS_REFERENCE else ["reference", "seeds", "test_seed_commands.py", "test_seed_commands_slow.py"]

# Files with tests of 10 s and more. They come first, so that at the end no worker waits for one of them.
LONG = (
    "packaging",
    "kill",
    "docs_python",
    "docs_porting",
    "docs_custom_models",
    "examples",
    "fuzz",
    "processes",
    "faults",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files with long tests first; each file stays whole, and keeps its order."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)
    for item in items if not HAS_REFERENCE else ():
        if item.get_closest_marker("reference"):
            item.add_marker(pytest.mark.skip(reason="headrace_reference is not there"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let tests that replace something trace their programs anew, and no other test get these."""
    if "monkeypatch" not in getattr(item, "fixturenames", ()):
        return (yield)
    with new_session(), mock.patch.object(stored_programs, "folder", return_value=None):
        return (yield)


MakeConfig = Callable[..., Config]

TINY: dict[str, Any] = {
    "dataset": "generated",
    "image_size": 8,
    "num_classes": 4,
    "num_samples": 64,
    "model_name": "cifar_resnet8",
    "micro_batch_size": 4,
    "num_epochs": 2,
    "progress": "none",
}


@pytest.fixture
def tiny_config(tmp_path: Path) -> MakeConfig:
    """Return a builder of small configurations: `tiny_config(num_replicas=2)`; runs are written below tmp_path."""

    def make(**options: Any) -> Config:
        return config_from(TINY | {"log_dir": str(tmp_path / "runs")} | options)

    return make
