"""TFRecords: checksums, messages and framing against TensorFlow's own bytes and a plain formula; damage."""

import base64
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.load import config_from
from headrace.core.errors import ConfigError, DataError
from headrace.data.dataset import describe_dataset, open_dataset
from headrace.data.decoding.image import BadImage
from headrace.data.sets.build_tfrecords import BuildPlan, build, read_boxes, read_metadata
from headrace.data.sets.crc32c import crc32c_numpy, masked_crc32c
from headrace.data.sets.formats.folder import read_folders
from headrace.data.sets.tf_example import BadMessage, Floats, read_example, write_example
from headrace.data.sets.tfrecord_file import walk_records, write_records
from headrace.data.sets.tfrecords import IMAGENET, SHARD, TFDS_SHARD, index_of, samples_of, shards

from .image_files import encode, smooth, write_classes

# Two records as TensorFlow 2.21 wrote them (TFRecordWriter): an Example, and a hundred letters x.
TENSORFLOW = zlib.decompress(
    base64.b64decode(
        "eNo7wgABDh+f1nIdZOSS4hLMzE1MT9VPzkksLtbPSUxKzRFilWLmYmTnkuUSQJYrSa0oEeLkYudiTVRITizhkuHihUin5iXnp6Sm"
        "CHFzAWULMpNLSotSudS4xCCy+UlZqckl+klJ+RX6FbmZeUI8QlxcHAwMDXZAZ9gDTcGirhKkjkmIgUuBiyMvNT2xJLMsVUhESohL"
        "4O9/KGBsAAEFSbc/dSlQPznHy9yvoAPo61BcBQAMBXMd"
    )
)
EXAMPLE = {
    "image/encoded": [b"picture"],
    "image/class/label": [7],
    "image/class/text": [b"a cat"],
    "image/object/bbox/xmin": Floats([0.25, 0.5]),
    "image/object/bbox/ymin": Floats(),
    "negative": [-3, 2**40],
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def plain_crc32c(data: bytes) -> int:
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def test_published_checksums() -> None:
    assert crc32c_numpy(b"123456789") == 0xE3069283
    assert crc32c_numpy(bytes(32)) == 0x8A9136AA  # RFC 3720
    assert crc32c_numpy(b"\xff" * 32) == 0x62A8AB43
    assert crc32c_numpy(b"") == 0


@given(st.binary(max_size=300))
def test_the_checksum_is_the_plain_loop(data: bytes) -> None:
    assert crc32c_numpy(data) == plain_crc32c(data)


def test_long_checksums() -> None:
    data = random.Random(0).randbytes(20_011)
    for size in (4095, 4096, 4097, 20_011):
        assert crc32c_numpy(data[:size]) == plain_crc32c(data[:size])


def test_tensorflows_records_are_read(tmp_path: Path) -> None:
    path = tmp_path / "g"
    extents = list(walk_records(path, memoryview(TENSORFLOW)))
    first, second = (TENSORFLOW[e.offset : e.offset + e.length] for e in extents)
    assert second == b"x" * 100
    assert read_example(first, EXAMPLE) == EXAMPLE
    assert set(read_example(first, ["negative"])) == {"negative"}


def test_our_records_are_tensorflows_byte_for_byte(tmp_path: Path) -> None:
    write_records(tmp_path / "mine", [write_example(EXAMPLE), b"x" * 100])
    assert (tmp_path / "mine").read_bytes() == TENSORFLOW


def test_lists_that_are_not_packed_are_read() -> None:
    """Old writers give each number a field of its own: label 5 as `08 05`, 0.5 as `0d 00 00 00 3f`."""

    def feature(name: bytes, value: bytes) -> bytes:
        entry = b"\x0a" + bytes([len(name)]) + name + b"\x12" + bytes([len(value)]) + value
        return b"\x0a" + bytes([len(entry)]) + entry

    body = feature(b"label", b"\x1a\x04\x08\x05\x08\x06") + feature(b"half", b"\x12\x05\x0d\x00\x00\x00\x3f")
    assert read_example(b"\x0a" + bytes([len(body)]) + body, ["label", "half"]) == {"label": [5, 6], "half": [0.5]}


@pytest.mark.parametrize("number", [-(2**63), -1, 0, 2**63 - 1])
def test_whole_numbers_of_64_bits_are_read(number: int) -> None:
    """Protocol buffers write a negative number as 2^64 more, seven bits a byte, the lowest first."""
    rest, code = number % 2**64, b""
    while rest >= 128:
        rest, code = rest // 128, code + bytes([rest % 128 + 128])
    code += bytes([rest])
    for values in (b"\x08" + code, b"\x0a" + bytes([len(code)]) + code):  # alone, and in a packed list
        listed = b"\x1a" + bytes([len(values)]) + values
        entry = b"\x0a\x01n\x12" + bytes([len(listed)]) + listed
        body = b"\x0a" + bytes([len(entry)]) + entry
        assert read_example(b"\x0a" + bytes([len(body)]) + body, ["n"]) == {"n": [number]}


def test_damaged_messages_are_refused_or_read() -> None:
    message, rng = write_example(EXAMPLE), random.Random(1)
    refused = 0
    for _ in range(2000):
        changed = bytearray(message)
        for _ in range(rng.randrange(1, 5)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            found = read_example(bytes(changed[: rng.randrange(1, len(changed) + 1)]), EXAMPLE)
        except BadMessage:
            refused += 1
        else:
            assert all(isinstance(values, list) for values in found.values())
    assert refused > 500


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "record 1 of 100 bytes is cut short"),
        (lambda data: data[: len(data) - 116 + 7], "record 1 is cut short inside its header"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "checksum of record 0's length is wrong"),
        (lambda data: data + bytes(12), "checksum of record 2's length is wrong"),
    ],
)
def test_damaged_framing_is_named_with_its_byte(change, words: str) -> None:
    with pytest.raises(DataError, match=words):
        list(walk_records(Path("shard"), memoryview(change(TENSORFLOW))))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "raw"
    write_classes(root / "train", {"n01": 7, "n02": 6}, (60, 80))
    write_classes(root / "validation", {"n01": 2, "n02": 3}, (60, 80), first_seed=40)
    (root / "train" / "n01" / "0.jpg").write_bytes(encode(smooth(50, 40), "PNG"))  # a PNG under a JPEG's name
    return root


