"""The ways an image can take to the network: bytes or floats, host or device; always the same numbers."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from headrace.config.load import config_from, resolve
from headrace.data.dataset import describe_dataset, open_dataset
from headrace.data.feeding.block_reader import feed_options
from headrace.data.feeding.feed import CallSpans, TrainFeed
from headrace.data.feeding.fetch import fetch
from headrace.data.feeding.order import StepShape

SHAPE = StepShape(
    seed=7,
    num_samples=1437,
    shuffle=True,
    updates_per_epoch=4,
    gradient_accumulation_count=1,
    num_replicas=1,
    micro_batch_size=16,
)


def first_images(put: Callable[[Any, str], Any], **options: Any) -> np.ndarray:
    """Return what the network sees in the first step."""
    config = config_from({"dataset": "digits", "train_augmentation": "flip-crop", **options})
    dataset = open_dataset(config.data, 7)
    how = feed_options(config.data, dataset.info, 7, 1, config.augment)
    feed = TrainFeed(dataset.train, SHAPE, CallSpans(first_step=0, last_step=1, max_steps=1), how, put)
    block = feed.next()
    micro = {key: value[0] if key in ("epoch", "seed") else value[0, 0] for key, value in block.items()}
    images, _ = jax.jit(lambda resident, micro: fetch(resident, micro, how.preprocess, True))(feed.resident, micro)
    feed.close()
    return np.asarray(images)


CHANGES: dict[str, Any] = {
    "color_jitter": 0.4,
    "rand_augment": 1,
    "rand_augment_operations": ["sharpness", "rotate"],
    "random_erasing": 0.5,
    "mixup_alpha": 1.0,
    "cutmix_alpha": 1.0,
    "micro_batch_size": 16,
}


@pytest.mark.parametrize("changes", [{}, {"normalise_input": True}, CHANGES], ids=["plain", "normalised", "changed"])
def test_every_way_gives_the_same_images(put: Callable[[Any, str], Any], changes: dict[str, Any]) -> None:
    resident = first_images(put, **changes)
    for way in (
        {"dataset_cache": "host"},
        {"dataset_cache": "host", "eight_bit_transfer": False},
        {"accelerator_side_preprocess": False},
        {"fused_preprocessing": True},
    ):
        found = first_images(put, **changes, **way)
        assert found.shape == (16, 32, 32, 1)  # fused or not: no channel is added
        assert (np.abs(found - resident) <= 2e-6).mean() > 0.999, way


def test_normalise_input_is_the_reference_formula() -> None:
    for on, name in ((True, "per-channel"), (False, "centred")):
        config = config_from({"dataset": "cifar10", "normalise_input": on})
        assert describe_dataset(config.data).normalization == name
    assert describe_dataset(config_from({"dataset": "cifar10"}).data).normalization == "per-image"


def test_fused_preprocessing_says_that_it_changes_nothing() -> None:
    resolved = resolve({"fused_preprocessing": True}, "none", environ={})
    assert any("fused_preprocessing on" in note and "changes nothing" in note for note in resolved.notes)
