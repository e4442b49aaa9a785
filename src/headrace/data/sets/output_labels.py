"""Labels with a number for each output: several labels of an image, or the targets of a regression.

Several labels are 0 or 1 each, uint8 [n, labels]. Targets are float64 [n, targets] as they were given; what is trained
on is float32, (target - mean) / std of the training images, whose scale goes with the run.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import ConfigError, DataError
from headrace.core.units import format_list
from headrace.rows.row import Scale
from headrace.rows.tasks import MULTILABEL, REGRESSION, TASKS

SEPARATORS = ("|", ";", ",")  # of several labels in one text; else spaces
_YES, _NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no", "")
_NUM_NAMED = 5
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


class OutputLabels(NamedTuple):
    """The names of the outputs, the labels of all images, and what is to be said of them."""

    names: tuple[str, ...]
    labels: np.ndarray
    remarks: tuple[str, ...] = ()


def separator_of(texts: Sequence[str]) -> str | None:
    """Return what stands between several labels in these texts; None: spaces."""
    return next((each for each in SEPARATORS if any(each in text for text in texts)), None)


def tags_of(texts: Sequence[str], places: Sequence[str], known: Sequence[bool]) -> OutputLabels:
    """Return the labels that each text names; only those of `known` texts (of training images) are there to name.

    `places` say where each text stands, for messages.
    """
    separator = separator_of(texts)
    words = [
        [word for part in (text.split(separator) if separator else text.split()) if (word := part.strip())]
        for text in texts
    ]
    names = tuple(sorted({word for row, is_known in zip(words, known, strict=True) if is_known for word in row}))
    if not names:
        raise DataError(
            f"{places[0] if places else 'The list'}: no training image has a label.",
            rule="The labels of an image are names, separated by |, ; or spaces.",
            remedy="Check which column holds the labels (--label-column).",
        )
    number = {name: place for place, name in enumerate(names)}
    labels = np.zeros((len(texts), len(names)), np.uint8)
    for row, (mine, place) in enumerate(zip(words, places, strict=True)):
        for word in mine:
            if word not in number:
                raise DataError(
                    f"{place}: the label {word!r} has no training image.",
                    rule="Validation can only ask for labels that were trained.",
                )
            labels[row, number[word]] = 1
    between = f"separated by {separator!r}" if separator else "separated by spaces"
    return OutputLabels(names, labels, (f"labels are {between}: {labels.sum() / max(1, len(labels)):.2f} an image",))


def flags_of(rows: Sequence[Sequence[str]], names: Sequence[str], places: Sequence[str]) -> OutputLabels:
    """Return the labels of columns of 0 and 1."""
    labels = np.zeros((len(rows), len(names)), np.uint8)
    for row, (texts, place) in enumerate(zip(rows, places, strict=True)):
        for column, text in enumerate(texts):
            if text.lower() in _YES:
                labels[row, column] = 1
            elif text.lower() not in _NO:
                raise DataError(
                    f"{place}: {names[column]} is {text[:40]!r}.",
                    rule="In columns of labels, 1 is an image that has the label and 0 one that has not.",
                    remedy="Name the columns of labels: --label-column cat,dog.",
                )
    return OutputLabels(tuple(names), labels)


def numbers_of(rows: Sequence[Sequence[str]], names: Sequence[str], places: Sequence[str]) -> OutputLabels:
    """Return the targets of columns of numbers, float64."""
    for texts, place in zip(rows, places, strict=True):
        wrong = next((k for k, text in enumerate(texts) if not _NUMBER.fullmatch(text)), None)
        if wrong is not None:
            raise DataError(
                f"{place}: {names[wrong]} is {texts[wrong][:40]!r}.",
                rule="A target is a finite number, with a point before its fraction.",
                remedy="Name the columns of numbers: --label-column angle,size; leave out images without a target.",
            )
    targets = np.array(rows, np.float64).reshape(len(rows), len(names))
    if not np.isfinite(targets).all():
        row, column = (int(axis[0]) for axis in np.nonzero(~np.isfinite(targets)))
        raise DataError(f"{places[row]}: {names[column]} is too large for a number.", rule="A target is finite.")
    return OutputLabels(tuple(names), targets)


def array_labels(array: np.ndarray, task: str, what: str) -> np.ndarray:
    """Return an array of labels [n, C] of a task in its type: uint8 of 0 and 1, or float64; refuse anything else."""
    found = array[:, None] if array.ndim == 1 and task == REGRESSION.name else array
    text = f"{what} are {array.dtype}{list(array.shape)}"
    if task == MULTILABEL.name:
        if found.ndim != 2 or found.dtype.kind not in "biuf" or not np.isin(found, (0, 1)).all():
            raise DataError(
                f"{text}.",
                rule="Several labels are an array [images, labels] of 0 and 1.",
                remedy="For numbers choose task regression, for one class of each image classification.",
            )
        return found.astype(np.uint8)
    if found.ndim != 2 or found.dtype.kind not in "biuf":
        raise DataError(f"{text}.", rule="Targets are numbers: an array [images] or [images, targets].")
    targets = found.astype(np.float64)
    if not np.isfinite(targets).all():
        row = int(np.nonzero(~np.isfinite(targets))[0][0])
        raise DataError(
            f"{what} have {targets[row].tolist()} for image {row}.",
            rule="Targets are finite.",
            remedy="Leave images without a target out.",
        )
    return targets


def output_names(task: str, count: int, given: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of outputs, or numbers."""
    word = TASKS[task].output
    return tuple(given) or ((word,) if count == 1 else tuple(f"{word} {k + 1}" for k in range(count)))


