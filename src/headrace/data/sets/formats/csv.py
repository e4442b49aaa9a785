"""Images listed in a CSV file: a column of paths, a column of labels and, optionally, a column of splits.

Columns are found by their names, in any order, separated by commas, semicolons or tabs. A path is relative to the
dataset's path or to the folder of the CSV file. Labels are names of classes; numbers are sorted as numbers.
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
from headrace.data.sets.samples import FileSamples

PATH_NAMES = ("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "image_id")
LABEL_NAMES = ("label", "class", "class_name", "category", "target")
SPLIT_NAMES = ("split", "subset", "set", "fold")
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | dict.fromkeys(
    ("val", "valid", "validation", "dev", "eval"), "validation"
)
MAX_BYTES = 1 << 30
_RULE = "The first line names the columns: path, label and, optionally, split (train, val or test)."


class _Row(NamedTuple):  # made three times as fast as a frozen dataclass: there may be millions
    line: int
    path: str
    label: str
    split: str  # train, validation, test, or empty where the file has no such column


class Columns(NamedTuple):
    """The names of the columns of images and labels, where they are given, and what follows each image's value."""

    image: str | None = None
    label: str | None = None
    suffix: str = ""


def columns_of(data: Data) -> Columns:
    """Return the columns that options name."""
    return Columns(data.image_column, data.label_column, data.image_suffix or "")


def read_csv_set(
    file: Path, dataset_path: str, validation_split: float, columns: Columns | None = None
) -> ClassFolders:
    """Return both splits of the images that a CSV file lists; anything inconsistent is a DataError with its line."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.", remedy="Check --labels.") from None
    rows = _rows(file, size, columns or Columns())
    root = _root(file, dataset_path, rows)
    _refuse_missing(file, root, rows)
    splits = {row.split for row in rows}
    held_out = "validation" if "validation" in splits else "test" if "test" in splits else ""
    if held_out and "train" not in splits:
        raise DataError(f"{file} has no row whose split is train.", rule=_RULE)
    # Images of a test split are not looked at while there is a validation split: otherwise it would be no test.
    unused = [row for row in rows if row.split == "test" and held_out == "validation"]
    used = [row for row in rows if row.split != "test" or held_out == "test"]
    if (fraction := first_fraction(row.label for row in used)) is not None:
        line = next(row.line for row in used if row.label == fraction)
        raise DataError(
            f"{file}, line {line:,}: the label is {fraction}, and all labels are numbers.",
            rule=NO_REGRESSION,
            remedy="Check which column holds the labels; where numbers are names of classes, add letters: x0.5.",
        )
    names = _class_names([row.label for row in used if row.split in ("", "train")])
    number = {name: label for label, name in enumerate(names)}
    if len(names) < 2:
        raise DataError(f"{file} has only one class: {', '.join(names)}.", rule="There must be two or more.")
    strange = next((row for row in used if row.label not in number), None)
    if strange is not None:
        raise DataError(
            f"{file}, line {strange.line:,}: the class {strange.label!r} has no training image.",
            rule="Validation can only ask for classes that were trained.",
        )
    labels = np.array([number[row.label] for row in used], np.int32)
    doubts = check_classes(str(file), names, labels)
    if held_out:
        mask = np.array([row.split == held_out for row in used])
        split_by = f"its column of splits: train and {held_out}"
        remarks = never_validated(names, labels[mask])
    else:
        part = hold_out([row.path for row in used], labels, validation_split, names, str(file), "a column split")
        mask, split_by, remarks = part.mask, part.text, part.remarks
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


def _rows(file: Path, size: int, named: Columns) -> list[_Row]:
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
            columns = _columns(file, next(csv.reader([header], delimiter=delimiter), []), named)
            table = csv.reader(lines, delimiter=delimiter, strict=True)
            line = 2
            for values in table:
                if values:
                    rows.append(_row(file, line, values, columns, named.suffix))
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
    return rows


def _columns(file: Path, header: Sequence[str], named: Columns) -> tuple[int, int, int | None]:
    names = [name.strip().lower() for name in header]
    for option, wanted in (("image_column", named.image), ("label_column", named.label)):
        if wanted is not None and names.count(wanted.strip().lower()) != 1:
            raise DataError(
                f"{file}, line 1: {option} is {wanted}, and the columns are {', '.join(names)[:200] or 'not named'}.",
                rule="It is the name of one column in the first line.",
                remedy=did_you_mean(wanted, names),
            )
    path, label, split = (
        next((names.index(name) for name in known if name in names), None)
        for known in (
            PATH_NAMES if named.image is None else (named.image.strip().lower(),),
            LABEL_NAMES if named.label is None else (named.label.strip().lower(),),
            SPLIT_NAMES,
        )
    )
    if path is None or label is None:
        raise DataError(
            f"{file}, line 1: the columns are {', '.join(names)[:200] or 'not named'}.",
            rule=_RULE,
            remedy="Name the others: --image-column NAME, --label-column NAME.",
        )
    return path, label, split


def _row(file: Path, line: int, values: list[str], columns: tuple[int, int, int | None], suffix: str) -> _Row:
    most = max(columns[0], columns[1], columns[2] or 0)
    if len(values) <= most:
        raise DataError(
            f"{file}, line {line:,}: {len(values)} value(s), but {most + 1} columns are needed.", rule=_RULE
        )
    path, label = values[columns[0]].strip(), values[columns[1]].strip()
    if not path or not label or "\0" in path + label:
        what, value = ("path", path) if not path or "\0" in path else ("label", label)
        raise DataError(f"{file}, line {line:,}: the {what} is {value!r}.", rule=_RULE)
    path += suffix
    if columns[2] is None:
        return _Row(line=line, path=path, label=label, split="")
    given = values[columns[2]].strip().lower()
    if given not in SPLITS:
        raise DataError(f"{file}, line {line:,}: the split is {given[:40]!r}.", rule=f"Splits: {', '.join(SPLITS)}.")
    return _Row(line=line, path=path, label=label, split=SPLITS[given])


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
