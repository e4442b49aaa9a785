"""Fetch a micro-batch inside the device program, whichever way its images came there."""

from typing import Any

import jax

from headrace.data.augment import Preprocess, preprocess

Arrays = dict[str, Any]


def fetch(resident: Arrays | None, block: Arrays, spec: Preprocess, train: bool) -> tuple[jax.Array, jax.Array]:
    """Return (images float32 [B, H, W, C], labels int32 [B]) of one micro-batch.

    `block` is {"index": [B]} with "epoch" (one number) for training, and "images" and "labels" where they were sent.
    Sets that are on the device are looked up by index; a made-up set may hold fewer images than there are samples.
    """
    if "images" in block:
        images, labels = block["images"], block["labels"]
    else:
        assert resident is not None, "neither the block nor the device holds the images"
        row = block["index"] % resident["images"].shape[0]
        images, labels = resident["images"][row], resident["labels"][row]
    if not spec.on_device:
        return images, labels
    return preprocess(images, block["index"], block.get("epoch", 0), spec, train), labels


def fetch_labels(resident: Arrays | None, block: Arrays) -> jax.Array:
    """Return the labels alone of one micro-batch; `resident` needs no images for it."""
    if "labels" in block:
        return block["labels"]
    assert resident is not None, "neither the block nor the device holds the labels"
    return resident["labels"][block["index"] % resident["labels"].shape[0]]
