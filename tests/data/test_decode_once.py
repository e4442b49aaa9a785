"""Images decoded once and cropped on the device: the pixels, the boxes, where they are kept, resuming, refusals."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from headrace.checkpoint.store import list_checkpoints
from headrace.cli.main import main
from headrace.config.load import config_from, resolve
from headrace.core.errors import ConfigError
from headrace.data.augmentation.crop_resize import crop_resize
from headrace.data.dataset import DataSet, open_dataset
from headrace.data.decoding import working_source
from headrace.data.decoding.crop import CROP_RULES, draws, random_crop
from headrace.data.feeding.block_reader import feed_options
from headrace.data.feeding.feed import CallSpans, TrainFeed
from headrace.data.feeding.fetch import fetch
from headrace.data.feeding.order import StepShape
from headrace.data.sets.source import kept
from headrace.engine.visible import Visible
from headrace.run import choices

from .image_files import encode, smooth

SHAPE = StepShape(
    seed=3,
    num_samples=9,
    shuffle=True,
    updates_per_epoch=2,
    gradient_accumulation_count=1,
    num_replicas=1,
    micro_batch_size=4,
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Write images of several shapes, one of them broken."""
    for split, count in (("train", 4), ("val", 2)):
        for label, name in enumerate("ab"):
            folder = tmp_path / "set" / split / name
            folder.mkdir(parents=True)
            for number in range(count + (label if split == "train" else 0)):
                hw = (120 + 17 * number, 190 - 21 * number)
                (folder / f"{number}.jpg").write_bytes(encode(smooth(*hw, seed=10 * label + number)))
    (tmp_path / "set" / "train" / "a" / "1.jpg").write_bytes(b"broken")
    return tmp_path / "set"


def data_of(place: Path, **options: Any):
    given = {"dataset": "folder", "dataset_path": str(place), "image_size": 40, "train_crop": "torchvision"}
    return config_from(given | {"max_bad_samples": 0.2} | options).data


