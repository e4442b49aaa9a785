"""Labels that can hardly be meant as classes: numbers with fractions, and as many classes as there are images."""

import re
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from headrace.core.errors import DataError
from headrace.core.units import format_list

NO_REGRESSION = "Images are sorted into classes, unless --task regression asks for numbers."
_NUMBER = re.compile(r"[+-]?(\d+[.,]?\d*|[.,]\d+)(e[+-]?\d+)?", re.IGNORECASE)
_NO_NUMBER = ("nan", "inf", "-inf", "na", "null", "none")  # how tables of numbers write what is missing
# Classes for each image. Above the first, an image hardly ever shares its class with another one: the labels are
# names of files, identities or measured numbers. Above the second there are fewer than two images for each class.
_IDENTITIES, _DOUBTFUL = 0.9, 0.5
_NUM_NAMED = 3


def first_fraction(labels: Iterable[str]) -> str | None:
    """Return the first label with a fraction where all labels are numbers, else None."""
    found = None
    for label in labels:
        if label.lower() in _NO_NUMBER:
            continue
        if not _NUMBER.fullmatch(label):
            return None
        with suppress(OverflowError):
            found = found or (label if float(label.replace(",", ".")) % 1 else None)
    return found


def check_classes(place: str, class_names: tuple[str, ...], labels: np.ndarray) -> tuple[str, ...]:
    """Remark on a column of labels with more classes than half of the images; refuse one with nearly as many."""
    classes = np.unique(labels).tolist()
    share = len(classes) / max(1, len(labels))
    numbers = f"{len(classes):,} classes for {len(labels):,} images"
    if share > _IDENTITIES:
        raise DataError(
            f"{place} has {numbers}: {format_list((class_names[label] for label in classes), _NUM_NAMED)}.",
            rule=f"At most {_IDENTITIES} classes for each image: otherwise nearly every image is a class of its own. "
            + NO_REGRESSION,
            remedy="Check which column holds the labels.",
        )
    return (f"{numbers}: fewer than two images for each class",) if share > _DOUBTFUL else ()
