"""Preparing ahead: in order, bounded, honest about waiting, and never hanging."""

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from headrace.data.feeding.prefetch import FeedStats, Kept, Prefetcher


class Call:
    """A device call that ends when it has been looked at so many times."""

    def __init__(self, num_looks: int) -> None:
        self._left = num_looks
        self.ended, self.end = threading.Event(), 0.0

    def is_ready(self) -> bool:
        self._left -= 1
        if self._left == 0:
            self.end = time.perf_counter()
            self.ended.set()
        return self._left <= 0


def ahead_of(
    read: Callable[[int], Any], num_blocks: int, depth: int, send: Callable[[Any], Any] = lambda block: block
) -> Prefetcher[Any]:
    """Return a prefetcher that has begun."""
    ahead = Prefetcher(read, depth, FeedStats(), send, num_blocks=num_blocks)
    ahead.prefetch()
    return ahead


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait for another thread, as long as a busy machine takes to run it."""
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)


def test_blocks_come_in_order() -> None:
    ahead = ahead_of(lambda number: number * number, 20, 3)
    assert [ahead.next() for _ in range(20)] == [number * number for number in range(20)]
    assert ahead.stats.blocks == 20
    with pytest.raises(RuntimeError, match="no more blocks"):
        ahead.next()
    ahead.close()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_never_more_than_depth_blocks_ahead(depth: int) -> None:
    made = []
    ahead = ahead_of(made.append, 50, depth)
    for taken in range(10):
        time.sleep(0.005)
        assert len(made) <= max(taken, 1) + depth  # one more before the first is in use
        ahead.next()
    wait_until(lambda: len(made) == 10 + depth)
    time.sleep(0.02)
    assert len(made) == 10 + depth
    ahead.close()


def test_an_error_surfaces_in_its_place_and_again() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise OSError("the disk is gone")
        return number

    ahead = ahead_of(make, 10, 4)
    assert [ahead.next(), ahead.next()] == [0, 1]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            ahead.next()
    ahead.close()


def test_waiting_is_measured_and_the_first_block_is_apart() -> None:
    found = []
    for _ in range(5):  # a busy machine may wake this thread late, again and again
        with closing(ahead_of(lambda _: time.sleep(0.2), 5, 1)) as ahead:
            for _ in range(4):
                ahead.next()
        assert ahead.stats.read_seconds >= 0.79
        found.append((ahead.stats.first_wait_seconds >= 0.1, ahead.stats.wait_seconds >= 0.4))
        if all(found[-1]):
            return
    raise AssertionError(found)


def test_waiting_while_the_device_is_busy_is_not_the_devices_waiting() -> None:
    call = Call(20)

    def make(number: int) -> None:
        if number == 2:
            call.ended.wait(60)
            time.sleep(0.05)

    ahead = ahead_of(make, 3, 1)
    ahead.next()
    ahead.next(Call(1_000_000))
    assert ahead.stats.wait_seconds == 0
    ahead.next(call)
    assert 0 < ahead.stats.wait_seconds <= time.perf_counter() - call.end
    ahead.close()


def test_blocks_that_are_ready_cost_no_waiting() -> None:
    waited = []
    for _ in range(3):  # the best of three on a busy machine
        made = []
        ahead = ahead_of(made.append, 30, 2)
        for taken in range(28):
            while len(made) < taken + 2:
                time.sleep(0.001)
            time.sleep(0.001)
            ahead.next()
        waited.append(ahead.stats.wait_seconds)
        ahead.close()
    assert min(waited) < 0.028  # a thousandth of a second each would be much


def test_close_with_blocks_in_flight_ends_the_thread() -> None:
    started, release = threading.Event(), threading.Event()

    def make(_: int) -> Any:
        started.set()
        release.wait(5)

    ahead = ahead_of(make, 10, 4)
    started.wait(5)
    threading.Timer(0.05, release.set).start()
    ahead.close()
    assert not any(thread.name.startswith("feed") for thread in threading.enumerate())
    ahead.close()


def test_reading_goes_on_while_a_block_is_sent() -> None:
    read, may_send = [], threading.Event()
    ahead = ahead_of(read.append, 10, 2, lambda _: may_send.wait(5))
    wait_until(lambda: len(read) == 3)
    assert read == [0, 1, 2]
    may_send.set()
    assert ahead.next()
    ahead.close()


def test_kept_blocks_are_made_once_and_the_others_each_time() -> None:
    for kept, read, sent in (
        (Kept(), [0, 1, 2] * 2, [0, 1, 2] * 2),
        (Kept(in_host=2), [0, 1, 2, 2], [0, 1, 2] * 2),
        (Kept(on_device=True), [0, 1, 2], [0, 1, 2]),
    ):
        were_read, were_sent = [], []

        def make(number: int, were_read: list[int] = were_read) -> int:
            were_read.append(number)
            return number

        def send(number: int, were_sent: list[int] = were_sent) -> int:
            were_sent.append(number)
            return number

        ahead = Prefetcher(make, 1, FeedStats(), send, num_blocks=3, kept=kept)
        for _ in range(2):
            assert [ahead.take(number) for number in range(3)] == [0, 1, 2]
        ahead.close()
        assert (sorted(were_read), were_sent) == (sorted(read), sent)
