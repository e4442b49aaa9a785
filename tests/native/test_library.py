"""The compiled C code is there wherever it can be, is never one that does not fit, and is not needed to install."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.data.decoding.jpeg import jpeg_decoder
from headrace.data.decoding.resize import Resampling, View, _resize_function, native_resize, pillow_resize
from headrace.native import library
from headrace.native.library import AVX2, BUILD_COMMAND, PORTABLE, SUFFIX, decode_library, find_library, source_hash

REPOSITORY = Path(__file__).parents[2]
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@needs_compiler
@pytest.mark.skipif(os.environ.get("HEADRACE_NATIVE") == "0", reason="the compiled code is turned off")
def test_the_c_code_is_compiled_wherever_there_is_a_compiler() -> None:
    """Without this, the tests of the C code would be skipped where its build is broken."""
    path, reason = decode_library()
    assert path is not None, f"{reason}. Build it: make native, or {BUILD_COMMAND}"
    assert native_resize() is not None
    assert jpeg_decoder() is not None


@pytest.mark.parametrize("name", [PORTABLE, AVX2])
def test_each_variant_resizes_as_pillow_does(name: str) -> None:
    found, _ = decode_library()
    path = found and found.with_name(f"{name}{SUFFIX}")
    if path is None or not path.exists():
        pytest.skip("not built")
    if name == AVX2 and not ctypes.CDLL(str(path)).hr_runs_avx2():
        pytest.skip("not for this processor")
    noise = np.random.default_rng(3).integers(0, 256, (53, 90, 3)).astype(np.uint8)
    whole = (0.0, 0.0, 53.0, 90.0)
    for size in ((17, 40), (80, 20), (120, 133)):
        out = np.empty((*size, 3), np.uint8)
        for how in (Resampling(), Resampling(bicubic=True), Resampling(first="down"), Resampling(True, True, "down")):
            _resize_function(path)(noise, View(whole, size), out, how)
            assert (out == pillow_resize(noise, whole, size, how)).all(), how


def test_a_folder_without_a_library_says_how_to_build_one(tmp_path: Path) -> None:
    path, reason = find_library(tmp_path)
    assert path is None
    assert BUILD_COMMAND in reason


def test_a_file_that_is_no_library_is_not_used(tmp_path: Path) -> None:
    (tmp_path / f"{PORTABLE}{SUFFIX}").write_text("not a library")
    path, reason = find_library(tmp_path)
    assert path is None
    assert "cannot be loaded" in reason


def test_a_library_older_than_its_sources_is_not_used(tmp_path: Path) -> None:
    built, _ = decode_library()
    if built is None:
        pytest.skip("not built")
    for path in built.parent.iterdir():
        if path.suffix in (".c", ".h", ".1"):
            shutil.copy(path, tmp_path)
    assert find_library(tmp_path) == (tmp_path / built.name, "")
    with (tmp_path / "resize.c").open("a") as file:
        file.write("/* changed */\n")
    path, reason = find_library(tmp_path)
    assert path is None
    assert "older than its sources" in reason


def test_nothing_is_looked_for_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library in the user's cache, from where earlier versions loaded it, is not touched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (tmp_path / "headrace" / "native").mkdir(parents=True)
    (tmp_path / "headrace" / "native" / f"{PORTABLE}{SUFFIX}").write_text("planted")
    assert find_library(tmp_path / "empty")[0] is None
    decode_library.cache_clear()
    path, _ = decode_library()
    assert path is None or path.parent == Path(library.__file__).parent


def test_the_environment_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NATIVE", "0")
    assert decode_library.__wrapped__() == (None, "HEADRACE_NATIVE is 0")


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build a copy of setup.py and the sources, without pyproject.toml, which an old setuptools cannot read."""
    pytest.importorskip("setuptools")
    shutil.copy(REPOSITORY / "setup.py", folder)
    native = folder / "src" / "headrace" / "native"
    native.mkdir(parents=True)
    for path in (REPOSITORY / "src" / "headrace" / "native").iterdir():
        if path.suffix in (".c", ".h", ".py"):
            shutil.copy(path, native)
    words = [sys.executable, "setup.py", "build_ext", "--build-lib", "out", "--build-temp", "work"]
    values = dict(os.environ) | environment
    return subprocess.run(words, cwd=folder, env=values, capture_output=True, text=True, check=False, timeout=200)


def test_without_a_compiler_the_build_succeeds(tmp_path: Path) -> None:
    done = build(tmp_path, CC=str(tmp_path / "no-such-compiler"))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob(f"*{SUFFIX}"))
    assert "failed" in done.stderr + done.stdout


@needs_compiler
def test_a_build_knows_the_sources_it_was_made_of(tmp_path: Path) -> None:
    done = build(tmp_path, CFLAGS="-O0")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.rglob(f"{PORTABLE}{SUFFIX}")
    function = ctypes.CDLL(str(path)).hr_source_hash
    function.restype = ctypes.c_char_p
    assert function().decode() == source_hash() != ""
