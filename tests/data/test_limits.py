"""Images that ask for more work than their size: refused before they are decoded, on every way to a decoder."""

import io
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.data.decoding import image as image_module
from headrace.data.decoding import limits
from headrace.data.decoding.crop import CROP_RULES
from headrace.data.decoding.image import BadImage, decode, read_header
from headrace.data.decoding.image_source import ViewSpec, decode_into
from headrace.data.decoding.jpeg_rows import cut_rows
from headrace.data.decoding.limits import MAX_SCANS, MAX_SEGMENTS
from headrace.data.sets.samples import FileSamples

from .image_files import ObjectSamples, encode, smooth

MOST_SECONDS = 4.0  # of processor time, for files of a few megabytes; without limits these take 10 s to hours


@contextmanager
def quickly() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < MOST_SECONDS


def whole(data: bytes) -> np.ndarray:
    return decode(data, read_header(data))


def crop(data: bytes) -> np.ndarray:
    """Decode as training does, by the C code where it takes the image."""
    out = np.empty((32, 32, 3), np.uint8)
    decode_into(ObjectSamples([(data, 0)]), 0, 0, ViewSpec(size=32, crop=CROP_RULES["torchvision"]), out, None)
    return out


def repeated_scans(num_scans: int, progressive: bool = True, side: int = 40) -> bytes:
    """Return a JPEG whose last scan, with the tables before it, is there again and again."""
    data = encode(smooth(side, side), progressive=progressive)
    scan = data[data.rfind(b"\xff\xc4") if progressive else data.rfind(b"\xff\xda") : -2]
    return data[:-2] + scan * (num_scans - data.count(b"\xff\xda")) + data[-2:]


