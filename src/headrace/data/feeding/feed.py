"""Feeds: blocks of samples for training and evaluation, read by threads and prefetched.

A set that is kept on the device is put there once, and a block holds only indices. Otherwise a block holds its images,
read by threads and put on the devices while earlier blocks are in use.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import jax
import numpy as np

from headrace.config.schema import Augment, Data
from headrace.core.errors import ConfigError
from headrace.core.process import num_processors, transferring
from headrace.core.rng import seed_word
from headrace.core.tree import PyTree
from headrace.data.augmentation.augment import Preprocess, preprocess, preprocess_spec
from headrace.data.dataset import DataInfo
from headrace.data.decoding.image_source import WorkingSource
from headrace.data.feeding.order import (
    WHOLE,
    CacheChoice,
    ProcessShard,
    Put,
    Resident,
    StepShape,
    balanced_order,
    decide_cache,
    epoch_order,
    repeated_order,
    step_indices,
)
from headrace.data.sets.samples import DecodingSource, Source

What = TypeVar("What")
Block = TypeVar("Block")

# Reading the images of a block with several threads


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
    """Reads the images of a block with several threads. The number of threads does not affect the result."""

    def __init__(self, source: Source, options: FeedOptions, train: bool, gate: "Gate | None" = None) -> None:
        self._source, self._options, self._train, self._gate = source, options, train, gate
        self._pool = ThreadPoolExecutor(options.num_threads, thread_name_prefix="read")
        self._closing = threading.Event()
        # Decoded straight into the block: bytes that nothing else has to be done to need no copy.
        as_sent = options.eight_bit_transfer and options.preprocess.on_device
        self._in_place = source if as_sent and isinstance(source, DecodingSource) else None

    def read(self, index: np.ndarray, epoch: np.ndarray | int, num_rows: int = 0) -> dict[str, np.ndarray]:
        """Return fresh {images [*index.shape, H, W, C], labels}; `epoch` is one number or one for each sample.

        The images have at least `num_rows` rows: rows beyond the index stay untouched, so that they take no memory.
        """
        flat = index.reshape(-1)
        epochs = np.broadcast_to(np.asarray(epoch, np.uint32), index.shape).reshape(-1)
        hwc = self._source.image_hwc
        shape = (max(len(index), num_rows), *index.shape[1:])
        images = _new_memory((math.prod(shape), *hwc), np.uint8 if self._options.eight_bit_transfer else np.float32)
        size = max(1, _CHUNK_BYTES // int(np.prod(hwc)))
        if self._in_place is not None:  # decoding is slow: few images at a time, so that the threads finish together
            size = max(1, min(size, len(flat) // (4 * self._options.num_threads)))

        def fill(start: int) -> None:
            # Between chunks, not between blocks: what is urgent waits for one chunk at most.
            if self._gate is not None:
                self._gate.wait()
            if self._closing.is_set():
                return
            chunk = slice(start, start + size)
            if self._in_place is not None:
                seen = seen_samples(flat[chunk], epochs[chunk], len(self._source))
                self._in_place.read_into(*seen, images[: len(flat)][chunk])
            else:
                images[: len(flat)][chunk] = self._chunk(flat[chunk], epochs[chunk])

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

    def _chunk(self, index: np.ndarray, epoch: np.ndarray) -> PyTree:
        images = self._source.read(*seen_samples(index, epoch, len(self._source)))
        spec = self._options.preprocess
        return images if spec.on_device else preprocess(images, index, epoch, spec, self._train)


def _new_memory(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    """Return an array that nobody has written to, in memory that one CPU device takes as it is.

    New for every block: a buffer used again would change a block in flight. From a multiple of 64 bytes on, because
    XLA copies others, unfilled rows as well: 500 MB took 0.9 s on two cores.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + 63, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + num_bytes].view(dtype).reshape(shape)


