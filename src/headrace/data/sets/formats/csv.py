"""Images listed in a CSV file: a column of paths, a column of labels and, optionally, a column of splits.

Columns are found by their names, in any order, separated by commas, semicolons or tabs. A path is relative to the
dataset's path or to the folder of the CSV file. Labels are names of classes; numbers are sorted as numbers. By the task
they are the names of several labels, columns of 0 and 1, or columns of numbers.
"""

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import DataError, did_you_mean
from headrace.data.sets.class_check import NO_REGRESSION, check_classes, first_fraction
from headrace.data.sets.file_problem import Skipped
from headrace.data.sets.formats.folder import ClassFolders
from headrace.data.sets.held_out import hold_out, never_validated
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.output_labels import flags_of, numbers_of, strata, strata_names, tags_of
from headrace.data.sets.samples import FileSamples
from headrace.rows.tasks import CLASSIFICATION, MULTILABEL, REGRESSION

PATH_NAMES = ("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "image_id")
LABEL_NAMES = ("label", "class", "class_name", "category", "target")
_MORE_NAMES = {MULTILABEL.name: ("labels", "tags"), REGRESSION.name: ("targets", "value", "y")}
SPLIT_NAMES = ("split", "subset", "set", "fold")
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | dict.fromkeys(
    ("val", "valid", "validation", "dev", "eval"), "validation"
)
MAX_BYTES = 1 << 30
_NUM_NAMED = 5
_RULE = "The first line names the columns: path, label and, optionally, split (train, val or test)."


class _Row(NamedTuple):  # made three times as fast as a frozen dataclass: there may be millions
    line: int
    path: str
    labels: tuple[str, ...]  # one of a class, or of several labels; of other tasks a value of each column
    split: str  # train, validation, test, or empty where the file has no such column


class Columns(NamedTuple):
    """The names of the columns of images and labels, where they are given, and what follows each image's value."""

    image: str | None = None
    label: str | None = None
    suffix: str = ""
    task: str = CLASSIFICATION.name


def columns_of(data: Data) -> Columns:
    """Return the columns that options name."""
    return Columns(data.image_column, data.label_column, data.image_suffix or "", data.task)


def read_csv_set(
    file: Path, dataset_path: str, validation_split: float, columns: Columns | None = None
) -> ClassFolders:
    """Return both splits of the images that a CSV file lists; anything inconsistent is a DataError with its line."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.", remedy="Check --labels.") from None
    named = columns or Columns()
    rows, label_names = _rows(file, size, named)
    root = _root(file, dataset_path, rows)
    _refuse_missing(file, root, rows)
    splits = {row.split for row in rows}
    held_out = "validation" if "validation" in splits else "test" if "test" in splits else ""
    if held_out and "train" not in splits:
        raise DataError(f"{file} has no row whose split is train.", rule=_RULE)
    # Images of a test split are not looked at while there is a validation split: otherwise it would be no test.
    unused = [row for row in rows if row.split == "test" and held_out == "validation"]
    used = [row for row in rows if row.split != "test" or held_out == "test"]
    names, labels, doubts = _labels(file, used, label_names, named.task)
    if held_out:
        mask = np.array([row.split == held_out for row in used])
        split_by = f"its column of splits: train and {held_out}"
        remarks = never_validated(names, labels[mask])
    else:
        part = hold_out(
            [row.path for row in used],
            strata(labels),
            validation_split,
            strata_names(labels, names),
            str(file),
            "a column split",
        )
        mask, split_by, remarks = part.mask, part.text, part.remarks
        remarks = remarks if labels.ndim == 1 else (*remarks, *never_validated(names, labels[mask]))
    absolute = any(row.path.startswith("/") for row in used)
    # Text, not paths: a million of those take 15 s to make.
    paths = [os.path.join(str(root), row.path) if absolute else row.path for row in used]  # noqa: PTH118
    train, validation = (
        FileSamples(
            Path("/") if absolute else root, [paths[n].lstrip("/") for n in np.flatnonzero(chosen)], labels[chosen]
        )
        for chosen in (~mask, mask)
    )
    skipped = (
        [Skipped(reason="rows of split test are not used in training", count=len(unused), example=unused[0].path)]
        if unused
        else []
    )
    return ClassFolders(
        class_names=names,
        train=train,
        validation=validation,
        split_by=split_by,
        skipped=tuple(skipped),
        remarks=(*doubts, *remarks),
    )


def _labels(
    file: Path, used: Sequence[_Row], columns: tuple[str, ...], task: str
) -> tuple[tuple[str, ...], np.ndarray, tuple[str, ...]]:
    """Return the names of classes, labels or targets, the labels of these rows, and what is to be said of them."""
    if task == CLASSIFICATION.name:
        return _classes(file, used)
    places = [f"{file}, line {row.line:,}" for row in used]
    if task == REGRESSION.name:
        found = numbers_of([row.labels for row in used], columns, places)
    elif len(columns) == 1:
        found = tags_of([row.labels[0] for row in used], places, [row.split in ("", "train") for row in used])
    else:
        found = flags_of([row.labels for row in used], columns, places)
    return found.names, found.labels, found.remarks


def _classes(file: Path, used: Sequence[_Row]) -> tuple[tuple[str, ...], np.ndarray, tuple[str, ...]]:
    """Return the names of the classes, the label of each row, and doubts about them."""
    given = [row.labels[0] for row in used]
    if (fraction := first_fraction(given)) is not None:
        line = used[given.index(fraction)].line
        raise DataError(
            f"{file}, line {line:,}: the label is {fraction}, and all labels are numbers.",
            rule=NO_REGRESSION,
            remedy="Add --task regression; or check which column holds the labels; where numbers are names of classes, "
            "add letters: x0.5.",
        )
    names = _class_names([label for label, row in zip(given, used, strict=True) if row.split in ("", "train")])
    number = {name: label for label, name in enumerate(names)}
    if len(names) < 2:
        raise DataError(f"{file} has only one class: {', '.join(names)}.", rule="There must be two or more.")
    strange = next((row for row in used if row.labels[0] not in number), None)
    if strange is not None:
        raise DataError(
            f"{file}, line {strange.line:,}: the class {strange.labels[0]!r} has no training image.",
            rule="Validation can only ask for classes that were trained.",
        )
    labels = np.array([number[label] for label in given], np.int32)
    return names, labels, check_classes(str(file), names, labels)


def _rows(file: Path, size: int, named: Columns) -> tuple[list[_Row], tuple[str, ...]]:
    """Return the rows of the file, and the names of its columns of labels."""
    if not file.is_file():
        raise DataError(f"{file} is not a regular file.", remedy="Give a CSV file with --labels.")
    if size > MAX_BYTES:
        raise DataError(f"{file} has {size:,} bytes.", rule=f"At most {MAX_BYTES:,} are read.")
    rows: list[_Row] = []
    line = 1  # at which a row begins: in quotes, one may have several lines
    try:
        # utf-8-sig: Excel begins its files with a byte-order mark, which would otherwise be part of the first column's
        # name.
        with file.open(newline="", encoding="utf-8-sig") as lines:
            header = lines.readline()
            # By the header: values may contain any of them, names of columns hardly do. Excel writes semicolons where
            # the comma is a decimal sign.
            delimiter = max(",;\t", key=header.count)
            heading = next(csv.reader([header], delimiter=delimiter), [])
            columns = _columns(file, heading, named)
            table = csv.reader(lines, delimiter=delimiter, strict=True)
            line = 2
            for values in table:
                if values:
                    rows.append(_row(file, line, values, columns, named))
                line = table.line_num + 2
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}, byte {error.start:,} after line {line - 1:,}: not UTF-8.", remedy="Save it as UTF-8."
        ) from None
    except csv.Error as error:
        raise DataError(f"{file}, line {line:,}: {error}.", rule="Quotes that are opened are closed.") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None
    if not rows:
        raise DataError(f"{file} lists no images.", rule=_RULE)
    return rows, tuple(heading[place].strip() for place in columns.labels)


class _ColumnPlaces(NamedTuple):
    """Where the columns are."""

    path: int
    labels: tuple[int, ...]
    split: int | None


def _columns(file: Path, header: Sequence[str], named: Columns) -> _ColumnPlaces:
    names = [name.strip().lower() for name in header]
    wanted = [name.strip().lower() for name in (named.label or "").split(",") if name.strip()]
    for option, given in (("image_column", [named.image] if named.image else []), ("label_column", wanted)):
        for name in given:
            if names.count(name.strip().lower()) != 1:
                raise DataError(
                    f"{file}, line 1: {option} is {name}, and the columns are {', '.join(names)[:200] or 'not named'}.",
                    rule="It is the name of one column in the first line.",
                    remedy=did_you_mean(name, names),
                )
    path, split = (
        next((names.index(name) for name in known if name in names), None)
        for known in (PATH_NAMES if named.image is None else (named.image.strip().lower(),), SPLIT_NAMES)
    )
    labels = [names.index(name) for name in wanted]
    if not labels:
        usual = LABEL_NAMES if named.task == CLASSIFICATION.name else (*LABEL_NAMES, *_MORE_NAMES[named.task])
        labels = [names.index(name) for name in usual if name in names][:1]
    if not labels and named.task != CLASSIFICATION.name and path is not None:
        labels = [place for place in range(len(names)) if place not in (path, split)]
    if path is None or not labels:
        raise DataError(
            f"{file}, line 1: the columns are {', '.join(names)[:200] or 'not named'}.",
            rule=_RULE,
            remedy="Name the others: --image-column NAME, --label-column NAME.",
        )
    return _ColumnPlaces(path, tuple(labels), split)


def _row(file: Path, line: int, values: list[str], columns: _ColumnPlaces, named: Columns) -> _Row:
    most = max(columns.path, *columns.labels, columns.split or 0)
    if len(values) <= most:
        raise DataError(
            f"{file}, line {line:,}: {len(values)} value(s), but {most + 1} columns are needed.", rule=_RULE
        )
    path, labels = values[columns.path].strip(), tuple(values[place].strip() for place in columns.labels)
    # An image may have none of several labels.
    empty = named.task != MULTILABEL.name and not all(labels)
    if not path or empty or any("\0" in text for text in (path, *labels)):
        what, value = ("path", path) if not path or "\0" in path else ("label", " ".join(labels))
        raise DataError(f"{file}, line {line:,}: the {what} is {value!r}.", rule=_RULE)
    path += named.suffix
    if columns.split is None:
        return _Row(line=line, path=path, labels=labels, split="")
    given = values[columns.split].strip().lower()
    if given not in SPLITS:
        raise DataError(f"{file}, line {line:,}: the split is {given[:40]!r}.", rule=f"Splits: {', '.join(SPLITS)}.")
    return _Row(line=line, path=path, labels=labels, split=SPLITS[given])


def _root(file: Path, dataset_path: str, rows: Sequence[_Row]) -> Path:
    """Return the folder that paths are relative to: the dataset's path, or the CSV file's if the images are there."""
    given, beside = Path(dataset_path).expanduser().absolute(), file.parent.absolute()
    # Unlike Path.exists, this one does not raise for a name that no file can have.
    there, here = (os.path.exists(folder / rows[0].path) for folder in (given, beside))  # noqa: PTH110
    return beside if here and not there else given


def _refuse_missing(file: Path, root: Path, rows: Sequence[_Row]) -> None:
    base = str(root)
    # All of them, before anything starts: a missing file would otherwise be met hours later.
    missing = [row for row in rows if not os.path.isfile(os.path.join(base, row.path))]  # noqa: PTH113, PTH118 (many)
    if missing:
        raise DataError(
            f"{file}: {len(missing):,} of {len(rows):,} images are not there, the first in line {missing[0].line:,}: "
            f"{str(root / missing[0].path)[:300]}.",
            rule="Paths are relative to --dataset-path, or else to the folder of the CSV file.",
        )


def _class_names(labels: Sequence[str]) -> tuple[str, ...]:
    names = set(labels)
    # Sorted as text, class 10 would come before class 2, and labels would not be the numbers in the file.
    if all(name.isascii() and name.lstrip("-").isdigit() and len(name) < 20 for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def open_set(path: Path, data: Data) -> ImageSet:
    """List the images of the file that --labels names."""
    if data.labels is None:
        raise DataError("The dataset is csv, but no CSV file is given.", remedy="Give it with --labels FILE.")
    file = Path(data.labels).expanduser()
    listed = read_csv_set(file, data.dataset_path, data.validation_split, columns_of(data))
    return listed.image_set("csv", file)
