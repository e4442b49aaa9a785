"""Find the shared libraries that setup.py built from the sources in this folder, in the variant this processor runs.

There are two, both optional: the decoder in C, which changes speed and never pixels, and the kernels of convolutions
on the CPU in C++ (`kernels.cc`), which XLA calls. They are looked for in this folder alone and nothing is compiled
at run time, so only someone who may replace the package's Python code may replace them. They use no Python API and are
loaded with ctypes: one build serves every Python version, building needs no Python headers, and a call through
ctypes.CDLL releases the interpreter lock.

Only the standard library is imported here: setup.py runs this file before headrace is installed.
"""

import ctypes
import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

SWITCH = "HEADRACE_NATIVE"  # environment variable; the value 0 turns the compiled code off
PORTABLE, AVX2 = "decode", "decode_avx2"  # the same sources, with the baseline's instructions and with AVX2 and BMI
# The kernels with AVX-512, with AVX2, and with what every processor has; the fastest that runs here is used.
KERNELS = ("kernels_avx512", "kernels_avx2", "kernels")
C_SOURCES, KERNEL_SOURCES = (".c", ".h"), (".cc", ".hh")
SUFFIX = ".so.1"  # not ".so": whatever walks over the package's modules would try to import the file
BUILD_COMMAND = "python setup.py build_ext --inplace"
# What brings the compiled code to an installation that was made without a compiler. pip would take its cached wheel.
INSTALL_AGAIN = (
    "install a C++ compiler, then Headrace again with pip install --force-reinstall --no-deps --no-cache-dir"
)
_FOLDER = Path(__file__).parent


def source_hash(folder: Path = _FOLDER, suffixes: tuple[str, ...] = C_SOURCES) -> str:
    """Return a digest of a library's sources, which the build stores in it; "" where they were not installed."""
    digest = hashlib.sha256()
    sources = sorted(path for path in folder.iterdir() if path.suffix in suffixes)
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16] if sources else ""


@lru_cache(maxsize=1)
def decode_library() -> tuple[Path | None, str]:
    """Return the library's path, or None and the reason why the compiled code is not used."""
    if os.environ.get(SWITCH) == "0":
        return None, f"{SWITCH} is 0"
    return find_library(_FOLDER)


def find_library(folder: Path) -> tuple[Path | None, str]:
    """Return the fastest usable library of a folder, or None and the reason."""
    portable, fast = (folder / f"{name}{SUFFIX}" for name in (PORTABLE, AVX2))
    if not portable.is_file():
        return None, f"the C code was not compiled when Headrace was installed (in a checkout: {BUILD_COMMAND})"
    try:
        library = ctypes.CDLL(str(portable))
        # After a pull, a checkout has new sources beside an old build, whose structs may have another layout.
        if _hash_of(library) != (source_hash(folder) or _hash_of(library)):
            return None, f"the compiled C code is older than its sources ({BUILD_COMMAND})"
        if library.hr_runs_avx2() and fast.is_file() and _hash_of(ctypes.CDLL(str(fast))) == _hash_of(library):
            return fast, ""
    except (OSError, AttributeError) as error:
        return None, f"{portable.name} cannot be loaded: {error}"
    return portable, ""


class Kernels(NamedTuple):
    """A library of kernels, the hash of its sources, and whether it has wide vectors (8 floats or more)."""

    path: Path
    hash: str
    is_wide: bool


@lru_cache(maxsize=1)
def kernels_library() -> tuple[Kernels | None, str]:
    """Return the kernels for this processor, or None and the reason why XLA computes convolutions."""
    if os.environ.get(SWITCH) == "0":
        return None, f"{SWITCH} is 0"
    return find_kernels(_FOLDER)


def find_kernels(folder: Path) -> tuple[Kernels | None, str]:
    """Return the fastest usable kernels of a folder, or None and the reason."""
    reason = f"the kernels were not compiled when Headrace was installed ({INSTALL_AGAIN}; in a checkout: make native)"
    for name in KERNELS:
        path = folder / f"{name}{SUFFIX}"
        if not path.is_file():
            continue
        try:
            library = ctypes.CDLL(str(path))
            built_from = _hash_of(library)
            if built_from != (source_hash(folder, KERNEL_SOURCES) or built_from):
                reason = f"the compiled kernels are older than their sources ({BUILD_COMMAND})"
            elif library.hr_runs_here():
                return Kernels(path, built_from, name != "kernels"), ""
            else:
                reason = "no compiled kernels are for this processor"
        except (OSError, AttributeError) as error:
            reason = f"{path.name} cannot be loaded: {error}"
    return None, reason


def describe_kernels() -> str:
    """Return which kernels there are for this processor, or why none and how to get them."""
    kernels, reason = kernels_library()
    if kernels is None:
        return f"none: {reason}"
    name = kernels.path.name.removesuffix(SUFFIX)
    return name if kernels.is_wide else f"{name}, for any processor: used with --cpu-kernels on"


def _hash_of(library: ctypes.CDLL) -> str:
    function = library.hr_source_hash
    function.restype = ctypes.c_char_p
    return function().decode()