def built(folder: Path, output: Path, threads: int = 2, **options) -> BuildPlan:
    plan = {"train_shards": 3, "validation_shards": 2, "texts": {"n02": "dog, hound"}, "boxes": {}} | options
    result = BuildPlan(folders=read_folders(folder, 0.1), output=output, num_threads=threads, **plan)
    report = build(result)
    assert report.counts == {"train": 13, "validation": 5}
    assert report.encoded_again == 1
    assert report.bad == ()
    return result


def test_built_records_hold_what_the_reference_reads(folder: Path, tmp_path: Path) -> None:
    boxes = {"3.jpg": [(0.1, 0.2, 0.5, 0.6), (0.0, 0.5, 1.0, 1.0)]}
    built(folder, tmp_path / "out", boxes=boxes)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "labels.txt",
        *(f"train-{number:05d}-of-00003" for number in range(3)),
        *(f"validation-{number:05d}-of-00002" for number in range(2)),
    ]
    seen = {}
    names = ["image/height", "image/width", "image/channels", "image/colorspace", "image/format", "image/filename"]
    names += ["image/class/label", "image/class/synset", "image/class/text", "image/encoded"]
    names += [f"image/object/bbox/{key}" for key in ("xmin", "ymin", "xmax", "ymax", "label")]
    for path in (tmp_path / "out").glob("train-*"):
        data = path.read_bytes()
        for extent in walk_records(path, memoryview(data)):
            row = read_example(data[extent.offset : extent.offset + extent.length], names)
            assert set(row) == set(names)
            assert row["image/encoded"][0][:2] == b"\xff\xd8"
            seen[row["image/class/synset"][0], row["image/filename"][0]] = row
    assert len(seen) == 13
    row = seen[b"n02", b"3.jpg"]
    assert row["image/class/label"] == [2]
    assert row["image/class/text"] == [b"dog, hound"]
    assert (row["image/height"], row["image/width"], row["image/channels"]) == ([60], [80], [3])
    assert row["image/object/bbox/xmin"] == pytest.approx([0.1, 0.0])
    assert row["image/object/bbox/ymax"] == pytest.approx([0.6, 1.0])
    assert row["image/object/bbox/label"] == [2, 2]
    assert row["image/encoded"] == [(folder / "train" / "n02" / "3.jpg").read_bytes()]
    assert seen[b"n01", b"0.jpg"]["image/height"] == [50]