def scale_of(targets: np.ndarray, names: Sequence[str], data: Data, place: str) -> Scale:
    """Return the scale of targets: as options say, or mean and standard deviation of these, the training images'."""
    for name, values in (("target_mean", data.target_mean), ("target_std", data.target_std)):
        if values is not None and len(values) != len(names):
            raise ConfigError(
                f"{name} has {len(values)} number(s), {place} has {len(names)} target(s): {', '.join(names)[:200]}.",
                rule="Each target has its number, in their order.",
            )
    if (data.target_mean is None or data.target_std is None) and not len(targets):
        raise DataError(
            f"{place} has no training images, from which the scale of its targets would follow.",
            remedy="Give target_mean and target_std, those of the training.",
        )
    mean = tuple(map(float, targets.mean(0))) if data.target_mean is None else tuple(map(float, data.target_mean))
    std = tuple(map(float, targets.std(0))) if data.target_std is None else tuple(map(float, data.target_std))
    if same := [name for name, each in zip(names, std, strict=True) if not each > 0]:
        raise DataError(
            f"{place}: {format_list(same, _NUM_NAMED)} has the same value in every training image.",
            rule="A target that never changes teaches nothing.",
            remedy="Leave it out, or give target_std.",
        )
    return Scale(mean=mean, std=std)


def normalised(targets: np.ndarray, scale: Scale) -> np.ndarray:
    """Return targets on their scale, float32."""
    return ((targets.astype(np.float64) - np.array(scale.mean)) / np.array(scale.std)).astype(np.float32)


def strata(labels: np.ndarray) -> np.ndarray:
    """Return the groups of which parts are held out: classes; of other labels all images are one group."""
    return labels if labels.ndim == 1 else np.zeros(len(labels), np.int32)


def strata_names(labels: np.ndarray, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of these groups."""
    return names if labels.ndim == 1 else ("images",)


def count_labels(labels: np.ndarray, num_outputs: int) -> tuple[int, ...]:
    """Return how many images each class or label has; nothing of numbers."""
    if labels.ndim == 1:
        return tuple(np.bincount(labels, minlength=num_outputs).tolist())
    return tuple(labels.sum(0, dtype=np.int64).tolist()) if labels.dtype == np.uint8 else ()


def refuse_kind(task: str, what: str) -> None:
    """Refuse a dataset whose labels are classes."""
    raise ConfigError(
        f"task is {task}, and {what} has classes.",
        rule="Several labels and numbers come from a CSV file, an .npz file, or arrays.",
        remedy="List the images with their labels (--labels FILE), or leave --task out.",
    )
