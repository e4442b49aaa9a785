"""The order of samples, shuffled, balanced by class or repeated, and the shard of each process.

The order is a pure function of (seed, epoch) in whole numbers, so that threads, replicas, resuming and library versions
never change which image a step sees.
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
    balanced: bool = False  # every class equally often
    repeats: int = 1  # of each image within a step, augmented differently

    @property
    def global_batch_size(self) -> int:
        """Return the samples of one step."""
        return self.gradient_accumulation_count * self.num_replicas * self.micro_batch_size


def epoch_order(seed: int, epoch: int, num_samples: int, shuffle: bool, turn: int = 0) -> np.ndarray:
    """Return the samples in the order of an epoch, int32; `turn` counts further passes over the set in one epoch.

    Samples are sorted by 64 addressed bits each: unlike NumPy's permutation, this cannot change with a library version.
    """
    index = np.arange(num_samples, dtype=np.uint32)
    if not shuffle:
        return index.astype(np.int32)
    high, low = (bits(seed, epoch, turn, index, name_id(f"order/{half}")) for half in ("high", "low"))
    # 64 bits: of a million samples with 32-bit keys about a hundred pairs would be equal, and stay in the order of the
    # files.
    keys = high.astype(np.uint64) << np.uint64(32) | low
    return np.argsort(keys, kind="stable").astype(np.int32)


def step_indices(
    shape: StepShape, first_step: int, num_steps: int, order: Order = epoch_order
) -> tuple[np.ndarray, np.ndarray]:
    """Return (sample at each position, int32 [K, G, B]; epoch of each step, uint32 [K]) for consecutive steps.

    A sample's position in its step is (g * R + r) * micro + m. `order` may be a cached `epoch_order`.
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
    """Return the samples at positions `start` to `stop` of an epoch, with further passes over the set as needed."""
    size = shape.num_samples
    return [
        order(shape.seed, epoch, size, shape.shuffle, turn)[max(start - turn * size, 0) : stop - turn * size]
        # weight_updates_per_epoch may ask for more than one pass over the set in an epoch; each pass is shuffled anew.
        for turn in range(start // size, (stop - 1) // size + 1)
    ]


# The shard of a process: it reads and decodes only the columns of its replicas


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
        """Return this process's rows of a set that all read together: equally many, so the last may exceed it."""
        # Rounded up, since the devices exchange arrays of equal shape.
        each = -(-num_rows // self.num_processes)
        return range(self.process * each, (self.process + 1) * each)


WHOLE = ProcessShard()

# Uneven classes: weights for the loss, or an order in which all classes are equally frequent


def refuse_weights(given: Sequence[Any], info: DataInfo) -> None:
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
        quota[_drawn(seed, epoch, turn, classes, "spare").argsort(kind="stable")[: num_samples % len(classes)]] += 1
        numbers = []
        for again in range(int((-(-quota // sizes)).max())):
            samples = np.flatnonzero(quota[class_of] > again * sizes[class_of])
            keys = _drawn(seed, epoch, turn, samples + again * num_samples, "pass")
            samples = samples[np.lexsort((keys, class_of[samples]))]
            first = np.searchsorted(class_of[samples], class_of[samples])  # where the sample's class begins
            wanted = quota[class_of[samples]] - again * sizes[class_of[samples]]
            chosen = samples[np.arange(len(samples)) - first < wanted]
            numbers.append(chosen + again % ((2**31 - 1) // num_samples) * num_samples)
        found = np.concatenate(numbers)
        place = np.arange(len(found))  # not the number, which may repeat when int32 overflows
        return found[_drawn(seed, epoch, turn, place, "place").argsort(kind="stable")].astype(np.int32)

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


def _drawn(seed: int, epoch: int, turn: int, numbers: np.ndarray, purpose: str) -> np.ndarray:
    """Return 64 random bits for each number."""
    address = seed, epoch, turn, numbers.astype(np.uint32)
    high, low = (bits(*address, name_id(f"balance/{purpose}/{half}")) for half in ("high", "low"))
    return high.astype(np.uint64) << np.uint64(32) | low
