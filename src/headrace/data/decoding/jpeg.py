"""Decode a crop of a JPEG in C: only what the crop needs is decoded, then resized and written to its destination.

The decoder (native/jpeg.h says how and why) takes baseline JPEGs, grey or YCbCr. Its pixels are those of
libjpeg-turbo with its fast transform and without interpolated colours, bit for bit. Unusual or damaged images are
left to image_source.decode_into and so to libjpeg, which decides what is broken. Damage below a crop's last row goes
unnoticed, unless the file is truncated.
"""

import ctypes
import io
import threading
from functools import lru_cache
from pathlib import Path

import numpy as np

from headrace.data.decoding.image import Header, decoder_name, header_of
from headrace.data.decoding.resize import View, native_resize
from headrace.native.library import decode_library

_TOLERANCE = 16  # of 255, in the check on first use; the tests compare with libjpeg to the bit


class ThreadMemory(threading.local):
    """A thread's working memory: a buffer that grows, and the tables of the latest image, initially zero."""

    def __init__(self, tables_size: int) -> None:
        self.tables = np.zeros(tables_size, np.uint8)
        self.tables_at = self.tables.ctypes.data
        self.room, self.room_at = np.empty(0, np.uint8), 0

    def grow(self, size: int) -> None:
        """Replace the buffer with a larger one."""
        self.room = np.empty(size + size // 4, np.uint8)
        self.room_at = self.room.ctypes.data


class JpegDecoder:
    """The compiled decoder. Safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        c_int, c_int64, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        # PyDLL keeps the interpreter lock: reading a header takes less time than releasing and acquiring it.
        self.library = library = ctypes.CDLL(str(path))
        short_calls = ctypes.PyDLL(str(path))
        self._view, self._header = library.hr_jpeg_view, short_calls.hr_jpeg_header
        self._view.argtypes = [ctypes.c_char_p, c_int64, *([c_int] * 12), pointer, pointer, c_int64, pointer]
        self._view.restype = c_int64
        self._header.argtypes = [ctypes.c_char_p, c_int64, pointer]
        self.memory = ThreadMemory(library.hr_tables_size())
        self._three = ctypes.c_int32 * 3

    def header(self, data: bytes) -> Header | None:
        """Return the header of a JPEG that this decoder takes, None for others."""
        found = self._three()
        if not self._header(data, len(data), found):
            return None
        return header_of("jpeg", (found[0], found[1]), found[2])

    def decode_into(self, data: bytes, view: View, out: np.ndarray, factor: int = 1) -> bool:
        """Decode at 1/factor of its size what a view of the stored image needs, and write the view into `out`.

        The crop is in whole pixels of the full size. Say whether that was possible.
        """
        assert out.flags.c_contiguous
        memory, place = self.memory, out.ctypes.data
        sizes = (factor, *map(int, view.crop), *view.resized_hw, *view.offset, *out.shape)
        while True:
            missing = self._view(data, len(data), *sizes, place, memory.room_at, len(memory.room), memory.tables_at)
            if missing <= 0:  # negative: not an image that this decoder takes
                return missing == 0
            memory.grow(missing)


@lru_cache(maxsize=1)
def jpeg_decoder() -> JpegDecoder | None:
    """Return the compiled decoder, or None if it is missing or gives wrong pixels."""
    path, _ = decode_library()
    # Checked once in a process, since neither the compiler nor the installed libraries are known when the package is
    # built.
    if path is None or native_resize() is None:  # decoding also needs the resizer
        return None
    try:
        decoder = JpegDecoder(path)
    except (OSError, AttributeError):
        return None
    return decoder if _is_right(decoder) else None


def decoders() -> str:
    """Describe what decodes JPEGs here, for `headrace data bench`."""
    compiled = jpeg_decoder() is not None
    return f"{'compiled C (training crops) and ' if compiled else ''}{decoder_name()}"


def describe_slower() -> list[str]:
    """Return a line that says why JPEGs are decoded more slowly than they could be, if they are."""
    if jpeg_decoder() is not None:
        return []
    reason = decode_library()[1] or "the compiled decoder gave other pixels than the installed libraries"
    return [f"JPEGs are decoded by {decoder_name()}, in twice the time of the compiled decoder: {reason}"]


def _is_right(decoder: JpegDecoder) -> bool:
    """Compare with Pillow on a smooth image, with each usual subsampling of colours."""
    from PIL import Image

    y, x = np.mgrid[0:50, 0:70]
    pixels = np.stack([2 * x + y, 255 - 3 * x, 40 + 4 * y], axis=2).astype(np.uint8)
    for subsampling in (0, 1, 2):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=95, subsampling=subsampling)
        out = np.empty((40, 41, 3), np.uint8)
        with Image.open(file) as image:
            want = np.asarray(image.convert("RGB"))[5:45, 19:60].astype(int)
        if (
            not decoder.decode_into(file.getvalue(), View((5, 19, 40, 41), (40, 41)), out)
            or np.abs(out - want).max() > _TOLERANCE
        ):
            return False
    return True
