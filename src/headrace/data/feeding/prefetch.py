"""Prefetch blocks on threads, in order, at most `depth` ahead."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

Block = TypeVar("Block")


class ReadingGate:
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


class PendingResult(Protocol):
    """A result of a call that may still run, such as a jax.Array."""

    def is_ready(self) -> bool: ...


class GivenUp(Exception):
    """What was waited for is no longer wanted."""


def wait_unless(future: Future[Any], given_up: Callable[[], bool]) -> None:
    """Wait for a result; raise GivenUp as soon as it is no longer wanted."""
    while not wait([future], timeout=_LOOK_SECONDS).done:
        if given_up():
            raise GivenUp


def never_given_up() -> bool:
    return False


class Kept(NamedTuple):
    """The blocks that stay once they were made, where all can be taken again."""

    in_host: int = 0  # how many of the first ones stay in host memory
    on_device: bool = False  # all stay on the devices


class Prefetcher(Generic[Block]):
    """The blocks `send(read(number))` for 0, 1, ... in order, at most `depth` ahead of the one in use.

    With `num_blocks` that many can be taken again and again, each by its number; blocks that are `kept` are made once.
    Blocks are read and sent by two threads, unless they are not to be `apart`.
    Every block is made of fresh arrays: a device array may share memory with its NumPy array.
    """

    def __init__(
        self,
        read: Callable[[int], Any],
        depth: int,
        stats: FeedStats,
        send: Callable[[Any], Block],
        *,
        num_blocks: int | None = None,
        kept: Kept | None = None,
        apart: bool = True,
    ) -> None:
        self._read_block, self._send_block, self._depth = read, send, depth
        self._end, self._kept = num_blocks, kept or Kept()
        # One thread: blocks are read in order, each with all reading threads, and the first is ready as early as can
        # be. Another sends them: reading goes on meanwhile, also while a program is compiled that has the devices to
        # itself. Where reading is nothing, one does both.
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._senders = ThreadPoolExecutor(1, thread_name_prefix="feed-send") if apart else self._readers
        # By number: what is in host memory and on the devices, some of it still being read or sent.
        self._read: dict[int, Future[Any]] = {}
        self._sent: dict[int, Future[Block]] = {}
        self._number = 0  # of the block that `next` delivers
        self._failure: BaseException | None = None
        self.stats = stats  # the caller's: `read` may count into it before this constructor has returned
        self._gate: ReadingGate | None = None
        self._reporting, self._num_unread = threading.Lock(), 0

    def prefetch(self) -> None:
        """Begin to prepare the first blocks, and all that are kept in host memory, before one is taken."""
        # One more than later, because none is in use yet.
        self._prepare(0, self._depth + 1, self._kept.in_host)

    def next(self, in_flight: PendingResult | None = None, given_up: Callable[[], bool] = never_given_up) -> Block:
        """Return the next block, as `take` does."""
        block = self.take(self._number, in_flight, given_up)
        self._number += 1
        return block

    def take(
        self, number: int, in_flight: PendingResult | None = None, given_up: Callable[[], bool] = never_given_up
    ) -> Block:
        """Return this block. Errors of the prefetching threads are raised here.

        `in_flight` is a result of the call that now runs: waiting is counted only after that call has ended. Without it
        all waiting counts. Raises GivenUp once the block is no longer wanted.
        """
        if self._failure is not None:
            raise self._failure
        if self._end is not None and number >= self._end:
            raise RuntimeError(f"The feed has no more blocks than {self._end}.")
        self._prepare(number, number + self._depth)
        future = self._sent[number]
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
        if not self._kept.on_device:
            del self._sent[number]
        # Only after this one was taken: memory holds `depth` blocks and the one in use.
        self._prepare(number + 1, number + 1 + self._depth)
        return block

    def hold(self, gate: ReadingGate) -> None:
        """Hold a gate whenever a block is being read."""
        self._gate = gate
        self._report(0)

    def finish(self) -> None:
        """Let the threads end with what they have been asked for so far; nothing else is asked for."""
        self._readers.shutdown(wait=False)
        self._senders.shutdown(wait=False)

    def close(self, *, wait: bool = True) -> None:
        """Stop the threads after their current blocks; wait for these, or do not. What is kept on devices stays."""
        self._readers.shutdown(wait=wait, cancel_futures=True)  # first: the other waits for what is read
        self._senders.shutdown(wait=wait, cancel_futures=True)
        self._read.clear()
        if not self._kept.on_device:
            self._sent.clear()

    def _prepare(self, first: int, end: int, num_kept: int = 0) -> None:
        """Begin to read and send what is not there yet of these blocks, or of all from `first` on that are kept.

        So many of the first blocks that are kept in host memory are read as well.
        """
        limit = end if self._end is None else self._end
        last = limit if self._kept.on_device else min(end, limit)
        # Those that are kept in host memory need no reading: what comes after them is read while they are sent.
        streamed = max(first, self._kept.in_host)
        ahead = range(streamed, min(streamed + end - first, limit))
        for number in range(first, last):
            if number not in self._sent:
                self._start_reading(number)
                # Blocks that are not kept are dropped from host memory as soon as they are sent.
                read = self._read[number] if number < self._kept.in_host else self._read.pop(number)
                self._sent[number] = self._senders.submit(lambda read: self._send_block(read.result()), read)
        for number in (*range(num_kept), *ahead):
            if number not in self._sent:
                self._start_reading(number)

    def _start_reading(self, number: int) -> None:
        if number in self._read:
            return
        self._report(1)
        self._read[number] = self._readers.submit(self._timed, number)
        self._read[number].add_done_callback(lambda _: self._report(-1))

    def _report(self, num_unread: int) -> None:
        with self._reporting:  # so that the later of two threads reports last
            self._num_unread += num_unread
            if self._gate is not None:
                self._gate.hold(self._num_unread > 0)

    def _timed(self, number: int) -> Any:
        start = time.perf_counter()
        try:
            return self._read_block(number)
        finally:
            self.stats.read_seconds += time.perf_counter() - start


def _idle_seconds(future: Future[Any], in_flight: PendingResult | None, given_up: Callable[[], bool]) -> float:
    """Wait for a block and return how long the device was idle."""
    # Polled: there is no event for "a block or the devices are ready".
    while in_flight is not None and not in_flight.is_ready():
        if wait([future], timeout=_POLL_SECONDS).done:
            return 0.0
    start = time.perf_counter()
    wait_unless(future, given_up)
    return time.perf_counter() - start
