"""Uneven classes: weights for the loss, or an order in which all classes are equally frequent."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.units import format_percent
from headrace.data.dataset import DataInfo
from headrace.data.feeding.order import Order, drawn, epoch_order
from headrace.rows.metrics import UNEVEN, class_ratio


def refuse_weights(given: Sequence[object], info: DataInfo) -> None:
    """Refuse weights that are not one for each class of the set."""
    if given and given != ("balanced",) and len(given) != info.num_classes:
        raise ConfigError(
            f"class_weights has {len(given)} numbers, the dataset {info.name} has {info.num_classes} classes.",
            rule="Every class needs its weight, in the order of the labels.",
            remedy=f"Give {info.num_classes} numbers, or balanced.",
        )


def class_weights(given: Sequence[Any], labels: np.ndarray, num_classes: int) -> tuple[float, ...] | None:
    """Return the weight of each class, or None if all are equal by default.

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


EVEN_OUT = ("--class-weights balanced", "--balanced-sampling")


def describe_uneven(names: Sequence[str], counts: Sequence[int], remedies: Sequence[str]) -> tuple[str, ...]:
    """Say that the training images are unevenly spread over the classes, and which options even that out."""
    ratio = class_ratio(counts)
    if ratio is None or ratio < UNEVEN:
        return ()
    some = [(count, name) for count, name in zip(counts, names, strict=True) if count]
    (most, largest), (least, smallest) = max(some, key=lambda each: each[0]), min(some, key=lambda each: each[0])
    advice = f"; {' or '.join(remedies)} evens them out" if remedies else ""
    return (
        f"The classes are uneven: {largest} has {most:,} training images, {smallest} {least:,}. Answering {largest} "
        f"alone is right for {format_percent(most / sum(counts))} of them, so look at balanced accuracy and macro F1 "
        f"rather than at top-1{advice}.",
    )


def balanced_order(labels: np.ndarray) -> Order:
    """Return an order of samples in which every class comes equally often; an epoch is as long as the set.

    Each class is passed over in random order, repeatedly until it has its quota, so that no sample repeats before all
    have been used. Repetition k of sample i of N in an epoch has the number i + k N: the remainder selects the image,
    the whole number its augmentation, so that repetitions differ.
    """
    classes, class_of = np.unique(labels, return_inverse=True)
    sizes = np.bincount(class_of)

    def order(seed: int, epoch: int, num_samples: int, shuffle: bool, turn: int = 0) -> np.ndarray:
        assert shuffle, "a balanced order is drawn at random"
        assert num_samples == len(labels)
        quota = np.full(len(classes), num_samples // len(classes))
        # Where the classes do not divide the set, which of them come once more is drawn anew in each epoch.
        quota[
            drawn(seed, epoch, turn, classes, "balance/spare").argsort(kind="stable")[: num_samples % len(classes)]
        ] += 1
        numbers = []
        for again in range(int((-(-quota // sizes)).max())):
            samples = np.flatnonzero(quota[class_of] > again * sizes[class_of])
            keys = drawn(seed, epoch, turn, samples + again * num_samples, "balance/pass")
            samples = samples[np.lexsort((keys, class_of[samples]))]
            first = np.searchsorted(class_of[samples], class_of[samples])  # where the sample's class begins
            wanted = quota[class_of[samples]] - again * sizes[class_of[samples]]
            chosen = samples[np.arange(len(samples)) - first < wanted]
            numbers.append(chosen + again % ((2**31 - 1) // num_samples) * num_samples)
        found = np.concatenate(numbers)
        place = np.arange(len(found))  # not the number, which may repeat when int32 overflows
        return found[drawn(seed, epoch, turn, place, "balance/place").argsort(kind="stable")].astype(np.int32)

    return order


def repeated_order(repeats: int, global_batch_size: int) -> Order:
    """Return an order in which each image of a step occurs `repeats` times in it (repeated augmentation).

    The global batch B and the length of an epoch stay. So a step has ceil(B / repeats) different images, the next ones
    of the shuffled order, and an epoch uses 1 / repeats of the set: another part each time, since each epoch is
    shuffled anew. Repetition k of sample i of N has the number i + k N, as in `balanced_order`: same image, other
    augmentation. Within a step all images come once, then all again: copies are as far apart as can be, in other
    micro-batches where there are several, so that mixing neighbours does not mix an image with itself. If `repeats`
    does not divide B, the last images of a step have one copy less.
    """

    def order(seed: int, epoch: int, num_samples: int, shuffle: bool, turn: int = 0) -> np.ndarray:
        distinct = -(-global_batch_size // repeats)
        step, within = np.divmod(np.arange(num_samples) + turn * num_samples, global_batch_size)
        shuffle_turn, place = np.divmod(step * distinct + within % distinct, num_samples)
        turns = range(int(shuffle_turn.min()), int(shuffle_turn.max()) + 1)
        shuffled = np.stack([epoch_order(seed, epoch, num_samples, shuffle, each) for each in turns])
        sample = shuffled[shuffle_turn - turns[0], place]
        # Numbers must fit int32, which the devices index with: after so many repetitions augmentations come again.
        again = within // distinct % ((2**31 - 1) // num_samples)
        return (sample + again * num_samples).astype(np.int32)

    return order
