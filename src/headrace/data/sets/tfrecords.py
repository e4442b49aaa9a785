"""TFRecord files, and sets stored in them: ImageNet's shards and folders that TFDS has prepared."""

import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.core.errors import DataError
from headrace.core.files import parse_json
from headrace.core.units import format_list
from headrace.data.decoding.image import BadImage
from headrace.data.sets.indexed_samples import ImageParts, Index, StoredSamples, indexed, make_index, read_names
from headrace.data.sets.samples import Boxes, Content

# TFRecord files: each record is its length, a checksum of that, its bytes, and a checksum of them.
#
# An Example is a map from names to lists of bytes, floats or whole numbers. Only the wanted names are unpacked; images
# that are not wanted are skipped.
#
# For a checksum the bytes are cut into lanes of 64, whose checksums advance together, two bytes a step. Neighbouring
# lanes are then joined in pairs: moving a checksum past n bytes is linear, so it takes four table look-ups. 110 kB take
# 0.6 ms instead of the 30 ms of a loop over bytes.


# `tf.train.Example` messages, read and written without TensorFlow or protobuf


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


# CRC-32C (Castagnoli), the checksum of TFRecords: google-crc32c where it is installed, else NumPy


# Castagnoli's polynomial, with its bits reversed.
_POLYNOMIAL = 0x82F63B78
_LANE = 64
# TFRecord files store a checksum rotated, with this added.
_MASK_DELTA = 0xA282EAD8


def crc32c(data: bytes | memoryview) -> int:
    """Return the checksum of some bytes."""
    native = _native()
    if native is not None:
        return native(bytes(data))
    return crc32c_numpy(data)