def seen_samples(index: np.ndarray, epoch: np.ndarray, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return samples and epochs for the source; a repeated sample gets another epoch, and so a different crop."""
    again, sample = np.divmod(index, num_samples)
    # Above the 16 bits of real epochs, so that no repetition shares its crop with another epoch of the sample.
    return sample, epoch + (again.astype(np.uint32) << np.uint32(16))


class Gate:
    """Holds back reading that can wait while something more urgent is being prepared."""

    def __init__(self) -> None:
        self._lock, self._open = threading.Lock(), threading.Event()
        self._held, self._urgent = False, False
        self._open.set()

    def hold(self, held: bool) -> None:
        """Say that something more urgent begins or ends."""
        with self._lock:
            self._held = held
            self._update()

    def hurry(self, urgent: bool) -> None:
        """Let everything pass whatever is held, or no longer."""
        with self._lock:
            self._urgent = urgent
            self._update()

    def wait(self) -> None:
        """Wait until the gate is open."""
        self._open.wait()

    def _update(self) -> None:
        (self._open.clear if self._held and not self._urgent else self._open.set)()


# Prefetching blocks on a thread, in order, at most `depth` ahead


GROWTH = 8  # of blocks and calls, each at most so many times the last: a first measurement may be far off
_POLL_SECONDS = 0.001  # interval at which to check whether the device is still busy
_LOOK_SECONDS = 0.1  # between two looks for a reason to give up waiting


@dataclass
class FeedStats:
    """The cost of feeding so far; `wait_seconds` is without the first block, which cannot be prefetched."""

    blocks: int = 0  # delivered
    images: int = 0  # samples prepared, some of them not delivered yet
    bytes: int = 0  # of prepared blocks, all sent to the devices
    read_seconds: float = 0.0  # to prepare `images` in host memory
    send_seconds: float = 0.0  # until the devices had them, while others were read
    wait_seconds: float = 0.0  # time the device was idle waiting for a block
    first_wait_seconds: float = 0.0


class InFlight(Protocol):
    """A result of a call that may still run, such as a jax.Array."""

    def is_ready(self) -> bool: ...


class GivenUp(Exception):
    """What was waited for is no longer wanted."""


def wait_unless(future: Future[Any], given_up: Callable[[], bool]) -> None:
    """Wait for a result; raise GivenUp as soon as it is no longer wanted."""
    while not wait([future], timeout=_LOOK_SECONDS).done:
        if given_up():
            raise GivenUp


def _never_given_up() -> bool:
    return False


class Prefetcher(Generic[What, Block]):
    """The blocks `send(read(what))` for each `what` in turn, prefetched.

    Every block is made of fresh arrays: a device array may share memory with its NumPy array.
    """

    def __init__(
        self,
        read: Callable[[What], Any],
        whats: Iterable[What],
        depth: int,
        stats: FeedStats,
        send: Callable[[Any], Block] = lambda read: read,
    ) -> None:
        self._read, self._send, self._whats = read, send, iter(whats)
        # One thread: blocks are read in order, each with all reading threads, and the first is ready as early as can
        # be. Another sends them: reading goes on meanwhile, also while a program is compiled that has the devices to
        # itself.
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._senders = ThreadPoolExecutor(1, thread_name_prefix="feed-send")
        self._pending: deque[Future[Block]] = deque()
        self._failure: BaseException | None = None
        self.stats = stats  # the caller's: `read` may count into it before this constructor has returned
        self._gate: Gate | None = None
        self._reporting = threading.Lock()
        self._depth, self._num_read, self._num_unread = depth, 0, 0
        # One more than later, because none is in use yet: programs are compiled meanwhile, and there is time for it.
        self._submit(depth + 1)

    def next(self, in_flight: InFlight | None = None, given_up: Callable[[], bool] = _never_given_up) -> Block:
        """Return the next block. Errors of the prefetching thread are raised here.

        `in_flight` is a result of the call that now runs: waiting is counted only after that call has ended. Without it
        all waiting counts. Raises GivenUp once the block is no longer wanted.
        """
        if self._failure is not None:
            raise self._failure
        # What is waited for is submitted again only after it was taken: memory holds `depth` blocks and the one in
        # use.
        future = self._pending.popleft()
        waited = _idle_seconds(future, in_flight, given_up)
        try:
            block = future.result()
        except BaseException as error:
            self._failure = error
            self.close()
            raise
        if self.stats.blocks == 0:
            self.stats.first_wait_seconds = waited
        else:
            self.stats.wait_seconds += waited
        self.stats.blocks += 1
        self._submit(self._depth - len(self._pending))
        return block

    def hold(self, gate: Gate) -> None:
        """Hold a gate whenever a block is being read."""
        self._gate = gate
        self._report(0)

    def close(self, *, wait: bool = True) -> None:
        """Drop the prefetched blocks and stop the threads after their current blocks; wait for these, or do not."""
        self._readers.shutdown(wait=wait, cancel_futures=True)  # first: the other waits for what is read
        self._senders.shutdown(wait=wait, cancel_futures=True)
        self._pending.clear()

    def _submit(self, num_blocks: int) -> None:
        for _ in range(num_blocks):
            self._report(1)
            read = self._readers.submit(self._timed)
            read.add_done_callback(lambda _: self._report(-1))
            self._pending.append(self._senders.submit(lambda read: self._send(read.result()), read))

    def _report(self, num_unread: int) -> None:
        with self._reporting:  # so that the later of two threads reports last
            self._num_unread += num_unread
            if self._gate is not None:
                self._gate.hold(self._num_unread > 0)

    def _timed(self) -> Any:
        # What a block holds is asked for when it is begun, not when it is submitted: more is known by then.
        for what in islice(self._whats, 1):
            start = time.perf_counter()
            try:
                return self._read(what)
            finally:
                self._num_read += 1
                self.stats.read_seconds += time.perf_counter() - start
        raise RuntimeError(f"The feed has no more blocks than {self._num_read}.")


def _idle_seconds(future: Future[Any], in_flight: InFlight | None, given_up: Callable[[], bool]) -> float:
    """Wait for a block and return how long the device was idle."""
    # Polled: there is no event for "a block or the devices are ready".
    while in_flight is not None and not in_flight.is_ready():
        if wait([future], timeout=_POLL_SECONDS).done:
            return 0.0
    start = time.perf_counter()
    wait_unless(future, given_up)
    return time.perf_counter() - start


class SplitFeed:
    """A feed of one split, which is resident on the devices or else read in blocks."""

    _reader: BlockReader | None
    _resident: Resident | None = None

    @property
    def resident(self) -> PyTree:
        """The set kept on the devices, or None; waits until it is there."""
        return self._resident.arrays if self._resident is not None else None

    def wait_for_resident(self, given_up: Callable[[], bool]) -> None:
        """Wait until a set kept on the devices is there; raise GivenUp as soon as it is no longer wanted."""
        if self._resident is not None:
            wait_unless(self._resident.made, given_up)

    def close(self, *, wait: bool = True) -> None:
        """Stop the threads and drop prefetched blocks; wait for what is being read, or do not."""
        if self._reader is not None:
            self._reader.close(wait=wait)
        if self._resident is not None:
            self._resident.close(wait=wait)


def places(shape: tuple[int, int], number: int, columns: slice) -> np.ndarray:
    """Return the positions in a split, from 0 on and beyond its end, of these columns of a block of batches."""
    size = shape[0] * shape[1]
    return np.arange(number * size, (number + 1) * size).reshape(shape)[:, columns]


class _PreparedFeed(SplitFeed):
    """A feed whose blocks are prefetched in order."""

    _prefetcher: Prefetcher[Any, Any]

    def next(
        self, in_flight: InFlight | None = None, given_up: Callable[[], bool] = _never_given_up
    ) -> dict[str, jax.Array]:
        """Return the next block, with images and labels unless they are resident.

        Give a result of the running call as `in_flight`, so that waiting is counted only while the device is idle.
        """
        return self._prefetcher.next(in_flight, given_up)

    def close(self, *, wait: bool = True) -> None:
        """Stop the threads and drop prefetched blocks; wait for what is being read, or do not."""
        super().close(wait=wait)
        self._prefetcher.close(wait=wait)


def _never(_step: int) -> int:
    return 2**62


@dataclass(frozen=True, kw_only=True)
class CallSpans:
    """How a run's steps are divided into blocks of at most `max_steps`, and these into calls."""

    first_step: int
    last_step: int
    max_steps: int
    limit: int = 0  # of the first block, and of calls until changed; 0: none
    block_seconds: float = 0.0  # about the longest that reading a block may take; 0: no limit
    next_end: Callable[[int], int] = _never  # the first step after `step` at which a call must end
    block_end: Callable[[int], int] = _never  # and a block
    rates: Callable[[int, int], np.ndarray] | None = None  # (first step, how many) -> the learning rate of each


class TrainFeed(_PreparedFeed):
    """The blocks of a training run from any step on: index [K, G, B]; epoch, seed and rate [K]; a row is a step.

    All blocks have one shape, so that one program runs them; rows without a step are not filled. A call runs some rows
    of a block. What ends a call does not end its block: on an H200 a block of one step sent 0.7 GB, as one of 18.
    """

    def __init__(self, source: Source, shape: StepShape, calls: CallSpans, options: FeedOptions, put: Put) -> None:
        assert shape.num_samples == len(source)
        self._shape, self._calls, self._put = shape, calls, put
        self._limit = calls.limit or calls.max_steps
        self._block: dict[str, jax.Array] = {}
        self._steps = range(calls.first_step, calls.first_step)  # of that block
        self._step = calls.first_step  # the next one to run
        self._row_seconds = 0.0  # to read a step of the block made last
        self.rows = range(0)  # of the block, for the call that `next` was asked for last
        self._columns = options.shard.columns(shape.num_replicas * shape.micro_batch_size)
        order = balanced_order(source.labels) if shape.balanced else epoch_order
        if shape.repeats > 1:
            order = repeated_order(shape.repeats, shape.global_batch_size)
        # Sorting a million samples takes longer than a short block.
        self._order = lru_cache(maxsize=4)(order)  # a block rarely spans more than two epochs
        self._boxes = source.boxes if isinstance(source, WorkingSource) else None
        if isinstance(source, WorkingSource) and options.cache.where != "device":
            source.keep()
        self._resident = Resident(source, put, options.shard) if options.cache.where == "device" else None
        self._reader = BlockReader(source, options, train=True) if self._resident is None else None
        # Before the prefetcher, whose thread counts into it at once.
        self.stats = FeedStats()  # what feeding cost so far
        self._image = source.image_hwc, np.uint8 if options.eight_bit_transfer else np.float32
        self._prefetcher = Prefetcher(self._read, self._spans(), options.prefetch_depth, self.stats, self._send)

    def next(
        self, in_flight: InFlight | None = None, given_up: Callable[[], bool] = _never_given_up
    ) -> dict[str, jax.Array]:
        """Return the block of the next call, with images and labels unless they are resident; `rows` are its rows."""
        if self._step == self._steps.stop:
            self._block, self._steps = self._prefetcher.next(in_flight, given_up)
        end = min(self._step + max(1, self._limit), self._calls.next_end(self._step), self._steps.stop)
        self.rows = range(self._step - self._steps.start, end - self._steps.start)
        self._step = end
        return self._block

    def described(self) -> tuple[PyTree, PyTree]:
        """Return the resident set and a block of all processes without values: shapes and devices, to compile with."""
        shape, steps = self._shape, self._calls.max_steps
        rows = (steps, shape.gradient_accumulation_count, shape.num_replicas * shape.micro_batch_size)
        number = jax.ShapeDtypeStruct((steps,), np.uint32)
        block = {"index": jax.ShapeDtypeStruct(rows, np.int32), "epoch": number, "seed": number}
        if self._calls.rates is not None:
            block["rate"] = jax.ShapeDtypeStruct((steps,), np.float32)
        if self._reader is not None:
            hwc, dtype = self._image
            block["images"] = jax.ShapeDtypeStruct((*rows, *hwc), dtype)
            block["labels"] = jax.ShapeDtypeStruct(rows, np.int32)
        if self._boxes is not None:
            block["box"] = jax.ShapeDtypeStruct((*rows, 4), np.float32)
        return self._resident and self._resident.described(), self._put(block, "steps")

    def hold(self, gate: Gate) -> None:
        """Hold a gate whenever images of training are being prepared."""
        self._prefetcher.hold(gate)

    def limit(self, num_steps: int) -> None:
        """Limit the number of steps of the calls to come."""
        self._limit = num_steps

    def _spans(self) -> Iterator[range]:
        calls = self._calls
        # A first block of one step is soon there, where reading is slow or the program was found in the cache. Indices
        # alone take no time to read.
        step, most = calls.first_step, calls.limit if calls.limit and self._reader else calls.max_steps
        while step < calls.last_step:
            end = min(step + most, calls.block_end(step), calls.last_step)
            yield range(step, end)
            # Here the block has been read. Processes of a job do not look at the clock: they need equal blocks, and
            # cannot agree on lengths while they compile.
            step, most = end, min(GROWTH * most, calls.max_steps)
            if calls.block_seconds and self._row_seconds:
                most = max(1, min(most, int(calls.block_seconds / self._row_seconds)))

    def _read(self, steps: range) -> tuple[dict[str, np.ndarray], range]:
        index, epoch = step_indices(self._shape, steps.start, len(steps), self._order)
        # Only this process's replicas: every process knows the whole order and reads its part of it.
        index = index[:, :, self._columns]
        block = {"index": index, "epoch": epoch, "seed": np.full_like(epoch, seed_word(self._shape.seed))}
        if self._calls.rates is not None:
            block["rate"] = self._calls.rates(steps.start, len(steps))
        if self._reader is not None:
            begin = time.perf_counter()
            block |= self._reader.read(index, epoch[:, None, None], self._calls.max_steps)
            self._row_seconds = (time.perf_counter() - begin) / len(steps)
        if self._boxes is not None:
            _ = self.resident  # decoded first: an image's size decides its crop
            epochs = np.broadcast_to(epoch[:, None, None], index.shape).reshape(-1)
            boxes = self._boxes(*seen_samples(index.reshape(-1), epochs, self._shape.num_samples))
            block["box"] = boxes.reshape(*index.shape, 4)
        # One shape for all blocks, so that one compiled program takes calls of any length.
        return {key: _with_rows(rows, self._calls.max_steps) for key, rows in block.items()}, steps

    def _send(self, read: tuple[dict[str, np.ndarray], range]) -> tuple[dict[str, jax.Array], range]:
        block, steps = read
        num_images = block["index"][0].size * len(steps)
        return sent(block, lambda: self._put(block, "steps"), self.stats, num_images), steps


class RepeatedFeed(_PreparedFeed):
    """Blocks of index [n, B], samples of a split in order, repeated: for benchmarks."""

    def __init__(self, source: Source, shape: tuple[int, int], num_blocks: int, options: FeedOptions, put: Put) -> None:
        self._shape, self._num_samples, self._put = shape, len(source), put
        self._columns = options.shard.columns(shape[1])
        self._reader = BlockReader(source, options, train=False) if options.cache.where != "device" else None
        self.stats = FeedStats()
        self._prefetcher = Prefetcher(self._read, range(num_blocks), options.prefetch_depth, self.stats, self._send)

    def _read(self, number: int) -> dict[str, np.ndarray]:
        index = places(self._shape, number, self._columns) % self._num_samples
        block: dict[str, Any] = {"index": index.astype(np.int32)}
        if self._reader is not None:
            block |= self._reader.read(block["index"], 0)
        return block

    def _send(self, block: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return sent(block, lambda: self._put(block, "batches"), self.stats)


def _with_rows(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Pad an array to this many rows."""
    if len(rows) == num_rows:
        return rows
    return np.concatenate([rows, np.zeros((num_rows - len(rows), *rows.shape[1:]), rows.dtype)])


def sent(
    block: dict[str, np.ndarray], put: Callable[[], PyTree], stats: FeedStats, images: int | None = None
) -> PyTree:
    """Send a block and wait until the devices have it: waiting costs this thread nothing and measures sending."""
    with transferring():
        begin = time.perf_counter()
        # Here, in a thread of the feed: otherwise the call would start with bytes that are still on their way, and
        # waiting for them would count as computing.
        placed = jax.block_until_ready(put())
        stats.send_seconds += time.perf_counter() - begin
    stats.images += block["index"].size if images is None else images
    stats.bytes += sum(array.nbytes for array in block.values())
    return placed
