"""Packed files, tar shards and TFDS folders: read back what was put in, at any place; damage is found."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import struct
import tarfile
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.cli.main import main
from headrace.config.load import config_from
from headrace.core.errors import DataError
from headrace.data.dataset import open_dataset
from headrace.data.decoding.image import BadImage, read_header
from headrace.data.sets.formats.tar import fits, tar_index, tar_shards
from headrace.data.sets.image_sets import detect
from headrace.data.sets.pack import open_pack, repack
from headrace.data.sets.tf_example import write_example
from headrace.data.sets.tfrecord_file import write_records

from .image_files import encode, smooth, write_classes


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    write_classes(tmp_path / "raw" / "train", {"a": 4, "b": 3}, (120, 160))
    write_classes(tmp_path / "raw" / "val", {"a": 2, "b": 2}, (150, 100), first_seed=20)
    (tmp_path / "raw" / "train" / "b" / "9.jpg").write_bytes(b"broken")
    words = ["data", "pack", "--dataset-path", str(tmp_path / "raw"), "--output", str(tmp_path / "p.hrp")]
    code = main([*words, "--shorter-side", "64", "--quality", "95"])
    told = capsys.readouterr().out
    assert code == 1
    assert "packed 11 images of 2 classes" in told
    assert "b/9.jpg: not an image" in told
    return tmp_path / "p.hrp"


def test_a_packed_file_holds_smaller_images_and_all_labels(packed: Path) -> None:
    pack = open_pack(packed)
    assert pack.class_names == ("a", "b")
    assert pack.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert pack.validation.labels.tolist() == [0, 0, 1, 1]
    data = pack.train.content(5).image
    assert (read_header(data).height, read_header(data).width) == (64, 85)
    want = Image.fromarray(smooth(120, 160, seed=5)).resize((85, 64), Image.Resampling.BILINEAR)
    difference = np.abs(np.asarray(Image.open(io.BytesIO(data))).astype(int) - np.asarray(want))
    assert difference.mean() < 1.5
    assert read_header(pack.validation.content(0).image).height == 96


def test_a_packed_file_is_a_data_set(packed: Path) -> None:
    assert detect(str(packed)) == "packed"
    dataset = open_dataset(config_from({"dataset": "auto", "dataset_path": str(packed), "image_size": 48}).data, 0)
    assert (dataset.info.name, dataset.info.num_train, dataset.info.num_validation) == ("packed", 7, 4)
    assert dataset.train.read(np.arange(7), 0).shape == (7, 48, 48, 3)


def test_small_images_are_not_enlarged() -> None:
    header = read_header(repack(encode(smooth(30, 50)), 64, 90))
    assert (header.height, header.width) == (30, 50)


def test_arrays_are_packed_without_their_alpha_channel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = np.concatenate([np.stack([smooth(40, 50, seed=seed) for seed in range(8)]), np.zeros((8, 40, 50, 1))], 3)
    np.savez(tmp_path / "x.npz", images=images.astype(np.uint8), labels=np.arange(8) % 2)
    words = ["data", "pack", "--dataset", "npz", "--dataset-path", str(tmp_path / "x.npz")]
    assert main([*words, "--output", str(tmp_path / "x.hrp"), "--quality", "95"]) == 0
    assert "from 62.5 KiB" in capsys.readouterr().out  # 8 x 40 x 50 x 4 bytes
    pack = open_pack(tmp_path / "x.hrp")
    found = np.asarray(Image.open(io.BytesIO(pack.train.content(0).image))).astype(int)
    assert min(np.abs(found - smooth(40, 50, seed=seed)).mean() for seed in range(8)) < 2


def test_an_image_too_long_for_a_jpeg_is_a_bad_one() -> None:
    with pytest.raises(BadImage, match="65,500"):
        repack(np.zeros((3, 65_501, 3), np.uint8), 64, 90)


def test_damage_to_a_packed_file_is_found(packed: Path) -> None:
    whole = packed.read_bytes()
    for data in (whole[:-1], whole[: len(whole) // 2], whole + b"x", b"headrace pack 1\n", whole[:-60] + bytes(60)):
        packed.write_bytes(data)
        with pytest.raises(DataError, match="not a complete packed file"):
            open_pack(packed)
    rng = random.Random(0)
    for _ in range(40):
        changed = bytearray(whole)
        place = rng.randrange(16, len(whole))
        changed[place] ^= 1 << rng.randrange(8)
        packed.write_bytes(changed)
        found = 0
        try:
            pack = open_pack(packed)
        except DataError:
            continue
        for part in (pack.train, pack.validation):
            for sample in range(len(part)):
                try:
                    part.content(sample)
                except BadImage:
                    found += 1
        assert found == 1, "one bit was changed, in one image"


def with_index(whole: bytes, **changes: np.ndarray) -> bytes:
    """Return a packed file with another index, its place and checksum right."""
    place, length, _ = struct.unpack("<QQI", whole[-32:-12])
    with np.load(io.BytesIO(whole[place : place + length])) as kept:
        arrays = dict(kept)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=True, **(arrays | changes))
    index = buffer.getvalue()
    return whole[:place] + index + struct.pack("<QQI", place, len(index), zlib.crc32(index)) + whole[-12:]


def facts(**values: object) -> np.ndarray:
    good = {"class_names": ["a", "b"], "shorter_side": 32, "quality": 90, "num_train": 1}
    return np.frombuffer(json.dumps(good | values).encode(), np.uint8)


HOSTILE_INDICES = {
    "label beyond the classes": lambda count: {"labels": np.full(count, 7, np.int32)},
    "negative label": lambda count: {"labels": np.full(count, -1, np.int32)},
    "labels of floats": lambda count: {"labels": np.zeros(count)},
    "place beyond the end": lambda count: {"offset": np.full(count, 1 << 40)},
    "negative place": lambda count: {"offset": np.full(count, -5)},
    "length that overflows": lambda count: {"length": np.full(count, np.iinfo(np.int64).max)},
    "columns of other lengths": lambda count: {"crc": np.zeros(count + 1, np.uint32)},
    "no column": lambda count: {"offset": np.int64(3)},
    "objects": lambda count: {"offset": np.array([{}] * count, object)},
    "facts that nest": lambda count: {"facts": np.frombuffer(b"[" * 200_000, np.uint8)},
    "facts that are a list": lambda count: {"facts": np.frombuffer(b"[]", np.uint8)},
    "more training samples than samples": lambda count: {"facts": facts(num_train=10**9)},
    "names that are numbers": lambda count: {"facts": facts(class_names=[1, 2])},
    "names that are a number": lambda count: {"facts": facts(class_names=3)},
    "facts of texts": lambda count: {"facts": facts(num_train="1")},
}


@pytest.mark.parametrize("make", HOSTILE_INDICES.values(), ids=HOSTILE_INDICES)
def test_a_hostile_index_with_the_right_checksum_is_refused(packed: Path, make) -> None:
    whole = packed.read_bytes()
    pack = open_pack(packed)
    packed.write_bytes(with_index(whole))
    assert open_pack(packed).class_names == pack.class_names, "the helper of this test keeps a good one good"
    packed.write_bytes(with_index(whole, **make(len(pack.train) + len(pack.validation))))
    with pytest.raises(DataError, match="not a complete packed file") as caught:
        open_pack(packed)
    assert "data pack" in caught.value.remedy


def test_a_damaged_index_cache_is_made_again(tars: Path) -> None:
    """Cut it anywhere, flip bits in it, or put another file's index in its place: the index is that of the files."""
    files = tar_shards(tars)[0]
    right = tar_index(files)
    (kept,) = (Path(os.environ["XDG_CACHE_HOME"]) / "headrace" / "indices").iterdir()
    whole, rng = kept.read_bytes(), random.Random(0)
    damaged = [whole[:length] for length in range(0, len(whole), 97)] + [b"PK\x03\x04", b"x" * 100]
    for _ in range(100):
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(changed))
    for data in damaged:
        kept.unlink()  # its columns are mapped: what is written in place would change them
        kept.write_bytes(data)
        found = tar_index(files)
        assert found.class_names == right.class_names
        for name in ("file", "offset", "length", "labels"):
            np.testing.assert_array_equal(getattr(found, name), getattr(right, name), err_msg=name)


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    for shard, first in (("train-0", 0), ("train-1", 3), ("val-0", 6)):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
            for number in range(first, first + 3):
                add(archive, f"d/{number:03d}.jpg", encode(smooth(50, 60, seed=number)))
                if number % 2:
                    add(archive, f"d/{number:03d}.cls", str(number % 2).encode())
                else:
                    add(archive, f"d/{number:03d}.json", json.dumps({"label": 0}).encode())
    (tmp_path / "classes.txt").write_text("even\nodd\n")
    return tmp_path


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"])
def test_compressed_shards_are_unpacked_once(tars: Path, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = config_from({"dataset": "auto", "dataset_path": str(tars), "image_size": 48}).data
    plain = open_dataset(data, 0)
    images = plain.train.read(np.arange(len(plain.train)), 0)
    pack = {"2": bz2.open, "z": lzma.open if ending == ".tar.xz" else gzip.open}.get(ending[-1], gzip.open)
    for file in sorted(tars.glob("*.tar")):
        with pack(tars / f"{file.stem}{ending}", "wb") as packed:
            packed.write(file.read_bytes())
        file.unlink()
    assert detect(str(tars)) == "tar"
    (tars / "cat").mkdir()
    assert not fits(tars), "an archive beside the folders that came in it"
    (tars / "cat").rmdir()
    for said in (True, False):
        packed = open_dataset(data, 0)
        assert ("unpacking" in capsys.readouterr().err) == said
        assert packed.train.labels.tolist() == plain.train.labels.tolist()
        assert (packed.train.read(np.arange(len(plain.train)), 0) == images).all()
        assert packed.info.class_names == plain.info.class_names
    whole = sorted(tars.glob(f"*{ending}"))[0]
    whole.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(DataError, match="cannot be unpacked"):
        open_dataset(data, 0)
    with pack(whole, "wb") as packed:
        packed.write(bytes(30_000_000))
    with pytest.raises(DataError, match="At most 200 times its size"):
        open_dataset(data, 0)


def test_names_that_are_added_later_count(tars: Path) -> None:
    files = tar_shards(tars)[0]
    (tars / "classes.txt").unlink(missing_ok=True)
    numbered = tar_index(files)
    names = tuple(f"kind {label}" for label in range(len(numbered.class_names)))
    (tars / "classes.txt").write_text("\n".join(names))
    assert tar_index(files).class_names == names != numbered.class_names


def test_a_shard_that_is_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "train-00000-of-00001").symlink_to(tmp_path / "not fetched")
    with pytest.raises(DataError, match="train-00000-of-00001 cannot be read: No such file"):
        open_dataset(config_from({"dataset": "tfrecord", "dataset_path": str(tmp_path)}).data, 0)


