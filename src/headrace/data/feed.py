"""Feeds: what the device loop takes its blocks from, for training and for evaluation.

A set that is kept on the device is put there once, and a block is indices alone. Otherwise a block holds its images,
read by threads and put on the devices while earlier blocks are in use.
"""

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from headrace.data.ahead import Ahead, FeedStats
from headrace.data.balance import balanced_order
from headrace.data.blocks import BlockReader, FeedOptions, feed_options
from headrace.data.cache import decide_cache, make_resident
from headrace.data.order import StepShape, epoch_order, step_indices
from headrace.data.source import Source

__all__ = ["EvalFeed", "FeedOptions", "FeedStats", "RepeatedFeed", "TrainFeed", "decide_cache", "feed_options"]

Put = Callable[
    [Any, str], Any
]  # (tree of arrays, `replicated` | `steps` | `batches` | `rows`) -> tree of device arrays


class _PreparedFeed:
    """A feed whose blocks are prepared ahead one after the other."""

    _reader: BlockReader | None
    _ahead: Ahead

    def next(self, in_flight: Any = None) -> dict[str, Any]:
        """Return the next block, with images and labels unless they are resident.

        Give a result of the running call as `in_flight`, so that only the device's own waiting is counted.
        """
        return self._ahead.next(in_flight)

    def close(self) -> None:
        """End the threads and drop what was prepared."""
        if self._reader is not None:
            self._reader.close()
        self._ahead.close()


class TrainFeed(_PreparedFeed):
    """The blocks of a training run from any step on, `num_calls` of them: index [K, G, B] and epoch [K]."""

    def __init__(
        self,
        source: Source,
        shape: StepShape,
        steps_per_call: int,
        first_step: int,
        num_calls: int,
        options: FeedOptions,
        put: Put,
    ) -> None:
        assert shape.num_samples == len(source)
        self._shape, self._steps, self._first, self._put = shape, steps_per_call, first_step, put
        self._columns = options.share.columns(shape.num_replicas * shape.micro_batch_size)
        order = balanced_order(source.labels) if shape.balanced else epoch_order
        self._order = lru_cache(maxsize=4)(order)  # a block is seldom in more than two epochs
        self.resident = make_resident(source, put, options.share) if options.cache.where == "device" else None
        self._reader = BlockReader(source, options, train=True) if self.resident is None else None
        self.stats = FeedStats()  # what feeding cost so far
        self._ahead = Ahead(self._make, num_calls, options.prefetch_depth, self.stats)

    def _make(self, number: int) -> dict[str, Any]:
        index, epoch = step_indices(self._shape, self._first + number * self._steps, self._steps, self._order)
        index = index[:, :, self._columns]
        block = {"index": index, "epoch": epoch}
        if self._reader is not None:
            block |= self._reader.read(index, epoch[:, None, None])
        return _sent(block, lambda: self._put(block, "steps"), self.stats)


class EvalFeed:
    """The blocks of an evaluation: every sample exactly once, in order, padded with samples of mask 0.

    Iterating starts anew each time; all blocks have one shape, [batches_per_block, batch_size].
    """

    def __init__(
        self, source: Source, batch_size: int, max_batches_per_block: int, options: FeedOptions, put: Put
    ) -> None:
        self._put, self._depth, self._num_samples = put, options.prefetch_depth, len(source)
        self._columns = options.share.columns(batch_size)
        self.num_batches = -(-len(source) // batch_size)
        self.num_blocks = -(-self.num_batches // max_batches_per_block)
        self._shape = (-(-self.num_batches // self.num_blocks), batch_size)  # blocks as even as can be: least padding
        self.resident = make_resident(source, put, options.share) if options.cache.where == "device" else None
        self._reader = BlockReader(source, options, train=False) if self.resident is None else None
        self.stats = FeedStats()  # of the latest iteration

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.stats = FeedStats()
        ahead = Ahead(self._make, self.num_blocks, self._depth, self.stats)
        try:
            for _ in range(self.num_blocks):
                yield ahead.next()
        finally:
            ahead.close()

    def close(self) -> None:
        """End the threads."""
        if self._reader is not None:
            self._reader.close()

    def _make(self, number: int) -> dict[str, Any]:
        size = self._shape[0] * self._shape[1]
        place = np.arange(number * size, (number + 1) * size).reshape(self._shape)[:, self._columns]
        counted = place < self._num_samples
        index = np.where(counted, place, 0).astype(np.int32)
        block = {"index": index, "mask": counted.astype(np.float32)}
        if self._reader is not None:
            block |= self._reader.read(index, 0)
        return _sent(block, lambda: self._put(block, "batches"), self.stats)


class RepeatedFeed(_PreparedFeed):
    """Blocks of index [n, B], samples of a split in order, over and over: for measuring, where nothing is counted."""

    def __init__(self, source: Source, shape: tuple[int, int], num_blocks: int, options: FeedOptions, put: Put) -> None:
        self._shape, self._num_samples, self._put = shape, len(source), put
        self._columns = options.share.columns(shape[1])
        self._reader = BlockReader(source, options, train=False) if options.cache.where != "device" else None
        self.stats = FeedStats()
        self._ahead = Ahead(self._make, num_blocks, options.prefetch_depth, self.stats)

    def _make(self, number: int) -> dict[str, Any]:
        size = self._shape[0] * self._shape[1]
        place = np.arange(number * size, (number + 1) * size).reshape(self._shape)[:, self._columns]
        index = place % self._num_samples
        block: dict[str, Any] = {"index": index.astype(np.int32)}
        if self._reader is not None:
            block |= self._reader.read(block["index"], 0)
        return _sent(block, lambda: self._put(block, "batches"), self.stats)


def _sent(block: dict[str, np.ndarray], put: Callable[[], Any], stats: FeedStats) -> Any:
    """Send a block and wait until the devices have it: this thread has nothing else to do, and so the time is known."""
    begin = time.perf_counter()
    placed = jax.block_until_ready(put())
    stats.send_seconds += time.perf_counter() - begin
    stats.images += block["index"].size
    stats.bytes += sum(array.nbytes for array in block.values())
    return placed
