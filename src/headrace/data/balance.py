"""Uneven classes: weights of classes for the loss, and an order of samples that shows every class equally often."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.core.errors import ConfigError
from headrace.data.dataset import DataInfo


def refuse_weights(given: Sequence[Any], info: DataInfo) -> None:
    """Refuse weights that are not one for each class of the set."""
    if given and given != ("balanced",) and len(given) != info.num_classes:
        raise ConfigError(
            f"class_weights has {len(given)} numbers, the data set {info.name} has {info.num_classes} classes.",
            rule="Every class needs its weight, in the order of the labels.",
            remedy=f"Give {info.num_classes} numbers, or the word balanced.",
        )


def class_weights(given: Sequence[Any], labels: np.ndarray, num_classes: int) -> tuple[float, ...] | None:
    """Return the weight of each class, or None where all are alike by default.

    `balanced` is N / (C x n) for a class of n images in a set of N images and C classes: the mean weight of an image
    is then 1. A class without images has weight 0.
    """
    if not given:
        return None
    if given != ("balanced",):
        return tuple(float(weight) for weight in given)
    counts = np.bincount(labels, minlength=num_classes)
    balanced = len(labels) / (num_classes * np.maximum(counts, 1)) * (counts > 0)
    return tuple(balanced.tolist())
