"""The kernels without wide vectors, for this processor and, in an emulator, for ARM: beside plain loops in float64.

`check_kernels.cc` calls the library as XLA does. For ARM: the Debian packages g++-aarch64-linux-gnu and qemu-user.
"""

import platform
import runpy
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from headrace.native.library import SUFFIX

ROOT = Path(__file__).parents[2]
CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
TARGETS = {
    "plain": (shutil.which("c++"), []),
    "arm": (CROSS, [EMULATOR, "-L", "/usr/aarch64-linux-gnu"] if EMULATOR else None),
}


def run(words: list[str], limit: int) -> str:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_the_plain_kernels_compute_what_loops_in_float64_do(target, tmp_path, monkeypatch):
    compiler, emulator = TARGETS[target]
    if compiler is None or emulator is None:
        pytest.skip("no compiler or no emulator for it")
    if target == "plain" and platform.machine() != "x86_64":
        pytest.skip("the other target is this one")
    # The flags of setup.py for a processor that it knows nothing of; it ends with the call of setup().
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.chdir(ROOT)
    build = runpy.run_path("setup.py")
    assert list(build["KERNEL_NETWORKS"]) == ["kernels"]
    flags = [*build["KERNEL_FLAGS"], "-fPIC", '-DHEADRACE_SOURCE_HASH="test"']
    headers, library, check = f"-isystem{jax.ffi.include_dir()}", tmp_path / f"kernels{SUFFIX}", tmp_path / "check"
    sources = [str(path) for path in sorted((ROOT / "src/headrace/native").glob("*.cc"))]
    run([compiler, *flags, headers, "-shared", *sources, "-o", str(library), "-lm"], 900)
    words = [
        compiler,
        "-O2",
        "-std=c++17",
        headers,
        "tests/ops/check_kernels.cc",
        "-o",
        str(check),
        "-ldl",
        "-lpthread",
    ]
    run(words, 300)
    assert "4 floats in a vector; 0 differences" in run([*emulator, str(check), str(library)], 600)
