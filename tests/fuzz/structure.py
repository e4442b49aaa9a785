"""Damage that knows a file's structure, and so reaches what random damage does not: checks behind other checks.

Each function takes a good file and returns one in which some field, and nothing that protects it, is wrong.
"""

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Mutation = Callable[[bytes, random.Random], bytes]

# JPEG

_DHT, _DQT, _DRI, _SOS, _APP1 = 0xC4, 0xDB, 0xDD, 0xDA, 0xE1
_SOF = (0xC0, 0xC1, 0xC2)
_AC_SYMBOLS = (0x00, 0x01, 0x0A, 0x11, 0x51, 0xA3, 0xF0, 0xF1, 0xE5, 0xFA)
_BYTES = (0, 1, 2, 3, 4, 8, 15, 16, 63, 64, 127, 128, 255)
Segment = list[Any]  # marker, payload


def _parse(data: bytes) -> tuple[list[Segment], bytes]:
    """Return the segments of a JPEG up to its scan, and all that follows."""
    found: list[Segment] = []
    place = 2
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker, length = data[place + 1], struct.unpack_from(">H", data, place + 2)[0]
        found.append([marker, bytearray(data[place + 4 : place + 2 + length])])
        place += 2 + length
        if marker == _SOS:
            break
    return found, data[place:]


def _join(segments: Sequence[Segment], scan: bytes) -> bytes:
    parts = [bytes((0xFF, marker)) + struct.pack(">H", min(2 + len(body), 65535)) + body for marker, body in segments]
    return b"\xff\xd8" + b"".join(parts) + scan


def _chosen(segments: list[Segment], rng: random.Random, *markers: int) -> bytearray:
    """Return the payload of a segment of one of these kinds, which is added where there is none."""
    known = [body for marker, body in segments if marker in markers and body]
    if known:
        return rng.choice(known)
    segments.insert(0, [markers[0], bytearray((0, 0))])
    return segments[0][1]


def _many_codes(segments: list[Segment], scan: bytes, rng: random.Random) -> bytes:
    """Give a table of codes more symbols than there are bytes, all of them with a code of their own."""
    kind = rng.randrange(2)
    counts = [0] * 8 + [rng.randint(20, 60) for _ in range(8)]
    symbols = bytes(rng.choice(_AC_SYMBOLS) if kind else rng.randrange(12) for _ in range(sum(counts)))
    body = bytearray((kind << 4 | rng.randrange(2), *counts)) + symbols
    segments.insert(len(segments) - 1, [_DHT, body])
    return scan


def _other_codes(segments: list[Segment], scan: bytes, rng: random.Random) -> bytes:
    """Change how many codes of a length there are, or what they mean: long runs, for example."""
    body = _chosen(segments, rng, _DHT)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(body))
        body[at] = rng.choice(_AC_SYMBOLS) if at > 16 else max(0, min(255, body[at] + rng.choice((-2, -1, 1, 2, 200))))
    return scan


def _long_runs(segments: list[Segment], scan: bytes, rng: random.Random) -> bytes:
    """Let most codes skip many coefficients, so that blocks end at any place."""
    for marker, body in segments:
        if marker == _DHT and body and body[0] >> 4:
            for at in range(17, len(body)):
                if rng.random() < 0.5:
                    body[at] = rng.randrange(16) << 4 | rng.randint(1, 10)
    return scan


def _fields(*markers: int) -> Callable[[list[Segment], bytes, random.Random], bytes]:
    """Return a mutation that sets single bytes of one kind of segment."""

    def change(segments: list[Segment], scan: bytes, rng: random.Random) -> bytes:
        body = _chosen(segments, rng, *markers)
        for _ in range(rng.randint(1, 2)):
            body[rng.randrange(min(len(body), 20))] = rng.choice(_BYTES)
        return scan

    return change


def _length(segments: list[Segment], scan: bytes, rng: random.Random) -> bytes:
    body = rng.choice(segments)[1]
    if rng.random() < 0.5:
        body.extend(bytes(rng.choice((1, 2, 3, 17, 65, 1000))))
    else:
        del body[max(0, len(body) - rng.randint(1, 20)) :]
    return scan


def _interval(segments: list[Segment], scan: bytes, rng: random.Random) -> bytes:
    body = _chosen(segments, rng, _DRI)
    body[:] = struct.pack(">H", rng.choice((0, 1, 2, 3, 4, 7, 12, 65535)))
    return scan


def _restarts(segments: list[Segment], scan: bytes, rng: random.Random) -> bytes:
    """Add restart markers whose numbers are the right ones, take some away, or exchange numbers."""
    found = bytearray(scan)
    places = [at for at in range(len(found) - 1) if found[at] == 0xFF and 0xD0 <= found[at + 1] <= 0xD7]
    for _ in range(rng.randint(1, 3)):
        match rng.randrange(3):
            case 0:
                end = found.rfind(b"\xff\xd9")
                found[end:end] = bytes((0xFF, 0xD0 + len(places) % 8))
                places.append(end)
            case 1 if places:
                at = places.pop(rng.randrange(len(places)))
                del found[at : at + 2]
                places = [place for place in places if place < at]
            case 2 if places:
                found[rng.choice(places) + 1] = 0xD0 + rng.randrange(8)
    return bytes(found)


