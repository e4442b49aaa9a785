"""Infeed: any dataset as a stream of elements of one shape, read ahead by a thread."""

import contextlib
import threading
import time

import numpy as np
import pytest

from headrace import HeadraceError, Infeed
from headrace.data.sets.source import memory_source


def numbers(count):
    return [np.array([i], np.float32) for i in range(count)]


def taken(infeed, count):
    return [float(np.ravel(element)[0]) for element in infeed.take(count)]


@pytest.mark.parametrize("dataset", [numbers(3), lambda: iter(numbers(3)), iter(numbers(3))], ids=["list", "f", "iter"])
def test_kinds_of_dataset(dataset):
    infeed = Infeed(dataset)
    assert taken(infeed, 2) == [0, 1]
    assert taken(infeed, 5) == [2]
    assert taken(infeed, 5) == []


@pytest.mark.parametrize("dataset", [numbers(3), lambda: iter(numbers(3))], ids=["list", "function"])
def test_repeat_starts_again(dataset):
    assert taken(Infeed(dataset, repeat=True), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_an_empty_dataset_is_not_repeated_for_ever():
    with pytest.raises(HeadraceError, match="empty"):
        _ = Infeed([], repeat=True).structure


def test_what_was_put_back_comes_next():
    infeed = Infeed(numbers(4))
    first, second = infeed.take(2)
    infeed.put_back([first, second])
    assert taken(infeed, 4) == [0, 1, 2, 3]


def test_looking_at_the_structure_takes_nothing():
    infeed = Infeed([{"x": np.zeros((2, 3)), "y": 1}, {"x": np.ones((2, 3)), "y": 2}])
    assert (
        str(infeed.structure) == "x: float32[2, 3], y: int32[]"
    )  # 64-bit numbers become 32-bit ones, as on the device
    assert [element["y"] for element in infeed.take(2)] == [1, 2]


def test_a_thread_reads_ahead_and_no_further():
    read = []

    def dataset():
        for i in range(100):
            read.append(i)
            yield np.float32(i)

    infeed = Infeed(dataset, prefetch_depth=3)
    assert not read  # nothing starts before it is needed
    assert taken(infeed, 1) == [0]
    deadline = time.monotonic() + 10
    while len(read) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert read == [0, 1, 2, 3, 4]  # one taken, three in the queue, one in the thread's hand
    infeed.close()


def test_threads_end_with_their_infeed():
    before = set(threading.enumerate())
    with Infeed(numbers(50)) as infeed:
        infeed.take(1)
    another = Infeed(numbers(50))
    another.take(1)
    mine = set(threading.enumerate()) - before
    assert mine
    del another
    for thread in mine:
        thread.join(30)
        assert not thread.is_alive()


def waits_at_the_end(infeed):
    """Take the first element, then a second one in another thread; return that thread."""
    assert taken(infeed, 1) == [0]
    waiting = threading.Thread(target=lambda: suppressed(infeed), daemon=True)
    waiting.start()
    return waiting


def suppressed(infeed):
    with contextlib.suppress(SystemExit):
        assert infeed.take(1) == []


def test_closing_wakes_up_who_waits_for_an_element():
    gate = threading.Event()

    def dataset():
        yield np.zeros(1)
        gate.wait(60)

    infeed = Infeed(dataset)
    waiting = waits_at_the_end(infeed)
    time.sleep(0.1)
    assert waiting.is_alive()
    infeed.close()
    waiting.join(10)
    gate.set()
    assert not waiting.is_alive()
    assert infeed.take(1) == []


def test_a_dataset_that_exits_leaves_nobody_waiting():
    def dataset():
        yield np.zeros(1)
        raise SystemExit(3)

    infeed = Infeed(dataset)
    waiting = waits_at_the_end(infeed)
    waiting.join(10)
    assert not waiting.is_alive()
    with pytest.raises(SystemExit):
        infeed.take(1)


def test_batches_of_a_source():
    images = np.arange(10 * 4, dtype=np.uint8).reshape(10, 2, 2, 1)
    source = memory_source(images, np.arange(10, dtype=np.int32))
    in_order = Infeed(source, batch_size=4).take(10)
    assert [list(element["labels"]) for element in in_order] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert np.array_equal(in_order[1]["images"], images[4:8])
    shuffled = Infeed(source, batch_size=5, seed=3, repeat=True).take(4)
    first, second = (np.concatenate([e["labels"] for e in shuffled[i : i + 2]]) for i in (0, 2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert list(first) != list(second)
    assert np.array_equal(shuffled[0]["images"], images[shuffled[0]["labels"]])


def test_an_error_of_the_dataset_reaches_the_one_who_takes():
    def dataset():
        yield np.float32(0)
        raise OSError("the disk is gone")

    infeed = Infeed(dataset)
    assert taken(infeed, 1) == [0]
    with pytest.raises(OSError, match="the disk is gone"):
        infeed.take(1)
    with pytest.raises(OSError, match="the disk is gone"):
        infeed.take_all(1, "a loop")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Infeed(numbers(3), prefetch_depth=0), "prefetch_depth is 0"),
        (lambda: Infeed(numbers(3), prefetch_depth=256), "1 to 255"),
        (lambda: Infeed(numbers(3), prefetch_depth=2.0), "whole number"),  # pyright: ignore[reportArgumentType]
        (lambda: Infeed(numbers(3), block_size=0), "block_size is 0"),
        (lambda: Infeed(iter(numbers(3)), repeat=True), "cannot be repeated"),
        (lambda: Infeed(5), "of type int"),  # pyright: ignore[reportArgumentType]
        (lambda: Infeed(numbers(3), batch_size=2), "batch_size is 2"),
        (lambda: Infeed(numbers(3), seed=2), "seed is 2"),
        (lambda: Infeed(lambda: 3).take(1), "returned a int"),  # pyright: ignore[reportArgumentType]
        (lambda: Infeed([object()]).take(1), "not an array"),
        (lambda: Infeed(["a"]).take(1), "type str is not an array of numbers"),
        (lambda: Infeed([np.zeros((4, 2)), np.zeros((3, 2))]).take_all(2, "x"), r"Element 1 .* float32\[3, 2\].*remai"),
        (lambda: Infeed([np.zeros(2), np.zeros(2, np.int32)]).take_all(2, "x"), r"int32\[2\] instead of float32"),
        (lambda: Infeed([{"a": 1.0}, {"b": 1.0}]).take_all(2, "x"), r"b: float32\[\]"),
        (lambda: Infeed(numbers(3)).take_all(4, "a loop"), "3 elements are left; needed for a loop: 4"),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(HeadraceError, match=message):
        make()


def test_a_source_needs_a_batch_size():
    source = memory_source(np.zeros((10, 2, 2, 1), np.uint8), np.zeros(10, np.int32))
    with pytest.raises(HeadraceError, match="needs a batch_size"):
        Infeed(source)
    with pytest.raises(HeadraceError, match="1 to 10"):
        Infeed(source, batch_size=11)
