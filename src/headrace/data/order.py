"""The order of samples: a pure function of (seed, epoch), written with whole numbers only.

Threads, replicas, resumes and library versions therefore never change which image a step sees.
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