def test_tar_shards_in_the_layout_of_webdataset(tars: Path) -> None:
    assert detect(str(tars)) == "tar"
    dataset = open_dataset(config_from({"dataset": "auto", "dataset_path": str(tars), "image_size": 48}).data, 0)
    assert dataset.info.class_names == ("even", "odd")
    assert dataset.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert dataset.validation.labels.tolist() == [0, 1, 0]
    train, _ = tar_shards(tars)
    index = tar_index(train)
    data = train[1].read_bytes()
    place = int(index.offset[4])
    assert data[place : place + int(index.length[4])] == encode(smooth(50, 60, seed=4))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("x.cls", b"cat", "holds no label, but b'cat'"),
        ("x.cls", b"-1", "out of range"),
        ("x.json", b"[]", "holds no label"),
        ("x.json", b'{"label": 1e400}', "holds no label"),
        ("x.json", b'{"label": 1.9}', "holds no label"),
        ("x.json", b'{"label": true}', "holds no label"),
        ("x.json", b"[" * 200_000, "holds no label"),
        ("x.cls", b"9" * 5000, "holds no label"),
        ("x.txt", b"1", "1 image.s. without a label, such as x"),
        ("x.cls", b"7", "A label is 7, but there are 2 class names"),
    ],
)
def test_tar_labels_that_cannot_be(tars: Path, name: str, data: bytes, words: str) -> None:
    with tarfile.open(tars / "train-2.tar", "w") as archive:
        add(archive, "x.jpg", encode(smooth(9, 9)))
        add(archive, name, data)
    with pytest.raises(DataError, match=words):
        tar_index(tar_shards(tars)[0])


