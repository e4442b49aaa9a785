"""Decode crops of several JPEGs in one call in C, from reading their files to the finished views.

The interpreter lock is released once for all of them, so that many threads do not wait for each other.
"""

import ctypes
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from headrace.data.decoding.crop import ATTEMPTS, CROP_RULES, MIN_COVERED, PURPOSE, CropRule
from headrace.data.decoding.jpeg import JpegDecoder, jpeg_decoder
from headrace.data.decoding.limits import MAX_PIXELS


class FileExtents(NamedTuple):
    """Where images are stored: in which file, from which byte on, how many bytes (-1: all), and their checksum.

    The image may be a part of these bytes: `sizes` bytes (-1: all) after `skips`. `objects` are the boxes (top, left,
    bottom, right, from 0 to 1) of the objects of all images; those of image i end before number object_ends[i].
    """

    paths: list[bytes]
    offsets: np.ndarray  # int64, as all five
    lengths: np.ndarray
    crcs: np.ndarray  # CRC-32, NO_CHECKSUM or RECORD_CHECKSUM
    skips: np.ndarray
    sizes: np.ndarray
    objects: np.ndarray | None = None  # float32 [m, 4]
    object_ends: np.ndarray | None = None  # int32


NO_CHECKSUM, RECORD_CHECKSUM = -1, -2  # the latter: the last four bytes are a TFRecord's checksum of those before


@runtime_checkable
class FileBackedSamples(Protocol):
    """Samples whose encoded images are files, or contiguous parts of files."""

    def extents(self, samples: np.ndarray) -> FileExtents:
        """Return where these samples are stored."""
        ...


Objects = tuple[np.ndarray | None, np.ndarray | None]  # `objects` and `object_ends` of FileExtents


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


class _Drawn(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("epochs", "samples", "object_ends", "objects"))


class _Images(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("paths", "offsets", "lengths", "crcs", "skips", "sizes")),
        ("drawn", _Drawn),
    )


class BatchDecoder:
    """Decodes training crops of several files at a time, or whole images. Safe to call from several threads."""

    def __init__(self, decoder: JpegDecoder, rule: CropRule | None, seed: int, size: int, channels: int) -> None:
        self._memory, self._rule = decoder.memory, rule_of(rule, seed, size, channels)
        self._call, self._crops = decoder.library.hr_decode_batch, decoder.library.hr_random_crops
        places = (ctypes.c_void_p,) * 4
        self._crops.argtypes, self._crops.restype = [*places[:3], ctypes.c_int, places[0]], None
        self._call.argtypes = [*places[:2], ctypes.c_int, *places, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._call.restype = ctypes.c_int64

    def decode_into(
        self, places: FileExtents, samples: np.ndarray, epochs: np.ndarray, out: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Write views of these samples into `out` [n, size, size, channels].

        Return which ones it could decode, and the heights and widths of those images, int32 [n, 2].
        """
        assert out.flags.c_contiguous
        count, memory = len(samples), self._memory
        paths = (ctypes.c_char_p * count)(*places.paths)
        # Held in variables while C runs: it gets addresses only, which keep no array alive.
        columns = [np.ascontiguousarray(column, np.int64) for column in places[1:6]]
        addresses = _addresses(samples, epochs, places.objects, places.object_ends)
        images = _Images(ctypes.addressof(paths), *(column.ctypes.data for column in columns), _drawn(addresses))
        decoded, sizes, after = np.zeros(count, np.uint8), np.zeros((count, 2), np.int32), ctypes.c_int32(0)
        fixed = ctypes.byref(images), ctypes.byref(self._rule), count, ctypes.byref(after)
        into = decoded.ctypes.data, sizes.ctypes.data, out.ctypes.data
        # C stops at an image that needs more memory than the thread has, and goes on there (`after`) with more.
        while missing := self._call(*fixed, *into, memory.room_at, len(memory.room), memory.tables_at):
            memory.grow(missing)
        return decoded.astype(bool), sizes

    def crops(
        self, hw: np.ndarray, samples: np.ndarray, epochs: np.ndarray, objects: Objects = (None, None)
    ) -> np.ndarray:
        """Return the crops of these samples, int32 [n, 4], in images of heights and widths [n, 2]."""
        out, sizes = np.empty((len(samples), 4), np.int32), np.ascontiguousarray(hw, np.int32)
        addresses = _addresses(samples, epochs, *objects)
        drawn = ctypes.byref(_drawn(addresses))
        self._crops(sizes.ctypes.data, ctypes.byref(self._rule), drawn, len(samples), out.ctypes.data)
        return out


def _addresses(
    samples: np.ndarray, epochs: np.ndarray, objects: np.ndarray | None, ends: np.ndarray | None
) -> tuple[np.ndarray | None, ...]:
    """Return what crops are drawn for, as the C code takes it; the caller keeps the arrays alive."""
    words = (column.astype(np.int64).astype(np.uint32) for column in (epochs, samples))  # as core.rng takes addresses
    if objects is None or ends is None:
        return *words, None, None
    return *words, np.ascontiguousarray(ends, np.int32), np.ascontiguousarray(objects, np.float32)


def _drawn(addresses: tuple[np.ndarray | None, ...]) -> _Drawn:
    return _Drawn(*(None if column is None else column.ctypes.data for column in addresses))


@lru_cache(maxsize=16)
def batch_decoder(rule: CropRule | None, seed: int, size: int, channels: int) -> BatchDecoder | None:
    """Return a decoder of batches (without a rule, of whole images); None where there is no compiled decoder."""
    decoder = jpeg_decoder()
    return None if decoder is None else BatchDecoder(decoder, rule, seed, size, channels)


def rule_of(rule: CropRule | None, seed: int, size: int, channels: int) -> _Rule:
    """Return a crop rule as the C code expects it."""
    # Without attempts, it is what the reference's sampler takes when all of them fail: the whole image.
    attempts = ATTEMPTS[rule.reference] if rule else 0
    rule = rule or CROP_RULES["reference"]
    return _Rule(
        (ctypes.c_double * 2)(*rule.area),
        (ctypes.c_double * 2)(*rule.aspect),
        MIN_COVERED,
        MAX_PIXELS,
        rule.reference,
        attempts,
        seed & 0xFFFFFFFF,
        PURPOSE,
        size,
        channels,
    )
