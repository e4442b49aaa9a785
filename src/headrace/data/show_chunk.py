"""Show several training pictures in one call in C, from reading their files to the finished views.

For samples that are pictures in files (class folders, packed files). Python's lock is given up once for a whole chunk,
so that many threads do not wait for each other. What is seen is what picture_source.show shows, to the bit; whatever is
no upright baseline JPEG, or is damaged, is left to it.
"""

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from headrace.data.crop import ATTEMPTS, MIN_COVERED, PURPOSE, CropRule
from headrace.data.jpeg_view import JpegViewer, jpeg_viewer
from headrace.data.picture import MAX_PIXELS


class Places(NamedTuple):
    """Where pictures lie: files, and in them the first byte, the number of bytes (-1: all), the CRC-32 (-1: none)."""

    paths: list[bytes]
    offsets: np.ndarray  # int64, as all three
    lengths: np.ndarray
    crcs: np.ndarray


@runtime_checkable
class PlacedSamples(Protocol):
    """Samples that are pictures in files."""

    def places(self, samples: np.ndarray) -> Places | None:
        """Return where these samples lie; None where they are not pictures as they lie there."""
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


class _Pictures(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("paths", "offsets", "lengths", "crcs", "epochs", "samples"))


class ChunkViewer:
    """Shows chunks of pictures as one look asks for. Safe to call from several threads."""

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
        pictures = _Pictures(ctypes.addressof(paths), *(column.ctypes.data for column in columns))
        shown, after = np.zeros(count, np.uint8), ctypes.c_int32(0)
        fixed = ctypes.byref(pictures), ctypes.byref(self._rule), count, ctypes.byref(after)
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
