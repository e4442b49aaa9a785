"""Chunks shown by one call in C: crops and views are those of Python, image by image, and damage is noticed."""

import os
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.data.decoding.batch_decoder import FileBackedSamples, FileExtents, batch_decoder
from headrace.data.decoding.crop import CROP_RULES, CropRule, draws, random_crop
from headrace.data.decoding.image_source import ViewSpec, decoded_source
from headrace.data.decoding.jpeg import jpeg_decoder
from headrace.data.sets.bad_samples import BadSamples
from headrace.data.sets.formats.folder import read_folders
from headrace.data.sets.image_sets import open_image_set
from headrace.data.sets.pack import open_pack, write_pack
from headrace.data.sets.samples import Samples
from headrace.data.sets.source import Source
from headrace.data.sets.tf_example import Floats, Values, write_example
from headrace.data.sets.tfrecord_file import write_records

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

    turned = [Image.Exif() for _ in range(2, 9)]
    for orientation, exif in enumerate(turned, start=2):
        exif[0x0112] = orientation
    forms = [
        ((300, 400), {}),
        ((900, 700), {"subsampling": 0}),
        ((64, 50), {"restart_marker_rows": 1}),
        ((120, 130), {"progressive": True}),
        *(((203, 140 + 60 * number), {"exif": exif}) for number, exif in enumerate(turned)),
        ((33, 200), {"quality": 40}),
    ]
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            place = tmp_path / "set" / split / name
            place.mkdir(parents=True)
            for number, (hw, form) in enumerate(forms):
                (place / f"{number:02}.jpg").write_bytes(encode(smooth(*hw, seed=number), **form))
            (place / "96.jpg").write_bytes(encode(smooth(90, 80)[:, :, 0]))
            (place / "97.png").write_bytes(encode(smooth(90, 80), "PNG"))
            (place / "98.jpg").write_bytes(encode(smooth(200, 180))[:-300])
            (place / "99.jpg").write_bytes(b"")
    return tmp_path / "set"


def source_and_bad(samples: Samples, rule: CropRule | None, channels: int = 3) -> tuple[Source, BadSamples]:
    """Return a training source that allows for any number of bad samples; without a rule, of whole images."""
    spec = ViewSpec(size=48, crop=rule, seed=-3, channels=channels, whole=rule is None)
    bad = BadSamples("set", len(samples), 1.0)
    return decoded_source(samples, spec, "train", bad), bad