def header(kind: bytes, size: int, name: str = "x") -> bytes:
    """Return the header of a member of any type that says any size."""
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def pax(data: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return header(kind, len(data)) + data.ljust(-(-len(data) // 512) * 512, b"\0")


SAMPLE = header(tarfile.REGTYPE, 1, "1.cls") + b"0".ljust(512, b"\0")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pax(b"12 path=a.b\n") * 2_000 + SAMPLE, "hundreds of headers"),
        ((header(tarfile.GNUTYPE_LONGNAME, 4) + b"abc".ljust(512, b"\0")) * 2_000 + SAMPLE, "hundreds of headers"),
        (header(tarfile.GNUTYPE_LONGNAME, 1 << 40) + SAMPLE, "a header of 1,099,511,627,776 bytes"),
        (header(tarfile.GNUTYPE_LONGLINK, 1 << 17) + bytes(1 << 17) + SAMPLE, "a header of 131,072 bytes"),
        (header(tarfile.XHDTYPE, 1 << 40) + SAMPLE, "a header of"),
        (header(tarfile.XGLTYPE, 1 << 40) + SAMPLE, "a header of"),
    ],
    ids=["pax chain", "long name chain", "long name", "long link", "pax", "global pax"],
)
def test_tar_headers_without_end_are_refused(tars: Path, content: bytes, words: str) -> None:
    (tars / "train-2.tar").write_bytes(content + bytes(1024))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=words):
            tar_index(tar_shards(tars)[0])
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_headers_that_count_for_all_files_are_not_kept_for_each(tars: Path) -> None:
    """Two megabytes: 5,000 headers that tarfile copies for each of a thousand files were 500 MiB."""
    every = b"".join(b"11 %05d=a\n" % n for n in range(5_000))
    member = pax(b"12 path=a.b\n") + SAMPLE
    (tars / "train-2.tar").write_bytes(pax(every, tarfile.XGLTYPE) + member * 1_000 + bytes(1024))
    tracemalloc.start()
    try:
        tar_index(tar_shards(tars)[0])
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_label_of_a_megabyte_is_read(tars: Path) -> None:
    """JSON beside an image may describe it at length."""
    with tarfile.open(tars / "train-0.tar", "w") as archive:
        add(archive, "1.jpg", b"x")
        add(archive, "1.json", json.dumps({"label": 1, "text": "a" * (1 << 19)}).encode())
    assert 1 in tar_index(tar_shards(tars)[0]).labels


