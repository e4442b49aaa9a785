"""Images stored as arrays in a NumPy file (.npz), or encoded in a table (.parquet, as Hugging Face `datasets` writes).

Both are read into memory. Tables that need more than a budget are read a group of rows at a time instead, which
suits `headrace data pack` but not training in random order.
"""

import os
import re
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import DataError
from headrace.core.files import MAX_BYTES, entries_of, parse_json
from headrace.core.units import format_bytes, format_list
from headrace.data.decoding.image import BadImage
from headrace.data.sets.catalog import numbered_classes
from headrace.data.sets.class_check import NO_REGRESSION
from headrace.data.sets.npz_file import StoredArray, stored_array
from headrace.data.sets.samples import Content, Samples

# NumPy files


_TRAIN_KEYS = (("train_images", "train_labels"), ("x_train", "y_train"), ("images", "labels"), ("x", "y"))
_VALIDATION_KEYS = (
    ("val_images", "val_labels"),
    ("validation_images", "validation_labels"),
    ("x_val", "y_val"),
    ("test_images", "test_labels"),
    ("x_test", "y_test"),
)
_BYTES_PER_IMAGE = 100  # its number, its label, and the name by which it is held out or not
_KEYS_RULE = (
    "Arrays are images and labels, or train_images, train_labels, val_images and val_labels, or x_train, y_train, "
    "x_test and y_test; class_names is optional."
)


@dataclass(frozen=True, kw_only=True)
class TableSet:
    """The splits of such a file; `validation` is None where it has none, and part of `train` is to be held out."""

    class_names: tuple[str, ...]
    train: "PixelSamples | TableSamples"
    validation: Samples | None
    add: str  # what to add so that there is one
    slow: bool = False  # reading in random order decodes a group of rows for each image


class PixelSamples:
    """Images of one array, uint8 [N, H, W, C]."""

    def __init__(self, name: str, images: np.ndarray, labels: np.ndarray, numbers: np.ndarray | None = None) -> None:
        self._name, self._images, self._all_labels = name, images, labels
        self._numbers = np.arange(len(labels)) if numbers is None else numbers
        self.labels = labels[self._numbers].astype(np.int32)

    def __len__(self) -> int:
        return len(self.labels)

    def content(self, sample: int) -> Content:
        return Content(self._images[self._numbers[sample]])

    def name(self, sample: int) -> str:
        """Return the array and the number of the image in it."""
        return f"{self._name}[{int(self._numbers[sample]):,}]"

    def take(self, chosen: np.ndarray) -> "PixelSamples":
        return PixelSamples(self._name, self._images, self._all_labels, self._numbers[chosen])


def is_npz(path: Path) -> bool:
    """Say whether a path is a file of NumPy arrays."""
    return path.suffix == ".npz" and path.is_file()


def read_npz_set(path: Path) -> TableSet:
    """Return the splits of a file of arrays; anything that is not images and labels is a DataError."""
    try:
        facts = path.stat()
        return _read_npz(path, (facts.st_size, facts.st_mtime_ns))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None


@lru_cache(maxsize=2)
def _read_npz(path: Path, changed: tuple[int, int]) -> TableSet:
    del changed  # part of the key
    try:
        with zipfile.ZipFile(path) as archive:
            found = _stored_arrays(path, archive)
            train, validation = (_pair(found, keys) for keys in (_TRAIN_KEYS, _VALIDATION_KEYS))
            if train is None:
                raise DataError(f"{path} has the arrays {', '.join(sorted(found))[:200] or 'none'}.", rule=_KEYS_RULE)
            pairs = [keys for keys in (train, validation) if keys]
            wanted = {name: found[name] for name in (*sum(pairs, ()), "class_names") if name in found}
            # By what their headers say, all of them before any is unpacked: a compressed file may claim any size.
            for keys in pairs:
                _refuse_other_arrays(path, found, keys)
            _refuse_large_arrays(path, wanted, pairs)
            arrays = {name: stored.read(archive) for name, stored in wanted.items()}
    except DataError:
        raise
    except Exception as error:  # zipfile and NumPy raise nearly anything for damaged files
        raise DataError(
            f"{path} is not a good .npz file ({type(error).__name__}: {str(error)[:200]}).",
            remedy="Write it again with np.savez.",
        ) from None
    parts = [_pixels(path, arrays, keys) for keys in pairs]
    names = tuple(map(str, arrays["class_names"].reshape(-1))) if "class_names" in arrays else ()
    held_out = None
    if validation is not None:
        held_out = PixelSamples(f"{path}: {validation[0]}", *parts[1])
    return TableSet(
        class_names=_class_names(path, names, [labels for _, labels in parts]),
        train=PixelSamples(f"{path}: {train[0]}", *parts[0]),
        validation=held_out,
        add="arrays val_images and val_labels",
    )


