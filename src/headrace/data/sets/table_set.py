"""What a file of arrays or a table holds: both splits, their class names and what is said of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from headrace.core.errors import DataError
from headrace.data.sets.catalog import numbered_classes
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
