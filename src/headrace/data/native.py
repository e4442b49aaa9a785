"""The resizer in C: compiled on first use where there is a compiler, kept in the user's cache, checked against Pillow.

Whether it is there changes the speed alone: its pixels are Pillow's, bit for bit, and where they are not, or anything
else goes wrong, Pillow is used. ctypes gives up Python's lock while it runs.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np

from headrace.data.scratch import Scratch

OFF = "HEADRACE_NATIVE"  # in the environment, with the value 0: do without
_FLAGS = (("-O3", "-DHR_CLONES"), ("-O3",))  # the first picks the best instructions of each processor at run time

Resize = Callable[[np.ndarray, tuple[int, int], tuple[int, int], np.ndarray], None]


@lru_cache(maxsize=1)
def native_resize() -> Resize | None:
    """Return the compiled resizer (pixels, resized size, offset, out), or None where it cannot be had."""
    if os.environ.get(OFF) == "0":
        return None
    try:
        for flags in _FLAGS:
            library = _library(flags)
            if library is not None:
                function = _function(library)
                return function if _is_right(function) else None
    except (OSError, AttributeError, subprocess.SubprocessError):
        pass
    return None


def _library(flags: tuple[str, ...]) -> Path | None:
    """Return the shared library, compiled if it is not there yet."""
    source = resources.files("headrace.data").joinpath("files", "resize.c").read_bytes()
    key = hashlib.sha256(source + repr((flags, platform.machine(), platform.system())).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "native"
    path = folder / f"resize-{key}.so"
    if path.exists():
        return path
    compiler = next(
        filter(None, (shutil.which(name) for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None
    )
    if compiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        (Path(work) / "resize.c").write_bytes(source)
        words = [compiler, *flags, "-shared", "-fPIC", "-o", f"{work}/out.so", f"{work}/resize.c"]
        if subprocess.run(words, capture_output=True, timeout=60, check=False).returncode != 0:
            return None
        Path(f"{work}/out.so").replace(path)
    return path


def _function(path: Path) -> Resize:
    function = ctypes.CDLL(str(path)).hr_resize
    whole = ctypes.c_int
    function.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, *([whole] * 9), ctypes.c_void_p, ctypes.c_void_p]
    function.restype = whole

    scratch = Scratch()

    def resize(pixels: np.ndarray, resized_hw: tuple[int, int], offset: tuple[int, int], out: np.ndarray) -> None:
        height, width, channels = pixels.shape
        size = out.shape[0] * width if resized_hw[0] < height else height * out.shape[1]
        between = scratch.take(size * channels + 4)
        assert pixels.strides[1:] == (channels, 1)
        assert out.flags.c_contiguous
        sizes = (height, width, channels, *resized_hw, *offset, *out.shape[:2])
        if not function(pixels.ctypes.data, pixels.strides[0], *sizes, out.ctypes.data, between.ctypes.data):
            raise MemoryError

    return resize


def _is_right(resize: Resize) -> bool:
    """Compare with Pillow: shrinking, enlarging, and a side that stays."""
    from headrace.data.resize import pillow_resize

    noise = np.random.default_rng(0).integers(0, 256, (61, 83, 3)).astype(np.uint8)
    for size in ((32, 24), (61, 40), (100, 83), (70, 190), (20, 190), (100, 20)):
        out = np.empty((*size, 3), np.uint8)
        resize(noise, size, (0, 0), out)
        if (out != pillow_resize(noise, size)).any():
            return False
    return True
