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
import threading
from collections.abc import Callable
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Memory that a thread uses again and again instead of asking for it afresh.


class Scratch(threading.local):
    """Memory for pixels that are used up before the same thread asks again.

    Fresh memory for each picture is handed over by the system page by page, which takes a fifth of the decoding time.
    """

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, size: int) -> np.ndarray:
        """Return so many bytes of this thread."""
        if len(self._bytes) < size:
            self._bytes = np.empty(size + size // 4, np.uint8)
        return self._bytes[:size]


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

    noise = np.random.default_rng(0).integers(0, 256, (61, 83, 3)).astype(np.uint8)
    for size in ((32, 24), (61, 40), (100, 83), (70, 190), (20, 190), (100, 20)):
        out = np.empty((*size, 3), np.uint8)
        resize(noise, size, (0, 0), out)
        if (out != pillow_resize(noise, size)).any():
            return False
    return True


# Resize a crop of a picture: bilinear, with antialiasing as Pillow does it, or plain as TensorFlow's default is.


Box = tuple[int, int, int, int]  # top, left, height, width


class View(NamedTuple):
    """What is seen of a picture: a crop, the size it is resized to, and where in that the result is cut out."""

    crop: Box
    resized_hw: tuple[int, int]
    offset: tuple[int, int] = (0, 0)  # top, left


def resize_view(pixels: np.ndarray, view: View, out: np.ndarray, antialias: bool = True) -> None:
    """Write a view of uint8 [h, w, C] pixels into `out` [H, W, C]. The crop's edge is an edge.

    With antialiasing each of the two passes is Pillow's, bit for bit; a picture that shrinks downwards is resized
    downwards first, others across first. Without it, each pixel is the mean of its four neighbours, weighted by
    distance, pixel centres aligned.
    """
    top, left, height, width = view.crop
    crop = pixels[top : top + height, left : left + width]
    rows, columns = (slice(start, start + size) for start, size in zip(view.offset, out.shape, strict=False))
    if crop.shape[:2] == view.resized_hw:
        out[...] = crop[rows, columns]
    elif antialias and (native := native_resize()) is not None and _fits(crop, out):
        native(crop, view.resized_hw, view.offset, out)
    elif antialias:
        out[...] = pillow_resize(crop, view.resized_hw)[rows, columns]
    else:
        _plain(crop, view, out)


def _fits(crop: np.ndarray, out: np.ndarray) -> bool:
    """Say whether pixels lie as the compiled resizer takes them."""
    return crop.strides[1:] == (crop.shape[2], 1) and crop.strides[0] > 0 and out.flags.c_contiguous


def pillow_resize(crop: np.ndarray, hw: tuple[int, int]) -> np.ndarray:
    """Return a picture resized by Pillow, the two passes in our order."""
    from PIL import Image

    grey = crop.shape[2] == 1
    image = Image.fromarray(np.ascontiguousarray(crop[:, :, 0] if grey else crop))
    between = (image.width, hw[0]) if hw[0] < image.height else (hw[1], image.height)
    # One call would take the passes in an order that depends on Pillow's version; the fewer rows across, the faster.
    for size in (between, (hw[1], hw[0])):
        image = image.resize(size, Image.Resampling.BILINEAR)
    resized = np.asarray(image)
    return resized[:, :, None] if grey else resized


def _plain(crop: np.ndarray, view: View, out: np.ndarray) -> None:
    low_y, high_y, part_y = _taps(crop.shape[0], view.resized_hw[0], view.offset[0], out.shape[0])
    low_x, high_x, part_x = _taps(crop.shape[1], view.resized_hw[1], view.offset[1], out.shape[1])
    above, below = crop[low_y].astype(np.float32), crop[high_y].astype(np.float32)
    rows = above + (below - above) * part_y[:, None, None]
    left, right = rows[:, low_x], rows[:, high_x]
    out[...] = np.floor(left + (right - left) * part_x[None, :, None] + np.float32(0.5)).astype(np.uint8)


def _taps(size: int, resized: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the two neighbours of each place and the second one's weight."""
    centre = np.maximum((np.arange(first, first + count) + 0.5) * (size / resized) - 0.5, 0)
    low = np.minimum(centre.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    return low, high, (centre - low).astype(np.float32)
