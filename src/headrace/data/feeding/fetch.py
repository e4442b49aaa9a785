"""Fetching a micro-batch inside the device program, resident or sent."""

from dataclasses import dataclass
from typing import Any

from headrace.core.tree import PyTree
from headrace.data.augmentation.crop_resize import crop_resize, shrink
from headrace.data.augmentation.mix import mix_images, mix_labels
from headrace.data.augmentation.preprocess import Preprocess, preprocess

Arrays = dict[str, Any]


@dataclass(frozen=True)
class FetchSamples:
    """How the samples of a feed come into a program."""

    spec: Preprocess
    train: bool

    def __call__(self, resident: Arrays | None, block: Arrays) -> tuple[PyTree, PyTree]:
        """Return the images and labels of one micro-batch."""
        return fetch(resident, block, self.spec, self.train)

    def labels(self, resident: Arrays | None, block: Arrays) -> PyTree:
        """Return its labels alone, for the last stage of a pipeline."""
        return fetch_labels(resident, block, self.spec, self.train)


@dataclass(frozen=True)
class FetchImages:
    """How images without labels come into a program that predicts their classes."""

    spec: Preprocess

    def __call__(self, _resident: object, block: Arrays) -> tuple[PyTree, None]:
        """Return the images as the network takes them."""
        return preprocess(block["images"], None, 0, self.spec, train=False), None

    def labels(self, _resident: object, _block: Arrays) -> None:
        """Return no labels."""


def fetch(resident: Arrays | None, block: Arrays, spec: Preprocess, train: bool) -> tuple[PyTree, PyTree]:
    """Return (images float32 [B, H, W, C], labels [B, ...] or MixedLabels) of one micro-batch.

    `block` is {"index": [B]} with "epoch" and "seed" (one number each) for training, "images" and "labels" if they
    were sent, and "box" (one for each image) if the device crops.
    Sets that are on the device are looked up by index; a synthetic set may have fewer images than samples.
    Images are shrunk and mixed here, even if the host preprocesses: only here is the whole micro-batch available.
    """
    if "images" in block:
        images = block["images"]
    else:
        assert resident is not None, "neither the block nor the device holds the images"
        # The remainder: repeated samples have numbers above the set's size, and a synthetic set repeats its images.
        images = resident["images"][block["index"] % resident["images"].shape[0]]
    if "box" in block:
        images = crop_resize(images, block["box"], spec.image_hwc[:2])
    index, epoch, spec = block["index"], block.get("epoch", 0), spec.with_seed(block.get("seed", spec.seed))
    if spec.on_device:
        images = preprocess(images, index, epoch, spec, train)
    # After the crop and before mixing: the box of cutmix is drawn for the size that the network sees.
    if train and spec.shrunk_hw is not None:
        images = shrink(images, spec.shrunk_hw)
    if train and spec.augment is not None:
        images = spec.augment(images, _labels(resident, block), index, epoch)
    if train and spec.mix is not None:
        images = mix_images(images, index, epoch, spec.mix)
    return images, fetch_labels(resident, block, spec, train)


def fetch_labels(resident: Arrays | None, block: Arrays, spec: Preprocess, train: bool) -> PyTree:
    """Return only the labels that `fetch` would; `resident` needs no images."""
    labels = _labels(resident, block)
    mix = spec.with_seed(block.get("seed", spec.seed)).mix
    if not train or mix is None:
        return labels
    return mix_labels(labels, block["index"], block.get("epoch", 0), mix)


def _labels(resident: Arrays | None, block: Arrays) -> PyTree:
    if "labels" in block:
        return block["labels"]
    assert resident is not None, "neither the block nor the device holds the labels"
    return resident["labels"][block["index"] % resident["labels"].shape[0]]
