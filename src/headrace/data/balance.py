"""Uneven classes: weights of classes for the loss, and an order of samples that shows every class equally often."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.rng import bits, name_id
from headrace.data.dataset import DataInfo
from headrace.data.order import Order


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


def balanced_order(labels: np.ndarray) -> Order:
    """Return an order of samples in which every class comes equally often; an epoch is as long as the set.

    A class is gone through at random, again and again until it has its share, so that none of its samples comes twice
    before all have come once. When sample i of N comes for the k-th time in an epoch its number is i + k N: it is
    looked up by the remainder and augmented by the whole number, another way each time.
    """
    classes, class_of = np.unique(labels, return_inverse=True)
    sizes = np.bincount(class_of)

    def order(seed: int, epoch: int, num_samples: int, shuffle: bool, turn: int = 0) -> np.ndarray:
        assert shuffle, "a balanced order is drawn at random"
        assert num_samples == len(labels)
        share = np.full(len(classes), num_samples // len(classes))
        share[_drawn(seed, epoch, turn, classes, "spare").argsort(kind="stable")[: num_samples % len(classes)]] += 1
        numbers = []
        for again in range(int((-(-share // sizes)).max())):
            samples = np.flatnonzero(share[class_of] > again * sizes[class_of])
            keys = _drawn(seed, epoch, turn, samples + again * num_samples, "pass")
            samples = samples[np.lexsort((keys, class_of[samples]))]
            first = np.searchsorted(class_of[samples], class_of[samples])  # where the sample's class begins
            wanted = share[class_of[samples]] - again * sizes[class_of[samples]]
            chosen = samples[np.arange(len(samples)) - first < wanted]
            numbers.append(chosen + again % ((2**31 - 1) // num_samples) * num_samples)
        found = np.concatenate(numbers)
        place = np.arange(len(found))  # not the number, which may come again when int32 is full
        return found[_drawn(seed, epoch, turn, place, "place").argsort(kind="stable")].astype(np.int32)

    return order


def _drawn(seed: int, epoch: int, turn: int, numbers: np.ndarray, purpose: str) -> np.ndarray:
    """Return 64 random bits for each number."""
    address = seed, epoch, turn, numbers.astype(np.uint32)
    high, low = (bits(*address, name_id(f"balance/{purpose}/{half}")) for half in ("high", "low"))
    return high.astype(np.uint64) << np.uint64(32) | low
