"""Training images that are sent larger than the network sees them: the device cuts its image out at random."""

from pathlib import Path

import jax
import numpy as np
import pytest

from headrace.cli.main import main
from headrace.config.load import config_from
from headrace.core.errors import ConfigError
from headrace.data.augmentation.preprocess import draw_offsets, preprocess
from headrace.data.dataset import describe_dataset, open_dataset
from headrace.data.feeding.block_reader import BlockReader, feed_options
from headrace.plan.data_memory import sent_data

from .image_files import write_classes


@pytest.fixture
def place(tmp_path: Path) -> str:
    """Write a small set."""
    write_classes(tmp_path / "train", {"cat": 6, "dog": 5}, hw=(90, 120))
    write_classes(tmp_path / "val", {"cat": 2, "dog": 2}, hw=(90, 120), first_seed=40)
    return str(tmp_path)


def options(place: str, **more: object) -> dict:
    return {"dataset": "auto", "dataset_path": place, "image_size": 32, "sent_image_size": 40, **more}


@pytest.mark.parametrize("crop", ["valid", "torchvision"])
def test_the_device_cuts_its_image_out_of_what_is_sent(place: str, crop: str) -> None:
    data = config_from(options(place, train_crop=crop, normalization="none")).data
    dataset = open_dataset(data, 3)
    assert dataset.info.image_hwc == (32, 32, 3)
    assert dataset.info.augmentation == "flip-crop"
    assert dataset.info.varies == (crop == "torchvision")
    assert dataset.validation.image_hwc == (32, 32, 3)
    spec = feed_options(data, dataset.info, 3, 1).preprocess
    index = np.arange(11)
    sent = dataset.train.read(index, 2)
    assert sent.shape == (11, 40, 40, 3)
    down, right, flip = draw_offsets(index, 2, spec, (9, 9))
    seen = preprocess(sent, index, 2, spec, train=True)
    on_device = np.asarray(jax.jit(lambda x, i: preprocess(x, i, 2, spec, train=True))(sent, index))
    assert (seen == on_device).all()
    for sample in range(11):
        image = sent[sample, :, ::-1] if flip[sample] else sent[sample]
        want = image[down[sample] : down[sample] + 32, right[sample] : right[sample] + 32]
        assert (seen[sample] == want).all()
    assert len({*zip(down.tolist(), right.tolist(), strict=True)}) > 5, "at random"
    part = preprocess(sent[[7, 2]], index[[7, 2]], 2, spec, train=True)
    assert (part == seen[[7, 2]]).all(), "whatever batch it is in"


def test_blocks_have_the_size_that_is_sent(place: str) -> None:
    data = config_from(options(place)).data
    dataset = open_dataset(data, 0)
    feed = feed_options(data, dataset.info, 0, 1)
    reader = BlockReader(dataset.train, feed, train=True)
    block = reader.read(np.arange(8).reshape(2, 4), 0)
    reader.close()
    assert block["images"].shape == (2, 4, 40, 40, 3)
    plan = type("Batch", (), {"micro_batch_size": 4, "gradient_accumulation_count": 2})
    assert sent_data(feed, dataset.info, plan).image_bytes == 40 * 40 * 3  # type: ignore[arg-type]
    assert "sent as 40x40" in describe_dataset(data).place


@pytest.mark.parametrize("cache", ["auto", "host"])
def test_a_run_trains_on_it(
    place: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "train",
        "--dataset-path",
        place,
        "--image-size",
        "32",
        "--sent-image-size",
        "40",
        "--model-name",
        "toy_model",
    ]
    words += ["--micro-batch-size", "2", "--num-epochs", "1", "--dataset-cache", cache]
    assert main(words) == 0
    assert "sent as 40x40" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sent_image_size": 31}, "sent_image_size is 31, but the image size is 32"),
        ({"train_augmentation": "flip"}, "sent_image_size 40 .* with train_augmentation flip"),
        ({"dataset": "digits", "image_size": None, "dataset_path": "."}, "sent_image_size 40"),
        ({"dataset": "imagenet", "generated_data": True}, "are synthetic"),
    ],
)
def test_what_does_not_go_together_is_refused(place: str, more: dict, words: str) -> None:
    given = {name: value for name, value in options(place, **more).items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        describe_dataset(config_from(given).data)
