"""`tf.train.Example` messages, read and written without TensorFlow or protobuf.

An Example is a map from names to lists of bytes, floats or whole numbers. Only the wanted names are unpacked; images
that are not wanted are skipped.
"""

import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3  # fields of a Feature, of which it has one


class Floats(list[float]):
    """A list of floats, also when it is empty: readers compare the kind of a list with the one they expect."""


Values = list[bytes] | Floats | list[int]


class BadMessage(ValueError):
    """Bytes that are not an Example."""


def read_example(data: bytes | memoryview, wanted: Collection[str], uncopied: str = "") -> dict[str, Any]:
    """Return {name: list of values} of the wanted features that the message has.

    Bytes of the feature `uncopied` are views of the message; `place_in` says where in it they are.
    """
    view = memoryview(data)
    found: dict[str, Any] = {}
    for field, features in _fields(view):
        if field != 1 or not isinstance(features, memoryview):
            continue
        for inner, entry in _fields(features):
            if inner == 1 and isinstance(entry, memoryview):
                _read_entry(entry, wanted, found, uncopied)
    return found


def place_in(data: memoryview, part: memoryview) -> int:
    """Return where a view of some bytes begins in them."""
    whole, inside = (np.frombuffer(view, np.uint8).ctypes.data for view in (data, part))
    return inside - whole


def write_example(features: Mapping[str, Values]) -> bytes:
    """Return the message that holds these features, in order of name."""
    entries = []
    for name in sorted(features):
        kind, body = _pack(features[name])
        value = _field(kind, body)
        entries.append(_field(1, _field(1, name.encode()) + _field(2, value)))
    return _field(1, b"".join(entries))


def _read_entry(entry: memoryview, wanted: Collection[str], found: dict[str, Any], uncopied: str) -> None:
    name, value = "", None
    for field, part in _fields(entry):
        if field == 1 and isinstance(part, memoryview):
            name = bytes(part).decode("utf-8", "replace")
            # The value, mostly an image, is not even looked at.
            if name not in wanted:
                return
        elif field == 2:
            value = part
    if name in wanted and isinstance(value, memoryview):
        found[name] = _values(value, copied=name != uncopied)


def _values(feature: memoryview, copied: bool = True) -> Values | list[memoryview]:
    for kind, body in _fields(feature):
        if not isinstance(body, memoryview):
            continue
        parts = [part for field, part in _fields(body) if field == 1]
        if kind == _BYTES_LIST:
            views = [part for part in parts if isinstance(part, memoryview)]
            return [bytes(part) for part in views] if copied else views
        if kind == _FLOAT_LIST:
            return Floats(value for part in parts for value in _floats(part))
        if kind == _INT64_LIST:
            return [value for part in parts for value in _ints(part)]
    return []


def _floats(part: memoryview | int) -> tuple[float, ...]:
    """Return packed floats, or the one float of a field that is not packed."""
    if isinstance(part, int) and part >= 1 << 32:
        raise BadMessage("a number in a list of floats has more than 32 bits")
    raw = struct.pack("<I", part) if isinstance(part, int) else part
    if len(raw) % 4:
        raise BadMessage("a list of floats has a broken length")
    return struct.unpack(f"<{len(raw) // 4}f", raw)


def _ints(part: memoryview | int) -> list[int]:
    if isinstance(part, int):
        return [_signed(part)]
    values, place = [], 0
    while place < len(part):
        value, place = _varint(part, place)
        values.append(_signed(value))
    return values


def _signed(value: int) -> int:
    # Protocol buffers store negative numbers as their 64-bit complement.
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(view: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Yield (field number, value); the value is a view of bytes, or a whole number."""
    place, end = 0, len(view)
    while place < end:
        tag, place = _varint(view, place)
        kind = tag & 7
        if kind == _BYTES:
            length, place = _varint(view, place)
            if place + length > end:
                raise BadMessage(f"a field of {length:,} bytes ends after its message")
            yield tag >> 3, view[place : place + length]
            place += length
        elif kind == _VARINT:
            value, place = _varint(view, place)
            yield tag >> 3, value
        elif kind in (_FIXED32, _FIXED64):
            width = 4 if kind == _FIXED32 else 8
            if place + width > end:
                raise BadMessage("a number ends after its message")
            yield tag >> 3, int.from_bytes(view[place : place + width], "little")
            place += width
        else:
            raise BadMessage(f"a field of kind {kind}, which Examples do not have")


def _varint(view: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        # Ten bytes at most: without a limit, damaged data would build numbers of any length.
        if place >= len(view) or shift > 63:
            raise BadMessage("a number has no end")
        byte = view[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7


def _pack(values: Values) -> tuple[int, bytes]:
    if isinstance(values, Floats):
        return _FLOAT_LIST, _field(1, struct.pack(f"<{len(values)}f", *values)) if values else b""
    if values and isinstance(values[0], bytes):
        return _BYTES_LIST, b"".join(_field(1, value) for value in values if isinstance(value, bytes))
    body = b"".join(_number(int(value) & (1 << 64) - 1) for value in values)
    return _INT64_LIST, _field(1, body) if values else b""


def _field(number: int, body: bytes) -> bytes:
    return _number(number << 3 | _BYTES) + _number(len(body)) + body


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
