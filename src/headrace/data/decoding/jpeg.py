"""Show a crop of a JPEG in one call in C: decode no more than the crop needs, resize it, write it where it belongs.

The decoder (files/jpeg.h says how and why) takes baseline JPEGs of grey or YCbCr. Its pixels are those that
libjpeg-turbo gives with its quick transform and without interpolated colours, bit for bit. What is unusual or
damaged it leaves to the slower ways of image.py, so that libjpeg has the word on what is broken. Damage below a
crop's last row is not seen, unless the file was cut short.

For samples that are images in files (class folders, packed files). Python's lock is given up once for a whole chunk,
so that many threads do not wait for each other. What is seen is what image_source.show shows, to the bit; whatever is
no upright baseline JPEG, or is damaged, is left to it.
"""

import ctypes
import io
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from headrace.data.decoding.crop import ATTEMPTS, MIN_COVERED, PURPOSE, CropRule
from headrace.data.decoding.image import MAX_PIXELS, Header, decoder_name, header_of
from headrace.data.decoding.resize import View, native_resize
from headrace.native.library import decode_library

_CLOSE = 16  # levels of 255 that the check on first use allows; tests compare with libjpeg to the bit


class ThreadMemory(threading.local):
    """What a thread's calls work in: room that grows, and the tables of the last image, zero at first."""

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
        """Write a view of an image that is decoded at 1/factor into `out`; say whether that could be done."""
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
    path, _ = decode_library()
    if path is None or native_resize() is None:  # it resizes with the same code
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


def describe_slower() -> list[str]:
    """Say once why JPEGs are read more slowly than they could be, if they are."""
    if jpeg_viewer() is not None:
        return []
    reason = decode_library()[1] or "the compiled decoder gave other pixels than the libraries here"
    return [f"JPEGs are decoded by {decoder_name()}, in twice the time of the compiled decoder: {reason}"]


def _is_right(viewer: JpegViewer) -> bool:
    """Compare with Pillow on an image of gentle slopes, in the usual forms."""
    from PIL import Image

    y, x = np.mgrid[0:50, 0:70]
    pixels = np.stack([2 * x + y, 255 - 3 * x, 40 + 4 * y], axis=2).astype(np.uint8)
    for subsampling in (0, 1, 2):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=95, subsampling=subsampling)
        out = np.empty((40, 41, 3), np.uint8)
        with Image.open(file) as image:
            want = np.asarray(image.convert("RGB"))[5:45, 19:60].astype(int)
        if not viewer.show(file.getvalue(), View((5, 19, 40, 41), (40, 41)), out) or np.abs(out - want).max() > _CLOSE:
            return False
    return True


# Show several training images in one call in C, from reading their files to the finished views.


class Places(NamedTuple):
    """Where images lie: files, and in them the first byte, the number of bytes (-1: all), the CRC-32 (-1: none)."""

    paths: list[bytes]
    offsets: np.ndarray  # int64, as all three
    lengths: np.ndarray
    crcs: np.ndarray


@runtime_checkable
class PlacedSamples(Protocol):
    """Samples that are images in files."""

    def places(self, samples: np.ndarray) -> Places | None:
        """Return where these samples lie; None where they are not images as they lie there."""
        ...


class _Rule(ctypes.Structure):
    _fields_ = (
        ("area", ctypes.c_double * 2),
        ("aspect", ctypes.c_double * 2),
        ("min_covered", ctypes.c_double),
        ("max_pixels", ctypes.c_double),
        ("reference", ctypes.c_int32),
        ("attempts", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("purpose", ctypes.c_uint32),
        ("size", ctypes.c_int32),
        ("channels", ctypes.c_int32),
    )


class _Images(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("paths", "offsets", "lengths", "crcs", "epochs", "samples"))


class ChunkViewer:
    """Shows chunks of images as one look asks for. Safe to call from several threads."""

    def __init__(self, viewer: JpegViewer, rule: CropRule, seed: int, size: int, channels: int) -> None:
        self._memory, self._rule = viewer.memory, rule_of(rule, seed, size, channels)
        self._call = viewer.library.hr_show_chunk
        places = (ctypes.c_void_p,) * 4
        self._call.argtypes = [*places[:2], ctypes.c_int, *places, ctypes.c_int64, ctypes.c_void_p]
        self._call.restype = ctypes.c_int64

    def show(self, places: Places, samples: np.ndarray, epochs: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write views of these samples into `out` [n, size, size, channels]; return which could be shown."""
        assert out.flags.c_contiguous
        count, memory = len(samples), self._memory
        paths = (ctypes.c_char_p * count)(*places.paths)
        columns = [np.ascontiguousarray(column, np.int64) for column in places[1:]]
        columns += [column.astype(np.int64).astype(np.uint32) for column in (epochs, samples)]  # as addresses are taken
        images = _Images(ctypes.addressof(paths), *(column.ctypes.data for column in columns))
        shown, after = np.zeros(count, np.uint8), ctypes.c_int32(0)
        fixed = ctypes.byref(images), ctypes.byref(self._rule), count, ctypes.byref(after)
        into = shown.ctypes.data, out.ctypes.data
        while missing := self._call(*fixed, *into, memory.room_at, len(memory.room), memory.tables_at):
            memory.grow(missing)
        return shown.astype(bool)


@lru_cache(maxsize=16)
def chunk_viewer(rule: CropRule, seed: int, size: int, channels: int) -> ChunkViewer | None:
    """Return what shows chunks, or None where there is no compiled decoder."""
    viewer = jpeg_viewer()
    return None if viewer is None else ChunkViewer(viewer, rule, seed, size, channels)


def rule_of(rule: CropRule, seed: int, size: int, channels: int) -> Any:
    """Return a crop rule as the code in C takes it."""
    return _Rule(
        (ctypes.c_double * 2)(*rule.area),
        (ctypes.c_double * 2)(*rule.aspect),
        MIN_COVERED,
        MAX_PIXELS,
        rule.reference,
        ATTEMPTS[rule.reference],
        seed & 0xFFFFFFFF,
        PURPOSE,
        size,
        channels,
    )
