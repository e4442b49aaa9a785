"""Where a dataset is kept during a run: on the devices or on the host."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import ConfigError
from headrace.core.process import num_processors
from headrace.core.session import session
from headrace.core.tree import PyTree
from headrace.core.units import format_bytes, parse_bytes
from headrace.data.dataset import DataInfo
from headrace.data.feeding.prefetch import FeedStats, Kept, Prefetcher, never_given_up
from headrace.data.feeding.shard import WHOLE, ProcessShard
from headrace.data.sets.cached_samples import KEPT
from headrace.data.sets.source import Source
from headrace.data.sets.synthetic import Synthetic, synthetic_images, synthetic_labels


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


# (tree of arrays, `replicated` | `steps` | `batches` | `rows`) -> tree of device arrays
Put = Callable[[PyTree, str], PyTree]


class Resident:
    """A set kept on the devices; a thread puts it there, while programs are compiled for its shapes."""

    def __init__(self, source: Source, put: Put, shard: ProcessShard = WHOLE, *, only_described: bool = False) -> None:
        self._source, self._put = source, put
        self._closing = threading.Event()
        # In a thread: decoding a set takes seconds, in which the programs are compiled.
        self._prefetcher = Prefetcher(
            lambda _: make_resident(source, put, shard, self._closing),
            1,
            FeedStats(),
            lambda resident: resident,
            num_blocks=1,
            kept=Kept(on_device=True),
            apart=False,
        )
        if only_described:
            return
        self._prefetcher.prefetch()
        self._prefetcher.finish()
        if shard.num_processes > 1:  # devices exchange images: in the same order in all processes
            self.wait()

    def described(self) -> PyTree:
        """Return its shapes and devices, to compile with."""
        source, count = self._source, self._source.num_distinct
        images = jax.ShapeDtypeStruct((count, *source.image_hwc), source.dtype)
        labels = jax.ShapeDtypeStruct((count, *source.label_shape), source.labels.dtype)
        return self._put({"images": images, "labels": labels}, "replicated")

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """The set on the devices; waits until it is there."""
        return self._prefetcher.take(0)

    def wait(self, given_up: Callable[[], bool] = never_given_up) -> None:
        """Wait until it is there; raise GivenUp as soon as it is no longer wanted."""
        self._prefetcher.take(0, given_up=given_up)

    def close(self, *, wait: bool = True) -> None:
        """Stop decoding; wait for what is being decoded, or do not."""
        self._closing.set()
        self._prefetcher.close(wait=wait)


def make_resident(
    source: Source, put: Put, shard: ProcessShard = WHOLE, closing: threading.Event | None = None
) -> dict[str, jax.Array]:
    """Return {images [N, H, W, C] in their stored dtype, labels [N, ...]} on the devices.

    With several processes each decodes its shard of the images, and the devices exchange them.
    """
    if source.synthetic is not None:
        with session().devices.transferring():
            return put(_synthetic_on_device(source.synthetic), "replicated")
    count = source.num_distinct
    if not source.slow:
        part = {"images": source.read(np.arange(count), 0), "labels": source.labels[:count]}
        with session().devices.transferring():
            return put(part, "replicated")
    # All processes must pass equally many rows; the last ones repeat an image, which is cut off after the exchange.
    rows = np.minimum(np.array(shard.rows(count)), count - 1)
    part = {"images": _read_slowly(source, rows, closing or threading.Event()), "labels": source.labels[rows]}
    if shard.num_processes == 1:
        with session().devices.transferring():
            return put(part, "replicated")
    sizes = source.original_hw if source.boxes is not None else None
    part |= {} if sizes is None else {"original_hw": sizes[rows]}
    resident = jax.tree.map(lambda array: array[:count], put(part, "rows"))
    if sizes is not None:  # every process draws crops of images that others decoded
        sizes[...] = np.asarray(resident.pop("original_hw"))
    return resident


# Images of one task: in each, a thread needs the interpreter lock a few times, and while the main thread traces a
# program that takes 5 ms a time. Few enough that threads which share the rest finish together.
_READ_TOGETHER = 16


def _read_slowly(source: Source, rows: np.ndarray, closing: threading.Event) -> np.ndarray:
    """Read these images with several threads; the rest stays unread once `closing` is set."""
    images = np.empty((len(rows), *source.image_hwc), source.dtype)

    def fill(first: int) -> None:
        if not closing.is_set():
            source.read_into(rows[first : first + _READ_TOGETHER], 0, images[first : first + _READ_TOGETHER])

    with ThreadPoolExecutor(num_processors(), thread_name_prefix="decode") as pool:
        firsts = range(0, len(images), _READ_TOGETHER)
        list(pool.map(fill, firsts))  # list: an exception in a thread is raised here
    return images


def _synthetic_on_device(spec: Synthetic) -> dict[str, jax.Array]:
    """Return the images and labels generated by one program on the default device."""

    def make() -> dict[str, jax.Array]:
        numbers = jnp.arange(spec.num_distinct, dtype=np.uint32)
        return {"images": synthetic_images(spec, numbers), "labels": synthetic_labels(spec, numbers)}

    return jax.jit(make)()
