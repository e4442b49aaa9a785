"""Sets stored as TFRecords: ImageNet's shards (`train-00000-of-01024`) and folders that TFDS has prepared.

Which features are read, and where labels start, are rows of a table. Every length's checksum is checked when the
index is made, and a record's data checksum when it is read (by Python only once in a process).
"""

import math
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headrace.core.errors import DataError
from headrace.core.json_text import parse_json
from headrace.core.units import format_list
from headrace.data.decoding.image import BadImage
from headrace.data.sets.indexed_samples import ImageParts, Index, StoredSamples, indexed, make_index, read_names
from headrace.data.sets.mirror import whole_file
from headrace.data.sets.samples import Boxes, Content
from headrace.data.sets.tf_example import BadMessage, place_in, read_example
from headrace.data.sets.tfrecord_file import FOOTER, Extent, checksum_is_right, walk_records

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
    # Of each file an array of its samples' numbers, and one of their files' names: tuples take eight times that.
    every: list[np.ndarray] = []
    file_names: list[np.ndarray] = []
    objects: list[tuple[float, ...]] = []
    # By label: shards come in any order, and a class may appear first in any of them.
    names: dict[int, str] = dict(enumerate(class_names))
    wanted = {schema.label, schema.image, *schema.texts, *schema.boxes, *([schema.file] if schema.file else [])}
    for number, path in enumerate(files):
        rows: list[tuple[int, ...]] = []
        images: list[bytes] = []
        for extent, view in _whole_records(path):
            try:
                features = read_example(view, wanted, uncopied=schema.image)
            except BadMessage as error:
                raise DataError(f"{path}, byte {extent.offset:,}: not an Example: {error}.") from None
            label = _label(path, extent.offset, features, schema)
            if label not in names:
                names[label] = _text(features, schema)
            images.append(_file_name(features, schema))
            encoded, boxes = (features.get(schema.image) or [b""])[0], _boxes(features, schema)
            skip = place_in(view, encoded) if isinstance(encoded, memoryview) and encoded else 0
            size = len(encoded) if isinstance(encoded, bytes | memoryview) else 0
            place = number, extent.offset, extent.length, label
            rows.append((*place, skip, size, len(objects), len(objects) + len(boxes)))
            objects += boxes
        every.append(np.array(rows, np.int64).reshape(-1, 8))
        file_names.append(np.array(images, bytes))
    table = np.concatenate(every) if every else np.zeros((0, 8), np.int64)
    if not len(table):
        raise DataError(f"{files[0].parent if files else 'The set'} has no records.", remedy="Check --dataset-path.")
    del every
    table = table[_by_name(table[:, 3], np.concatenate([part for part in file_names if len(part)]))]
    count = max(names) + 1
    skip, size, first, end = table[:, 4:].T
    parts = ImageParts(
        skip=skip,
        size=size,
        first_object=first.astype(np.int32),
        end_object=end.astype(np.int32),
        objects=np.array(objects, np.float32).reshape(len(objects), 4),
    )
    index = make_index(table[:, :4], [names.get(label) or f"class {label}" for label in range(count)])
    return replace(index, parts=parts)


def _by_name(labels: np.ndarray, names: np.ndarray) -> np.ndarray:
    """Return the order of records by class and file name; as they are unless each has a name of its own."""
    order = np.lexsort((names, labels))
    same = (labels[order][1:] == labels[order][:-1]) & (names[order][1:] == names[order][:-1])
    return np.arange(len(labels)) if same.any() or (names == b"").any() else order


def _whole_records(path: Path) -> Iterator[tuple[Extent, memoryview]]:
    with whole_file(path) as there:
        yield from _records(there)


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
