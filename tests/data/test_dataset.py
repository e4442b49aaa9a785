"""What sets are said to be, what is refused, and synthetic sets."""

from typing import Any

import jax
import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.config.schema import Data
from headrace.core.errors import ConfigError, DataError
from headrace.data.dataset import describe_dataset, open_dataset
from headrace.data.sets.catalog import KNOWN_SETS
from headrace.data.sets.source import memory_source
from headrace.data.sets.synthetic import Synthetic, distinct_images, synthetic_images, synthetic_labels


def data(**options: Any) -> Data:
    return config_from(options).data


@pytest.mark.parametrize(
    ("name", "hwc", "classes", "train", "validation", "augmentation", "normalization"),
    [
        ("digits", (32, 32, 1), 10, 1437, 360, "crop", "zero-one"),
        ("cifar10", (32, 32, 3), 10, 50_000, 10_000, "flip-crop", "per-image"),
        ("cifar100", (32, 32, 3), 100, 50_000, 10_000, "flip-crop", "per-image"),
        ("mnist", (28, 28, 1), 10, 60_000, 10_000, "none", "zero-one"),
        ("fashion_mnist", (28, 28, 1), 10, 60_000, 10_000, "flip-crop", "zero-one"),
        ("generated", (32, 32, 3), 10, 50_000, 10_000, "none", "per-channel"),
        ("synthetic", (32, 32, 3), 10, 50_000, 10_000, "none", "per-channel"),
    ],
)
def test_what_is_known_without_files(
    name: str, hwc: Any, classes: int, train: int, validation: int, augmentation: str, normalization: str
) -> None:
    info = describe_dataset(data(dataset=name, dataset_path="/nowhere"))
    assert (info.image_hwc, info.num_classes, info.num_train, info.num_validation) == (hwc, classes, train, validation)
    assert (info.augmentation, info.normalization) == (augmentation, normalization)
    assert len(info.class_names) == classes == len(set(info.class_names))
    assert len(info.channel_mean) == len(info.channel_std) == hwc[2]


def test_published_counts_add_up() -> None:
    for row in KNOWN_SETS.values():
        assert sum(row.train_counts) == row.num_train
        assert sum(row.validation_counts) == row.num_validation
        assert len(row.train_counts) == len(row.validation_counts) == row.num_classes


def test_options_win_over_the_sets_own() -> None:
    info = describe_dataset(data(train_augmentation="none", normalization="per-image"))
    assert (info.augmentation, info.normalization) == ("none", "per-image")


def test_digits_have_the_stated_channel_statistics() -> None:
    dataset = open_dataset(data(), 0)
    pixels = dataset.train.read(np.arange(1437), 0) / 255
    assert dataset.info.channel_mean[0] == pytest.approx(pixels.mean(), abs=1e-5)
    assert dataset.info.channel_std[0] == pytest.approx(pixels.std(), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"image_size": 28}, "image_size"),
        ({"num_channels": 4}, "num_channels"),
        ({"num_classes": 11}, "num_classes"),
        ({"num_samples": 100}, "num_samples"),
    ],
)
def test_sizes_that_contradict_the_set_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        describe_dataset(Data(dataset="cifar10", **options))


def test_sizes_that_agree_are_accepted() -> None:
    agreeing = Data(dataset="mnist", image_size=28, num_channels=1, num_classes=10, num_samples=60_000)
    assert describe_dataset(agreeing).image_hwc == (28, 28, 1)


def test_an_unknown_set_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean cifar10"):
        describe_dataset(Data(dataset="cifar11"))


def synthetic_on(name: str, seed: int = 0, **options: Any) -> Any:
    options = {"image_size": 5, "num_channels": 3, "num_classes": 7, "num_samples": 2500} | options
    return open_dataset(data(dataset=name, **options), seed)


def test_generated_images_have_the_asked_shape_and_are_uniform_bytes() -> None:
    dataset = synthetic_on("generated")
    assert (len(dataset.train), len(dataset.validation), dataset.train.num_distinct) == (2500, 500, 1024)
    images = dataset.train.read(np.arange(1024), 0)
    assert images.shape == (1024, 5, 5, 3)
    counts = np.bincount(images.ravel(), minlength=256)
    expected = images.size / 256
    assert ((counts - expected) ** 2 / expected).sum() < 256 + 6 * np.sqrt(2 * 256)  # chi-squared
    labels = np.bincount(dataset.train.labels, minlength=7)
    assert labels.sum() == 2500
    assert labels.min() > 2500 / 7 * 0.7


def test_generated_and_synthetic_are_the_same_pure_function_of_the_seed() -> None:
    first, second, synthetic, other = (
        synthetic_on("generated"),
        synthetic_on("generated"),
        synthetic_on("synthetic"),
        synthetic_on("generated", 1),
    )
    index = np.array([2400, 3, 1027, 3])
    images = first.train.read(index, 0)
    assert (images == second.train.read(index, 5)).all()
    assert (images == synthetic.train.read(index, 0)).all()
    assert (first.train.labels == synthetic.train.labels).all()
    assert (images != other.train.read(index, 0)).mean() > 0.98
    assert (images != first.validation.read(index % 500, 0)).mean() > 0.9
    assert (images[1] == images[3]).all()
    assert (images[1] == images[2]).all(), "1027 is image 3 again"
    assert first.train.labels[3] == first.train.labels[1027]


def test_the_device_makes_the_same_images() -> None:
    spec = Synthetic(seed=9, split="train", image_hwc=(3, 5, 3), num_classes=6, num_distinct=40)
    numbers = np.arange(40, dtype=np.uint32)
    images, labels = jax.jit(lambda n: (synthetic_images(spec, n), synthetic_labels(spec, n)))(numbers)
    assert (np.asarray(images) == synthetic_images(spec, numbers)).all()
    assert (np.asarray(labels) == synthetic_labels(spec, numbers)).all()


def test_distinct_images_are_bounded_by_samples_memory_and_1024() -> None:
    assert distinct_images(10**6, 3072, 2**31) == 1024
    assert distinct_images(12, 3072, 2**31) == 12
    assert distinct_images(10**6, 1000, 40_000) == 10
    assert distinct_images(10**6, 1000, 1) == 1


def test_a_source_cannot_be_written_to() -> None:
    source = memory_source(np.zeros((2, 4, 4, 1), np.uint8), np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="read-only"):
        source.labels[0] = 1
    source.read(np.array([0]), 0)[0] = 1  # what was read is a copy
    assert source.read(np.array([0]), 0).max() == 0


def test_imagenet_without_a_place_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()  # any folder would pass for a class
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="The path of ImageNet is not given") as caught:
        describe_dataset(config_from({"dataset": "imagenet"}).data)
    assert "--generated-data" in caught.value.remedy
