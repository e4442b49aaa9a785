"""ArrayRecords as TFDS prepares them (the extra `array-record`): its examples, found by number."""

import importlib
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import DataError
from headrace.data.decoding.image import BadImage
from headrace.data.sets.catalog import numbered_classes
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.indexed_samples import Index, indexed, make_index
from headrace.data.sets.samples import Content
from headrace.data.sets.shard_set import ShardReader, set_of_shards
from headrace.data.sets.tf_example import BadMessage, read_example
from headrace.data.sets.tfrecords import Schema, has_shards, shards, tfds_names, tfds_schema

SHARD = re.compile(r"(.+)-(train|validation|test)\.array_record-(\d{5})-of-(\d{5})")
_AT_ONCE = 256  # records read at a time for their labels


class ArrayRecordSamples:
    """Images by number of file and record, read under a lock for each file."""

    def __init__(self, files: Sequence[Path], index: Index, schema: Schema) -> None:
        self._files, self._index, self._image = files, index, schema.image
        self._readers = [_reader(file) for file in files]
        self._locks = [threading.Lock() for _ in files]
        self.labels = index.labels

    def __len__(self) -> int:
        return len(self.labels)

    def content(self, sample: int) -> Content:
        """Return the encoded image of a record."""
        file, number = int(self._index.file[sample]), int(self._index.offset[sample])
        try:
            with self._locks[file]:
                (record,) = self._readers[file].read([number])
            found = read_example(record, (self._image,)).get(self._image) or [b""]
        except (BadMessage, ValueError, RuntimeError, IndexError) as error:
            raise BadImage(f"the record cannot be read: {str(error)[:200]}") from None
        if not isinstance(found[0], bytes):
            raise BadImage(f"{self._image} holds no bytes")
        return Content(found[0])

    def name(self, sample: int) -> str:
        """Return the file and the number of the record."""
        return f"{self._files[int(self._index.file[sample])]}, record {int(self._index.offset[sample]):,}"


def fits(path: Path) -> bool:
    """Say whether a folder has such shards."""
    return has_shards(path, SHARD)


def open_set(path: Path, data: Data) -> ImageSet:
    """List the records of both splits."""
    schema, names = tfds_schema(path), tfds_names(path)

    def index_of(files: list[Path]) -> Index:
        return indexed(f"array-record-{schema.label}", files, names, lambda: _make_index(files, schema, names))

    reader = ShardReader(
        kind="array_record",
        index=index_of,
        samples=lambda files, part: ArrayRecordSamples(files, part, schema),
    )
    validation = shards(path, "validation", SHARD) or shards(path, "test", SHARD)
    return set_of_shards(path, data, reader, shards(path, "train", SHARD), validation)


def _make_index(files: Sequence[Path], schema: Schema, class_names: Sequence[str]) -> Index:
    rows: list[tuple[int, int, int, int]] = []
    for number, file in enumerate(files):
        reader = _reader(file)
        count = reader.num_records()
        for first in range(0, count, _AT_ONCE):
            chosen = list(range(first, min(first + _AT_ONCE, count)))
            try:
                records = reader.read(chosen)
                labels = [read_example(record, (schema.label,)).get(schema.label) or [None] for record in records]
            except (BadMessage, ValueError, RuntimeError, IndexError) as error:
                raise DataError(
                    f"{file}, records from {first:,}: they cannot be read: {str(error)[:200]}.",
                    remedy="Prepare or fetch the file again.",
                ) from None
            for place, label in zip(chosen, labels, strict=True):
                found = label[0]
                if not isinstance(found, int) or not 0 <= found < 10**6:
                    raise DataError(
                        f"{file}, record {place:,}: the label in {schema.label} is {found!r}.",
                        rule="Labels are whole numbers from 0.",
                    )
                rows.append((number, place, 1, found))
    if not rows:
        raise DataError(f"{files[0].parent} has no records.", remedy="Check --dataset-path.")
    most = int(np.array(rows)[:, 3].max())
    if class_names and most >= len(class_names):
        raise DataError(f"A label is {most}, but there are {len(class_names)} class names.")
    return make_index(rows, class_names or numbered_classes(most + 1))


def _reader(file: Path) -> Any:
    try:
        module: Any = importlib.import_module("array_record.python.array_record_module")
    except ImportError:
        raise DataError(
            f"{file} is an ArrayRecord, and array_record is not installed.",
            remedy="pip install 'headrace[array-record]'",
        ) from None
    try:
        reader = module.ArrayRecordReader(str(file))
        if not reader.ok():
            raise ValueError("it is damaged")
    except (ValueError, RuntimeError) as error:
        raise DataError(
            f"{file} is no good ArrayRecord: {str(error)[:200]}.", remedy="Prepare or fetch it again."
        ) from None
    return reader
