"""The decoding source: what it reads is the crop that was drawn, whichever thread reads it; bad images and limits."""

import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace.config.load import config_from
from headrace.core.errors import ConfigError, DataError
from headrace.data.dataset import open_dataset
from headrace.data.decoding.crop import CROP_RULES, draws, random_crop
from headrace.data.decoding.image_source import ViewSpec, decoded_source
from headrace.data.feeding.block_reader import feed_options
from headrace.data.feeding.cache import decide_cache, make_resident
from headrace.data.feeding.eval_feed import EvalFeed
from headrace.data.feeding.feed import CallSpans, TrainFeed
from headrace.data.feeding.order import StepShape, epoch_order
from headrace.data.sets.bad_samples import BadSamples
from headrace.data.sets.cached_samples import Budget, CachedSamples
from headrace.data.sets.samples import Content

from .image_files import ObjectSamples, encode, smooth, write_classes


def opened(path: Path, **options: Any):
    return open_dataset(config_from({"dataset": "folder", "dataset_path": str(path)} | options).data, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_classes(tmp_path / "train", {"a": 4, "b": 5}, (150, 190))
    write_classes(tmp_path / "val", {"a": 2, "b": 2}, (190, 150), first_seed=30)
    return tmp_path


def test_training_reads_the_drawn_crop(folder: Path) -> None:
    source = opened(folder, image_size=96, train_crop="torchvision", decode_once="off").train
    images = source.read(np.array([7, 2]), np.array([4, 5]))
    for image, sample, epoch in zip(images, (7, 2), (4, 5), strict=True):
        name = f"b/{sample - 4}.jpg" if sample >= 4 else f"a/{sample}.jpg"
        original = Image.open(folder / "train" / name)
        top, left, height, width = random_crop((150, 190), CROP_RULES["torchvision"], draws(3, epoch, sample))
        want = original.crop((left, top, left + width, top + height)).resize((96, 96), Image.Resampling.BILINEAR)
        difference = np.abs(image.astype(int) - np.asarray(want))
        assert difference.max() <= 8, "the quick decoding of training"
        assert difference.mean() < 2


def test_validation_reads_the_centre(folder: Path) -> None:
    source = opened(folder, image_size=96).validation
    image = Image.open(folder / "val" / "b" / "1.jpg").resize((109, 138), Image.Resampling.BILINEAR)
    want = np.asarray(image)[21:117, 6:102]  # 96 * 256 // 224 = 109; 190 * 109 / 150 = 138.07
    assert (source.read(np.array([3]), 0)[0] == want).all()
    assert (source.read(np.array([3]), 9) == source.read(np.array([3]), 0)).all()


def test_large_images_are_decoded_small_where_that_is_asked_for(tmp_path: Path) -> None:
    """1/4 of the size is decoded; the result is near that of decoding everything."""
    write_classes(tmp_path, {"a": 2, "b": 2}, (700, 900))
    source = opened(tmp_path, image_size=96, eval_reduced_decoding=True).validation
    assert source.samples is not None
    image = source.read(np.array([0]), 0)[0]
    whole = Image.open(source.samples.name(0)).resize((round(900 * 109 / 700), 109), Image.Resampling.BILINEAR)
    left = (whole.width - 96) // 2
    difference = np.abs(image.astype(int) - np.asarray(whole)[6:102, left : left + 96])
    assert 0 < difference.mean() < 1
    assert difference.max() <= 8


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_feeds_give_the_same_images_at_any_number_of_threads(folder: Path, put, threads: int) -> None:
    """Two calls of two steps, resumed in the middle of an epoch: the blocks are those of single reads."""
    data = config_from(
        {
            "dataset": "folder",
            "dataset_path": str(folder),
            "image_size": 100,
            "pipeline_num_parallel": threads,
            "train_crop": "torchvision",
            "decode_once": "off",
        }
    ).data
    dataset = open_dataset(data, 3)
    options = feed_options(data, dataset.info, 3, 1)
    assert options.cache.where == "host"
    shape = StepShape(
        seed=3,
        num_samples=9,
        shuffle=True,
        updates_per_epoch=4,
        gradient_accumulation_count=1,
        num_replicas=1,
        micro_batch_size=2,
    )
    feed = TrainFeed(dataset.train, shape, CallSpans(first_step=2, last_step=6, max_steps=2), options, put)
    for call in range(2):
        block = feed.next()
        for step in range(2):
            number = 2 + 2 * call + step
            samples = epoch_order(3, number // 4, 9, True)[number % 4 * 2 :][:2]
            want = dataset.train.read(samples, number // 4)
            assert (np.asarray(block["images"][step, 0]) == want).all()
            assert (np.asarray(block["labels"][step, 0]) == dataset.train.labels[samples]).all()
    feed.close()


def test_an_evaluation_has_every_sample_once(folder: Path, put) -> None:
    data = config_from({"dataset": "folder", "dataset_path": str(folder), "image_size": 100}).data
    dataset = open_dataset(data, 3)
    feed = EvalFeed(dataset.validation, 3, 1, feed_options(data, dataset.info, 3, 1), put)
    seen = [int(i) for block in feed for i, m in zip(block["index"].ravel(), block["mask"].ravel(), strict=True) if m]
    feed.close()
    assert seen == [0, 1, 2, 3]


def test_images_that_do_not_vary_can_lie_on_the_device(folder: Path, put) -> None:
    data = config_from({"dataset": "folder", "dataset_path": str(folder), "image_size": 48}).data
    dataset = open_dataset(data, 3)
    assert decide_cache(dataset.info, data, 1).where == "device"
    resident = make_resident(dataset.train, put)
    assert (np.asarray(resident["images"]) == dataset.train.read(np.arange(9), 0)).all()
    given = {"dataset": "folder", "dataset_path": str(folder), "dataset_cache": "device", "decode_once": "off"}
    varying = config_from(given).data
    with pytest.raises(ConfigError, match="cropped anew in every epoch"):
        decide_cache(open_dataset(varying, 0).info, varying, 1)


def test_a_bad_image_is_replaced_by_the_next_of_its_class(folder: Path, tmp_path: Path) -> None:
    good = opened(folder, image_size=100, train_crop="valid").train.read(np.arange(9), 0)
    (folder / "train" / "a" / "1.jpg").write_bytes(b"nonsense")
    whole = (folder / "train" / "b" / "4.jpg").read_bytes()
    (folder / "train" / "b" / "4.jpg").write_bytes(whole[: len(whole) // 2])
    dataset = opened(folder, image_size=100, train_crop="valid", max_bad_samples=0.2)
    listed = tmp_path / "bad.jsonl"
    assert dataset.bad is not None
    dataset.bad.write_to(listed)
    dataset.train.read(np.arange(9), 0)
    images = dataset.train.read(np.arange(9), 0)
    want = good[[0, 2, 2, 3, 4, 5, 6, 7, 4]]
    assert (images == want).all()
    assert dataset.train.labels.tolist() == [0] * 4 + [1] * 5
    rows = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [(row["split"], row["sample"], Path(row["name"]).name) for row in rows] == [
        ("train", 1, "1.jpg"),
        ("train", 8, "4.jpg"),
    ]
    assert "not an image" in rows[0]["problem"]
    assert "2 bad sample(s) were replaced" in dataset.bad.describe()
    resumed = opened(folder, image_size=100, train_crop="valid", max_bad_samples=0.2)
    assert resumed.bad is not None
    resumed.bad.write_to(listed)
    resumed.train.read(np.arange(9), 0)
    assert len(listed.read_text().splitlines()) == 2, "a resumed run lists none twice"


def test_a_list_of_bad_images_that_was_cut_off_is_continued(tmp_path: Path) -> None:
    listed = tmp_path / "bad.jsonl"
    listed.write_text('{"split": "train", "sample": 1, "name": "a", "problem": "b"}\n{"split": "tr')
    bad = BadSamples("a set", 10, 1.0)
    for sample in (1, 2):
        bad.add("train", sample, f"{sample}.jpg", "empty")
    bad.write_to(listed)
    assert [json.loads(line)["sample"] for line in listed.read_text().splitlines() if line.endswith("}")] == [1, 2]


def test_too_many_bad_images_stop_the_run(folder: Path) -> None:
    (folder / "train" / "a" / "1.jpg").write_bytes(b"")
    opened(folder, image_size=100).train.read(np.arange(9), 0)  # 0.1 % of 13 is none, but one is always allowed
    with pytest.raises(DataError, match=r"1 bad sample.*a/1.jpg: empty.*max-bad-samples"):
        opened(folder, image_size=100, max_bad_samples=0).train.read(np.arange(9), 0)
    (folder / "train" / "b" / "4.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"2 bad sample.*b/4.jpg: empty.*At most 1 may be bad"):
        opened(folder, image_size=100).train.read(np.arange(9), 0)


def test_a_class_without_a_good_image_is_named(folder: Path) -> None:
    for file in (folder / "val" / "a").iterdir():
        file.write_bytes(b"")
    dataset = opened(folder, image_size=100, max_bad_samples=0.9)
    with pytest.raises(DataError, match="No sample of class 0 in validation can be read"):
        dataset.validation.read(np.array([1]), 0)


def test_bad_samples_are_counted_once_by_many_threads() -> None:
    bad = BadSamples("set", 1000, 0.05)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: bad.add("train", number % 40, "x", "y"), range(4000)))
    assert len(bad) == 40


def test_grey_images(folder: Path) -> None:
    source = opened(folder, image_size=100, num_channels=1).validation
    want = Image.open(folder / "val" / "a" / "0.jpg").convert("L").resize((114, 144), Image.Resampling.BILINEAR)
    assert source.image_hwc == (100, 100, 1)
    assert np.abs(source.read(np.array([0]), 0)[0, :, :, 0].astype(int) - np.asarray(want)[22:122, 7:107]).max() <= 3


def test_objects_that_give_images() -> None:
    class Mine:
        def __len__(self) -> int:
            return 3

        def get(self, number: int) -> tuple[Any, int]:
            pixels = smooth(60, 80, seed=number)
            return (pixels, encode(pixels, "PNG"), pixels[:, :, 0])[number], number

    samples = ObjectSamples(Mine())
    look = ViewSpec(size=56, channels=3)
    source = decoded_source(samples, look, "train", BadSamples("mine", 3, 0))
    assert samples.labels.tolist() == [0, 1, 2]
    images = source.read(np.arange(3), 0)
    for number in (0, 1):
        whole = Image.open(io.BytesIO(encode(smooth(60, 80, seed=number), "PNG"))).resize(
            (85, 64), Image.Resampling.BILINEAR
        )
        assert (images[number] == np.asarray(whole)[4:60, 14:70]).all()
    assert (images[2][:, :, 0] == images[2][:, :, 2]).all()


@pytest.mark.parametrize("form", ["raw", "decoded"])
def test_kept_samples_show_the_same_and_are_read_once(folder: Path, form: str) -> None:
    options = {"image_size": 100, "train_crop": "torchvision", "dataset_cache": form}
    source = opened(folder, **options).train
    first = [source.read(np.arange(9), epoch) for epoch in range(2)]
    for file in (folder / "train" / "a").iterdir():
        file.write_bytes(b"gone")
    again = [source.read(np.arange(9), epoch) for epoch in range(2)]
    assert all((one == other).all() for one, other in zip(first, again, strict=True))


def test_a_sample_that_two_threads_read_at_once_counts_once() -> None:
    together = threading.Barrier(2, timeout=10)

    class Slow:
        labels = np.zeros(9, np.int32)

        def __len__(self) -> int:
            return 9

        def name(self, sample: int) -> str:
            return str(sample)

        def content(self, sample: int) -> Content:
            together.wait()
            return Content(bytes(100))

    budget = Budget(1000)
    kept = CachedSamples(Slow(), budget, decoded=False, channels=3, quick=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(kept.content, [4, 4]))
    assert budget.left == 900


def test_the_host_budget_holds(folder: Path) -> None:
    """An image of 150 x 190 is 85,500 bytes decoded: two fit, the others are read again and show the same."""
    options = {"image_size": 100, "train_crop": "torchvision", "dataset_cache": "decoded"}
    whole = opened(folder, **options).train.read(np.arange(9), 1)
    source = opened(folder, **options, dataset_host_budget="180000").train
    assert (source.read(np.arange(9), 1) == whole).all()
    samples = source.samples
    assert isinstance(samples, CachedSamples)
    assert len(samples._kept) == 2
    assert (source.read(np.arange(9), 1) == whole).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": "cifar10", "dataset_cache": "raw"}, "raw and decoded are for image files"),
        ({"dataset": "folder", "dataset_host_budget": "1GiB"}, "dataset_host_budget 1GiB"),
    ],
)
def test_a_host_cache_that_would_be_ignored_is_refused(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from(options)
