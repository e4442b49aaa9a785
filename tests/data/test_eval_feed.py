"""The images of a validation: read once where they may be kept, ahead of time where they may not, never in the way."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.config.schema import Validation
from headrace.core.errors import ConfigError
from headrace.data.augmentation.preprocess import Preprocess
from headrace.data.dataset import DataInfo
from headrace.data.feeding.block_reader import FeedOptions
from headrace.data.feeding.cache import CacheChoice
from headrace.data.feeding.eval_feed import EvalCache, EvalFeed, plan_eval_cache
from headrace.data.feeding.feed import CallSpans, TrainFeed
from headrace.data.feeding.order import StepShape
from headrace.data.sets.source import Source, memory_source

HWC = (4, 4, 3)
NUM = 22  # in batches of 4, two to a block: three blocks of 24, the last two samples of mask 0
OPTIONS = FeedOptions(
    preprocess=Preprocess(
        augmentation="none",
        normalization="none",
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        seed=5,
        image_hwc=HWC,
        on_device=True,
    ),
    cache=CacheChoice("host", "a test"),
    eight_bit_transfer=True,
    num_threads=2,
    prefetch_depth=1,
)
BLOCK_BYTES = 8 * (48 + 12)


class Counting:
    """A source that counts how often each sample is read."""

    def __init__(self, num: int = NUM, seconds: float = 0.0) -> None:
        self.images = np.random.default_rng(num).integers(0, 256, (num, *HWC), np.uint8)
        whole = memory_source(self.images, np.arange(num, dtype=np.int32))
        self.reads: Counter[int] = Counter()

        def read_into(indices: np.ndarray, epoch: np.ndarray | int, out: np.ndarray) -> None:
            time.sleep(seconds)
            self.reads.update(indices.tolist())
            whole.read_into(indices, epoch, out)

        self.source = replace(whole, read_into=read_into)


def cache(where: str, host_bytes: int = 0) -> EvalCache:
    return EvalCache(
        where=where, reason="", num_bytes=0, batches_per_block=2, block_bytes=BLOCK_BYTES, host_bytes=host_bytes
    )


def blocks_of(feed: EvalFeed) -> list[dict[str, Any]]:
    return list(feed)


def eventually(holds: Any) -> bool:
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.002)
    return holds()


@pytest.fixture
def feeds() -> Iterator[Any]:
    made: list[Any] = []

    def make(source: Source, kept: EvalCache | None, sent: list[Any] | None = None) -> EvalFeed:
        def put(tree: Any, kind: str) -> Any:
            if sent is not None:
                sent.append(tree["index"][0, 0])
            return tree

        made.append(EvalFeed(source, 4, 2, OPTIONS, put, kept))
        return made[-1]

    yield make
    for feed in made:
        feed.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("feed", "read"))]


@pytest.mark.parametrize(
    ("kept", "reads", "sends"),
    [
        (cache("device"), 1, 3),  # three blocks, once
        (cache("host", 3 * BLOCK_BYTES), 1, 9),  # each evaluation sends them
        (cache("streamed"), 3, 9),
        (None, 3, 9),
    ],
    ids=["device", "host", "streamed", "no cache"],
)
def test_what_is_kept_is_read_once_and_all_deliver_the_same(feeds, kept, reads, sends):
    source, sent = Counting(), []
    feed = feeds(source.source, kept, sent)
    for _ in range(3):
        blocks = blocks_of(feed)
        masks = np.concatenate([block["mask"].ravel() for block in blocks])
        labels = np.concatenate([block["labels"].ravel() for block in blocks])
        images = np.concatenate([block["images"].reshape(-1, *HWC) for block in blocks])
        assert masks.tolist() == [1.0] * NUM + [0.0] * 2
        assert labels[:NUM].tolist() == list(range(NUM))
        assert (images[:NUM] == source.images).all()
    assert {source.reads[sample] for sample in range(1, NUM)} == {reads}
    assert len(sent) == sends


def test_a_budget_keeps_the_blocks_that_fit_and_streams_the_others(feeds):
    source = Counting()
    feed = feeds(source.source, cache("streamed", 2 * BLOCK_BYTES - 1))  # one of three
    for _ in range(3):
        blocks_of(feed)
    assert [source.reads[sample] for sample in (1, 7, 8, 21)] == [1, 1, 3, 3]


def test_blocks_are_prepared_before_the_evaluation_is_due(feeds):
    source, sent = Counting(), []
    feed = feeds(source.source, cache("host", 3 * BLOCK_BYTES), sent)
    feed.prefetch()
    assert eventually(lambda: all(source.reads[sample] for sample in range(NUM)))
    assert eventually(lambda: sent == [0, 8])  # as many as are prefetched; the others stay in host memory
    blocks_of(feed)
    assert eventually(lambda: sent == [0, 8, 16, 0, 8])  # ready for the next evaluation
    streamed = Counting()
    feed = feeds(streamed.source, cache("streamed"))
    feed.prefetch()
    assert eventually(lambda: streamed.reads[7] == 1)
    time.sleep(0.05)
    assert streamed.reads[16] == 0  # no more than is prefetched
    blocks_of(feed)
    assert eventually(lambda: streamed.reads[7] == 2)
    assert streamed.reads[16] == 1


def test_reading_ahead_waits_for_training_images_until_the_evaluation_is_due(feeds):
    validation, training = Counting(), Counting(64, seconds=0.05)
    feed = feeds(validation.source, cache("device"))
    shape = StepShape(
        seed=1,
        num_samples=64,
        shuffle=True,
        updates_per_epoch=8,
        gradient_accumulation_count=1,
        num_replicas=1,
        micro_batch_size=8,
    )
    calls = CallSpans(first_step=0, last_step=80, max_steps=8)
    train_feed = TrainFeed(training.source, shape, calls, replace(OPTIONS, prefetch_depth=2), lambda tree, kind: tree)
    try:
        train_feed.hold(feed.gate)
        feed.prefetch()
        assert not validation.reads  # three blocks of training images come first
        assert eventually(lambda: all(validation.reads[sample] for sample in range(NUM)))
        assert training.reads.total() == 3 * 64
    finally:
        train_feed.close()
    urgent = Counting()
    feed = feeds(urgent.source, cache("device"))
    feed.gate.hold(True)
    feed.prefetch()
    time.sleep(0.05)
    assert not urgent.reads
    assert len(blocks_of(feed)) == 3  # due: read at once


INFO = DataInfo(
    name="folder",
    image_hwc=(32, 32, 3),
    class_names=("a", "b"),
    num_train=100,
    num_validation=1000,
    augmentation="flip",
    normalization="none",
    channel_mean=(0.0,),
    channel_std=(1.0,),
    place="somewhere",
)


def planned(info: DataInfo = INFO, replicas: int = 1, processes: int = 1, **wanted: str) -> EvalCache:
    return plan_eval_cache(info, OPTIONS, Validation(**wanted), 10 * replicas, replicas, processes)  # pyright: ignore[reportArgumentType]


def test_the_plan_chooses_the_device_then_the_host_then_a_stream():
    size = 1000 * (32 * 32 * 3 + 12)
    chosen = planned()
    assert (chosen.where, chosen.num_bytes) == ("device", size)
    assert planned(validation_device_budget=str(size)).where == "device"
    too_small = str(size - 1)
    chosen = planned(validation_device_budget=too_small)
    assert (chosen.where, chosen.host_bytes) == ("host", size)
    assert planned(replicas=2, validation_device_budget=str(size // 2)).where == "device"  # each has its half
    chosen = planned(validation_device_budget=too_small, validation_host_budget="1MiB")
    assert (chosen.where, chosen.host_bytes) == ("streamed", 1 << 20)
    assert "beyond the host's budget of 1.0 MiB" in chosen.reason
    halves = planned(processes=2, validation_device_budget=too_small, validation_host_budget=str(size // 2))
    assert (halves.where, halves.host_bytes) == ("host", size // 2)
    assert planned(validation_cache="none").where == "streamed"
    assert planned(validation_cache="host").where == "host"
    in_memory = planned(replace(INFO, place=""), validation_device_budget=too_small)
    assert (in_memory.where, in_memory.host_bytes) == ("streamed", 0)


def test_a_dataset_on_the_device_has_its_validation_images_there():
    options = replace(OPTIONS, cache=CacheChoice("device", "it fits"))
    assert plan_eval_cache(INFO, options, Validation(), 10, 1, 1).resident
    with pytest.raises(ConfigError, match="validation_cache is host, but the whole dataset is kept on the device"):
        plan_eval_cache(INFO, options, Validation(validation_cache="host"), 10, 1, 1)
