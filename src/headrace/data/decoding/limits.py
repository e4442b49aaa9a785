"""How much work an image may ask for, decided before it is decoded: bytes, pixels, scans of a JPEG, parts of a file.

A file says in a few bytes what takes minutes to do: a JPEG repeats a scan of the whole image, a PNG has a million
chunks, which Pillow reads one by one in Python. The limits are far from what programs write, and none is on time, so
that a file is good or bad on every machine.
"""

import io
import re
import struct
from collections.abc import Collection, Iterator
from typing import Any

MAX_PIXELS = 89_478_485  # 256 MiB decoded, where Pillow warns too; more is a mistake or an attack
MAX_BYTES = 1 << 30  # of one encoded image: 12 for each of so many pixels
# Encoders write up to twenty scans, each of which may visit all coefficients; libtiff has this limit too. The largest
# image may have 16: a progressive one has ten.
MAX_SCANS = 100
_MAX_SCANNED = 16 * MAX_PIXELS  # pixels times scans: 9,400 x 9,400 pixels took 30 ms for each of the emptiest scans
MAX_SEGMENTS = 10_000  # of a JPEG, 64 KiB each: colour profiles and depth maps have some hundreds
# Some of Pillow's decoders are loops in Python: 0.6 (DDS, QOI) to 1.7 (PPM) microseconds a pixel.
MAX_PYTHON_PIXELS = 1 << 22
_NO_LOOPS = {"SGI16"}
_MAX_STRIPS = 100_000  # of a TIFF: Pillow makes a Python object of each
# Pillow reads a file part by part, a few calls for each: at least 2 KiB apart where programs write them.
_CALLS, _BYTES_PER_CALL = 50_000, 256
_CALLS_PER_PIXEL = 8  # of a decoder in Python
_MAX_READS = 16  # times that the same bytes may be read: the tags of a TIFF may all have the same value
_SCAN, _END, _ALONE = 0xDA, 0xD9, {0x01, 0xD8}  # the last have no length
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # but restart markers and stuffed bytes, which are inside of scans


class BadImage(Exception):
    """Bytes that are not an image, or a damaged image; the message says why."""


def refuse_large_file(num_bytes: int) -> None:
    """Refuse an encoded image of more bytes than one can need."""
    if num_bytes > MAX_BYTES:
        raise BadImage(f"{num_bytes:,} bytes, more than {MAX_BYTES:,}")


def refuse_many_pixels(height: int, width: int) -> None:
    """Refuse a size that is too large: a file of a few kilobytes can claim gigabytes of pixels."""
    if height * width > MAX_PIXELS:
        raise BadImage(f"{width:,} x {height:,} pixels, more than {MAX_PIXELS:,}: a decompression bomb?")


def segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, place, length) of a JPEG's segments up to its first scan, which comes last."""
    place = 2
    for _ in range(MAX_SEGMENTS):
        if place + 4 > len(data) or data[place] != 0xFF:
            return
        marker, length = data[place + 1], struct.unpack_from(">H", data, place + 2)[0]
        yield marker, place, length
        if marker == _SCAN:
            return
        place += 2 + length
    raise _many_segments()


def refuse_many_scans(data: bytes, num_pixels: int) -> None:
    """Refuse a JPEG whose scans are too many for its size: each may visit every pixel and have hardly any bytes."""
    most = min(MAX_SCANS, _MAX_SCANNED // max(1, num_pixels))
    if data.count(b"\xff\xda") <= most:  # a gigabyte a second, and never too few; thumbnails have scans of their own
        return
    place = scans = 0
    for _ in range(MAX_SEGMENTS):
        found = _MARKER.search(data, place)
        if found is None or (marker := data[found.start() + 1]) == _END:
            return
        place = found.end()
        scans += marker == _SCAN
        if scans > most:
            raise BadImage(f"more than {most} scans of {num_pixels:,} pixels: a decompression bomb?")
        if marker not in _ALONE and place + 2 <= len(data):
            place += struct.unpack_from(">H", data, place)[0]
    raise _many_segments()


def _many_segments() -> BadImage:
    return BadImage(f"more than {MAX_SEGMENTS:,} segments")


class MeteredFile(io.BytesIO):
    """Bytes that Pillow reads as a file, with as many calls as a file of this size can need."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._calls, self._bytes = _CALLS + len(data) // _BYTES_PER_CALL, _MAX_READS * len(data) + (1 << 20)

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        self._spend(len(found))
        return found

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._spend(0)
        return super().seek(offset, whence)

    def _spend(self, num_bytes: int) -> None:
        self._calls -= 1
        self._bytes -= num_bytes
        if self._calls < 0:
            raise BadImage("too many parts for a file of its size")
        if self._bytes < 0:
            raise BadImage("its parts are larger than the file")

    def allow_loops(self, codecs: Collection[str], image: Any) -> None:
        """Let a decoder in Python, one of Pillow's `codecs`, read an image pixel by pixel, unless it is too large."""
        # All tiles of an image have the same decoder; an icon, which has an image in it, has none.
        codec = image.tile[0][0] if image.tile else ""
        if codec not in codecs or codec in _NO_LOOPS:
            return
        num_pixels = image.width * image.height
        if num_pixels > MAX_PYTHON_PIXELS:
            raise BadImage(
                f"{image.width:,} x {image.height:,} pixels, more than {MAX_PYTHON_PIXELS:,}, of a kind of "
                f"{image.format} that is decoded in Python"
            )
        self._calls += _CALLS_PER_PIXEL * num_pixels


def refuse_hidden_parts(data: bytes) -> None:
    """Refuse what Pillow would go through before it tells an image's size: strips of a TIFF, an image in an icon."""
    if data[:2] in (b"II", b"MM"):
        _refuse_many_strips(data)
    if data[:4] == b"\0\0\1\0":
        for found in re.finditer(rb"\x89PNG\r\n\x1a\n....IHDR(.{8})", data, re.DOTALL):
            refuse_many_pixels(*struct.unpack(">II", found[1]))


def _refuse_many_strips(data: bytes) -> None:
    order = "<" if data[:2] == b"II" else ">"
    try:
        if struct.unpack_from(order + "H", data, 2)[0] == 43:  # BigTIFF
            place, count, entry = struct.unpack_from(order + "Q", data, 8)[0], "Q", "HHQ8x"
        else:
            place, count, entry = struct.unpack_from(order + "I", data, 4)[0], "H", "HHI4x"
        entries = struct.unpack_from(order + count, data, place)[0]
        first = place + struct.calcsize(order + count)
        for number in range(min(entries, 1 << 16)):
            place = first + number * struct.calcsize(order + entry)
            tag, _, num_values = struct.unpack_from(order + entry, data, place)
            if tag in (273, 324) and num_values > _MAX_STRIPS:
                raise BadImage(f"{num_values:,} strips, more than {_MAX_STRIPS:,}")
    except struct.error:  # Pillow says what is damaged
        return
