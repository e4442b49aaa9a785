"""Fetch a micro-batch inside the device program, whichever way its images came there."""

from typing import Any

from headrace.data.augment import Preprocess, preprocess
from headrace.data.mix import mix_images, mix_labels
from headrace.data.shrink import shrink

Arrays = dict[str, Any]


def fetch(resident: Arrays | None, block: Arrays, spec: Preprocess, train: bool) -> tuple[Any, Any]:
    """Return (images float32 [B, H, W, C], labels int32 [B] or MixedLabels) of one micro-batch.

    `block` is {"index": [B]} with "epoch" (one number) for training, and "images" and "labels" where they were sent.
    Sets that are on the device are looked up by index; a made-up set may hold fewer images than there are samples.
    Images are shrunk and mixed here, also where the host preprocesses: only here a micro-batch is together.
    """
    if "images" in block:
        images = block["images"]
    else:
        assert resident is not None, "neither the block nor the device holds the images"
        images = resident["images"][block["index"] % resident["images"].shape[0]]
    index, epoch = block["index"], block.get("epoch", 0)
    if spec.on_device:
        images = preprocess(images, index, epoch, spec, train)
    if train and spec.shrunk_hw is not None:
        images = shrink(images, spec.shrunk_hw)
    if train and spec.mix is not None:
        images = mix_images(images, index, epoch, spec.mix)
    return images, fetch_labels(resident, block, spec, train)


def fetch_labels(resident: Arrays | None, block: Arrays, spec: Preprocess, train: bool) -> Any:
    """Return the labels alone of one micro-batch, as `fetch` does; `resident` needs no images for it."""
    if "labels" in block:
        labels = block["labels"]
    else:
        assert resident is not None, "neither the block nor the device holds the labels"
        labels = resident["labels"][block["index"] % resident["labels"].shape[0]]
    if not train or spec.mix is None:
        return labels
    return mix_labels(labels, block["index"], block.get("epoch", 0), spec.mix)
