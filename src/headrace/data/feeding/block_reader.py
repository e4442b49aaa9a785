"""Read the images of a block with several threads."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from headrace.config.schema import Augment, Data
from headrace.core.errors import ConfigError
from headrace.core.process import num_processors
from headrace.data.augmentation.preprocess import Preprocess, preprocess, preprocess_spec
from headrace.data.dataset import DataInfo
from headrace.data.feeding.cache import CacheChoice, decide_cache
from headrace.data.feeding.prefetch import ReadingGate
from headrace.data.feeding.shard import WHOLE, ProcessShard
from headrace.data.sets.source import Source

# Read by a thread at a time: large enough to be worth the switch, small enough to balance the threads.
_CHUNK_BYTES = 1 << 20
_MAX_THREADS = 16  # without --pipeline-num-parallel; gathering is limited by memory bandwidth long before


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """The options of a feed; only `preprocess` affects the values that it delivers."""

    preprocess: Preprocess
    cache: CacheChoice
    eight_bit_transfer: bool
    num_threads: int
    prefetch_depth: int
    shard: ProcessShard = WHOLE  # the columns of every batch that this process reads
    only_described: bool = False  # nothing is read nor sent: programs are compiled for devices that are not here


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


@runtime_checkable
class SlowlyFetched(Protocol):
    """Samples that may come from far away, and faster where it is known which ones are next."""

    def ahead(self, samples: np.ndarray) -> None: ...


class BlockReader:
    """Reads the images of a block with several threads. The number of threads does not affect the result."""

    def __init__(self, source: Source, options: FeedOptions, train: bool, gate: "ReadingGate | None" = None) -> None:
        self._source, self._options, self._train, self._gate = source, options, train, gate
        self._pool = ThreadPoolExecutor(options.num_threads, thread_name_prefix="read")
        self._closing = threading.Event()
        self._dtype = np.dtype(np.uint8 if options.eight_bit_transfer else np.float32)
        # Straight into the block: what nothing else has to be done to needs no copy.
        self._in_place = options.preprocess.on_device and source.dtype == self._dtype

    def read(self, index: np.ndarray, epoch: np.ndarray | int, num_rows: int = 0) -> dict[str, np.ndarray]:
        """Return fresh {images [*index.shape, H, W, C], labels}; `epoch` is one number or one for each sample.

        The images have at least `num_rows` rows: rows beyond the index stay untouched, so that they take no memory.
        """
        flat = index.reshape(-1)
        if isinstance(self._source.samples, SlowlyFetched):
            self._source.samples.ahead(flat % len(self._source))
        epochs = np.broadcast_to(np.asarray(epoch, np.uint32), index.shape).reshape(-1)
        hwc = self._source.image_hwc
        shape = (max(len(index), num_rows), *index.shape[1:])
        images = _new_memory((math.prod(shape), *hwc), self._dtype)
        size = max(1, _CHUNK_BYTES // int(np.prod(hwc)))
        if self._source.begin is not None:
            self._source.begin(*seen_samples(flat, epochs, len(self._source)))
        if self._source.slow:  # few images at a time, so that the threads finish together
            size = max(1, min(size, len(flat) // (4 * self._options.num_threads)))

        def fill(start: int) -> None:
            # Between chunks, not between blocks: what is urgent waits for one chunk at most.
            if self._gate is not None:
                self._gate.wait()
            if self._closing.is_set():
                return
            chunk = slice(start, start + size)
            samples, when = seen_samples(flat[chunk], epochs[chunk], len(self._source))
            out = images[: len(flat)][chunk]
            if self._in_place:
                self._source.read_into(samples, when, out)
                return
            read, spec = self._source.read(samples, when), self._options.preprocess
            out[...] = read if spec.on_device else preprocess(read, flat[chunk], epochs[chunk], spec, self._train)

        starts = range(0, len(flat), size)
        if len(starts) == 1 or self._options.num_threads == 1:
            for start in starts:
                fill(start)
        else:
            # Chunks are written to their places, so that their order does not matter.
            list(self._pool.map(fill, starts))  # list: an exception in a thread is raised here
        return {"images": images.reshape(*shape, *hwc), "labels": self._source.labels[index % len(self._source)]}

    def close(self, *, wait: bool = True) -> None:
        """Stop the threads without finishing the current block; wait for what they are in the middle of, or do not."""
        self._closing.set()
        self._pool.shutdown(wait=wait, cancel_futures=True)


def _new_memory(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array that nobody has written to, in memory that one CPU device takes as it is.

    New for every block: a buffer used again would change a block in flight. From a multiple of 64 bytes on, because
    XLA copies others, unfilled rows as well: 500 MB took 0.9 s on two cores.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + 63, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + num_bytes].view(dtype).reshape(shape)


def seen_samples(index: np.ndarray, epoch: np.ndarray, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return samples and epochs for the source; a repeated sample gets another epoch, and so a different crop."""
    again, sample = np.divmod(index, num_samples)
    # Above the 16 bits of real epochs, so that no repetition shares its crop with another epoch of the sample.
    return sample, epoch + (again.astype(np.uint32) << np.uint32(16))
