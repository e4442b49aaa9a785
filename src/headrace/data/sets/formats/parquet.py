"""Images encoded in a table (.parquet, as Hugging Face `datasets` writes).

Tables are read into memory. One that needs more than a budget is read a group of rows at a time instead, which suits
`headrace data pack` but not training in random order.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import DataError
from headrace.core.json_text import parse_json
from headrace.core.units import format_bytes, format_list, parse_bytes
from headrace.data.decoding.image import BadImage
from headrace.data.sets.class_check import NO_REGRESSION
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.mirror import mirror_of, open_file
from headrace.data.sets.samples import Content
from headrace.data.sets.table_set import TableSet, names_of_classes, set_of_table

_LABEL_COLUMNS = ("label", "labels", "fine_label")
_OTHER_NAMES = ("class", "category", "target")
_SPLIT_WORDS = {"val": "validation", "valid": "validation", "validation": "validation", "test": "test"}
_KEPT_GROUPS = 4
# When rows are unpacked. Images are compressed already, and a column of equal labels, which shrinks far more, is small.
_MOST_EXPANSION = 200


class TableSamples:
    """Encoded images of the rows of parquet files."""

    def __init__(self, table: "_Table", rows: np.ndarray, labels: np.ndarray) -> None:
        self._table, self._rows, self.labels = table, rows, labels.astype(np.int32)

    def __len__(self) -> int:
        return len(self._rows)

    def content(self, sample: int) -> Content:
        """Return the encoded image."""
        return Content(self._table.image(int(self._rows[sample])))

    def name(self, sample: int) -> str:
        """Return the file and the row."""
        return self._table.name(int(self._rows[sample]))

    def take(self, chosen: np.ndarray) -> "TableSamples":
        return TableSamples(self._table, self._rows[chosen], self.labels[chosen])


class _Table:
    """The image column of some parquet files, by row: in memory, or the groups of rows that were read last."""

    def __init__(self, files: Sequence[Path], column: str, keep: bool) -> None:
        parquet = _pyarrow(files[0])
        self._files, self._column = files, column
        self._open = [parquet.ParquetFile(_source(file)) for file in files]
        self._groups = [(n, g) for n, file in enumerate(self._open) for g in range(file.metadata.num_row_groups)]
        sizes = [self._open[n].metadata.row_group(g).num_rows for n, g in self._groups]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._most, self._lock = len(self._groups) if keep else _KEPT_GROUPS, threading.Lock()

    def name(self, row: int) -> str:
        number, _ = self._groups[int(np.searchsorted(self._starts, row, "right")) - 1]
        first = self._starts[self._groups.index((number, 0))]
        return f"{self._files[number]}, row {row - int(first):,}"

    def image(self, row: int) -> bytes:
        group = int(np.searchsorted(self._starts, row, "right")) - 1
        # One thread decodes a group of rows at a time: others that want the same group would decode it again.
        with self._lock:
            values = self._kept.get(group)
            if values is None:
                values = self._read(group)
                self._kept[group] = values
                while len(self._kept) > self._most:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(group)
        value = values[int(row - self._starts[group])].as_py()
        found = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(found, bytes):
            raise BadImage("the row has no image, or only its path")
        return found

    def _read(self, group: int) -> Any:
        number, part = self._groups[group]
        try:
            return self._open[number].read_row_group(part, columns=[self._column]).column(0)
        except (OSError, ValueError, MemoryError) as error:  # pyarrow's errors are subclasses of these
            raise BadImage(f"the group of rows {part} cannot be read: {str(error)[:200]}") from None


def parquet_files(path: Path) -> list[Path]:
    """Return the parquet files of a path: itself, those in the folder, or those in its folder `data`."""
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    return sorted(path.glob("*.parquet")) or sorted((path / "data").glob("*.parquet"))


def read_parquet_set(path: Path, budget: int) -> TableSet:
    """Return the splits of parquet files with a column of images and one of labels."""
    files: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    for file in parquet_files(path):
        words = re.split(r"[^a-z]+", file.stem.lower())
        files[next((split for word, split in _SPLIT_WORDS.items() if word in words), "train")].append(file)
    if not files["train"]:
        raise DataError(f"{path} has no parquet file of training images.", rule="Names with val or test are others.")
    held_out = files["validation"] or files["test"]
    parts = [_read_table(part, budget) for part in (files["train"], held_out) if part]
    return TableSet(
        class_names=names_of_classes(path, parts[0][1], [part.labels for part, _, _ in parts]),
        train=parts[0][0],
        validation=parts[1][0] if held_out else None,
        add="a file named NAME-validation.parquet",
        slow=any(slow for _, _, slow in parts),
    )


def _read_table(files: list[Path], budget: int) -> tuple[TableSamples, tuple[str, ...], bool]:
    parquet = _pyarrow(files[0])
    columns, names = None, ()
    labels, size = [], 0
    for file in files:
        try:
            opened = parquet.ParquetFile(_source(file))
            image, label, names = _columns_of(file, opened.schema_arrow)
            size += _stated_bytes(file, opened.metadata)
            values = opened.read(columns=[label]).column(0)
        except (OSError, ValueError, MemoryError) as error:
            raise DataError(
                f"{file} is not a good parquet file: {str(error)[:200]}.", remedy="Fetch or write it again."
            ) from None
        if columns not in (None, (image, label)):
            raise DataError(f"{file} has other columns than {files[0]}.")
        columns = image, label
        # As Python objects: a null would silently become a float in an integer column.
        numbers = values.to_pylist()
        for row, value in enumerate(numbers):
            if type(value) is not int or not 0 <= value < 10**6:
                raise DataError(
                    f"{file}, row {row:,}: the label in the column {label} is {value!r}.",
                    rule="Labels are whole numbers from 0.",
                )
        labels.append(np.array(numbers, np.int32))
    assert columns is not None
    every = np.concatenate(labels)
    if not len(every):
        raise DataError(f"{files[0]} has no rows.")
    return TableSamples(_Table(files, columns[0], size <= budget), np.arange(len(every)), every), names, size > budget


def _stated_bytes(file: Path, metadata: Any) -> int:
    """Return how many bytes a file's rows take in memory, by its own account; more than is plausible is refused."""
    stored = file.stat().st_size
    stated = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    if metadata.num_rows > stored or stated > _MOST_EXPANSION * stored:
        raise DataError(
            f"{file} has {format_bytes(stored)}, but says that it holds {metadata.num_rows:,} rows "
            f"of {format_bytes(stated)} together.",
            rule=f"A row takes at least a byte, and rows at most {_MOST_EXPANSION} times the bytes they are stored in.",
        )
    return stated


