"""Resize a crop of an image: bilinear or bicubic, antialiased as in Pillow, or plain as is TensorFlow's default.

The antialiased resizer in C gives Pillow's pixels bit for bit, several times faster and without the interpreter lock.
Where it is missing, or would give other pixels, Pillow does the work: only the speed changes.
"""

import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.native.library import decode_library

Box = tuple[float, float, float, float]  # top, left, height, width
Resize = Callable[[np.ndarray, "View", np.ndarray, "Resampling"], None]
_SPARE = 64  # bytes after the intermediate image: the C code reads and writes whole vectors


class View(NamedTuple):
    """The part of an image that is used: a crop, its size after resizing, and the window taken from the result."""

    crop: Box  # its edges may lie inside of pixels
    resized_hw: tuple[int, int]
    offset: tuple[int, int] = (0, 0)  # top, left


class Resampling(NamedTuple):
    """How a crop is resized."""

    antialias: bool = True
    bicubic: bool = False
    # Which of the two passes comes first; between them values are rounded, and what bicubic weights carry beyond black
    # and white is clipped. "across" is Pillow's order, up to version 12 for every image: published weights were
    # measured with it. (Pillow 13 turns it round where the height loses more than twice as many pixels as the width.)
    # "down" is the same for an image that is stored sideways. "quick", for training, leaves fewer rows to the slower
    # pass across: where an image shrinks downwards, that pass is the second.
    first: str = "across"

    def is_down_first(self, height: int, resized_height: int) -> bool:
        """Say whether rows are resized before columns."""
        return self.first == "down" or (self.first == "quick" and resized_height < height)


PILLOWS = Resampling()  # bilinear, as Pillow computes it