def test_building_does_not_depend_on_the_threads(folder: Path, tmp_path: Path) -> None:
    built(folder, tmp_path / "a", threads=1)
    built(folder, tmp_path / "b", threads=4)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_set_of_records_shows_what_its_folder_shows(folder: Path, tmp_path: Path) -> None:
    built(folder, tmp_path / "out")
    options = {"image_size": 40, "train_crop": "valid"}
    records = open_dataset(config_from({"dataset": "auto", "dataset_path": str(tmp_path / "out")} | options).data, 0)
    files = open_dataset(config_from({"dataset": "folder", "dataset_path": str(folder)} | options).data, 0)
    assert records.info.name == "tfrecord"
    assert records.info.class_names == ("n01", "dog, hound")
    for split in ("train", "validation"):
        one, other = getattr(records, split), getattr(files, split)
        assert sorted(one.labels) == sorted(other.labels)
        images = {
            (int(label), image.tobytes())
            for label, image in zip(one.labels, one.read(np.arange(len(one)), 0), strict=True)
        }
        wanted = {
            (int(label), image.tobytes())
            for label, image in zip(other.labels, other.read(np.arange(len(other)), 0), strict=True)
        }
        assert len(images & wanted) >= len(one) - (split == "train"), "all but the PNG, which became a JPEG"


def test_the_index_is_kept_and_made_again_when_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train-00000-of-00001"
    one = write_example({"image/encoded": [encode(smooth(9, 9))], "image/class/label": [1], "image/class/text": [b"a"]})
    write_records(path, [one, one])
    files = shards(tmp_path, "train")
    assert index_of(files, IMAGENET).labels.tolist() == [0, 0]
    monkeypatch.setattr("headrace.data.sets.tfrecords._make_index", None)  # the kept one is used
    assert index_of(files, IMAGENET).class_names == ("a",)
    monkeypatch.undo()
    write_records(path, [one, one, one])
    assert len(index_of(files, IMAGENET).labels) == 3


def test_a_wrong_checksum_is_found_when_the_record_is_read(folder: Path, tmp_path: Path) -> None:
    built(folder, tmp_path / "out")
    files = shards(tmp_path / "out", "train")
    index = index_of(files, IMAGENET)
    file = files[int(index.file[0])]
    data = bytearray(file.read_bytes())
    place = int(index.offset[0]) + int(index.length[0]) // 2
    data[place] ^= 1
    file.write_bytes(data)
    samples = samples_of(files, index, IMAGENET)
    with pytest.raises(BadImage, match="checksum is wrong"):
        samples.content(0)
    samples.content(1)
    file.write_bytes(data[: place - 1])
    with pytest.raises(BadImage, match="the file ends inside"):
        samples_of(files, index, IMAGENET).content(0)


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ({"image/encoded": [b"x"], "image/class/label": [0]}, "label 0 is out of range.*start from 1"),
        ({"image/encoded": [b"x"], "image/class/label": [-4]}, "label -4 is out of range"),
        ({"image/encoded": [b"x"]}, "no image/class/label"),
    ],
)
def test_labels_that_cannot_be(tmp_path: Path, features, words: str) -> None:
    write_records(tmp_path / "train-00000-of-00001", [write_example(features)])
    with pytest.raises(DataError, match=words):
        open_dataset(config_from({"dataset": "imagenet", "dataset_path": str(tmp_path)}).data, 0)


