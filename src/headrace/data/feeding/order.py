"""The order of samples: a pure function of (seed, epoch) in whole numbers.

So threads, replicas, resuming and library versions never change which image a step sees.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headrace.core.rng import bits, name_id

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
    return np.argsort(drawn(seed, epoch, turn, index, "order"), kind="stable").astype(np.int32)


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


def drawn(seed: int, epoch: int, turn: int, numbers: np.ndarray, purpose: str) -> np.ndarray:
    """Return 64 random bits for each number."""
    # 64 bits: of a million samples with 32-bit keys about a hundred pairs would be equal, and stay in the order of the
    # files.
    address = seed, epoch, turn, numbers.astype(np.uint32)
    high, low = (bits(*address, name_id(f"{purpose}/{half}")) for half in ("high", "low"))
    return high.astype(np.uint64) << np.uint64(32) | low
