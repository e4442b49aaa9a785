"""Feeds for training and evaluation: what they deliver, at any thread count, from any step, and how they fail."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.augmentation.preprocess import Preprocess, preprocess
from headrace.data.feeding import block_reader
from headrace.data.feeding.block_reader import FeedOptions
from headrace.data.feeding.cache import CacheChoice
from headrace.data.feeding.eval_feed import EvalFeed
from headrace.data.feeding.feed import CallSpans, TrainFeed
from headrace.data.feeding.order import StepShape, step_indices
from headrace.data.sets.source import Source, memory_source

HWC = (6, 6, 3)
Put = Callable[[Any, str], Any]


def source(count: int = 40, seconds: float = 0.0, bad: int = -1) -> Source:
    """Return a source that takes its time and can fail at one sample."""
    images = np.random.default_rng(count).integers(0, 256, (count, *HWC), np.uint8)
    whole = memory_source(images, (np.arange(count) % 9).astype(np.int32))

    def read_into(indices: np.ndarray, epoch: np.ndarray | int, out: np.ndarray) -> None:
        time.sleep(seconds)
        if bad in indices:
            raise OSError(f"sample {bad} cannot be read")
        whole.read_into(indices, epoch, out)

    return replace(whole, read_into=read_into)


def options(
    where: str = "host", threads: int = 2, on_device: bool = True, eight_bit: bool | None = None
) -> FeedOptions:
    how = Preprocess(
        augmentation="flip-crop",
        normalization="per-image",
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        seed=5,
        image_hwc=HWC,
        on_device=on_device,
    )
    return FeedOptions(
        preprocess=how,
        cache=CacheChoice(where, "a test"),
        eight_bit_transfer=on_device if eight_bit is None else eight_bit,
        num_threads=threads,
        prefetch_depth=2,
    )


def shape(num_samples: int = 40, updates: int = 3) -> StepShape:
    return StepShape(
        seed=1,
        num_samples=num_samples,
        shuffle=True,
        updates_per_epoch=updates,
        gradient_accumulation_count=2,
        num_replicas=2,
        micro_batch_size=3,
    )


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reader, "_CHUNK_BYTES", 7 * int(np.prod(HWC)))  # so that several threads have work


def taken(feed: TrainFeed, num_calls: int) -> list[dict[str, np.ndarray]]:
    try:
        return [{key: np.asarray(value) for key, value in feed.next().items()} for _ in range(num_calls)]
    finally:
        feed.close()


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("together", [False, True])
def test_calls_end_where_they_must_and_blocks_have_one_shape(put: Put, where: str, together: bool) -> None:
    """Ends at 3, 7 and 12, blocks of four steps from 2 on; and the same samples as one step at a time."""

    def next_end(step: int) -> int:
        return min(end for end in (3, 7, 12) if end > step)

    calls = CallSpans(first_step=2, last_step=12, max_steps=4, next_end=next_end)
    calls = replace(calls, block_end=next_end) if together else calls
    feed = TrainFeed(source(), shape(), calls, options(where), put)
    single = CallSpans(first_step=2, last_step=12, max_steps=1)
    wanted = iter(taken(TrainFeed(source(), shape(), single, options(where), put), 10))
    found, blocks_taken = [], []
    try:
        while sum(map(len, found)) < 10:
            block = feed.next()
            blocks_taken += [] if blocks_taken and blocks_taken[-1] is block else [block]
            found.append(feed.rows)
            assert {len(rows) for rows in block.values()} == {4}
            for row in feed.rows:
                one = next(wanted)
                assert all((np.asarray(block[key])[row] == one[key][0]).all() for key in one)
        across = [range(1), range(1, 4), range(1), range(1, 4), range(2)]
        assert found == ([range(1), range(4), range(4), range(1)] if together else across)
        assert len(blocks_taken) == feed.stats.blocks == (4 if together else 3)
        with pytest.raises(RuntimeError, match=f"no more blocks than {len(blocks_taken)}"):
            feed.next()
        assert feed.stats.images == 10 * 12, "padding is not counted"
    finally:
        feed.close()


def test_a_limit_holds_for_the_next_call(put: Put) -> None:
    calls = CallSpans(first_step=0, last_step=40, max_steps=8)
    feed = TrainFeed(source(), shape(), calls, options(), put)
    found = []
    try:
        for limit in (1, 3, 3, 100, 5, 5):
            feed.limit(limit)
            feed.next()
            found.append(feed.rows)
    finally:
        feed.close()
    assert found == [range(1), range(1, 4), range(4, 7), range(7, 8), range(5), range(5, 8)]


def lengths_of_blocks(data: Source, calls: CallSpans, put: Put, where: str = "host") -> list[int]:
    feed = TrainFeed(data, shape(), calls, options(where, threads=1), put)
    feed.limit(calls.max_steps)
    lengths = []
    try:
        while sum(lengths) < calls.last_step:
            feed.next()
            lengths.append(len(feed.rows))
    finally:
        feed.close()
    return lengths


def test_the_first_block_is_soon_read_and_blocks_grow_as_far_as_reading_is_fast(put: Put) -> None:
    calls = CallSpans(first_step=0, last_step=100, max_steps=40, limit=1, block_seconds=60.0)
    assert lengths_of_blocks(source(), calls, put) == [1, 8, 40, 40, 11]
    assert lengths_of_blocks(source(), calls, put, "device") == [40, 40, 20], "indices take no time to read"
    assert lengths_of_blocks(source(), replace(calls, limit=0), put) == [40, 40, 20], "no limit was asked for"
    slow = replace(calls, last_step=12, block_seconds=0.2)
    lengths = lengths_of_blocks(source(seconds=0.03), slow, put)  # 12 samples are two chunks, of at least 0.06 s
    assert lengths[0] == 1
    assert max(lengths) <= 3
    assert lengths_of_blocks(source(seconds=0.001), replace(slow, block_seconds=0.0), put) == [1, 8, 3]


def test_a_resident_set_sends_indices_alone(put: Put) -> None:
    data = source()
    feed = TrainFeed(data, shape(), CallSpans(first_step=0, last_step=12, max_steps=4), options("device"), put)
    assert feed.resident is not None
    assert (np.asarray(feed.resident["images"]) == data.read(np.arange(40), 0)).all()
    for number, block in enumerate(taken(feed, 3)):
        index, epoch = step_indices(shape(), number * 4, 4)
        assert set(block) == {"index", "epoch", "seed"}
        assert (block["seed"] == shape().seed).all()
        assert (block["index"] == index).all()
        assert (block["epoch"] == epoch).all()
    assert feed.stats.bytes == 3 * (4 * 2 * 6 + 4 + 4) * 4


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_sent_blocks_hold_the_images_of_their_indices(put: Put, threads: int) -> None:
    data = source()
    for number, block in enumerate(
        taken(
            TrainFeed(data, shape(), CallSpans(first_step=3, last_step=11, max_steps=2), options(threads=threads), put),
            4,
        )
    ):
        index, epoch = step_indices(shape(), 3 + 2 * number, 2)
        assert (block["index"] == index).all()
        assert (block["epoch"] == epoch).all()
        assert block["images"].dtype == np.uint8
        assert block["images"].shape == (2, 2, 6, *HWC)
        assert (block["images"] == data.read(index.ravel(), 0).reshape(2, 2, 6, *HWC)).all()
        assert (block["labels"] == index % 9).all()


@pytest.mark.parametrize("threads", [1, 4])
def test_the_host_preprocesses_by_the_epoch_of_each_step(put: Put, threads: int) -> None:
    data, how = source(), options(on_device=False, threads=threads)
    (block,) = taken(TrainFeed(data, shape(), CallSpans(first_step=1, last_step=6, max_steps=5), how, put), 1)
    index, epoch = step_indices(shape(), 1, 5)
    assert block["images"].dtype == np.float32
    for k in range(5):
        for g in range(2):
            expected = preprocess(data.read(index[k, g], 0), index[k, g], epoch[k], how.preprocess, True)
            assert (block["images"][k, g] == expected).all()


def test_without_eight_bits_the_bytes_cross_as_float32(put: Put) -> None:
    data = source()
    (block,) = taken(
        TrainFeed(data, shape(), CallSpans(first_step=0, last_step=1, max_steps=1), options(eight_bit=False), put), 1
    )
    assert block["images"].dtype == np.float32
    assert (block["images"].reshape(-1, *HWC) == data.read(block["index"].ravel(), 0)).all()


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_feed_starts_at_any_step(put: Put, where: str) -> None:
    whole = taken(
        TrainFeed(source(), shape(), CallSpans(first_step=0, last_step=12, max_steps=1), options(where), put), 12
    )
    for first in (1, 5, 11):
        rest = taken(
            TrainFeed(
                source(),
                shape(),
                CallSpans(first_step=first, last_step=first + 1 * (12 - first), max_steps=1),
                options(where),
                put,
            ),
            12 - first,
        )
        for ours, theirs in zip(rest, whole[first:], strict=True):
            assert all((ours[key] == theirs[key]).all() for key in theirs)


@pytest.mark.parametrize("num_samples", [1, 2, 11])
def test_tiny_sets_and_more_updates_than_samples(put: Put, num_samples: int) -> None:
    plan = shape(num_samples, updates=7)
    blocks_taken = taken(
        TrainFeed(source(num_samples), plan, CallSpans(first_step=0, last_step=14, max_steps=7), options(), put), 2
    )
    for block in blocks_taken:
        places = block["index"].ravel()[: 84 // num_samples * num_samples].reshape(-1, num_samples)
        assert all(sorted(turn.tolist()) == list(range(num_samples)) for turn in places)


def test_blocks_do_not_share_memory(put: Put) -> None:
    """A device array may be the NumPy array it was put from: no block may be written into a later one."""
    feed = TrainFeed(source(), shape(), CallSpans(first_step=0, last_step=24, max_steps=2), options(), put)
    kept = [feed.next() for _ in range(12)]
    copies = [{key: np.array(value) for key, value in block.items()} for block in kept]
    feed.close()
    for number, (block, copy) in enumerate(zip(kept, copies, strict=True)):
        index, _ = step_indices(shape(), 2 * number, 2)
        assert (copy["index"] == index).all()
        assert all((np.asarray(block[key]) == copy[key]).all() for key in block)


def test_a_slow_source_is_seen_in_the_waiting(put: Put) -> None:
    feed = TrainFeed(
        source(seconds=0.03), shape(), CallSpans(first_step=0, last_step=5, max_steps=1), options(threads=1), put
    )
    taken(feed, 5)
    assert feed.stats.wait_seconds > 0.1
    assert feed.stats.images == 5 * 12
    fast = TrainFeed(source(), shape(), CallSpans(first_step=0, last_step=5, max_steps=1), options(), put)
    for _ in range(5):
        time.sleep(0.02)
        fast.next()
    fast.close()
    assert fast.stats.wait_seconds < feed.stats.wait_seconds


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_a_thread_surfaces_in_next(put: Put, threads: int) -> None:
    feed = TrainFeed(
        source(bad=13), shape(), CallSpans(first_step=0, last_step=9, max_steps=1), options(threads=threads), put
    )
    first_bad = next(step for step in range(9) if 13 in step_indices(shape(), step, 1)[0])
    for _ in range(first_bad):
        feed.next()
    for _ in range(2):
        with pytest.raises(OSError, match="sample 13 cannot be read"):
            feed.next()
    feed.close()


def test_an_error_in_put_surfaces_in_next() -> None:
    def put(tree: Any, kind: str) -> Any:
        raise MemoryError("the device is full")

    feed = TrainFeed(source(), shape(), CallSpans(first_step=0, last_step=9, max_steps=1), options(), put)
    with pytest.raises(MemoryError, match="full"):
        feed.next()
    feed.close()


def test_close_leaves_unfinished_blocks_and_no_threads(put: Put) -> None:
    feed = TrainFeed(
        source(4000, seconds=0.2),
        replace(shape(), num_samples=4000),
        CallSpans(first_step=0, last_step=450, max_steps=50),
        options(),
        put,
    )
    time.sleep(0.05)
    start = time.perf_counter()
    feed.close()  # a whole block would take 86 chunks / 2 threads * 0.2 s = 8.6 s
    assert time.perf_counter() - start < 4
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("feed", "read"))]


def evaluated(feed: EvalFeed) -> tuple[list[int], list[dict[str, np.ndarray]]]:
    found = [{key: np.asarray(value) for key, value in block.items()} for block in feed]
    return [int(i) for block in found for i in block["index"][block["mask"] == 1]], found


@given(st.integers(1, 60), st.integers(1, 17), st.integers(1, 6))
def test_evaluation_sees_every_sample_exactly_once(num_samples: int, batch: int, per_block: int) -> None:
    feed = EvalFeed(source(num_samples), batch, per_block, options("device"), lambda tree, kind: tree)
    seen, found = evaluated(feed)
    feed.close()
    assert seen == list(range(num_samples))
    assert len({block["index"].shape for block in found}) == 1
    assert all(block["index"].shape[0] <= per_block for block in found)
    assert all(set(np.unique(block["mask"])) <= {0, 1} for block in found)
    padding = sum(block["mask"].size for block in found) - num_samples
    assert padding < batch * (len(found) + 1)


@pytest.mark.parametrize("on_device", [True, False])
def test_evaluation_sends_images_and_labels(put: Put, on_device: bool) -> None:
    data, how = source(11), options(on_device=on_device)
    feed = EvalFeed(data, 4, 2, how, put)
    for _ in range(2):  # it can be used again
        seen, found = evaluated(feed)
        assert seen == list(range(11))
        for block in found:
            flat = block["index"].ravel()
            expected = data.read(flat, 0)
            if not on_device:
                expected = preprocess(expected, flat, 0, how.preprocess, False)
            assert (block["images"].reshape(-1, *HWC) == expected).all()
            assert (block["labels"] == block["index"] % 9).all()
    feed.close()
    assert feed.stats.blocks == feed.num_blocks == 2


def test_evaluation_blocks_are_put_as_batches() -> None:
    kinds = []

    def put(tree: Any, kind: str) -> Any:
        kinds.append(kind)
        return jax.device_put(tree)

    feed = EvalFeed(source(11), 4, 2, options("device"), put)
    list(feed)
    feed.close()
    TrainFeed(source(), shape(), CallSpans(first_step=0, last_step=1, max_steps=1), options(), put).close()
    # In any order: the set that stays on the device and the blocks are put by different threads.
    assert sorted(kinds[:3]) == ["batches", "batches", "replicated"]
    assert set(kinds[3:]) <= {"steps"}


def test_an_evaluation_left_early_ends_its_threads(put: Put) -> None:
    feed = EvalFeed(source(40), 2, 1, options(), put)
    for block in feed:
        assert block["index"].shape == (1, 2)
        break
    feed.close()
    time.sleep(0.01)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("feed", "read"))]


def test_one_cpu_device_takes_the_memory_of_a_block_as_it_is() -> None:
    """Else rows that are not filled would be copied as well: a first block of one step may have the size of 2 GB."""
    given: list[np.ndarray] = []

    def put(tree: Any, kind: str) -> Any:
        given.append(tree["images"])
        return jax.device_put(tree, jax.devices()[0])

    calls = CallSpans(first_step=0, last_step=24, max_steps=12, limit=1)
    feed = TrainFeed(source(), shape(), calls, options(), put)
    try:
        for block in (feed.next(), feed.next()):
            assert block["images"].unsafe_buffer_pointer() == given.pop(0).ctypes.data
    finally:
        feed.close()