def test_missing_shards_are_named(folder: Path, tmp_path: Path) -> None:
    built(folder, tmp_path / "out")
    (tmp_path / "out" / "train-00001-of-00003").unlink()
    with pytest.raises(DataError, match="lacks 1 of 3 train shards: 00001-of-00003"):
        shards(tmp_path / "out", "train")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (SHARD, ["train-00000-of-00002", "train-00001-of-00002", "train-00000-of-00001"]),
        (TFDS_SHARD, ["a-train.tfrecord-00000-of-00001", "b-train.tfrecord-00000-of-00001"]),
    ],
)
def test_shards_of_two_sets_are_not_mixed(tmp_path: Path, pattern: Any, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(DataError, match="train shards of 2 sets"):
        shards(tmp_path, "train", pattern)
    assert shards(tmp_path, "validation", pattern) == []
    (tmp_path / names[-1]).unlink()
    assert shards(tmp_path, "train", pattern) == [tmp_path / name for name in names[:-1]]


def test_what_cannot_be_built_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="99 train shards for 13 images"):
        built(folder, tmp_path / "out", train_shards=99)
    built(folder, tmp_path / "out")
    with pytest.raises(DataError, match="already has shards"):
        built(folder, tmp_path / "out")


def test_metadata_and_boxes_files(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("n01\tcat, house cat\nn02\tdog\n")
    assert read_metadata(tmp_path / "m") == {"n01": "cat, house cat", "n02": "dog"}
    (tmp_path / "b").write_text(
        "file,xmin,ymin,xmax,ymax\na.jpg,0.1,0.2,0.3,0.4\na.jpg,0,0,1,1\nb.jpg,0.5,0.5,0.5,0.9\n"
    )
    assert read_boxes(tmp_path / "b") == {"a.jpg": [(0.1, 0.2, 0.3, 0.4), (0, 0, 1, 1)]}
    (tmp_path / "m").write_text("\nn01 cat\n")
    with pytest.raises(DataError, match="line 2: no tab"):
        read_metadata(tmp_path / "m")
    (tmp_path / "b").write_text("a.jpg,0,0,1,1\nb.jpg,zero,0,1,1\n")
    with pytest.raises(DataError, match="line 2"):
        read_boxes(tmp_path / "b")


def test_masked_checksums_are_tensorflows() -> None:
    length = struct.pack("<Q", 100)
    assert masked_crc32c(length) == struct.unpack("<I", TENSORFLOW[-116 + 8 : -116 + 12])[0]


def test_a_part_of_imagenet_keeps_its_labels(folder: Path, tmp_path: Path) -> None:
    for split, labels in (("train", (3, 3, 41, 41, 41)), ("validation", (41, 3))):
        features = [{"image/encoded": [encode(smooth(40, 40, seed=n))], "image/class/label": [n]} for n in labels]
        write_records(tmp_path / f"{split}-00000-of-00001", map(write_example, features))
    info = describe_dataset(config_from({"dataset": "imagenet", "dataset_path": str(tmp_path)}).data)
    assert (info.num_classes, info.num_train, info.num_validation) == (1000, 5, 2)
    assert info.remarks == ("39 of 41 classes have no training image: class 0, class 1, class 3 and 36 more",)
    auto = open_dataset(config_from({"dataset": "auto", "dataset_path": str(tmp_path)}).data, 0)
    assert auto.info.num_classes == 41
    assert auto.train.labels.tolist() == [2, 2, 40, 40, 40]
    (tmp_path / "train-00000-of-00001").unlink()
    alone = open_dataset(config_from({"dataset": "imagenet", "dataset_path": str(tmp_path)}).data, 0)
    assert (alone.info.num_train, alone.info.num_validation, alone.info.num_classes) == (0, 2, 1000)
    assert alone.validation.read(np.arange(2), 0).shape == (2, *alone.info.image_hwc)
