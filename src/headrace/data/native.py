"""The code in C: compiled on first use where there is a compiler, kept in the user's cache, checked against Pillow.

Whether it is there changes the speed alone: the resizer's pixels are Pillow's and the decoder's are libjpeg's, bit for
bit (jpeg_view.py), and where they are not, or anything else goes wrong, these are used. ctypes gives up Python's lock.
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
_SAME = ("-fwrapv", "-ffp-contract=off")  # whole numbers wrap; products are rounded before they are added, as in Python
_FLAGS = (("-O3", *_SAME, "-march=native"), ("-O3", *_SAME))
_SOURCES = ("jpeg_view.c", "jpeg_frame.c", "jpeg_pixels.c", "resize.c", "show.c", "jpeg.h", "jpeg_bits.h")
_SPARE = 64  # bytes after what lies between the two passes: whole vectors are read and written

Resize = Callable[[np.ndarray, tuple[int, int], tuple[int, int], np.ndarray], None]


@lru_cache(maxsize=1)
def native_library() -> Path | None:
    """Return the compiled library, or None where it cannot be had or does not resize as Pillow does."""
    if os.environ.get(OFF) == "0":
        return None
    for flags in _FLAGS:
        try:
            path = _compiled(flags)
            if path is not None:
                return path if _is_right(_resize_function(path)) else None
        except (OSError, AttributeError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: there is no home
            continue
    return None


@lru_cache(maxsize=1)
def native_resize() -> Resize | None:
    """Return the compiled resizer (pixels, resized size, offset, out), or None where it cannot be had."""
    path = native_library()
    return None if path is None else _resize_function(path)


def _compiled(flags: tuple[str, ...]) -> Path | None:
    """Return the shared library, compiled if it is not there yet."""
    files = resources.files("headrace.data").joinpath("files")
    sources = {name: files.joinpath(name).read_bytes() for name in _SOURCES}
    key = hashlib.sha256(repr((sources, flags, platform.system(), _processor())).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "native"
    path = folder / f"input-{key}.so"
    if path.exists():
        return path
    compiler = next(
        filter(None, (shutil.which(name) for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None
    )
    if compiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        for name, text in sources.items():
            (Path(work) / name).write_bytes(text)
        units = [f"{work}/{name}" for name in _SOURCES if name.endswith(".c")]
        words = [compiler, *flags, "-shared", "-fPIC", "-o", f"{work}/out.so", *units, "-lm"]
        if subprocess.run(words, capture_output=True, timeout=120, check=False).returncode != 0:
            return None
        Path(f"{work}/out.so").replace(path)
    return path


def _processor() -> str:
    """Say what instructions this processor has: a home may be shared by machines that differ."""
    lines = []
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))][:1]
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()} {''.join(lines)}"


def _resize_function(path: Path) -> Resize:
    function = ctypes.CDLL(str(path)).hr_resize
    whole = ctypes.c_int
    function.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, *([whole] * 9), ctypes.c_void_p, ctypes.c_void_p]
    function.restype = whole

    scratch = Scratch()

    def resize(pixels: np.ndarray, resized_hw: tuple[int, int], offset: tuple[int, int], out: np.ndarray) -> None:
        height, width, channels = pixels.shape
        size = out.shape[0] * width if resized_hw[0] < height else height * out.shape[1]
        between = scratch.take(size * channels + _SPARE)
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
