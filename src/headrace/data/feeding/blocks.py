"""Make the host's part of a block: gather images by threads and, where the host preprocesses, preprocess them."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.config.schema import Augment, Data
from headrace.core.errors import ConfigError
from headrace.data.augmentation.augment import Preprocess, preprocess, preprocess_spec
from headrace.data.dataset import DataInfo
from headrace.data.feeding.cache import CacheChoice, decide_cache, num_processors
from headrace.data.feeding.order import WHOLE, ProcessShard
from headrace.data.sets.source import DecodingSource, Source

_CHUNK_BYTES = 1 << 20  # of images that a thread reads at a time: worth a hand-over, and yet many in a block
_MAX_THREADS = 16  # without --pipeline-num-parallel; gathering is bound by memory long before


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """How a feed works; the values it delivers depend on `preprocess` alone."""

    preprocess: Preprocess
    cache: CacheChoice
    eight_bit_transfer: bool
    num_threads: int
    prefetch_depth: int
    shard: ProcessShard = WHOLE  # of this process in every batch


def feed_options(
    data: Data, info: DataInfo, seed: int, num_devices: int, augment: Augment | None = None
) -> FeedOptions:
    """Return the feed's options from the configuration; `augment` matters for training only."""
    eight_bit = data.eight_bit_transfer
    bytes_kept = info.image_dtype == "uint8"
    if eight_bit and not bytes_kept:
        raise ConfigError(
            f"eight_bit_transfer is on, but the images are {info.image_dtype}.",
            rule="Only images of whole numbers from 0 to 255 fit 8 bits.",
            remedy="Leave eight_bit_transfer out, or give the images as uint8.",
        )
    return FeedOptions(
        preprocess=preprocess_spec(data, augment or Augment(), info, seed),
        cache=decide_cache(info, data, num_devices),
        eight_bit_transfer=data.accelerator_side_preprocess and bytes_kept if eight_bit is None else eight_bit,
        num_threads=num_threads_of(data),
        prefetch_depth=data.prefetch_depth,
    )


def num_threads_of(data: Data) -> int:
    """Return how many threads prepare images."""
    return data.pipeline_num_parallel or min(_MAX_THREADS, num_processors())


class BlockReader:
    """Reads the images of a block with several threads. The result does not depend on how many."""

    def __init__(self, source: Source, options: FeedOptions, train: bool) -> None:
        self._source, self._options, self._train = source, options, train
        self._pool = ThreadPoolExecutor(options.num_threads, thread_name_prefix="read")
        self._closing = threading.Event()
        as_sent = options.eight_bit_transfer and options.preprocess.on_device
        self._in_place = source if as_sent and isinstance(source, DecodingSource) else None

    def read(self, index: np.ndarray, epoch: np.ndarray | int, num_rows: int = 0) -> dict[str, np.ndarray]:
        """Return fresh {images [*index.shape, H, W, C], labels}; `epoch` is one number or one for each sample.

        The images have at least `num_rows` rows: those beyond the index are not touched, and so take no memory yet.
        """
        flat = index.reshape(-1)
        epochs = np.broadcast_to(np.asarray(epoch, np.uint32), index.shape).reshape(-1)
        hwc = self._source.image_hwc
        shape = (max(len(index), num_rows), *index.shape[1:])
        images = np.empty((math.prod(shape), *hwc), np.uint8 if self._options.eight_bit_transfer else np.float32)
        size = max(1, _CHUNK_BYTES // int(np.prod(hwc)))
        if self._in_place is not None:  # decoding: few images at a time, so that the threads end together
            size = max(1, min(size, len(flat) // (4 * self._options.num_threads)))

        def fill(start: int) -> None:
            if self._closing.is_set():
                return
            chunk = slice(start, start + size)
            if self._in_place is not None:
                self._in_place.read_into(*self._shown(flat[chunk], epochs[chunk]), images[: len(flat)][chunk])
            else:
                images[: len(flat)][chunk] = self._chunk(flat[chunk], epochs[chunk])

        starts = range(0, len(flat), size)
        if len(starts) == 1 or self._options.num_threads == 1:
            for start in starts:
                fill(start)
        else:
            list(self._pool.map(fill, starts))  # list: an exception in a thread is raised here
        return {"images": images.reshape(*shape, *hwc), "labels": self._source.labels[index % len(self._source)]}

    def close(self) -> None:
        """End the threads, leaving a block that is being read unfinished."""
        self._closing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _chunk(self, index: np.ndarray, epoch: np.ndarray) -> Any:
        images = self._source.read(*self._shown(index, epoch))
        spec = self._options.preprocess
        return images if spec.on_device else preprocess(images, index, epoch, spec, self._train)

    def _shown(self, index: np.ndarray, epoch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return samples and epochs for the source: what comes again in an epoch (balance.py) is read as of another."""
        again, sample = np.divmod(index, len(self._source))
        return sample, epoch + (again.astype(np.uint32) << np.uint32(16))
