"""The order of samples, the shard of each process, and how a step fetches its images from where they are kept."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import ConfigError
from headrace.core.process import num_processors, transferring
from headrace.core.rng import bits, name_id
from headrace.core.tree import PyTree
from headrace.core.units import format_bytes, format_percent, parse_bytes
from headrace.data.augmentation.augment import Preprocess, mix_images, mix_labels, preprocess, shrink
from headrace.data.augmentation.crop_resize import crop_resize
from headrace.data.dataset import DataInfo
from headrace.data.decoding.image_source import WorkingSource
from headrace.data.sets.samples import (
    KEPT,
    DecodingSource,
    Source,
    Synthetic,
    SyntheticSource,
    synthetic_images,
    synthetic_labels,
)
from headrace.rows.metrics import UNEVEN, class_ratio

# The order of samples is a pure function of (seed, epoch) in whole numbers, so that threads, replicas, resuming and
# library versions never change which image a step sees.


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
    return np.argsort(_drawn(seed, epoch, turn, index, "order"), kind="stable").astype(np.int32)


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


# The shard of a process: it reads and decodes only the columns of its replicas


@dataclass(frozen=True, kw_only=True)
class ProcessShard:
    """Which process this is among those that read a batch together."""

    process: int = 0
    num_processes: int = 1

    def columns(self, num_columns: int) -> slice:
        """Return the columns of a batch that belong to this process."""
        assert num_columns % self.num_processes == 0, (num_columns, self.num_processes)
        each = num_columns // self.num_processes
        return slice(self.process * each, (self.process + 1) * each)

    def rows(self, num_rows: int) -> range:
        """Return this process's rows of a set that all read together: equally many, so the last may exceed it."""
        # Rounded up, since the devices exchange arrays of equal shape.
        each = -(-num_rows // self.num_processes)
        return range(self.process * each, (self.process + 1) * each)


WHOLE = ProcessShard()

# Uneven classes: weights for the loss, or an order in which all classes are equally frequent


def refuse_weights(given: Sequence[object], info: DataInfo) -> None:
    """Refuse weights that are not one for each class of the set."""
    if given and given != ("balanced",) and len(given) != info.num_classes:
        raise ConfigError(
            f"class_weights has {len(given)} numbers, the dataset {info.name} has {info.num_classes} classes.",
            rule="Every class needs its weight, in the order of the labels.",
            remedy=f"Give {info.num_classes} numbers, or balanced.",
        )


def class_weights(given: Sequence[Any], labels: np.ndarray, num_classes: int) -> tuple[float, ...] | None:
    """Return the weight of each class, or None if all are equal by default.

    `balanced` is N / (C x n) for a class of n images in a set of N images and C classes: the mean weight of an image
    is then 1. A class without images has weight 0.
    """
    if not given:
        return None
    if given != ("balanced",):
        return tuple(float(weight) for weight in given)
    counts = np.bincount(labels, minlength=num_classes)
    balanced = len(labels) / (num_classes * np.maximum(counts, 1)) * (counts > 0)
    return tuple(balanced.tolist())


EVEN_OUT = ("--class-weights balanced", "--balanced-sampling")


def describe_uneven(names: Sequence[str], counts: Sequence[int], remedies: Sequence[str]) -> tuple[str, ...]:
    """Say that the training images are unevenly spread over the classes, and which options even that out."""
    ratio = class_ratio(counts)
    if ratio is None or ratio < UNEVEN:
        return ()
    some = [(count, name) for count, name in zip(counts, names, strict=True) if count]
    (most, largest), (least, smallest) = max(some, key=lambda each: each[0]), min(some, key=lambda each: each[0])
    advice = f"; {' or '.join(remedies)} evens them out" if remedies else ""
    return (
        f"The classes are uneven: {largest} has {most:,} training images, {smallest} {least:,}. Answering {largest} "
        f"alone is right for {format_percent(most / sum(counts))} of them, so look at balanced accuracy and macro F1 "
        f"rather than at top-1{advice}.",
    )


def balanced_order(labels: np.ndarray) -> Order:
    """Return an order of samples in which every class comes equally often; an epoch is as long as the set.

    Each class is passed over in random order, repeatedly until it has its quota, so that no sample repeats before all
    have been used. Repetition k of sample i of N in an epoch has the number i + k N: the remainder selects the image,
    the whole number its augmentation, so that repetitions differ.
    """
    classes, class_of = np.unique(labels, return_inverse=True)
    sizes = np.bincount(class_of)

    def order(seed: int, epoch: int, num_samples: int, shuffle: bool, turn: int = 0) -> np.ndarray:
        assert shuffle, "a balanced order is drawn at random"
        assert num_samples == len(labels)
        quota = np.full(len(classes), num_samples // len(classes))
        # Where the classes do not divide the set, which of them come once more is drawn anew in each epoch.
        quota[
            _drawn(seed, epoch, turn, classes, "balance/spare").argsort(kind="stable")[: num_samples % len(classes)]
        ] += 1
        numbers = []
        for again in range(int((-(-quota // sizes)).max())):
            samples = np.flatnonzero(quota[class_of] > again * sizes[class_of])
            keys = _drawn(seed, epoch, turn, samples + again * num_samples, "balance/pass")
            samples = samples[np.lexsort((keys, class_of[samples]))]
            first = np.searchsorted(class_of[samples], class_of[samples])  # where the sample's class begins
            wanted = quota[class_of[samples]] - again * sizes[class_of[samples]]
            chosen = samples[np.arange(len(samples)) - first < wanted]
            numbers.append(chosen + again % ((2**31 - 1) // num_samples) * num_samples)
        found = np.concatenate(numbers)
        place = np.arange(len(found))  # not the number, which may repeat when int32 overflows
        return found[_drawn(seed, epoch, turn, place, "balance/place").argsort(kind="stable")].astype(np.int32)

    return order


def repeated_order(repeats: int, global_batch_size: int) -> Order:
    """Return an order in which each image of a step occurs `repeats` times in it (repeated augmentation).

    The global batch B and the length of an epoch stay. So a step has ceil(B / repeats) different images, the next ones
    of the shuffled order, and an epoch uses 1 / repeats of the set: another part each time, since each epoch is
    shuffled anew. Repetition k of sample i of N has the number i + k N, as in `balanced_order`: same image, other
    augmentation. Within a step all images come once, then all again: copies are as far apart as can be, in other
    micro-batches where there are several, so that mixing neighbours does not mix an image with itself. If `repeats`
    does not divide B, the last images of a step have one copy less.
    """

    def order(seed: int, epoch: int, num_samples: int, shuffle: bool, turn: int = 0) -> np.ndarray:
        distinct = -(-global_batch_size // repeats)
        step, within = np.divmod(np.arange(num_samples) + turn * num_samples, global_batch_size)
        shuffle_turn, place = np.divmod(step * distinct + within % distinct, num_samples)
        turns = range(int(shuffle_turn.min()), int(shuffle_turn.max()) + 1)
        shuffled = np.stack([epoch_order(seed, epoch, num_samples, shuffle, each) for each in turns])
        sample = shuffled[shuffle_turn - turns[0], place]
        # Numbers must fit int32, which the devices index with: after so many repetitions augmentations come again.
        again = within // distinct % ((2**31 - 1) // num_samples)
        return (sample + again * num_samples).astype(np.int32)

    return order


def _drawn(seed: int, epoch: int, turn: int, numbers: np.ndarray, purpose: str) -> np.ndarray:
    """Return 64 random bits for each number."""
    # 64 bits: of a million samples with 32-bit keys about a hundred pairs would be equal, and stay in the order of the
    # files.
    address = seed, epoch, turn, numbers.astype(np.uint32)
    high, low = (bits(*address, name_id(f"{purpose}/{half}")) for half in ("high", "low"))
    return high.astype(np.uint64) << np.uint64(32) | low


# Where a dataset is kept during a run, on the device or on the host, and how a step fetches its images.


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

    def __init__(self, source: Source, put: Put, shard: ProcessShard = WHOLE) -> None:
        self._source, self._put = source, put
        self._closing = threading.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="resident")
        # In a thread: decoding a set takes seconds, in which the programs are compiled.
        self.made = self._worker.submit(make_resident, source, put, shard, self._closing)
        if shard.num_processes > 1:  # devices exchange images: in the same order in all processes
            self.made.result()

    def described(self) -> PyTree:
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
        return self.made.result()

    def close(self, *, wait: bool = True) -> None:
        """Stop decoding; wait for what is being decoded, or do not."""
        self._closing.set()
        self._worker.shutdown(wait=wait, cancel_futures=True)


def make_resident(
    source: Source, put: Put, shard: ProcessShard = WHOLE, closing: threading.Event | None = None
) -> dict[str, jax.Array]:
    """Return {images [N, H, W, C] in their stored dtype, labels int32 [N]} on the devices.

    With several processes each decodes its shard of the images, and the devices exchange them.
    """
    if isinstance(source, SyntheticSource):
        with transferring():
            return put(_synthetic_on_device(source.spec), "replicated")
    count = source.num_distinct
    sizes = {"original_hw": source.original_hw} if isinstance(source, WorkingSource) else {}
    if not isinstance(source, DecodingSource):
        part = {"images": source.read(np.arange(count), 0), "labels": source.labels[:count]}
        with transferring():
            return put(part, "replicated")
    # All processes must pass equally many rows; the last ones repeat an image, which is cut off after the exchange.
    rows = np.minimum(np.array(shard.rows(count)), count - 1)
    part = {"images": _decoded(source, rows, closing or threading.Event()), "labels": source.labels[rows]}
    if shard.num_processes == 1:
        with transferring():
            return put(part, "replicated")
    part |= {name: array[rows] for name, array in sizes.items()}
    resident = jax.tree.map(lambda array: array[:count], put(part, "rows"))
    for name, array in sizes.items():  # every process draws crops of images that others decoded
        array[...] = np.asarray(resident.pop(name))
    return resident


# Images of one task: in each, a thread needs the interpreter lock a few times, and while the main thread traces a
# program that takes 5 ms a time. Few enough that threads which share the rest finish together.
_DECODED_TOGETHER = 16


def _decoded(source: DecodingSource, rows: np.ndarray, closing: threading.Event) -> np.ndarray:
    """Decode these images with several threads; the rest stays undecoded once `closing` is set."""
    images = np.empty((len(rows), *source.image_hwc), np.uint8)

    def fill(first: int) -> None:
        if not closing.is_set():
            source.read_into(rows[first : first + _DECODED_TOGETHER], 0, images[first : first + _DECODED_TOGETHER])

    with ThreadPoolExecutor(num_processors(), thread_name_prefix="decode") as pool:
        firsts = range(0, len(images), _DECODED_TOGETHER)
        list(pool.map(fill, firsts))  # list: an exception in a thread is raised here
    return images


def _synthetic_on_device(spec: Synthetic) -> dict[str, jax.Array]:
    """Return the images and labels generated by one program on the default device."""

    def make() -> dict[str, jax.Array]:
        numbers = jnp.arange(spec.num_distinct, dtype=np.uint32)
        return {"images": synthetic_images(spec, numbers), "labels": synthetic_labels(spec, numbers)}

    return jax.jit(make)()


# Fetching a micro-batch inside the device program, resident or sent


Arrays = dict[str, Any]


def fetch(resident: Arrays | None, block: Arrays, spec: Preprocess, train: bool) -> tuple[PyTree, PyTree]:
    """Return (images float32 [B, H, W, C], labels int32 [B] or MixedLabels) of one micro-batch.

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