def source(samples: Samples, rule: CropRule | None) -> Source:
    return source_and_bad(samples, rule)[0]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_crops_are_those_of_python(rule: CropRule) -> None:
    """With and without objects that a crop has to cover."""
    for seed in (0, 7, 2**31 + 5):
        decoder = batch_decoder(rule, seed, 224, 3)
        assert decoder is not None
        rng = np.random.default_rng(seed)
        hw = rng.integers(1, np.resize([30, 3000, 600], (1500, 1)) + np.zeros((1, 2), int))
        epochs, samples = rng.integers(0, 2**32, (2, 1500))
        counts = rng.integers(0, 3, 1500)
        objects = np.sort(rng.random((int(counts.sum()), 2, 2)), axis=1).reshape(-1, 4).astype(np.float32)
        ends = np.cumsum(counts)
        alone, covering = decoder.crops(hw, samples, epochs), decoder.crops(hw, samples, epochs, (objects, ends))
        for number, (size, epoch, sample) in enumerate(zip(hw.tolist(), epochs, samples, strict=True)):
            address = seed, int(epoch), int(sample)
            boxes = objects[ends[number] - counts[number] : ends[number]].tolist()
            assert tuple(alone[number]) == random_crop(tuple(size), rule, draws(*address))
            assert tuple(covering[number]) == random_crop(tuple(size), rule, draws(*address), boxes)


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("rule", [*RULES[:2], None], ids=["reference", "torchvision", "whole"])
def test_views_are_those_of_one_at_a_time(
    folder: Path, rule: CropRule | None, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = read_folders(folder, 0.0).train
    index, epochs = np.array([*range(len(samples)), 3, 0, 0]), np.arange(len(samples) + 3) % 5
    together, bad = source_and_bad(samples, rule, channels)
    shown = together.read(index, epochs)
    monkeypatch.setattr("headrace.data.decoding.image_source.batch_decoder", lambda *_: None)
    alone, bad_alone = source_and_bad(samples, rule, channels)
    assert (shown == alone.read(index, epochs)).all()
    sizes = together.original_hw
    assert sizes is not None
    assert (sizes == alone.original_hw).all()
    assert sizes.all()
    assert [row["sample"] for row in bad.rows] == [row["sample"] for row in bad_alone.rows]
    assert len(bad) == 4, "two that were cut short, two that are empty"


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
    assert decoder.decode_into(places, index, index, out)[0].all(), "every packed image is an upright baseline JPEG"
    shown = source(samples, rule).read(index, 2)
    with monkeypatch.context() as changed:
        changed.setattr("headrace.data.decoding.image_source.batch_decoder", lambda *_: None)
        assert (shown == source(samples, rule).read(index, 2)).all()
    content = bytearray(path.read_bytes())
    content[int(places.offsets[4]) + int(places.lengths[4]) - 3] ^= 1  # at the end: no crop would notice
    path.write_bytes(content)
    assert decoder.decode_into(places, index, index, out)[0].tolist() == [number != 4 for number in range(len(index))]
    damaged, bad = source_and_bad(open_pack(path).train, rule)
    damaged.read(index, 2)
    assert [(row["sample"], row["problem"]) for row in bad.rows] == [(4, "the checksum is wrong")]


def test_files_that_are_gone_or_no_files_are_left_to_python(tmp_path: Path) -> None:
    decoder = batch_decoder(CROP_RULES["torchvision"], 0, 16, 3)
    assert decoder is not None
    (tmp_path / "good.jpg").write_bytes(encode(smooth(40, 30)))
    paths = [bytes(tmp_path / name) for name in ("good.jpg", "gone.jpg", ".", "good.jpg")]
    none, out = np.full(4, -1), np.zeros((4, 16, 16, 3), np.uint8)
    zero = np.zeros(4, np.int64)
    places = FileExtents(paths, np.array([0, 0, 0, 10**9]), np.array([-1, -1, -1, 5]), none, zero, none)
    assert decoder.decode_into(places, np.arange(4), np.zeros(4, int), out)[0].tolist() == [True, False, False, False]


def tar_of(folder: Path, place: Path) -> Path:
    """Write the training images to a tar shard, and one to another for validation."""
    place.mkdir()
    files = sorted((folder / "train").rglob("*.*"))
    for name, chosen in (("train.tar", files), ("val.tar", files[:1])):
        with tarfile.open(place / name, "w") as archive:
            for number, file in enumerate(chosen):
                label = place / "label"
                label.write_text(str(int(file.parent.name == "dog")))
                archive.add(file, f"{number:03}{file.suffix}")
                archive.add(label, f"{number:03}.cls")
                label.unlink()
    return place


def records_of(folder: Path, place: Path) -> Path:
    """Write the training images to TFRecords, each with two objects."""
    place.mkdir()
    rng = np.random.default_rng(0)
    records = []
    for number, file in enumerate(sorted((folder / "train").rglob("*.*"))):
        sides = np.sort(rng.random((2, 2, 2)), axis=1)
        features: dict[str, Values] = {
            f"image/object/bbox/{side}": Floats(sides[:, at, axis].tolist())
            for side, at, axis in (("ymin", 0, 0), ("xmin", 0, 1), ("ymax", 1, 0), ("xmax", 1, 1))
        }
        features |= {"image/encoded": [file.read_bytes()], "image/filename": [f"{number:03}".encode()]}
        records.append(write_example(features | {"image/class/label": [1 + int(file.parent.name == "dog")]}))
    write_records(place / "train-00000-of-00001", records)
    write_records(place / "validation-00000-of-00001", records[:1])
    return place


@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
def test_shards_are_decoded_together(folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every good baseline JPEG, turned or not, and what is decoded is what one at a time gives."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = (tar_of if kind == "tar" else records_of)(folder, tmp_path / kind)
    data = config_from({"dataset": kind, "dataset_path": str(place)}).data
    for attempt in ("built", "from the cache"):
        samples, rule = open_image_set(data, kind).train, CROP_RULES["reference"]
        assert isinstance(samples, FileBackedSamples), attempt
        index = np.arange(len(samples))
        decoder = batch_decoder(rule, -3, 48, 3)
        assert decoder is not None
        out = np.zeros((len(index), 48, 48, 3), np.uint8)
        done, _ = decoder.decode_into(samples.extents(index), index, index, out)
        assert done.sum() == 2 * 12, "all but one that is progressive, one PNG and two that are broken, of each class"
    shown = source(samples, rule).read(index, index)
    assert (shown[done] == out[done]).all()
    monkeypatch.setattr("headrace.data.decoding.image_source.batch_decoder", lambda *_: None)
    assert (source(samples, rule).read(index, index) == shown).all()


def test_a_record_with_a_wrong_checksum_is_left_to_python(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = records_of(folder, tmp_path / "records")
    data = config_from({"dataset": "tfrecord", "dataset_path": str(place)}).data
    samples = open_image_set(data, "tfrecord").train
    assert isinstance(samples, FileBackedSamples)
    places = samples.extents(np.arange(3))
    content = bytearray((place / "train-00000-of-00001").read_bytes())
    content[int(places.offsets[1] + places.lengths[1]) - 8] ^= 1  # in the label, which no decoder would notice
    (place / "train-00000-of-00001").write_bytes(content)
    damaged, bad = source_and_bad(open_image_set(data, "tfrecord").train, CROP_RULES["reference"])
    damaged.read(np.arange(3), 0)
    assert [(row["sample"], row["problem"]) for row in bad.rows] == [(1, "the record's checksum is wrong")]


def test_a_fifo_in_the_place_of_an_image_does_not_block(tmp_path: Path) -> None:
    """Opening one waits for a writer; it is left to Python, which reports it."""
    decoder = batch_decoder(CROP_RULES["torchvision"], 0, 8, 3)
    if decoder is None:
        pytest.skip("the compiled decoder is not there")
    os.mkfifo(tmp_path / "x.jpg")
    column, whole, zero = np.full(1, -1, np.int64), np.full(1, 100, np.int64), np.zeros(1, np.int64)
    for lengths in (column, whole):
        places = FileExtents([os.fsencode(tmp_path / "x.jpg")], zero, lengths, column, zero, column)
        out = np.zeros((1, 8, 8, 3), np.uint8)
        thread = threading.Thread(target=decoder.decode_into, args=(places, zero, zero, out), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "it waits for a writer"