def test_a_tar_that_is_cut_short(tars: Path) -> None:
    path = tars / "train-1.tar"
    whole = path.read_bytes()
    path.write_bytes(whole[:700])
    with pytest.raises(DataError, match="not a complete tar file"):
        tar_index(tar_shards(tars)[0])


def test_a_folder_that_tfds_has_prepared(tmp_path: Path) -> None:
    features = {
        "image": {"pythonClassName": "tensorflow_datasets.core.features.image_feature.Image"},
        "kind": {"pythonClassName": "tensorflow_datasets.core.features.class_label_feature.ClassLabel"},
    }
    (tmp_path / "features.json").write_text(json.dumps({"featuresDict": {"features": features}}))
    (tmp_path / "label.labels.txt").write_text("cat\ndog\n")
    for split, count in (("train", 4), ("test", 2)):
        records = [
            write_example({"image": [encode(smooth(40, 40, seed=number), "PNG")], "kind": [number % 2]})
            for number in range(count)
        ]
        write_records(tmp_path / f"pets-{split}.tfrecord-00000-of-00001", records)
    assert detect(str(tmp_path)) == "tfds"
    dataset = open_dataset(config_from({"dataset": "auto", "dataset_path": str(tmp_path), "image_size": 40}).data, 0)
    assert dataset.info.class_names == ("cat", "dog")
    assert dataset.train.labels.tolist() == [0, 1, 0, 1]
    assert (dataset.train.read(np.array([3]), 0)[0] == smooth(40, 40, seed=3)).all()


