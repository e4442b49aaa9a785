"""Synthetic data: random bytes, a pure function of (seed, split, image), the same on host and device.

`generated` images are made on the host and sent like real ones; `synthetic` ones are made on the device and cost no
host traffic. There are at most 1,024 different images, used repeatedly, so that making them never limits a run.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.rng import HostOrDevice, array_module, bits, name_id
from headrace.data.sets.source import Source, memory_source

MAX_DISTINCT = 1024


def distinct_images(num_samples: int, image_bytes: int, budget_bytes: int) -> int:
    """Return how many different images to make, at most what fits a quarter of the device budget."""
    return max(1, min(num_samples, MAX_DISTINCT, budget_bytes // (4 * image_bytes)))


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """What determines the images and labels of a synthetic split."""

    seed: int
    split: str
    image_hwc: tuple[int, int, int]
    num_classes: int
    num_distinct: int


def synthetic_images(spec: Synthetic, numbers: HostOrDevice) -> Any:
    """Return the images of these numbers (uint32 [n]) as uint8 [n, H, W, C], where the numbers are."""
    xp = array_module(numbers)
    size = int(np.prod(spec.image_hwc))
    num_words = -(-size // 4)
    # Four bytes from each word of random bits: a quarter of the hashing.
    address = numbers[:, None] * np.uint32(num_words) + xp.arange(num_words, dtype=np.uint32)[None, :]
    # "made up" is part of the address of the bits: another name would change every image and label
    words = bits(spec.seed, name_id(f"made up/{spec.split}/images"), address.reshape(-1))
    shifts = xp.arange(0, 32, 8, dtype=np.uint32)
    each_byte = (words[:, None] >> shifts[None, :]).astype(np.uint8)
    return each_byte.reshape(len(numbers), num_words * 4)[:, :size].reshape(len(numbers), *spec.image_hwc)


def synthetic_labels(spec: Synthetic, numbers: HostOrDevice) -> Any:
    """Return the labels of the images of these numbers, int32 [n]."""
    draw = bits(spec.seed, name_id(f"made up/{spec.split}/labels"), numbers)
    return (draw % np.uint32(spec.num_classes)).astype(np.int32)


_AT_ONCE = 16  # images made together: they stay in the processor's cache, four times faster than all at once


def synthetic_source(spec: Synthetic, num_samples: int) -> Source:
    """Return a split that the device generates; the host can generate the same images when it needs them."""

    def read_into(indices: np.ndarray, _epoch: np.ndarray | int, out: np.ndarray) -> None:
        out[...] = synthetic_images(spec, (indices % spec.num_distinct).astype(np.uint32))

    distinct = synthetic_labels(spec, np.arange(spec.num_distinct, dtype=np.uint32))
    return Source(
        labels=distinct[np.arange(num_samples) % spec.num_distinct],
        image_hwc=spec.image_hwc,
        num_distinct=spec.num_distinct,
        read_into=read_into,
        synthetic=spec,
    )


def generated_source(spec: Synthetic, num_samples: int) -> Source:
    """Return a synthetic split whose images the host generates now and sends like real ones."""
    numbers = np.arange(spec.num_distinct, dtype=np.uint32)
    chunks = np.array_split(numbers, -(-len(numbers) // _AT_ONCE))
    images = np.concatenate([synthetic_images(spec, part) for part in chunks])
    return memory_source(images, synthetic_labels(spec, numbers), num_samples)
