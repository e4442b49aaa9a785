"""The order of samples: a pure function of (seed, epoch), written with whole numbers only.

Threads, replicas, resumes and library versions therefore never change which image a step sees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.rng import bits, name_id
from headrace.data.dataset import DataInfo

Order = Callable[[int, int, int, bool, int], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """How the samples of an epoch are cut into steps."""

    seed: int
    num_samples: int
    shuffle: bool
    updates_per_epoch: int
    gradient_accumulation_count: int
    num_replicas: int
    micro_batch_size: int
    balanced: bool = False  # every class equally often, see balance.py

    @property
    def global_batch_size(self) -> int:
        """Return the samples of one step."""
        return self.gradient_accumulation_count * self.num_replicas * self.micro_batch_size


def epoch_order(seed: int, epoch: int, num_samples: int, shuffle: bool, turn: int = 0) -> np.ndarray:
    """Return the samples in the order of an epoch, int32; `turn` counts further passes over the set in one epoch.

    Samples are sorted by 64 addressed bits each: unlike NumPy's permutation this stays the same for ever.
    """
    index = np.arange(num_samples, dtype=np.uint32)
    if not shuffle:
        return index.astype(np.int32)
    high, low = (bits(seed, epoch, turn, index, name_id(f"order/{half}")) for half in ("high", "low"))
    keys = high.astype(np.uint64) << np.uint64(32) | low
    return np.argsort(keys, kind="stable").astype(np.int32)


def step_indices(
    shape: StepShape, first_step: int, num_steps: int, order: Order = epoch_order
) -> tuple[np.ndarray, np.ndarray]:
    """Return (sample of each place, int32 [K, G, B]; epoch of each step, uint32 [K]) for consecutive steps.

    In its step a sample's place is (g * R + r) * micro + m. `order` may be a remembering form of `epoch_order`.
    """
    steps = np.arange(first_step, first_step + num_steps)
    epochs = steps // shape.updates_per_epoch
    pieces = []
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        within = steps[epochs == epoch] % shape.updates_per_epoch
        start, stop = int(within[0]) * shape.global_batch_size, int(within[-1] + 1) * shape.global_batch_size
        pieces += _places(shape, epoch, start, stop, order)
    columns = shape.num_replicas * shape.micro_batch_size
    index = np.concatenate(pieces).reshape(num_steps, shape.gradient_accumulation_count, columns)
    return index, epochs.astype(np.uint32)


def _places(shape: StepShape, epoch: int, start: int, stop: int, order: Order) -> list[np.ndarray]:
    """Return the samples at places `start` to `stop` of an epoch, which goes on with further turns where it must."""
    size = shape.num_samples
    return [
        order(shape.seed, epoch, size, shape.shuffle, turn)[max(start - turn * size, 0) : stop - turn * size]
        for turn in range(start // size, (stop - 1) // size + 1)
    ]


# The share of a process in every batch: its replicas' columns, and nothing else is read or decoded.


@dataclass(frozen=True, kw_only=True)
class ProcessShard:
    """Which process this is among those that read a batch together."""

    process: int = 0
    num_processes: int = 1

    def columns(self, num_columns: int) -> slice:
        """Return the columns of a batch that belong to this process."""
        assert num_columns % self.num_processes == 0, (num_columns, self.num_processes)
        each = num_columns // self.num_processes
        return slice(self.process * each, (self.process + 1) * each)

    def rows(self, num_rows: int) -> range:
        """Return this process's rows of a set that all read together: each has as many; the last may go too far."""
        each = -(-num_rows // self.num_processes)
        return range(self.process * each, (self.process + 1) * each)


WHOLE = ProcessShard()

# Uneven classes: weights of classes for the loss, and an order of samples that shows every class equally often.


def refuse_weights(given: Sequence[Any], info: DataInfo) -> None:
    """Refuse weights that are not one for each class of the set."""
    if given and given != ("balanced",) and len(given) != info.num_classes:
        raise ConfigError(
            f"class_weights has {len(given)} numbers, the dataset {info.name} has {info.num_classes} classes.",
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
