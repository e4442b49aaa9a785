"""Feeds: blocks of samples for training and evaluation, read by threads and prefetched.

A set that is kept on the device is put there once, and a block holds only indices. Otherwise a block holds its images,
read by threads and put on the devices while earlier blocks are in use.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from headrace.core.rng import seed_word
from headrace.core.session import session
from headrace.core.tree import PyTree
from headrace.data.feeding.balance import balanced_order, repeated_order
from headrace.data.feeding.block_reader import BlockReader, FeedOptions, seen_samples
from headrace.data.feeding.cache import Put, Resident
from headrace.data.feeding.order import StepShape, epoch_order, step_indices
from headrace.data.feeding.prefetch import GROWTH, FeedStats, PendingResult, Prefetcher, ReadingGate, never_given_up
from headrace.data.sets.source import Source, kept


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
            self._resident.wait(given_up)

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

    _prefetcher: Prefetcher[Any]

    def next(
        self, in_flight: PendingResult | None = None, given_up: Callable[[], bool] = never_given_up
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
    rates: Callable[[np.ndarray], np.ndarray] | None = None  # the learning rate of each of these steps


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
        self._boxes = source.boxes
        if source.boxes is not None and options.cache.where != "device":
            source = kept(source)
        described = options.only_described
        on_device = options.cache.where == "device"
        self._resident = Resident(source, put, options.shard, only_described=described) if on_device else None
        self._reader = BlockReader(source, options, train=True) if self._resident is None else None
        # Before the prefetcher, whose thread counts into it at once.
        self.stats = FeedStats()  # what feeding cost so far
        self._label_shape, self._label_dtype = source.label_shape, source.labels.dtype
        self._image = source.image_hwc, np.uint8 if options.eight_bit_transfer else np.float32
        self._to_read = self._spans()
        # Indices alone take no time to read.
        apart = self._reader is not None
        self._prefetcher = Prefetcher(self._read, options.prefetch_depth, self.stats, self._send, apart=apart)
        if not described:
            self._prefetcher.prefetch()

    def next(
        self, in_flight: PendingResult | None = None, given_up: Callable[[], bool] = never_given_up
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
            block["labels"] = jax.ShapeDtypeStruct((*rows, *self._label_shape), self._label_dtype)
        if self._boxes is not None:
            block["box"] = jax.ShapeDtypeStruct((*rows, 4), np.float32)
        return self._resident and self._resident.described(), self._put(block, "steps")

    def hold(self, gate: ReadingGate) -> None:
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

    def _read(self, number: int) -> tuple[dict[str, np.ndarray], range]:
        # What a block holds is asked for when it is begun, not when it is submitted: more is known by then.
        steps = next(self._to_read, None)
        if steps is None:
            raise RuntimeError(f"The feed has no more blocks than {number}.")
        index, epoch = step_indices(self._shape, steps.start, len(steps), self._order)
        # Only this process's replicas: every process knows the whole order and reads its part of it.
        index = index[:, :, self._columns]
        block = {"index": index, "epoch": epoch, "seed": np.full_like(epoch, seed_word(self._shape.seed))}
        if self._calls.rates is not None:
            block["rate"] = self._calls.rates(np.arange(steps.start, steps.stop))
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
        self._prefetcher = Prefetcher(self._read, options.prefetch_depth, self.stats, self._send, num_blocks=num_blocks)
        self._prefetcher.prefetch()

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
    with session().devices.transferring():
        begin = time.perf_counter()
        # Here, in a thread of the feed: otherwise the call would start with bytes that are still on their way, and
        # waiting for them would count as computing.
        placed = jax.block_until_ready(put())
        stats.send_seconds += time.perf_counter() - begin
    stats.images += block["index"].size if images is None else images
    stats.bytes += sum(array.nbytes for array in block.values())
    return placed
