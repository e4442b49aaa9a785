"""What a file of arrays or a table holds: both splits, their class names and what is said of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import DataError
from headrace.data.sets.catalog import numbered_classes
from headrace.data.sets.class_check import check_classes
from headrace.data.sets.held_out import hold_out
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.output_labels import strata, strata_names
from headrace.data.sets.samples import Samples


class DivisibleSamples(Samples, Protocol):
    """Samples of which a part can be held out."""

    def take(self, chosen: np.ndarray) -> Samples:
        """Return these samples alone."""
        ...


@dataclass(frozen=True, kw_only=True)
class TableSet:
    """The splits of such a file; `validation` is None where it has none, and part of `train` is to be held out."""

    class_names: tuple[str, ...]
    train: DivisibleSamples
    validation: Samples | None
    add: str  # what to add so that there is one
    slow: bool = False  # reading in random order decodes a group of rows for each image


def names_of_classes(path: Path, names: tuple[str, ...], labels: Sequence[np.ndarray]) -> tuple[str, ...]:
    """Return the names that a file gives its classes, or numbers; too few names for its labels are a DataError."""
    count = max(int(each.max(initial=0)) for each in labels) + 1
    if names and count > len(names):
        raise DataError(f"{path}: a label is {count - 1}, but there are {len(names)} class names.")
    # A file with one class still trains a classifier of two, so that a loss exists.
    return names or numbered_classes(max(count, 2))


def set_of_table(kind: str, path: Path, data: Data, table: TableSet) -> ImageSet:
    """Return the set of a table; without validation rows, hold out a fraction of each class by number."""
    train, validation, split_by, remarks = table.train, table.validation, "its two parts", ()
    parts = [part.labels for part in (train, validation) if part is not None]
    together = np.concatenate(parts)
    doubts = check_classes(str(path), table.class_names, together) if together.ndim == 1 else ()
    if validation is None:
        rows, groups = tuple(map(str, range(len(train)))), strata_names(together, table.class_names)
        held_out = hold_out(rows, strata(train.labels), data.validation_split, groups, str(path), table.add)
        train, validation = train.take(np.flatnonzero(~held_out.mask)), train.take(np.flatnonzero(held_out.mask))
        split_by, remarks = held_out.text, held_out.remarks
    slow = (
        f"The images do not fit --dataset-host-budget {data.dataset_host_budget}: a whole group of rows is decoded for "
        "each image. `headrace data pack` makes a file that is read faster."
    )
    return ImageSet(
        kind=kind,
        place=str(path),
        class_names=table.class_names,
        train=train,
        validation=validation,
        split_by=split_by,
        remarks=(*doubts, *remarks, *((slow,) if table.slow else ())),
    )