def blocks_of(dataset: DataSet, data: Any, put: Any, first_step: int = 0) -> tuple[TrainFeed, list[dict]]:
    feed = TrainFeed(
        dataset.train,
        SHAPE,
        CallSpans(first_step=first_step, last_step=4, max_steps=2),
        feed_options(data, dataset.info, 3, 1),
        put,
    )
    blocks = [feed.next() for _ in range((4 - first_step) // 2)]
    feed.close()
    return feed, blocks


@pytest.mark.parametrize("size", [(32, 32), (20, 45), (100, 90)])
def test_the_device_resizes_boxes_as_pillow_does(size: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (12, 64, 56, 3)).astype(np.uint8)
    top, left = rng.random(12) * 20, rng.random(12) * 20
    boxes = np.stack([top, left, 1 + rng.random(12) * 40, 1 + rng.random(12) * 34], 1).astype(np.float32)
    boxes[0] = 0, 0, 64, 56
    boxes[1] = 3, 5, 32, 24
    found = np.asarray(jax.jit(crop_resize, static_argnums=2)(images, boxes, size)).astype(int)
    for image, box, view in zip(images, boxes.astype(float), found, strict=True):
        y0, x0, height, width = box
        touched = image[int(y0) : int(np.ceil(y0 + height)), int(x0) : int(np.ceil(x0 + width))]
        y0, x0 = y0 % 1, x0 % 1
        edges = (x0, y0, x0 + width, y0 + height)
        want = Image.fromarray(touched).resize((size[1], size[0]), Image.Resampling.BILINEAR, box=edges)
        assert np.abs(view - np.asarray(want)).max() <= 1, "Pillow rounds after each of its two passes"


def test_crops_are_those_of_the_streaming_source_in_the_kept_image(place: Path, put) -> None:
    """Every view is Pillow's crop and resize of the original, but for what the working size loses."""
    data = data_of(place, decode_once="on", normalization="none", train_augmentation="none")
    dataset = open_dataset(data, 3)
    assert dataset.train.boxes is not None
    assert (dataset.info.sent_hw, dataset.info.varies) == ((80, 80), False)
    feed, blocks = blocks_of(dataset, data, put)
    assert feed.resident is not None
    spec = feed_options(data, dataset.info, 3, 1).preprocess
    fetch_views = jax.jit(partial(fetch, spec=spec, train=True))
    files = sorted((place / "train").rglob("*.jpg"))
    files[1] = files[2]  # the broken image is replaced by the next of its class
    worst = 0.0
    for call, block in enumerate(blocks):
        assert "images" not in block
        for step in range(2):
            micro = {key: np.asarray(block[key])[step, 0] for key in ("index", "box")}
            views, labels = fetch_views(feed.resident, micro | {"epoch": np.asarray(block["epoch"])[step]})
            for view, label, sample in zip(
                np.asarray(views), np.asarray(labels), np.asarray(micro["index"]), strict=True
            ):
                image = Image.open(files[sample])
                crop = random_crop((image.height, image.width), CROP_RULES["torchvision"], draws(3, call, int(sample)))
                edges = (crop[1], crop[0], crop[1] + crop[3], crop[0] + crop[2])
                want = np.asarray(image.crop(edges).resize((40, 40), Image.Resampling.BILINEAR)).astype(float)
                worst = max(worst, np.abs(view - want).mean())
                assert label == int(sample >= 4)
    assert worst < 3


def test_it_does_not_matter_where_images_are_kept_or_where_a_run_starts(
    place: Path, put, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for options in ({}, {"dataset_cache": "host"}, {"dataset_cache": "host"}):
        data = data_of(place, decode_once="on", **options)
        dataset = open_dataset(data, 3)
        if len(found) == 2:
            monkeypatch.setattr(working_source, "batch_decoder", lambda *_: None)  # crops drawn by Python
        feed, blocks = blocks_of(dataset, data, put)
        assert (feed.resident is None) == bool(options)
        spec = feed_options(data, dataset.info, 3, 1).preprocess
        fetch_views = jax.jit(partial(fetch, spec=spec, train=True))
        views = []
        for block in blocks:
            micro = {key: np.asarray(rows)[1, 0] for key, rows in block.items() if key not in ("epoch", "seed")}
            views.append(np.asarray(fetch_views(feed.resident, micro | {"epoch": np.asarray(block["epoch"])[1]})[0]))
        found.append((np.stack(views), [np.asarray(block["box"]) for block in blocks]))
        _, later = blocks_of(open_dataset(data, 3), data, put, first_step=2)
        assert (np.asarray(later[0]["box"]) == found[-1][1][1]).all()
    for views, boxes in found[1:]:
        assert (views == found[0][0]).all()
        assert all((box == other).all() for box, other in zip(boxes, found[0][1], strict=True))


def test_images_kept_in_host_memory_are_decoded_once(place: Path, put) -> None:
    data = data_of(place, decode_once="on", dataset_cache="host")
    dataset = open_dataset(data, 3)
    train = kept(dataset.train)
    first = train.read(np.arange(9), 0)
    for file in (place / "train").rglob("*.jpg"):
        file.unlink()
    assert (train.read(np.arange(9), 1) == first).all()


@pytest.mark.parametrize(
    ("options", "once"),
    [
        ({}, True),
        ({"dataset_device_budget": "100KiB"}, False),
        ({"train_crop": "valid"}, False),
        ({"dataset_cache": "raw"}, False),
        ({"accelerator_side_preprocess": False}, False),
        ({"resize_antialias": False}, False),
        ({"sent_image_size": 50}, False),
        ({"sent_image_size": 50, "decode_once": "on"}, True),
        ({"decode_once": "off"}, False),
    ],
)
def test_the_automatic_choice(place: Path, options: dict, once: bool) -> None:
    assert open_dataset(data_of(place, **options), 0).info.decoded_once == once


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train_crop": "valid"}, "nothing is cropped at random"),
        ({"dataset_cache": "none"}, "dataset_cache is none"),
        ({"resize_antialias": False}, "resize_antialias is off"),
        ({"dataset_device_budget": "100KiB", "dataset_host_budget": "100KiB"}, "exceed dataset_host_budget"),
    ],
)
def test_what_cannot_be_decoded_once_is_refused(place: Path, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_dataset(data_of(place, decode_once="on", **options), 0)


def test_beyond_the_device_budget_images_are_kept_in_host_memory(place: Path) -> None:
    data = data_of(place, decode_once="on", dataset_device_budget="100KiB")
    cache = feed_options(data, open_dataset(data, 0).info, 0, 1).cache
    assert cache.where == "host"
    assert "kept in host memory" in cache.reason


def test_only_accelerators_crop_without_being_asked(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"dataset_path": str(place), "image_size": 32, "train_crop": "torchvision"}

    def chosen(platform: str, **options: Any) -> str:
        monkeypatch.setattr(choices, "visible_devices", lambda _, **__: Visible(platform=platform, count=1))
        return choices.with_replicas(resolve(asked | options, environ={})).config.data.decode_once

    assert (chosen("cpu"), chosen("gpu"), chosen("tpu")) == ("off", "auto", "auto")
    assert chosen("cpu", decode_once="on") == "on"


def test_a_run_keeps_its_choice(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted run continues to the same weights, also where the automatic choice would now be another."""
    words = ["--dataset-path", str(place), "--image-size", "32", "--train-crop", "torchvision", "--model-name"]
    words += ["toy_model", "--micro-batch-size", "4", "--max-bad-samples", "0.2", "--no-validation"]
    words += ["--lr-schedule", "const", "--lr-warmup-params", "none", "--log-dir"]
    command = ["train", *words, str(tmp_path / "runs"), "--ckpts-per-epoch", "1"]
    monkeypatch.setattr(choices, "visible_devices", lambda platform, **_: Visible(platform="gpu", count=1))
    assert main([*command, "--run-name", "whole", "--num-epochs", "2"]) == 0
    assert main([*command, "--run-name", "part", "--num-epochs", "1"]) == 0
    saved = json.loads((tmp_path / "runs" / "part" / "config.json").read_text())
    assert saved["values"]["decode_once"] == "on"
    again = ["resume", str(tmp_path / "runs" / "part"), "--num-epochs", "2"]
    assert main([*again, "--dataset-device-budget", "100KiB"]) == 0
    assert "decoded once as 64x64; kept in host memory" in capsys.readouterr().out
    last = [list_checkpoints(tmp_path / "runs" / name / "checkpoints")[-1] for name in ("whole", "part")]
    assert last[0].name == last[1].name
    tensors = [(path / "state.safetensors").read_bytes() for path in last]
    assert tensors[0] == tensors[1]
    assert main([*again, "--decode-once", "off"]) != 0
    assert "another decode_once" in capsys.readouterr().err
