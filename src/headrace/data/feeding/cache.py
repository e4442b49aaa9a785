"""Where a dataset is kept during a run, on the device or on the host, and how a step fetches its images."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import ConfigError
from headrace.core.units import format_bytes, parse_bytes
from headrace.data.augmentation.augment import Preprocess, preprocess, shrink
from headrace.data.augmentation.crop_resize import crop_resize
from headrace.data.augmentation.mix import mix_images, mix_labels
from headrace.data.dataset import DataInfo
from headrace.data.decoding.working_source import WorkingSource
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
    """Return where to keep the set; every device holds a full copy."""
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
                remedy="Add --decode-once on, or --train-crop valid (with --train-augmentation flip-crop), or leave "
                "--dataset-cache out.",
            )
        kept = f", kept {data.dataset_cache} in memory" if data.dataset_cache in KEPT else ""
        return CacheChoice("host", f"images are decoded and cropped as they are needed{kept}")
    if data.dataset_cache in ("host", "none", *KEPT):
        return CacheChoice("host", f"--dataset-cache {data.dataset_cache}")
    # Whoever asks for generated images wants to measure sending them.
    if info.synthetic_on == "host" and data.dataset_cache == "auto":
        return CacheChoice("host", "generated images measure the transfer")
    # Validation images go along: both parts are on the device, or neither. 4 bytes are a label.
    need = info.num_train * (info.train_image_bytes + 4) + info.num_validation * (info.image_bytes + 4)
    budget = parse_bytes(data.dataset_device_budget)
    copies = f" on each of {num_devices} devices" if num_devices > 1 else ""
    if data.dataset_cache == "device":
        return CacheChoice("device", f"--dataset-cache device ({format_bytes(need)}{copies})")
    if need <= budget:
        return CacheChoice("device", f"{format_bytes(need)}{copies} fit the budget of {format_bytes(budget)}")
    kept = "kept in host memory and sent: " if info.decoded_once else ""
    return CacheChoice("host", f"{kept}{format_bytes(need)} do not fit the budget of {format_bytes(budget)}")


class Resident:
    """A set kept on the devices; a thread puts it there, while programs are compiled for its shapes."""

    def __init__(self, source: Source, put: Any, shard: ProcessShard = WHOLE) -> None:
        self._source, self._put = source, put
        self._closing = threading.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="resident")
        # In a thread: decoding a set takes seconds, in which the programs are compiled.
        self._made = self._worker.submit(make_resident, source, put, shard, self._closing)
        if shard.num_processes > 1:  # devices exchange images: in the same order in all processes
            self._made.result()

    def described(self) -> Any:
        """Return its shapes and devices, to compile with."""
        source, count = self._source, self._source.num_distinct
        stored = (
            np.uint8 if isinstance(source, DecodingSource | SyntheticSource) else source.read(np.arange(0), 0).dtype
        )
        images = jax.ShapeDtypeStruct((count, *source.image_hwc), stored)
        return self._put({"images": images, "labels": jax.ShapeDtypeStruct((count,), np.int32)}, "replicated")

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """The set on the devices; waits until it is there."""
        return self._made.result()

    def close(self) -> None:
        """Stop decoding."""
        self._closing.set()
        self._worker.shutdown(wait=True, cancel_futures=True)


def make_resident(
    source: Source, put: Any, shard: ProcessShard = WHOLE, closing: threading.Event | None = None
) -> dict[str, jax.Array]:
    """Return {images [N, H, W, C] in their stored dtype, labels int32 [N]} on the devices.

    With several processes each decodes its shard of the images, and the devices exchange them.
    """
    if isinstance(source, SyntheticSource):
        return put(_synthetic_on_device(source.spec), "replicated")
    count = source.num_distinct
    sizes = {"original_hw": source.original_hw} if isinstance(source, WorkingSource) else {}
    if not isinstance(source, DecodingSource):
        return put({"images": source.read(np.arange(count), 0), "labels": source.labels[:count]}, "replicated")
    # All processes must pass equally many rows; the last ones repeat an image, which is cut off after the exchange.
    rows = np.minimum(np.array(shard.rows(count)), count - 1)
    part = {"images": _decoded(source, rows, closing or threading.Event()), "labels": source.labels[rows]}
    if shard.num_processes == 1:
        return put(part, "replicated")
    part |= {name: array[rows] for name, array in sizes.items()}
    resident = jax.tree.map(lambda array: array[:count], put(part, "rows"))
    for name, array in sizes.items():  # every process draws crops of images that others decoded
        array[...] = np.asarray(resident.pop(name))
    return resident


def _decoded(source: DecodingSource, rows: np.ndarray, closing: threading.Event) -> np.ndarray:
    """Decode these images with several threads; the rest stays undecoded once `closing` is set."""
    images = np.empty((len(rows), *source.image_hwc), np.uint8)

    def fill(number: int) -> None:
        if not closing.is_set():
            # One image at a time: sizes differ, and threads that share the rest finish together.
            source.read_into(rows[number : number + 1], 0, images[number : number + 1])

    with ThreadPoolExecutor(num_processors(), thread_name_prefix="decode") as pool:
        list(pool.map(fill, range(len(images))))  # list: an exception in a thread is raised here
    return images


def num_processors() -> int:
    """Return the number of processors that this process may use; all of them where the system does not say (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _synthetic_on_device(spec: Synthetic) -> dict[str, jax.Array]:
    """Return the images and labels generated by one program on the default device."""

    def make() -> dict[str, jax.Array]:
        numbers = jnp.arange(spec.num_distinct, dtype=np.uint32)
        return {"images": synthetic_images(spec, numbers, jnp), "labels": synthetic_labels(spec, numbers)}

    return jax.jit(make)()


# Fetching a micro-batch inside the device program, resident or sent


Arrays = dict[str, Any]


def fetch(resident: Arrays | None, block: Arrays, spec: Preprocess, train: bool) -> tuple[Any, Any]:
    """Return (images float32 [B, H, W, C], labels int32 [B] or MixedLabels) of one micro-batch.

    `block` is {"index": [B]} with "epoch" (one number) for training, "images" and "labels" if they were sent, and
    "box" (one for each image) if the device crops.
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
    index, epoch = block["index"], block.get("epoch", 0)
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


def fetch_labels(resident: Arrays | None, block: Arrays, spec: Preprocess, train: bool) -> Any:
    """Return only the labels that `fetch` would; `resident` needs no images."""
    labels = _labels(resident, block)
    if not train or spec.mix is None:
        return labels
    return mix_labels(labels, block["index"], block.get("epoch", 0), spec.mix)


def _labels(resident: Arrays | None, block: Arrays) -> Any:
    if "labels" in block:
        return block["labels"]
    assert resident is not None, "neither the block nor the device holds the labels"
    return resident["labels"][block["index"] % resident["labels"].shape[0]]