def _columns_of(file: Path, schema: Any) -> tuple[str, str, tuple[str, ...]]:
    """Return (column of images, column of labels, class names where the file has them)."""
    import pyarrow as pa  # pyright: ignore[reportMissingImports]

    features: Any = {}
    with suppress(ValueError, KeyError, TypeError):  # written by other programs: class numbers instead of names
        features = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    features = features if isinstance(features, dict) else {}
    images = [
        field.name
        for field in schema
        if pa.types.is_binary(field.type)
        or pa.types.is_large_binary(field.type)
        or (pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0)
    ]
    numbers = [field.name for field in schema if pa.types.is_integer(field.type)]
    fractions = [field.name for field in schema if pa.types.is_floating(field.type) or pa.types.is_decimal(field.type)]
    known = [name for name in numbers if isinstance(features.get(name), dict) and features[name].get("names")]
    named = [name for name in _LABEL_COLUMNS if name in schema.names]
    named += [name for name in _OTHER_NAMES if name in (*numbers, *fractions)]
    # A column that is named so is meant, whatever other whole numbers there are, such as an identity.
    label = next(iter((*named, *known, *numbers)), None)
    if label is not None and label not in numbers:
        raise DataError(
            f"{file}: the column {label} is {schema.field(label).type}.",
            rule="Labels are whole numbers from 0." + (f" {NO_REGRESSION}" if label in fractions else ""),
            remedy="Number the classes, or rename the column where another one holds the labels.",
        )
    if not (named or known) and len(numbers) > 1:
        raise DataError(
            f"{file} has several columns of whole numbers: {format_list(numbers, 8)}.",
            rule=f"The column of labels is named {', '.join((*_LABEL_COLUMNS, *_OTHER_NAMES))}, or has class names.",
            remedy="Rename the column of labels to label.",
        )
    if not images or label is None:
        raise DataError(
            f"{file} has the columns {', '.join(schema.names)[:200]}.",
            rule="A column holds encoded images (bytes, or a struct with bytes), another one labels (whole numbers).",
        )
    names = features[label].get("names") if isinstance(features.get(label), dict) else None
    return images[0], label, tuple(map(str, names)) if isinstance(names, list) else ()


def _source(file: Path) -> Any:
    """Return what pyarrow reads a file from: its path, or what fetches the parts that it reads from a store."""
    return open_file(file) if mirror_of(file) else file


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(
            f"{file} is a parquet file, and pyarrow is not installed.", remedy="pip install 'headrace[parquet]'"
        ) from None
    return pyarrow.parquet


def fits(path: Path) -> bool:
    """Say whether a path is such a table, or a folder with some."""
    return bool(parquet_files(path))


def open_set(path: Path, data: Data) -> ImageSet:
    """List the rows of both splits."""
    return set_of_table("parquet", path, data, read_parquet_set(path, parse_bytes(data.dataset_host_budget)))
