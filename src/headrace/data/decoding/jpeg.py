"""Decode crops of JPEGs in C: only what a crop needs is decoded, then resized and written to its destination.

`JpegDecoder` takes one image, `BatchDecoder` several files in one call, from reading them to the finished views: the
interpreter lock is released once for all of them, so that many threads do not wait for each other.

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
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from headrace.data.decoding.image import Header, decoder_name, header_of
from headrace.data.decoding.limits import MAX_PIXELS
from headrace.data.decoding.resize import ATTEMPTS, CROP_RULES, MIN_COVERED, PURPOSE, CropRule, View, native_resize
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


# Several files in one call


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
