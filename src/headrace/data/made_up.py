"""Made-up data: random bytes that are a pure function of (seed, split, image), on the host or on the device alike.

`generated` images are made on the host and sent like real ones; `synthetic` ones are made on the device and cost no
host traffic. There are at most 1,024 different images, shown again and again, so making them never binds a run.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.rng import bits, name_id

MAX_DISTINCT = 1024


def distinct_images(num_samples: int, image_bytes: int, budget_bytes: int) -> int:
    """Return how many different images to make: never more than a quarter of the device budget holds."""
    return max(1, min(num_samples, MAX_DISTINCT, budget_bytes // (4 * image_bytes)))


@dataclass(frozen=True, kw_only=True)
class MadeUp:
    """What determines the images and labels of a made-up split."""

    seed: int
    split: str
    image_hwc: tuple[int, int, int]
    num_classes: int
    num_distinct: int


def made_up_images(spec: MadeUp, numbers: Any, xp: Any) -> Any:
    """Return the images of these numbers (uint32 [n]) as uint8 [n, H, W, C]; `xp` is numpy or jax.numpy."""
    size = int(np.prod(spec.image_hwc))
    num_words = -(-size // 4)
    address = numbers[:, None] * np.uint32(num_words) + xp.arange(num_words, dtype=np.uint32)[None, :]
    words = bits(spec.seed, name_id(f"made up/{spec.split}/images"), address.reshape(-1))
    shifts = xp.arange(0, 32, 8, dtype=np.uint32)
    each_byte = (words[:, None] >> shifts[None, :]).astype(np.uint8)
    return each_byte.reshape(len(numbers), num_words * 4)[:, :size].reshape(len(numbers), *spec.image_hwc)


def made_up_labels(spec: MadeUp, numbers: Any) -> Any:
    """Return the labels of the images of these numbers, int32 [n]."""
    draw = bits(spec.seed, name_id(f"made up/{spec.split}/labels"), numbers)
    return (draw % np.uint32(spec.num_classes)).astype(np.int32)
