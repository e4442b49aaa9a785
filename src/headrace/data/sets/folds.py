"""K folds of a set of image files: each image is validated once, and trained on in the other folds."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.files import write_atomic
from headrace.core.rng import bits, name_id
from headrace.data.dataset import resolved_set
from headrace.data.sets.formats.csv import columns_of, read_csv_set
from headrace.data.sets.formats.folder import ClassFolders, read_folders
from headrace.data.sets.held_out import HELD_OUT
from headrace.rows.tasks import CLASSIFICATION

if TYPE_CHECKING:
    from headrace.config.schema import Data


def fold_of(names: Sequence[str], labels: np.ndarray, num_folds: int) -> np.ndarray:
    """Return the fold in which each image is validated, from 0; every class is shared out evenly, by names alone."""
    draw = bits(name_id("folds"), np.array([name_id(name) for name in names], np.uint32))
    order = np.lexsort((draw, labels))
    folds = np.empty(len(names), np.int64)
    # Through all classes without a break, so that the folds are of equal size, too.
    folds[order] = np.arange(len(names)) % num_folds
    return folds


def write_folds(data: "Data", files: Sequence[Path]) -> str:
    """Write a CSV file for each fold, with columns path, label and split; return what they share out.

    A validation part of its own is left out: it stays a test of the network that is chosen.
    """
    found, apart = _listed(data)
    num_folds = len(files)
    parts = [found.train] if apart else [found.train, found.validation]
    names = [part.name(sample) for part in parts for sample in range(len(part))]
    labels = np.concatenate([part.labels for part in parts])
    sizes = np.bincount(labels, minlength=len(found.class_names))
    if sizes.max() < num_folds:
        raise ConfigError(
            f"--folds is {num_folds}, and the largest class has {sizes.max():,} images.",
            rule="In each fold, images are validated.",
            remedy=f"Give --folds {max(2, sizes.max())} or less.",
        )
    folds = fold_of(names, labels, num_folds)
    files[0].parent.mkdir(parents=True, exist_ok=True)
    for fold, file in enumerate(files):
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("path", "label", "split"))
        for name, label, of in zip(names, labels, folds, strict=True):
            writer.writerow((Path(name).absolute(), found.class_names[label], "val" if of == fold else "train"))
        write_atomic(file, text.getvalue().encode())
    left_out = f"; the {len(found.validation):,} of its validation part are left out" if apart else ""
    return f"{len(names):,} images in {num_folds} folds, each class shared out evenly{left_out}"


def _listed(data: "Data") -> tuple[ClassFolders, bool]:
    """Return the images of a folder or a CSV file, and whether they have a validation part of their own."""
    data = resolved_set(data)
    kind = data.dataset
    if data.task != CLASSIFICATION.name:
        raise ConfigError(
            f"--folds with the task {data.task}.",
            rule="Folds share out the images of each class.",
            remedy="Leave --folds out, or give several seeds: --seed 1,2,3.",
        )
    if kind == "csv":
        found = read_csv_set(
            Path(data.labels or "").expanduser(), data.dataset_path, data.validation_split, columns_of(data)
        )
    elif kind == "folder":
        elsewhere = Path(data.validation_path).expanduser() if data.validation_path else None
        found = read_folders(Path(data.dataset_path).expanduser(), data.validation_split, elsewhere, data.label_pattern)
    else:
        raise ConfigError(
            f"--folds with the dataset {kind}.",
            rule="Folds are made of image files: a folder for each class, or a list of them (--labels).",
            remedy="Leave --folds out, or give several seeds: --seed 1,2,3.",
        )
    return found, HELD_OUT not in found.split_by
