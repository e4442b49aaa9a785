"""Show a crop of a JPEG in one call in C: decode no more than the crop needs, resize it, write it where it belongs.

The decoder (files/jpeg.h says how and why) takes baseline JPEGs of grey or YCbCr. Its pixels are those that
libjpeg-turbo gives with its quick transform and without interpolated colours, bit for bit. What is unusual or
damaged it leaves to the slower ways of picture.py, so that libjpeg has the word on what is broken. Damage below a
crop's last row is not seen, unless the file was cut short.
"""

import ctypes
import io
import os
import threading
from functools import lru_cache
from pathlib import Path

import numpy as np

from headrace.data.native import OFF, native_library
from headrace.data.picture import Header, decoder_name, header_of
from headrace.data.resize import View

_CLOSE = 16  # levels of 255 that the check on first use allows; tests compare with libjpeg to the bit


class ThreadMemory(threading.local):
    """What a thread's calls work in: room that grows, and the tables of the last picture, zero at first."""

    def __init__(self, tables_size: int) -> None:
        self.tables = np.zeros(tables_size, np.uint8)
        self.tables_at = self.tables.ctypes.data
        self.room, self.room_at = np.empty(0, np.uint8), 0

    def grow(self, size: int) -> None:
        """Take more room."""
        self.room = np.empty(size + size // 4, np.uint8)
        self.room_at = self.room.ctypes.data


class JpegViewer:
    """The compiled decoder. Safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        whole, long, place = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        library, short_calls = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))  # the latter keep Python's lock
        self.library = library
        self._view, self._header = library.hr_jpeg_view, short_calls.hr_jpeg_header
        self._view.argtypes = [ctypes.c_char_p, long, *([whole] * 12), place, place, long, place]
        self._view.restype = long
        self._header.argtypes = [ctypes.c_char_p, long, place]
        self.memory = ThreadMemory(library.hr_tables_size())
        self._three = ctypes.c_int32 * 3

    def header(self, data: bytes) -> Header | None:
        """Return the header of a JPEG that can be shown here, None for others."""
        found = self._three()
        if not self._header(data, len(data), found):
            return None
        return header_of("jpeg", (found[0], found[1]), found[2])

    def show(self, data: bytes, view: View, out: np.ndarray, factor: int = 1) -> bool:
        """Write a view of a picture that is decoded at 1/factor into `out`; say whether that could be done."""
        assert out.flags.c_contiguous
        memory, place = self.memory, out.ctypes.data
        sizes = (factor, *view.crop, *view.resized_hw, *view.offset, *out.shape)
        missing = self._view(data, len(data), *sizes, place, memory.room_at, len(memory.room), memory.tables_at)
        if missing > 0:
            memory.grow(missing)
            missing = self._view(data, len(data), *sizes, place, memory.room_at, len(memory.room), memory.tables_at)
        return missing == 0


@lru_cache(maxsize=1)
def jpeg_viewer() -> JpegViewer | None:
    """Return the compiled decoder, or None where it cannot be had."""
    path = native_library()
    if path is None:
        return None
    try:
        viewer = JpegViewer(path)
    except (OSError, AttributeError):
        return None
    return viewer if _is_right(viewer) else None


def decoders() -> str:
    """Say what decodes JPEGs here."""
    own = jpeg_viewer() is not None
    return f"{'own C (training crops) and ' if own else ''}{decoder_name()}"


def told_slower() -> list[str]:
    """Say once why JPEGs are read more slowly than they could be, if they are."""
    if jpeg_viewer() is not None:
        return []
    off = os.environ.get(OFF) == "0"
    why = f"{OFF} is 0" if off else "no C compiler (cc, gcc, clang) that works was found"
    return [f"JPEGs are decoded by {decoder_name()}: {why}; with the compiled decoder it takes half the time"]


def _is_right(viewer: JpegViewer) -> bool:
    """Compare with Pillow on a picture of gentle slopes, in the usual forms."""
    from PIL import Image

    y, x = np.mgrid[0:50, 0:70]
    picture = np.stack([2 * x + y, 255 - 3 * x, 40 + 4 * y], axis=2).astype(np.uint8)
    for subsampling in (0, 1, 2):
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=95, subsampling=subsampling)
        out = np.empty((40, 41, 3), np.uint8)
        with Image.open(file) as image:
            want = np.asarray(image.convert("RGB"))[5:45, 19:60].astype(int)
        if not viewer.show(file.getvalue(), View((5, 19, 40, 41), (40, 41)), out) or np.abs(out - want).max() > _CLOSE:
            return False
    return True
