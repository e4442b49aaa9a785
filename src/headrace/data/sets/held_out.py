"""A part of each class that is held out for validation: which images, and what is said of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.core.errors import DataError
from headrace.core.rng import bits, name_id
from headrace.core.units import format_list

HELD_OUT = "held out"  # in the description of every such split, also in those of earlier versions
_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Which images are held out, that in numbers, and what is surprising about it."""

    mask: np.ndarray
    text: str
    remarks: tuple[str, ...]


def hold_out(
    names: Iterable[str], labels: np.ndarray, fraction: float, class_names: tuple[str, ...], where: str, part: str
) -> HeldOut:
    """Hold out `fraction` of each class of the set at `where`; what leaves nothing to validate is a DataError.

    `part` is what to add so that nothing has to be held out.
    """
    mask = held_out_mask(names, labels, fraction)
    sizes = np.bincount(labels, minlength=len(class_names))
    if not mask.any():
        raise _nothing_held_out(sizes, fraction, where, part)
    counts = np.bincount(labels[mask], minlength=len(class_names))
    text = f"{mask.sum():,} of {len(mask):,} images {HELD_OUT} ({100 * mask.mean():.3g} %), always the same"
    return HeldOut(mask=mask, text=text, remarks=_remarks(class_names, sizes, counts, fraction))


def held_out_mask(names: Iterable[str], labels: np.ndarray, fraction: float) -> np.ndarray:
    """Return which images are held out: that fraction of each class, chosen by name, independent of the seed.

    An image's draw depends on its name (its path) alone, so adding images moves few others to the other split.
    """
    ids = np.fromiter(map(name_id, names), np.uint32, len(labels))
    # Not by the run's seed: two runs with different seeds must be compared on the same held-out images.
    draw = bits(name_id("validation split"), ids)
    # All classes at once: with a pass over all labels for each, a million images of 21,000 classes took 8.6 s, not 0.6.
    order = np.lexsort((draw, labels))
    _, first, sizes = np.unique(labels[order], return_index=True, return_counts=True)
    # At least one image of each class is validated, and at least one stays to train on.
    counts = np.minimum(np.maximum(np.rint(fraction * sizes), fraction > 0), sizes - 1)
    within = np.arange(len(labels)) - np.repeat(first, sizes)
    held_out = np.zeros(len(labels), bool)
    held_out[order[within < np.repeat(counts, sizes)]] = True
    return held_out


def never_validated(class_names: tuple[str, ...], validation_labels: np.ndarray) -> tuple[str, ...]:
    """Return a remark on classes that have images, but none in the validation part; numbers have no classes."""
    if validation_labels.ndim > 1 and validation_labels.dtype != np.uint8:
        return ()
    several = validation_labels.ndim > 1
    counts = validation_labels.sum(0) if several else np.bincount(validation_labels, minlength=len(class_names))
    missing = [class_names[label] for label in np.flatnonzero(counts == 0)]
    if not missing:
        return ()
    word = "labels" if several else "classes"
    return (f"{len(missing):,} of {len(counts):,} {word} have no validation image: {_named(missing)}",)


def _remarks(class_names: tuple[str, ...], sizes: np.ndarray, counts: np.ndarray, fraction: float) -> tuple[str, ...]:
    """Return remarks on the classes that are too small: their share is another one, or they are not validated."""
    small = np.flatnonzero((counts != np.rint(fraction * sizes)) & (sizes > 1))
    alone = [class_names[label] for label in np.flatnonzero(sizes == 1)]
    remarks = []
    if len(small):
        shares = [f"{counts[label]:,} of {sizes[label]:,} images of {class_names[label]}" for label in small]
        remarks.append(
            f"{len(small):,} of {len(sizes):,} classes are too small for validation_split {fraction:.3g}, since at "
            f"least one image is {HELD_OUT} and one trained on: {_named(shares)}"
        )
    if alone:
        remarks.append(
            f"{len(alone):,} of {len(sizes):,} classes have one image, which is trained on, and none to validate: "
            f"{_named(alone)}"
        )
    return tuple(remarks)


def _nothing_held_out(sizes: np.ndarray, fraction: float, where: str, part: str) -> DataError:
    if sizes.max() > 1:
        return DataError(
            f"{where} has no validation part, and validation_split {fraction:g} holds nothing out.",
            rule="An accuracy is measured on images that are not trained on.",
            remedy=f"Add {part}, or raise validation_split.",
        )
    return DataError(
        f"{where} has no validation part, and each of its {len(sizes):,} classes has one image alone.",
        rule="A part of a class is held out only where another image of it stays to train on.",
        remedy=f"Add images, two or more for each class, or {part}.",
    )


def _named(items: Sequence[str]) -> str:
    return format_list(items, _NUM_NAMED)
