"""Prefetch blocks on a thread, in order, at most `depth` ahead."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

What = TypeVar("What")
Block = TypeVar("Block")


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


def never_given_up() -> bool:
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

    def next(self, in_flight: InFlight | None = None, given_up: Callable[[], bool] = never_given_up) -> Block:
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