def _class_names(path: Path, names: tuple[str, ...], labels: Sequence[np.ndarray]) -> tuple[str, ...]:
    """Return the names that a file gives its classes, or numbers; too few names for its labels are a DataError."""
    count = max(int(each.max(initial=0)) for each in labels) + 1
    if names and count > len(names):
        raise DataError(f"{path}: a label is {count - 1}, but there are {len(names)} class names.")
    # A file with one class still trains a classifier of two, so that a loss exists.
    return names or numbered_classes(max(count, 2))


def _stored_arrays(path: Path, archive: zipfile.ZipFile) -> dict[str, StoredArray]:
    """Return what the headers say of the arrays that a set may have, by lower-case name."""
    known = {name for pair in (*_TRAIN_KEYS, *_VALIDATION_KEYS) for name in pair} | {"class_names"}
    found = {}
    for info in entries_of(archive):
        name = info.filename.removesuffix(".npy").lower()
        if name not in known or not info.filename.endswith(".npy"):
            continue
        found[name] = stored_array(archive, info)
        if not found[name].fits:
            raise DataError(f"{path}: {info.filename} is {found[name]}, which the file cannot hold.")
    return found


def _pair(found: Collection[str], keys: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    return next(((images, labels) for images, labels in keys if images in found and labels in found), None)


def _refuse_other_arrays(path: Path, found: Mapping[str, StoredArray], keys: tuple[str, str]) -> None:
    """Refuse arrays that are not images and labels of one number."""
    images, labels = found[keys[0]], found[keys[1]]
    # MNIST's usual form: grey images without a channel dim.
    shape = (*images.shape, 1) if len(images.shape) == 3 else images.shape
    if len(shape) != 4 or images.dtype != np.uint8 or shape[3] not in (1, 3, 4) or 0 in shape:
        raise DataError(
            f"{path}: {keys[0]} is {images}.",
            rule="Images are uint8 [number, height, width] or [number, height, width, 1, 3 or 4].",
            remedy="Give channels last: images.transpose(0, 2, 3, 1)." if len(shape) == 4 else "",
        )
    if labels.dtype.kind not in "iu" or labels.shape not in ((shape[0],), (shape[0], 1)):
        raise _other_labels(path, keys[1], labels, shape[0], NO_REGRESSION if labels.dtype.kind == "f" else "")


def _other_labels(path: Path, name: str, found: object, num_images: int, more: str = "") -> DataError:
    rule = f"Labels are whole numbers from 0, one for each image. {more}".strip()
    return DataError(f"{path}: {name} is {found} for {num_images:,} images.", rule=rule)


def _refuse_large_arrays(path: Path, wanted: Mapping[str, StoredArray], pairs: Sequence[tuple[str, str]]) -> None:
    """Refuse arrays that, with what is noted of each image, are more than half of the machine's memory."""
    names = wanted.get("class_names")
    if names is not None and names.info.file_size > MAX_BYTES:
        raise DataError(f"{path}: class_names is {names}.", rule=f"Names of classes take at most {MAX_BYTES:,} bytes.")
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    total = sum(stored.info.file_size for stored in wanted.values())
    total += _BYTES_PER_IMAGE * sum(wanted[images].shape[0] for images, _ in pairs)
    if total > limit:
        raise DataError(
            f"{path} holds arrays of {format_bytes(total)}, with the numbers of its images.",
            rule=f"They are read into memory: at most {format_bytes(limit)}, half of what this machine has.",
            remedy="Write the images as files, or as several sets.",
        )


def _pixels(path: Path, arrays: dict[str, np.ndarray], keys: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    images, labels = arrays[keys[0]], arrays[keys[1]].reshape(-1)
    if labels.min() < 0 or labels.max() >= 10**6:
        raise _other_labels(path, keys[1], f"{labels.dtype} from {labels.min()} to {labels.max()}", len(images))
    return images if images.ndim == 4 else images[..., None], labels.astype(np.int32)


# Tables


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
        self._open = [parquet.ParquetFile(file) for file in files]
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
        class_names=_class_names(path, parts[0][1], [part.labels for part, _, _ in parts]),
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
            opened = parquet.ParquetFile(file)
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


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(
            f"{file} is a parquet file, and pyarrow is not installed.", remedy="pip install 'headrace[parquet]'"
        ) from None
    return pyarrow.parquet