class Scratch(threading.local):
    """A buffer per thread, for pixels that are used up before the same thread asks again.

    Fresh memory is mapped page by page on first use, which would take a fifth of the decoding time.
    """

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, size: int) -> np.ndarray:
        """Return this thread's buffer, at this size."""
        if len(self._bytes) < size:
            self._bytes = np.empty(size + size // 4, np.uint8)
        return self._bytes[:size]


def resize_view(pixels: np.ndarray, view: View, out: np.ndarray, how: Resampling = PILLOWS) -> None:
    """Write a view of uint8 [h, w, C] pixels into `out` [H, W, C]. Pixels outside of the crop have no influence.

    Pixels that the crop's edges divide count as Pillow's `resize(box=...)` counts them.
    With antialiasing the result is Pillow's, bit for bit. Without it, each pixel is the mean of its four neighbours,
    weighted by distance, with pixel centres aligned.
    """
    top, left, height, width = view.crop
    first_row, first_column = int(top), int(left)
    crop = pixels[first_row : math.ceil(top + height), first_column : math.ceil(left + width)]
    box = (top - first_row, left - first_column, height, width)
    view = view._replace(crop=box)
    rows, columns = (slice(start, start + size) for start, size in zip(view.offset, out.shape, strict=False))
    # Nothing to resize: copied, so that small images of the right size keep their bytes.
    if box == (0, 0, *view.resized_hw):
        out[...] = crop[rows, columns]
    elif not how.antialias:
        _resize_plain(crop, view, out)
    elif (native := native_resize()) is not None and _fits(crop, out):
        native(crop, view, out, how)
    else:
        out[...] = pillow_resize(crop, box, view.resized_hw, how)[rows, columns]


def _fits(crop: np.ndarray, out: np.ndarray) -> bool:
    """Say whether the arrays have the memory layout that the compiled resizer expects."""
    return crop.strides[1:] == (crop.shape[2], 1) and crop.strides[0] > 0 and out.flags.c_contiguous


def pillow_resize(crop: np.ndarray, box: Box, hw: tuple[int, int], how: Resampling = PILLOWS) -> np.ndarray:
    """Return a part of an image resized by Pillow, a call for each pass: in one call the order is the version's."""
    from PIL import Image

    top, left, height, width = box
    grey = crop.shape[2] == 1
    method = Image.Resampling.BICUBIC if how.bicubic else Image.Resampling.BILINEAR
    image = Image.fromarray(np.ascontiguousarray(crop[:, :, 0] if grey else crop))
    down_first = how.is_down_first(image.height, hw[0])
    for vertical in (down_first, not down_first):
        size = (image.width, hw[0]) if vertical else (hw[1], image.height)
        part = (0, top, image.width, top + height) if vertical else (left, 0, left + width, image.height)
        image = image.resize(size, method, box=part)
    resized = np.asarray(image)
    return resized[:, :, None] if grey else resized


def _resize_plain(crop: np.ndarray, view: View, out: np.ndarray) -> None:
    (low_y, high_y, part_y), (low_x, high_x, part_x) = (
        _taps(crop.shape[axis], view.crop[axis::2], view.resized_hw[axis], view.offset[axis], out.shape[axis])
        for axis in (0, 1)
    )
    above, below = crop[low_y].astype(np.float32), crop[high_y].astype(np.float32)
    rows = above + (below - above) * part_y[:, None, None]
    left, right = rows[:, low_x], rows[:, high_x]
    out[...] = np.floor(left + (right - left) * part_x[None, :, None] + np.float32(0.5)).astype(np.uint8)


def _taps(
    size: int, part: Sequence[float], resized: int, first: int, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the two source positions of each output position and the weight of the second one.

    `part` is what is resized of `size` pixels: its start and its length.
    """
    start, length = part
    # Pixel centres are aligned, as in TensorFlow 2 and Pillow.
    centre = np.maximum(start + (np.arange(first, first + count) + 0.5) * (length / resized) - 0.5, 0)
    low = np.minimum(centre.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    return low, high, (centre - low).astype(np.float32)


@lru_cache(maxsize=1)
def native_resize() -> Resize | None:
    """Return the compiled resizer (pixels, view of them, out, how); None if missing or wrong."""
    path, _ = decode_library()
    if path is None:
        return None
    resize = _resize_function(path)
    return resize if _is_pillows(resize) else None


def _resize_function(path: Path) -> Resize:
    function = ctypes.CDLL(str(path)).hr_resize
    c_int = ctypes.c_int
    place = ctypes.c_void_p
    function.argtypes = [place, ctypes.c_ssize_t, *([c_int] * 3), place, *([c_int] * 8), place, place]
    function.restype = c_int

    scratch = Scratch()

    def resize(pixels: np.ndarray, view: View, out: np.ndarray, how: Resampling) -> None:
        height, width, channels = pixels.shape
        down_first = how.is_down_first(height, view.resized_hw[0])
        # The intermediate image.
        size = out.shape[0] * width if down_first else height * out.shape[1]
        between = scratch.take(size * channels + _SPARE)
        assert how.antialias
        assert pixels.strides[1:] == (channels, 1)
        assert out.flags.c_contiguous
        sizes = (height, width, channels, (ctypes.c_double * 4)(*view.crop), *view.resized_hw, *view.offset)
        choices = (*out.shape[:2], how.bicubic, down_first)
        if not function(pixels.ctypes.data, pixels.strides[0], *sizes, *choices, out.ctypes.data, between.ctypes.data):
            raise MemoryError

    return resize


def _is_pillows(resize: Resize) -> bool:
    """Compare with the installed Pillow: shrinking, enlarging, a side that keeps its size, divided pixels.

    Once per process, since neither the user's compiler nor the version of Pillow is known when the package is built.
    """
    noise = np.random.default_rng(0).integers(0, 256, (61, 83, 3)).astype(np.uint8)
    whole, divided = (0.0, 0.0, 61.0, 83.0), (0.75, 0.125, 59.5, 82.25)
    sizes = (32, 24), (61, 40), (100, 83), (70, 190), (20, 190), (100, 20)
    for size, box, bicubic, first in product(sizes, (whole, divided), (False, True), ("across", "down")):
        how = Resampling(bicubic=bicubic, first=first)
        out = np.empty((*size, 3), np.uint8)
        resize(noise, View(box, size), out, how)
        if (out != pillow_resize(noise, box, size, how)).any():
            return False
    return True
