"""Prepare blocks ahead of their use: in order, at most `depth` of them, on a thread of its own."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

_GLANCE = 0.001  # seconds between two looks at whether the device is still busy


@dataclass
class FeedStats:
    """What feeding cost so far. The first block is apart: nothing can be prepared ahead of it."""

    blocks: int = 0  # handed out
    images: int = 0  # samples prepared, some of them not handed out yet
    bytes: int = 0  # of prepared blocks, all sent to the devices
    prepare_seconds: float = 0.0  # it took to prepare `images`, sending included
    send_seconds: float = 0.0  # of these, until the devices had the bytes
    wait_seconds: float = 0.0  # time the device stood idle for want of a block
    first_wait_seconds: float = 0.0


class Ahead:
    """The blocks `make(0)` ... `make(num_blocks - 1)`, each made before it is asked for.

    Every block is made of fresh arrays: a device array may share memory with the NumPy array it was put from.
    """

    def __init__(self, make: Callable[[int], Any], num_blocks: int, depth: int, stats: FeedStats) -> None:
        self._make, self._num_blocks = make, num_blocks
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._pending: deque[Future[Any]] = deque()
        self._next_block = 0
        self._failure: BaseException | None = None
        self.stats = stats  # the caller's: `make` may count into it before this constructor has returned
        for _ in range(depth):
            self._submit()

    def next(self, in_flight: Any = None) -> Any:
        """Return the next block. What went wrong while it was made is raised here.

        `in_flight` is a result of the call that now runs (anything with `is_ready()`): waiting counts as the device's
        only from when that call has ended. Without it all waiting counts.
        """
        if self._failure is not None:
            raise self._failure
        if not self._pending:
            raise RuntimeError(f"The feed has no more blocks than {self._num_blocks}.")
        future = self._pending.popleft()
        waited = _idle_seconds(future, in_flight)
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
        self._submit()
        return block

    def close(self) -> None:
        """Drop the blocks not asked for and end the thread, after the block it is at."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def _submit(self) -> None:
        if self._next_block < self._num_blocks:
            self._pending.append(self._worker.submit(self._timed, self._next_block))
            self._next_block += 1

    def _timed(self, number: int) -> Any:
        start = time.perf_counter()
        try:
            return self._make(number)
        finally:
            self.stats.prepare_seconds += time.perf_counter() - start


def _idle_seconds(future: Future[Any], in_flight: Any) -> float:
    """Wait for a block and return for how long the device had nothing to do."""
    while in_flight is not None and not in_flight.is_ready():
        if wait([future], timeout=_GLANCE).done:
            return 0.0
    start = time.perf_counter()
    wait([future])
    return time.perf_counter() - start