def test_verify_names_every_broken_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(tmp_path, {"a": 4, "b": 4})
    whole = (tmp_path / "a" / "1.jpg").read_bytes()
    (tmp_path / "a" / "1.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b" / "2.jpg").write_bytes(b"")
    assert main(["data", "verify", "--dataset-path", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "2 problem(s)" in told
    assert "a/1.jpg: " in told
    assert "b/2.jpg: empty" in told
    (tmp_path / "a" / "1.jpg").write_bytes(whole)
    (tmp_path / "b" / "2.jpg").unlink()
    assert main(["data", "verify", "--dataset-path", str(tmp_path)]) == 0
    assert "No problems found." in capsys.readouterr().out


def test_bench_measures_each_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(tmp_path, {"a": 4, "b": 4}, (100, 120))
    words = ["data", "bench", "--dataset-path", str(tmp_path), "--threads", "1", "2", "--seconds", "0.05", "--json"]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)["epochs"]
    assert [(row["part"], row["threads"]) for row in rows] == [
        (part, threads) for threads in (1, 2) for part in ("read", "decode", "view", "block")
    ]
    for row in rows:
        assert row["elements_per_second"] == pytest.approx(row["elements_processed"] / row["time_elapsed"])
        assert row["bandwidth"] == pytest.approx(row["total_bytes_processed"] / row["time_elapsed"] / 1e9)
    assert rows[3]["total_bytes_processed"] == rows[3]["elements_processed"] * 128 * 128 * 3


def test_bench_counts_a_broken_image_as_training_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(tmp_path / "train", {"a": 20, "b": 20})
    write_classes(tmp_path / "val", {"a": 1, "b": 1})
    (tmp_path / "train" / "a" / "broken.jpg").write_bytes(b"no image")
    words = ["data", "bench", "--dataset-path", str(tmp_path), "--seconds", "0.05", "--threads", "1", "--json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)["epochs"]
    assert [row["part"] for row in rows] == ["read", "decode", "view", "block"]
    assert all(row["elements_processed"] > 0 for row in rows)
    assert "warning: 1 bad sample(s)" in captured.err
    assert "broken.jpg: not an image" in captured.err
    (tmp_path / "train" / "b" / "broken.jpg").write_bytes(b"no image")
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "2 bad sample(s)" in told
    assert "or raise --max-bad-samples" in told
    assert main([*words, "--max-bad-samples", "0.1"]) == 0, "the remedy"


def test_build_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(tmp_path / "raw", {"a": 6, "b": 6})
    words = ["data", "build", "--dataset-path", str(tmp_path / "raw"), "--output-dir", str(tmp_path / "out")]
    assert main([*words, "--train-shards", "2", "--validation-shards", "1"]) == 0
    assert "wrote 10 train, 2 validation images of 2 classes" in capsys.readouterr().out
    assert main([*words, "--train-shards", "2", "--validation-shards", "1"]) == 2
    assert "already has shards" in capsys.readouterr().err
    assert main(["data", "biuld"]) == 2
    assert "Did you mean build?" in capsys.readouterr().err


def test_a_run_that_verifies_stops_before_it_leaves_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(tmp_path / "raw", {"a": 6, "b": 6})
    (tmp_path / "raw" / "b" / "2.jpg").write_bytes(b"")
    words = ["train", "--dataset-path", str(tmp_path / "raw"), "--model", "cifar_resnet8", "--verify-dataset"]
    assert main([*words, "--micro-batch-size", "2", "--log-dir", str(tmp_path / "runs")]) == 2
    told = capsys.readouterr().err
    assert "has 1 problem(s)" in told
    assert "b/2.jpg: empty" in told
    assert not (tmp_path / "runs").exists()


def test_built_records_number_their_samples_as_the_folders_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_classes(tmp_path / "set" / "train", {"ant": 7, "bee": 5, "cat": 9})
    write_classes(tmp_path / "set" / "val", {"ant": 2, "bee": 3, "cat": 2}, first_seed=50)
    words = ["data", "build", "--dataset-path", str(tmp_path / "set"), "--output-dir", str(tmp_path / "records")]
    assert main([*words, "--train-shards", "4", "--validation-shards", "2"]) == 0
    sets = [
        open_dataset(config_from({"dataset": "auto", "dataset_path": str(tmp_path / name)}).data, 0)
        for name in ("set", "records")
    ]
    for folder, records in ((sets[0].train, sets[1].train), (sets[0].validation, sets[1].validation)):
        index = np.arange(len(folder))
        assert (folder.labels == records.labels).all()
        assert (folder.read(index, 3) == records.read(index, 3)).all()


def test_class_names_that_are_not_utf8_are_refused(tars: Path) -> None:
    (tars / "classes.txt").write_bytes("gerade\nübrig\n".encode("latin1"))
    with pytest.raises(DataError, match=r"classes\.txt cannot be read"):
        tar_index(tar_shards(tars)[0])