def crc32c_numpy(data: bytes | memoryview) -> int:
    """Return the checksum as NumPy computes it."""
    size = len(data)
    # The trick below inverts the first four bytes, which must be there.
    if size < 4:
        state = 0xFFFFFFFF
        for byte in bytes(data):
            state = int(_table()[(state ^ byte) & 0xFF]) ^ state >> 8
        return state ^ 0xFFFFFFFF
    # A power of two, so that lanes can be joined in pairs to the end.
    num_lanes = 1 << max(0, (-(-size // _LANE) - 1).bit_length())
    padded = np.zeros(num_lanes * _LANE, np.uint8)  # zeros in front do not change a checksum that starts from 0
    padded[-size:] = np.frombuffer(data, np.uint8)
    padded[len(padded) - size : len(padded) - size + 4] ^= 0xFF  # the same as starting from all ones
    words = np.ascontiguousarray(padded.view("<u2").reshape(num_lanes, _LANE // 2).T)
    table, state = _wide_table(), np.zeros(num_lanes, np.uint32)
    for word in words:
        state = table[(state ^ word) & np.uint32(0xFFFF)] ^ (state >> np.uint32(16))
    for level in range(num_lanes.bit_length() - 1):
        state = _moved(state[0::2], level) ^ state[1::2]
    return int(state[0]) ^ 0xFFFFFFFF


def masked_crc32c(data: bytes | memoryview) -> int:
    """Return the checksum as TFRecords store it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


@lru_cache(maxsize=1)
def _native():
    try:
        import google_crc32c  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    # Its fallback in Python is a loop over bytes.
    return google_crc32c.value if google_crc32c.implementation == "c" else None


@lru_cache(maxsize=1)
def _table() -> np.ndarray:
    """Return what each byte becomes when it leaves the register."""
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, values >> 1 ^ np.uint32(_POLYNOMIAL), values >> 1).astype(np.uint32)
    return values


@lru_cache(maxsize=1)
def _wide_table() -> np.ndarray:
    """Return the same for two bytes at once."""
    pairs = np.arange(65536, dtype=np.uint32)
    table = _table()
    once = table[pairs & 0xFF] ^ pairs >> 8
    return table[once & 0xFF] ^ once >> 8


@lru_cache(maxsize=32)
def _move_tables(level: int) -> np.ndarray:
    """Return [4, 256]: what each byte of a checksum becomes when 64 * 2^level zero bytes follow."""
    if level > 0:
        before = _move_tables(level - 1).reshape(-1)
        return _moved(before, level - 1).reshape(4, 256)
    state = np.arange(256, dtype=np.uint32)[None, :] << (np.arange(4, dtype=np.uint32) * 8)[:, None]
    for _ in range(_LANE // 2):
        state = _wide_table()[state & np.uint32(0xFFFF)] ^ state >> np.uint32(16)
    return state


def _moved(state: np.ndarray, level: int) -> np.ndarray:
    tables = _move_tables(level)
    result = tables[0][state & np.uint32(0xFF)]
    for byte in range(1, 4):
        result = result ^ tables[byte][state >> np.uint32(8 * byte) & np.uint32(0xFF)]
    return result


# Around a record: its length (8 bytes) with a checksum, and the checksum of its data.
HEADER, FOOTER = 12, 4


class Extent(NamedTuple):
    """Where a record's bytes are in its file."""

    offset: int
    length: int


def write_records(path: Path, records: Iterable[bytes]) -> int:
    """Write a file of records, whole or not at all; return how many."""
    count = 0
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            for record in records:
                length = struct.pack("<Q", len(record))
                file.write(length + struct.pack("<I", masked_crc32c(length)))
                file.write(record)
                file.write(struct.pack("<I", masked_crc32c(record)))
                count += 1
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return count


def walk_records(path: Path, view: memoryview) -> Iterator[Extent]:
    """Yield the extents of a file's records; a file that is cut short or damaged is a DataError with the byte."""
    place, end, number = 0, len(view), 0
    while place < end:
        if place + HEADER > end:
            raise _damaged(path, place, f"record {number:,} is cut short inside its header")
        header = bytes(view[place : place + HEADER])
        length, crc = struct.unpack("<QI", header)
        # Before the length is believed: a damaged one would lead anywhere in the file.
        if masked_crc32c(header[:8]) != crc:
            raise _damaged(path, place, f"the checksum of record {number:,}'s length is wrong")
        stop = place + HEADER + length + FOOTER
        if stop > end:
            raise _damaged(path, place, f"record {number:,} of {length:,} bytes is cut short: the file ends before")
        yield Extent(place + HEADER, length)
        place, number = stop, number + 1


def checksum_is_right(record: bytes, footer: bytes) -> bool:
    """Say whether a record's bytes are those that were written."""
    return struct.unpack("<I", footer)[0] == masked_crc32c(record)


def _damaged(path: Path, place: int, problem: str) -> DataError:
    return DataError(
        f"{path}, byte {place:,}: {problem}.",
        rule="Records follow each other without gaps; each has its length and two checksums.",
        remedy="Fetch or build this file again; `headrace data verify` names all damaged ones.",
    )


# Sets stored as TFRecords: ImageNet's shards (`train-00000-of-01024`) and folders that TFDS has prepared.
#
# Which features are read, and where labels start, are rows of a table. Every length's checksum is checked when the
# index is made, and a record's data checksum when it is read (by Python only once in a process).


_BOX_KEYS = tuple(f"image/object/bbox/{side}" for side in ("ymin", "xmin", "ymax", "xmax"))
SHARD = re.compile(r"(train|validation)-(\d{5})-of-(\d{5})")
TFDS_SHARD = re.compile(r"(.+)-(train|validation|test)\.tfrecord-(\d{5})-of-(\d{5})")


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The names of the features, and the label of the first class."""

    image: str
    label: str
    first_label: int
    texts: tuple[str, ...] = ()  # features that name a class, in order of preference
    boxes: tuple[str, ...] = ()
    file: str = ""  # the feature that names the image's file


IMAGENET = Schema(
    image="image/encoded",
    label="image/class/label",
    first_label=1,
    texts=("image/class/text", "image/class/synset"),
    boxes=_BOX_KEYS,
    file="image/filename",
)
TFDS = Schema(image="image", label="label", first_label=0)


def has_shards(path: Path, pattern: re.Pattern[str] = SHARD) -> bool:
    """Say whether a folder has files named like shards."""
    return path.is_dir() and any(pattern.fullmatch(entry.name) for entry in path.iterdir())


def shards(path: Path, split: str, pattern: re.Pattern[str] = SHARD) -> list[Path]:
    """Return a split's shards in order; one that is missing, or of another set, is a DataError."""
    found: dict[int, Path] = {}
    sets: dict[tuple[str, ...], str] = {}
    for entry in sorted(path.iterdir()):
        match = pattern.fullmatch(entry.name)
        if match and match.groups()[-3] == split:
            *name, _, number, count = match.groups()
            found[int(number)] = entry
            sets[*name, count] = entry.name
    if len(sets) > 1:  # one with fewer shards would be replaced by the other in part
        raise DataError(
            f"{path} has {split} shards of {len(sets)} sets: {format_list(sets.values(), 3)}.",
            remedy="Keep each in a folder of its own.",
        )
    total = int(next(iter(sets))[-1]) if sets else 0
    missing = [number for number in range(total) if number not in found]
    if missing:
        named = format_list((f"{number:05d}-of-{total:05d}" for number in missing), 5)
        raise DataError(
            f"{path} lacks {len(missing):,} of {total:,} {split} shards: {named}.",
            remedy="Fetch or build the missing ones.",
        )
    return [found[number] for number in range(total)]


def index_of(files: Sequence[Path], schema: Schema, class_names: Sequence[str] = ()) -> Index:
    """Return the index of these shards, building it if necessary."""
    kind = f"records-{schema.label.replace('/', '-')}"
    return indexed(kind, files, class_names, lambda: _make_index(files, schema, class_names))


def samples_of(files: Sequence[Path], index: Index, schema: Schema) -> StoredSamples:
    return StoredSamples(files, index, _opener(schema, len(index.labels)), footer=FOOTER)


def _opener(schema: Schema, count: int) -> Callable[[bytes, int], Content]:
    checked = np.zeros(count, bool)  # two threads may check the same record, which does no harm
    wanted = (schema.image, *schema.boxes)

    def open_content(data: bytes, sample: int) -> Content:
        record = memoryview(data)[:-FOOTER]
        if not checked[sample]:
            if not checksum_is_right(bytes(record), data[-FOOTER:]):
                raise BadImage("the record's checksum is wrong")
            checked[sample] = True
        try:
            features = read_example(record, wanted)
        except BadMessage as error:
            raise BadImage(f"not an Example: {error}") from None
        images = features.get(schema.image) or [b""]
        if not isinstance(images[0], bytes):
            raise BadImage(f"{schema.image} holds no bytes")
        return Content(images[0], _boxes(features, schema))

    return open_content


def _boxes(features: dict, schema: Schema) -> Boxes:
    sides = [features.get(key, ()) for key in schema.boxes]
    if not sides or not all(sides):
        return ()
    # Boxes with a side that is not a number are dropped: the image can be cropped without them.
    return tuple(box for box in zip(*sides, strict=False) if all(map(_is_number, box)))


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _make_index(files: Sequence[Path], schema: Schema, class_names: Sequence[str]) -> Index:
    """Index all shards; the images are skipped, so that little of the files is read, but their places are kept.

    Samples are numbered by class and file name where records have such names: as in the class folders they were built
    from, so that a run on either sees the same samples in the same order.
    """
    rows: list[tuple[int, int, int, int]] = []
    images: list[tuple[int, bytes]] = []
    places: list[tuple[int, int, int, int]] = []
    objects: list[tuple[float, ...]] = []
    # By label: shards come in any order, and a class may appear first in any of them.
    names: dict[int, str] = dict(enumerate(class_names))
    wanted = {schema.label, schema.image, *schema.texts, *schema.boxes, *([schema.file] if schema.file else [])}
    for number, path in enumerate(files):
        for extent, view in _records(path):
            try:
                features = read_example(view, wanted, uncopied=schema.image)
            except BadMessage as error:
                raise DataError(f"{path}, byte {extent.offset:,}: not an Example: {error}.") from None
            label = _label(path, extent.offset, features, schema)
            if label not in names:
                names[label] = _text(features, schema)
            rows.append((number, extent.offset, extent.length, label))
            images.append((label, _file_name(features, schema)))
            encoded, boxes = (features.get(schema.image) or [b""])[0], _boxes(features, schema)
            skip = place_in(view, encoded) if isinstance(encoded, memoryview) and encoded else 0
            size = len(encoded) if isinstance(encoded, bytes | memoryview) else 0
            places.append((skip, size, len(objects), len(objects) + len(boxes)))
            objects += boxes
    # Only if every record has a name of its own: otherwise the order of the files is all there is.
    if len({*images}) == len(rows) and all(name for _, name in images):
        order = sorted(range(len(rows)), key=images.__getitem__)
        rows, places = [rows[number] for number in order], [places[number] for number in order]
    if not rows:
        raise DataError(f"{files[0].parent if files else 'The set'} has no records.", remedy="Check --dataset-path.")
    count = max(names) + 1
    skip, size, first, end = np.array(places, np.int64).reshape(len(rows), 4).T
    parts = ImageParts(
        skip=skip,
        size=size,
        first_object=first.astype(np.int32),
        end_object=end.astype(np.int32),
        objects=np.array(objects, np.float32).reshape(len(objects), 4),
    )
    index = make_index(rows, [names.get(label) or f"class {label}" for label in range(count)])
    return replace(index, parts=parts)


def _records(path: Path) -> Iterator[tuple[Extent, memoryview]]:
    """Yield the records of a file. The memory map is never closed: an exception may still refer to a part of it."""
    try:
        if not path.stat().st_size:
            return
        with path.open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        for extent in walk_records(path, view):
            yield extent, view[extent.offset : extent.offset + extent.length]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def _label(path: Path, offset: int, features: dict, schema: Schema) -> int:
    value = (features.get(schema.label) or [None])[0]
    if not isinstance(value, int):
        raise DataError(
            f"{path}, byte {offset:,}: the record has no {schema.label}.",
            rule=f"A record has {schema.image} and {schema.label}.",
        )
    label = value - schema.first_label
    if not 0 <= label < 1_000_000:
        raise DataError(
            f"{path}, byte {offset:,}: the label {value} is out of range.",
            rule=f"Labels start from {schema.first_label} in this layout.",
        )
    return label


def _file_name(features: dict, schema: Schema) -> bytes:
    values = features.get(schema.file)
    return values[0] if values and isinstance(values[0], bytes) else b""


def _text(features: dict, schema: Schema) -> str:
    for key in schema.texts:
        values = features.get(key)
        if values and isinstance(values[0], bytes) and values[0]:
            return values[0].decode("utf-8", "replace")
    return ""


def tfds_names(path: Path) -> tuple[str, ...]:
    """Return the class names that TFDS wrote beside its records, if it did."""
    return read_names(path / "label.labels.txt")


def tfds_schema(path: Path) -> Schema:
    """Return the features' names from what TFDS wrote beside its records."""
    file = path / "features.json"
    if not file.is_file():
        return TFDS
    try:
        features = parse_json(file.read_bytes())["featuresDict"]["features"]
        kinds = {name: str(row.get("pythonClassName", "")).rsplit(".", 1)[-1] for name, row in features.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return TFDS
    image = next((name for name, kind in kinds.items() if kind == "Image"), TFDS.image)
    label = next((name for name, kind in kinds.items() if kind == "ClassLabel"), TFDS.label)
    return Schema(image=image, label=label, first_label=0)
