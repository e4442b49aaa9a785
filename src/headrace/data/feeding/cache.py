"""Where a dataset is kept while a run trains on it: whole on the device, or on the host and sent block by block."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import ConfigError
from headrace.core.units import format_bytes, parse_bytes
from headrace.data.augmentation.augment import Preprocess, preprocess, shrink
from headrace.data.augmentation.mix import mix_images, mix_labels
from headrace.data.dataset import DataInfo
from headrace.data.feeding.order import WHOLE, ProcessShard
from headrace.data.sets.samples import KEPT
from headrace.data.sets.source import (
    DecodingSource,
    Source,
    Synthetic,
    SyntheticSource,
    synthetic_images,
    synthetic_labels,
)


class CacheChoice(NamedTuple):
    """`device` or `host`, and the reason as a sentence."""

    where: str
    reason: str


def decide_cache(info: DataInfo, data: Data, num_devices: int) -> CacheChoice:
    """Return where to keep the set; each device that keeps it keeps all of it."""
    if info.synthetic_on == "device":
        return CacheChoice("device", "synthetic images are made on the device")
    if not data.accelerator_side_preprocess:
        if data.dataset_cache == "device":
            raise ConfigError(
                "dataset_cache is device, but accelerator_side_preprocess is off.",
                rule="A set on the device is kept as bytes and preprocessed there.",
                remedy="Leave one of the two out.",
            )
        return CacheChoice("host", "the host preprocesses the images")
    if info.varies:
        if data.dataset_cache == "device":
            raise ConfigError(
                "dataset_cache is device, but training images are cropped anew in every epoch.",
                rule="A set on the device is decoded once.",
                remedy="Add --train-crop valid (with --train-augmentation flip-crop), or leave --dataset-cache out.",
            )
        kept = f", kept {data.dataset_cache} in memory" if data.dataset_cache in KEPT else ""
        return CacheChoice("host", f"images are decoded and cropped as they are needed{kept}")
    if data.dataset_cache in ("host", "none", *KEPT):
        return CacheChoice("host", f"--dataset-cache {data.dataset_cache}")
    if info.synthetic_on == "host" and data.dataset_cache == "auto":
        return CacheChoice("host", "generated images are there to be sent")
    need = info.num_train * (info.train_image_bytes + 4) + info.num_validation * (info.image_bytes + 4)
    budget = parse_bytes(data.dataset_device_budget)
    copies = f" on each of {num_devices} devices" if num_devices > 1 else ""
    if data.dataset_cache == "device":
        return CacheChoice("device", f"--dataset-cache device ({format_bytes(need)}{copies})")
    if need <= budget:
        return CacheChoice("device", f"{format_bytes(need)}{copies} fit the budget of {format_bytes(budget)}")
    return CacheChoice("host", f"{format_bytes(need)} do not fit the budget of {format_bytes(budget)}")


def make_resident(source: Source, put: Any, shard: ProcessShard = WHOLE) -> dict[str, jax.Array]:
    """Return {images [N, H, W, C] in their own dtype, labels int32 [N]} on the devices.

    Of several processes each decodes its share of the images, and the devices exchange them.
    """
    if isinstance(source, SyntheticSource):
        return put(_synthetic_on_device(source.spec), "replicated")
    count = source.num_distinct
    if not isinstance(source, DecodingSource):
        return put({"images": source.read(np.arange(count), 0), "labels": source.labels[:count]}, "replicated")
    rows = np.minimum(np.array(shard.rows(count)), count - 1)
    part = {"images": _decoded(source, rows), "labels": source.labels[rows]}
    if shard.num_processes == 1:
        return put(part, "replicated")
    return jax.tree.map(lambda array: array[:count], put(part, "rows"))


def _decoded(source: DecodingSource, rows: np.ndarray) -> np.ndarray:
    """Return these images of a source that decodes, made by several threads."""
    images = np.empty((len(rows), *source.image_hwc), np.uint8)

    def fill(number: int) -> None:
        source.read_into(rows[number : number + 1], 0, images[number : number + 1])

    with ThreadPoolExecutor(num_processors(), thread_name_prefix="decode") as pool:
        list(pool.map(fill, range(len(images))))  # list: an exception in a thread is raised here
    return images


def num_processors() -> int:
    """Return the processors this process may use, where the system says so (not on macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _synthetic_on_device(spec: Synthetic) -> dict[str, jax.Array]:
    """Return the images and labels as one program makes them on the default device."""

    def make() -> dict[str, jax.Array]:
        numbers = jnp.arange(spec.num_distinct, dtype=np.uint32)
        return {"images": synthetic_images(spec, numbers, jnp), "labels": synthetic_labels(spec, numbers)}

    return jax.jit(make)()


# Fetch a micro-batch inside the device program, whichever way its images came there.


Arrays = dict[str, Any]


def fetch(resident: Arrays | None, block: Arrays, spec: Preprocess, train: bool) -> tuple[Any, Any]:
    """Return (images float32 [B, H, W, C], labels int32 [B] or MixedLabels) of one micro-batch.

    `block` is {"index": [B]} with "epoch" (one number) for training, and "images" and "labels" where they were sent.
    Sets that are on the device are looked up by index; a synthetic set may hold fewer images than there are samples.
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
