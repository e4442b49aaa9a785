"""One micro-batch inside a program: the same images whichever way they came to the device."""

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from headrace.data.augmentation.preprocess import Preprocess, preprocess
from headrace.data.feeding.fetch import fetch

HWC = (8, 6, 3)
IMAGES = np.random.default_rng(0).integers(0, 256, (20, *HWC), np.uint8)
LABELS = np.arange(20, dtype=np.int32) % 7
INDEX = np.array([3, 19, 3, 0, 11], np.int32)


def spec(on_device: bool = True) -> Preprocess:
    return Preprocess(
        augmentation="flip-crop",
        normalization="per-channel",
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.2, 0.3),
        seed=4,
        image_hwc=HWC,
        on_device=on_device,
    )


def run(resident: Any, block: Any, how: Preprocess, train: bool = True) -> tuple[np.ndarray, np.ndarray]:
    images, labels = jax.jit(lambda r, b: fetch(r, b, how, train))(resident, block)
    return np.asarray(images), np.asarray(labels)


def test_resident_and_sent_images_are_the_same() -> None:
    block = {"index": INDEX, "epoch": np.uint32(2)}
    expected = preprocess(IMAGES[INDEX], INDEX, 2, spec(), True)
    sent = {"images": IMAGES[INDEX], "labels": LABELS[INDEX]}
    ways = [
        run({"images": IMAGES, "labels": LABELS}, block, spec()),
        run(None, block | sent, spec()),
        run(None, block | sent | {"images": IMAGES[INDEX].astype(np.float32)}, spec()),
        run(None, block | sent | {"images": expected}, spec(on_device=False)),
    ]
    for images, labels in ways:
        assert images.dtype == np.float32
        assert np.abs(images - expected).max() <= 1e-6
        assert labels.tolist() == [3, 5, 3, 0, 4]


def test_preprocessed_images_are_passed_on_untouched() -> None:
    images = np.random.default_rng(1).normal(size=(5, *HWC)).astype(np.float32)
    block = {"index": INDEX, "epoch": np.uint32(2), "images": images, "labels": LABELS[INDEX]}
    assert (run(None, block, spec(on_device=False))[0] == images).all()


def test_samples_beyond_a_made_up_set_are_its_images_again() -> None:
    resident = {"images": IMAGES[:6], "labels": LABELS[:6]}
    images, labels = run(resident, {"index": INDEX, "epoch": np.uint32(0)}, spec())
    rows = [3, 1, 3, 0, 5]
    assert labels.tolist() == [LABELS[row] for row in rows]
    assert np.abs(images - preprocess(IMAGES[rows], INDEX, 0, spec(), True)).max() <= 1e-6


def test_evaluation_needs_no_epoch() -> None:
    images, _ = run({"images": IMAGES, "labels": LABELS}, {"index": INDEX}, spec(), train=False)
    assert np.abs(images - preprocess(IMAGES[INDEX], INDEX, 0, spec(), False)).max() <= 1e-6


def test_inside_a_device_loop() -> None:
    index = np.arange(12, dtype=np.int32).reshape(3, 4)
    epoch = np.array([0, 0, 1], np.uint32)
    resident = {"images": IMAGES, "labels": LABELS}

    def steps(resident: Any, block: Any) -> Any:
        return lax.scan(lambda carry, step: (carry, fetch(resident, step, spec(), True)), 0, block)[1]

    images, labels = jax.jit(steps)(resident, {"index": index, "epoch": epoch})
    for k in range(3):
        expected = preprocess(IMAGES[index[k]], index[k], epoch[k], spec(), True)
        assert np.abs(np.asarray(images[k]) - expected).max() <= 1e-6
    assert (np.asarray(labels) == LABELS[index]).all()


def test_no_images_anywhere_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        fetch(None, {"index": INDEX}, spec(), True)
