"""Chunks shown by one call in C: crops and views are those of Python, image by image, and damage is noticed."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from headrace.data.decoding import jpeg as show_chunk
from headrace.data.decoding.crop import CROP_RULES, CropRule, draws, random_crop
from headrace.data.decoding.image_source import ImageSource, ViewSpec
from headrace.data.decoding.jpeg import batch_decoder, jpeg_decoder, rule_of
from headrace.data.sets.file_problem import BadSamples
from headrace.data.sets.folder import read_folders
from headrace.data.sets.packed import open_pack, write_pack
from headrace.data.sets.samples import Samples

from .image_files import encode, smooth

RULES = [*CROP_RULES.values(), CropRule(area=(0.5, 0.9), aspect=(1.5, 2.0), reference=False)]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if jpeg_decoder() is None:
        pytest.skip("not compiled")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write images of many kinds: large, small, grey, turned, progressive, PNG, broken."""
    from PIL import Image

    turned = Image.Exif()
    turned[0x0112] = 6
    forms = [
        ((300, 400), {}),
        ((900, 700), {"subsampling": 0}),
        ((64, 50), {"restart_marker_rows": 1}),
        ((120, 130), {"progressive": True}),
        ((100, 140), {"exif": turned}),
        ((33, 200), {"quality": 40}),
    ]
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            place = tmp_path / "set" / split / name
            place.mkdir(parents=True)
            for number, (hw, form) in enumerate(forms):
                (place / f"{number}.jpg").write_bytes(encode(smooth(*hw, seed=number), **form))
            (place / "6.jpg").write_bytes(encode(smooth(90, 80)[:, :, 0]))
            (place / "7.png").write_bytes(encode(smooth(90, 80), "PNG"))
            (place / "8.jpg").write_bytes(encode(smooth(200, 180))[:-300])
            (place / "9.jpg").write_bytes(b"")
    return tmp_path / "set"


def source(samples: Samples, rule: CropRule, channels: int = 3) -> ImageSource:
    """Return a training source that allows for any number of bad samples."""
    return ImageSource(
        samples, ViewSpec(size=48, crop=rule, seed=-3, channels=channels), "train", BadSamples("set", len(samples), 1.0)
    )


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_crops_are_those_of_python(rule: CropRule) -> None:
    decoder = jpeg_decoder()
    assert decoder is not None
    call = decoder.library.hr_random_crop
    for seed in (0, 7, 2**31 + 5):
        given = rule_of(rule, seed, 224, 3)
        rng = np.random.default_rng(seed)
        for number in range(1500):
            height, width = (int(side) for side in rng.integers(1, [30, 3000, 600][number % 3], 2))
            epoch, sample = int(rng.integers(0, 2**32)), int(rng.integers(0, 2**32))
            found = (ctypes.c_int32 * 4)()
            call(height, width, ctypes.byref(given), ctypes.c_uint32(epoch), ctypes.c_uint32(sample), found)
            assert tuple(found) == random_crop((height, width), rule, draws(seed, epoch, sample))


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("rule", RULES[:2], ids=["reference", "torchvision"])
def test_views_are_those_of_one_at_a_time(
    folder: Path, rule: CropRule, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = read_folders(folder, 0.0).train
    index, epochs = np.array([*range(len(samples)), 3, 0, 0]), np.arange(len(samples) + 3) % 5
    together = source(samples, rule, channels)
    shown = together.read(index, epochs)
    monkeypatch.setattr("headrace.data.decoding.image_source.batch_decoder", lambda *_: None)
    alone = source(samples, rule, channels)
    assert (shown == alone.read(index, epochs)).all()
    assert [row["sample"] for row in together.bad.rows] == [row["sample"] for row in alone.bad.rows]
    assert len(together.bad) == 4, "two that were cut short, two that are empty"


def test_packed_images_are_shown_and_checked(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, path = read_folders(folder, 0.0), tmp_path / "set.hrp"
    write_pack(path, found.class_names, (found.train, found.validation), (64, 90), 2)
    samples = open_pack(path).train
    rule, index = CROP_RULES["torchvision"], np.arange(len(samples))
    places = samples.extents(index)
    decoder = batch_decoder(rule, 0, 48, 3)
    assert places is not None
    assert decoder is not None
    out = np.zeros((len(index), 48, 48, 3), np.uint8)
    assert decoder.decode_into(places, index, index, out).all(), "every packed image is an upright baseline JPEG"
    shown = source(samples, rule).read(index, 2)
    with monkeypatch.context() as changed:
        changed.setattr("headrace.data.decoding.image_source.batch_decoder", lambda *_: None)
        assert (shown == source(samples, rule).read(index, 2)).all()
    content = bytearray(path.read_bytes())
    content[int(places.offsets[4]) + int(places.lengths[4]) - 3] ^= 1  # at the end: no crop would notice
    path.write_bytes(content)
    assert decoder.decode_into(places, index, index, out).tolist() == [number != 4 for number in range(len(index))]
    damaged = source(open_pack(path).train, rule)
    damaged.read(index, 2)
    assert [(row["sample"], row["problem"]) for row in damaged.bad.rows] == [(4, "the checksum is wrong")]


def test_files_that_are_gone_or_no_files_are_left_to_python(tmp_path: Path) -> None:
    decoder = batch_decoder(CROP_RULES["torchvision"], 0, 16, 3)
    assert decoder is not None
    (tmp_path / "good.jpg").write_bytes(encode(smooth(40, 30)))
    paths = [bytes(tmp_path / name) for name in ("good.jpg", "gone.jpg", ".", "good.jpg")]
    none, out = np.full(4, -1), np.zeros((4, 16, 16, 3), np.uint8)
    places = show_chunk.FileExtents(paths, np.array([0, 0, 0, 10**9]), np.array([-1, -1, -1, 5]), none)
    assert decoder.decode_into(places, np.arange(4), np.zeros(4, int), out).tolist() == [True, False, False, False]
