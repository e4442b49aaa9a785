"""The share of a process: what its feed reads, and nothing else."""

import numpy as np
import pytest

from headrace.config.schema import Augment, Data
from headrace.data.augmentation.preprocess import preprocess_spec
from headrace.data.dataset import describe_dataset
from headrace.data.feeding.block_reader import FeedOptions
from headrace.data.feeding.cache import CacheChoice, make_resident
from headrace.data.feeding.eval_feed import EvalFeed
from headrace.data.feeding.feed import CallSpans, TrainFeed
from headrace.data.feeding.order import StepShape, step_indices
from headrace.data.feeding.shard import ProcessShard
from headrace.data.sets.source import Source

NUM_SAMPLES, SEED = 50, 3


class Watched:
    """A split of images whose first pixel is the sample's number; it remembers what was read."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        labels = (np.arange(NUM_SAMPLES) % 7).astype(np.int32)
        self.source = Source(
            labels=labels, image_hwc=(2, 2, 3), num_distinct=NUM_SAMPLES, read_into=self.read_into, slow=True
        )

    def read_into(self, indices: np.ndarray, epoch: np.ndarray | int, out: np.ndarray) -> None:
        """Write images of one number each."""
        self.seen += [int(index) for index in indices]
        out[:] = indices[:, None, None, None]


def options(share: ProcessShard) -> FeedOptions:
    data = Data(dataset="generated", image_size=2)
    preprocess = preprocess_spec(data, Augment(), describe_dataset(data), SEED)
    cache = CacheChoice("host", "for the test")
    return FeedOptions(
        preprocess=preprocess, cache=cache, eight_bit_transfer=True, num_threads=2, prefetch_depth=1, shard=share
    )


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_each_process_reads_the_columns_of_its_replicas_alone(num_processes: int) -> None:
    shape = StepShape(
        seed=SEED,
        num_samples=NUM_SAMPLES,
        shuffle=True,
        updates_per_epoch=3,
        gradient_accumulation_count=2,
        num_replicas=4,
        micro_batch_size=2,
    )
    whole, _ = step_indices(shape, 1, 2)  # [K, G, B], replica r in columns 2r and 2r + 1
    blocks = []
    for process in range(num_processes):
        source = Watched()
        share = ProcessShard(process=process, num_processes=num_processes)
        feed = TrainFeed(
            source.source,
            shape,
            CallSpans(first_step=1, last_step=3, max_steps=2),
            options(share),
            lambda tree, _: tree,
        )
        block = feed.next()
        feed.close()
        each = 4 // num_processes
        columns = [c for r in range(process * each, (process + 1) * each) for c in (2 * r, 2 * r + 1)]
        mine = whole[:, :, columns]
        np.testing.assert_array_equal(block["index"], mine)
        np.testing.assert_array_equal(block["images"][..., 0, 0, 0], mine)
        np.testing.assert_array_equal(block["labels"], mine % 7)
        assert sorted(source.seen) == sorted(mine.reshape(-1).tolist())
        blocks.append(block["index"])
    np.testing.assert_array_equal(np.concatenate(blocks, axis=2), whole)


def test_an_evaluation_counts_every_sample_in_exactly_one_process() -> None:
    counted = np.zeros(NUM_SAMPLES)
    for process in range(4):
        source = Watched()
        feed = EvalFeed(
            source.source, 8, 3, options(ProcessShard(process=process, num_processes=4)), lambda tree, _: tree
        )
        for block in feed:
            assert block["index"].shape == (3, 2)
            np.add.at(counted, block["index"][block["mask"] == 1], 1)
        feed.close()
        assert len(source.seen) == 3 * 3 * 2  # three blocks of three batches; what pads them is read too
    np.testing.assert_array_equal(counted, 1)


def test_a_set_on_the_device_is_decoded_by_shares() -> None:
    parts = []
    for process in range(3):
        source = Watched()
        kinds: list[str] = []

        def put(tree: dict[str, np.ndarray], kind: str, kinds: list[str] = kinds) -> dict[str, np.ndarray]:
            kinds.append(kind)
            return tree

        part = make_resident(source.source, put, ProcessShard(process=process, num_processes=3))
        assert kinds == ["rows"]
        assert len(set(source.seen)) <= 17  # 50 / 3, rounded up
        parts.append(np.asarray(part["images"])[:, 0, 0, 0])
    np.testing.assert_array_equal(np.concatenate(parts)[:NUM_SAMPLES], np.arange(NUM_SAMPLES))