def _bits(segments: list[Segment], scan: bytes, rng: random.Random) -> bytes:
    """Replace a part of the scan by other bits, all of them the same or random."""
    found = bytearray(scan)
    at = rng.randrange(len(found))
    size = rng.choice((1, 8, 64, 500))
    fill = rng.choice((b"\xfe" * size, bytes(size), bytes(rng.randrange(255) for _ in range(size))))
    found[at : min(at + size, len(found) - 2)] = fill[: max(0, min(size, len(found) - 2 - at))]
    return bytes(found)


def _cut(segments: list[Segment], scan: bytes, rng: random.Random) -> bytes:
    """End in the middle, often with the first half of a marker."""
    return scan[: rng.randrange(len(scan))] + rng.choice((b"", b"\xff", b"\xff\xd9", b"\xff\x00", b"\xff\xd0"))


_JPEG = (
    *(_many_codes, _other_codes, _long_runs, _length, _interval, _restarts, _bits, _cut),
    *(_fields(*_SOF), _fields(_SOS), _fields(_DQT), _fields(_APP1)),
)


def jpeg(data: bytes, rng: random.Random) -> bytes:
    """Change one to three fields of a JPEG; other files stay as they are."""
    segments, scan = _parse(data)
    if data[:2] != b"\xff\xd8" or not segments or len(scan) < 4:
        return data
    for _ in range(rng.choice((1, 1, 2, 3))):
        scan = rng.choice(_JPEG)(segments, scan, rng) if len(scan) > 4 else scan
    return _join(segments, scan)


# Arrays of NumPy, and tables of places made of them

_NUMBERS = (-1, 0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 255, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63))
_SIZES = (0, 1, 2, 5, 2**16, 2**24, 2**28, 2**31, 2**33, 2**40, 2**62)
_DTYPES = ("|u1", "<i4", "<i8", "<f8", "|S1000", "<U100000", "|O", "|b1")


def npz_values(data: bytes, rng: random.Random) -> bytes:
    """Change a value, the type or the shape of one array; the archive is a good one."""
    with np.load(io.BytesIO(data), allow_pickle=False) as kept:
        arrays = {name: kept[name] for name in kept.files}
    name = rng.choice(list(arrays))
    array = arrays[name].copy()
    match rng.choice((0, 0, 0, 0, 1, 2, 3, 4)):
        case 0 if array.size and array.dtype.kind in "iu":
            limits = np.iinfo(array.dtype)
            fitting = [number for number in _NUMBERS if limits.min <= number <= limits.max]
            array.flat[rng.randrange(array.size)] = rng.choice(fitting)
        case 1:
            array = array.astype(rng.choice(("u1", "i4", "f8", "U4") if array.dtype.kind in "iu" else ("U4", "S4")))
        case 2:
            array = array[: rng.randrange(len(array) + 1)] if array.ndim else array[None]
        case 3:
            array = array[None] if rng.random() < 0.5 else np.repeat(array, 2, 0) if array.ndim else array
        case _:
            array = array.reshape(-1)
    file = io.BytesIO()
    arrays[name] = array
    with zipfile.ZipFile(file, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as out:
        for key, values in arrays.items():
            with out.open(f"{key}.npy", "w") as member:
                np.lib.format.write_array(member, values, allow_pickle=False)
    return file.getvalue()


def npz_header(data: bytes, rng: random.Random) -> bytes:
    """Let the header of one array claim another shape or type than its bytes have."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as archive,
        zipfile.ZipFile(file, "w", archive.infolist()[0].compress_type) as out,
    ):
        chosen = rng.choice(archive.namelist())
        for name in archive.namelist():
            content = archive.read(name)
            if name == chosen:
                stored = io.BytesIO(content)
                np.lib.format.read_magic(stored)
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(stored)
                wanted, kind = list(shape) or [1], dtype.str
                if rng.random() < 0.7:
                    wanted[rng.randrange(len(wanted))] = rng.choice(_SIZES)
                else:
                    kind = rng.choice(_DTYPES)
                head = io.BytesIO()
                facts = {"descr": kind, "fortran_order": fortran, "shape": tuple(wanted)}
                np.lib.format.write_array_header_1_0(head, facts)
                content = head.getvalue() + stored.read()
            out.writestr(name, content)
    return file.getvalue()


def packed(data: bytes, rng: random.Random) -> bytes:
    """Change the index of a packed file, and make its checksum right."""
    end, trailer = b"end of pack\n", struct.Struct("<QQI")
    at = len(data) - len(end) - trailer.size
    place, length, _ = trailer.unpack_from(data, at)
    index = rng.choice((npz_values, npz_values, npz_header))(data[place : place + length], rng)
    return data[:place] + index + trailer.pack(place, len(index), zlib.crc32(index)) + end


def records(data: bytes, rng: random.Random) -> bytes:
    """Change one of the numbers around a TFRecord: its length or one of its two checksums."""
    starts, place = [], 0
    while place + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        starts.append((place, place + 12 + length))
        place += 16 + length
    start, end = rng.choice(starts)
    found = bytearray(data)
    at = rng.choice((start, start + 8, end)) + rng.randrange(4)
    found[at] ^= rng.choice((1, 128, 255))
    return bytes(found)