@pytest.fixture(params=["simplejpeg", "Pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Pillow":
        monkeypatch.setattr(image_module, "_simplejpeg", lambda: None)
    return request.param


@pytest.mark.parametrize("progressive", [True, False])
@pytest.mark.parametrize("read", [whole, crop])
def test_a_jpeg_of_many_scans_is_refused(decoder: str, read: Callable[[bytes], np.ndarray], progressive: bool) -> None:
    with quickly(), pytest.raises(BadImage, match=f"more than {MAX_SCANS} scans of 1,600 pixels"):
        read(repeated_scans(MAX_SCANS + 1, progressive))


def test_scans_times_pixels_are_bounded(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the largest image, 16 scans: as many as are written for any image."""
    monkeypatch.setattr(limits, "_MAX_SCANNED", 16 * 400 * 400)
    data = encode(smooth(400, 400), progressive=True)
    assert data.count(b"\xff\xda") == 10
    assert whole(data).shape == (400, 400, 3)
    with pytest.raises(BadImage, match="more than 16 scans of 160,000 pixels"):
        whole(repeated_scans(17, side=400))


def test_scans_of_a_thumbnail_do_not_count() -> None:
    data = encode(smooth(40, 40), progressive=True)
    thumbnail = b"\xff\xda" * 1000
    app = b"\xff\xe1" + struct.pack(">H", 2 + len(thumbnail)) + thumbnail
    assert (whole(data[:2] + app + data[2:]) == whole(data)).all()
    assert (whole(data + app) == whole(data)).all(), "nor those of what follows, as in files of several images"


def test_a_jpeg_of_many_empty_segments_is_refused(decoder: str) -> None:
    data = encode(smooth(40, 40))
    many = data[:2] + b"\xff\xe0\0\2" * 1_000_000 + data[2:]
    for read in (whole, crop):  # the C code leaves it to the others, so that it is bad on every machine
        with quickly(), pytest.raises(BadImage, match=r"segments|too many parts"):
            read(many)
    with quickly(), pytest.raises(BadImage, match="segments"):
        cut_rows(many, 0, 8)
    few = data[:2] + b"\xff\xe0\0\2" * (MAX_SEGMENTS // 2) + data[2:]
    assert (whole(few) == whole(data)).all()


def test_restart_markers_are_counted_no_further_than_there_are_rows() -> None:
    file = io.BytesIO()
    Image.fromarray(smooth(64, 64)).save(file, "JPEG", restart_marker_rows=1)
    data = file.getvalue()
    assert cut_rows(data, 0, 8) is not None
    with quickly():
        assert cut_rows(data[:-2] + b"\xff\xd0" * 10_000_000 + data[-2:], 0, 8) is None


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


PNG = b"\x89PNG\r\n\x1a\n"


def png(height: int, width: int, before: bytes = b"", part: int = 1 << 16) -> bytes:
    """Return a black PNG whose data is divided into parts."""
    data = zlib.compress(bytes(height * (width + 1)))
    parts = b"".join(chunk(b"IDAT", data[at : at + part]) for at in range(0, len(data), part))
    return (
        PNG
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
        + before
        + parts
        + chunk(b"IEND", b"")
    )


def tiff(entries: list[tuple[int, int, int, int]], rest: bytes = b"", following: int = 0) -> bytes:
    """Return a TIFF of one directory: (tag, type, count, value); `rest` comes after it."""
    rows = b"".join(struct.pack("<HHII", *entry) for entry in sorted(entries))
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + rows + struct.pack("<I", following) + rest


def size_tags(side: int) -> list[tuple[int, int, int, int]]:
    return [(256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (277, 3, 1, 1)]


def strips(number: int) -> bytes:
    """Return a TIFF of strips of a row each, all of them the same bytes."""
    start = 10 + 12 * 9 + 4
    tags = [*size_tags(8), (273, 4, number, start), (278, 4, 1, 1), (279, 4, number, start)]
    return tiff(tags, struct.pack("<I", 8) * number)


def shared_values(number: int, size: int) -> bytes:
    """Return a TIFF whose tags all have the same bytes as their value."""
    start = 10 + 12 * (number + 8) + 4
    tags = [*size_tags(8), (273, 4, 1, start), (279, 4, 1, 64)]
    return tiff([*tags, *((40_000 + n, 7, size, start) for n in range(number))], bytes(size))


def psd(number: int) -> bytes:
    resources = (b"8BIM\0\1\0\0" + bytes(4)) * number
    head = b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 8, 8, 8, 3)
    return head + bytes(4) + struct.pack(">I", len(resources)) + resources + bytes(4) + b"\0\0" + bytes(192)


def gif(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(smooth(8, 8)).save(file, "GIF")
    data = file.getvalue()
    first = data.index(b"\x2c", 13 + 3 * (2 << (data[10] & 7)))
    return data[:first] + b"\x21\xfe\x01a\0" * number + data[first:]


def dds(side: int) -> bytes:
    head = b"DDS " + struct.pack("<7I", 124, 0x1007, side, side, side * 3, 0, 0) + bytes(44)
    return head + struct.pack("<8I", 32, 0x40, 0, 24, 0xFF0000, 0xFF00, 0xFF, 0) + bytes(20 + side * side * 3)


def qoi(side: int) -> bytes:
    return b"qoif" + struct.pack(">IIBB", side, side, 3, 0) + b"\xfd" * (side * side // 62 + 1) + bytes(7) + b"\1"


def icon(inside: bytes) -> bytes:
    return b"\0\0\1\0\1\0" + struct.pack("<BBBBHHII", 0, 0, 0, 0, 1, 8, len(inside), 22) + inside


TEXT = chunk(b"tEXt", b"a\0b")
HOSTILE = {
    "png chunks": (lambda: png(8, 8, TEXT * 300_000), "too many parts"),
    "icon with chunks": (lambda: icon(png(8, 8, TEXT * 300_000)), "too many parts"),
    "icon of many pixels": (lambda: icon(png(10_000, 10_000)), "decompression bomb"),
    "tiff strips": (lambda: strips(2_000_000), "2,000,000 strips"),
    "psd resources": (lambda: psd(1_000_000), "too many parts"),
    "gif comments": (lambda: gif(1_000_000), "too many parts"),
    "ppm comment": (lambda: b"P6\n#" + b"a" * 10_000_000 + b"\n8 8\n255\n" + bytes(192), "too many parts"),
    "dds": (lambda: dds(2_100), "decoded in Python"),
    "qoi": (lambda: qoi(9_000), "decoded in Python"),
    "ppm of an odd range": (lambda: b"P6\n2100 2100\n100\n" + bytes(2_100 * 2_100 * 3), "decoded in Python"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_files_of_many_parts_are_refused(kind: str) -> None:
    make, told = HOSTILE[kind]
    data = make()
    with quickly(), pytest.raises(BadImage, match=told):
        whole(data)


GOOD = {
    "png of small chunks": lambda: png(2_000, 2_000, part=64),
    "png with texts": lambda: png(8, 8, TEXT * 1_000),
    "icon": lambda: icon(png(256, 256)),
    "tiff strips": lambda: strips(8),
    "psd resources": lambda: psd(100),
    "gif comments": lambda: gif(1_000),
    "dds": lambda: dds(200),
    "qoi": lambda: qoi(1_000),
    "ppm of an odd range": lambda: b"P6\n300 300\n100\n" + bytes(300 * 300 * 3),
}


@pytest.mark.parametrize("kind", GOOD)
def test_the_same_with_less_is_what_pillow_reads(kind: str) -> None:
    data = GOOD[kind]()
    with Image.open(io.BytesIO(data)) as image:
        assert (whole(data) == np.asarray(image.convert("RGBA").convert("RGB"))).all()


@pytest.mark.filterwarnings("ignore:Tag data larger than file")
def test_tags_of_a_tiff_that_share_their_value_take_no_more_memory() -> None:
    """Two thousand tags of the same megabyte: newer releases of Pillow leave them out, older ones read them all."""
    data = shared_values(2_000, 1 << 20)
    tracemalloc.start()
    try:
        with quickly(), suppress(BadImage):
            whole(data)
        assert tracemalloc.get_traced_memory()[1] < 32 * len(data)
    finally:
        tracemalloc.stop()


def test_a_file_that_is_larger_than_an_image_is_not_read(tmp_path: Path) -> None:
    """A sparse file of a terabyte takes no room on a disk."""
    path = tmp_path / "a.png"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadImage, match="1,099,511,627,776 bytes, more than"):
        FileSamples(tmp_path, ["a.png"], np.zeros(1)).content(0)
