"""Listed in a CSV file, stored as arrays (.npz) or in tables (.parquet): read as folders are, or clear errors."""

import io
import json
import sys
import tracemalloc
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.config.load import config_from, resolve
from headrace.core.errors import ConfigError, DataError
from headrace.data.dataset import DataSet, describe_dataset, open_dataset
from headrace.data.sets.formats import parquet
from headrace.data.sets.formats.npz import read_npz_set
from headrace.data.sets.image_sets import detect
from headrace.data.verify import verify

from .image_files import encode, smooth, write_classes

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (24, 28, 28), dtype=np.uint8)
LABELS = np.arange(24) % 3


def opened(**options: object) -> DataSet:
    return open_dataset(config_from({"dataset": "auto", "dataset_path": ".", **options}).data, 0)


def write_csv(root: Path, text: str, count: int = 6) -> Path:
    for number in range(count):
        (root / f"{number}.jpg").write_bytes(encode(smooth(20, 20, seed=number)))
    (root / "list.csv").write_text(text)
    return root / "list.csv"


def test_a_csv_file_with_splits(tmp_path: Path) -> None:
    text = "Split;label;PATH\ntrain;10;0.jpg\ntrain;9;1.jpg\nval;9;2.jpg\ntest;9;3.jpg\ntraining;10;%s\n\n"
    file = write_csv(tmp_path, text % (tmp_path / "4.jpg"))
    dataset = opened(labels=str(file))
    assert (dataset.info.name, dataset.info.class_names) == ("csv", ("9", "10")), "numbers in numeric order"
    assert (dataset.train.labels.tolist(), dataset.validation.labels.tolist()) == ([1, 0, 1], [0])
    assert dataset.info.remarks == (
        "1 file is skipped (rows of split test are not used in training): 3.jpg",
        "1 of 2 classes have no validation image: 10",
    )
    assert dataset.train.read(np.arange(3), 0).shape == (3, 32, 32, 3)
    assert verify(config_from({"dataset": "auto", "labels": str(file)}).data).counts == {
        "train": (1, 2),
        "validation": (1, 0),
    }
    assert resolve({"labels": str(file)}, environ={}).name == "images"


def test_columns_and_the_ending_of_files_are_named(tmp_path: Path) -> None:
    """As Kaggle has them: ids without an ending, and columns that nobody could guess."""
    text = "id,Species,label\n0,9,x\n1,10,x\n2,9,x\n3,10,x\n"
    named = {"labels": str(write_csv(tmp_path, text)), "image_column": "ID", "label_column": "species"}
    dataset = opened(**named, image_suffix=".jpg", validation_split=0.5)
    assert dataset.info.class_names == ("9", "10")
    assert dataset.train.name is not None
    assert {dataset.train.name(number).removeprefix(f"{tmp_path}/") for number in range(2)} <= {
        f"{number}.jpg" for number in range(4)
    }
    with pytest.raises(DataError, match=r"label_column is specie, and the columns are id, species, label.*species"):
        opened(**named | {"label_column": "specie"}, image_suffix=".jpg")
    with pytest.raises(DataError, match="4 of 4 images are not there"):
        opened(**named)
    with pytest.raises(DataError, match=r"--image-column NAME, --label-column NAME"):
        opened(labels=str(write_csv(tmp_path, "id,Species\n0,9\n")))
    for name in ("image_column", "label_column", "image_suffix"):
        with pytest.raises(ConfigError, match=f"{name} .*, and there is no CSV file"):
            config_from({name: "x", "dataset": "folder"})


def test_classes_in_the_names_of_files(tmp_path: Path) -> None:
    write_classes(tmp_path, {"Abyssinian": 3, "pug": 3})
    for file in sorted(tmp_path.glob("*/*.jpg")):
        file.rename(tmp_path / f"{file.parent.name}_{file.stem}.jpg")
    pattern = r"(.+)_[0-9]+[.]jpg"
    dataset = opened(dataset_path=str(tmp_path), label_pattern=pattern, validation_split=0.3)
    assert (dataset.info.name, dataset.info.class_names) == ("folder", ("Abyssinian", "pug"))
    assert (dataset.info.train_counts, len(dataset.validation)) == ((2, 2), 2)
    data = config_from({"dataset": "auto", "dataset_path": str(tmp_path), "label_pattern": pattern}).data
    assert sum(map(sum, verify(data).counts.values())) == 6
    with pytest.raises(DataError, match=r"label_pattern \(dog\)_ finds no class in 6 of 6 names"):
        opened(dataset_path=str(tmp_path), label_pattern="(dog)_")
    with pytest.raises(DataError, match="6 classes for 6 images"):
        opened(dataset_path=str(tmp_path), label_pattern="(.+)[.]jpg")
    for wrong, words in (("(a", "must be a regular expression"), ("a", "must have one group"), ("(a)(b)", "it has 2")):
        with pytest.raises(ConfigError, match=words):
            config_from({"dataset": "folder", "label_pattern": wrong})
    with pytest.raises(ConfigError, match="the labels are given in another way"):
        config_from({"dataset": "csv", "labels": "x.csv", "label_pattern": pattern})


def test_a_csv_file_without_splits_is_split_as_folders_are(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 6, "b": 4})
    rows = [f"{file.relative_to(tmp_path)},{file.parent.name}" for file in sorted(tmp_path.glob("*/*.jpg"))]
    (tmp_path / "list.csv").write_text("\ufefffile,class\n" + "\n".join(rows))  # as Excel writes it
    listed = opened(labels=str(tmp_path / "list.csv"), dataset_path=str(tmp_path), validation_split=0.25)
    folders = opened(dataset_path=str(tmp_path), validation_split=0.25)
    assert listed.info.class_names == folders.info.class_names
    for split in ("train", "validation"):
        ours, theirs = getattr(listed, split), getattr(folders, split)
        assert np.array_equal(ours.read(np.arange(len(ours)), 0), theirs.read(np.arange(len(theirs)), 0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n0.jpg,1\n", "line 1: the columns are a, b"),
        ("", "line 1: the columns are not named"),
        ("path,label\n", "lists no images"),
        ("path,label\n0.jpg\n", "line 2: 1 value"),
        ("path,label\n0.jpg,\n", "line 2: the label is ''"),
        ("path,label\n\0,x\n", "line 2: the path is"),
        ("path,label\n0.jpg,a\n9.jpg,b\n", "1 of 2 images are not there, the first in line 3: .*9.jpg"),
        ("path,label\n0.jpg,a\n1.jpg,a\n", "only one class: a"),
        ("path,label,split\n0.jpg,a,holdout\n", "line 2: the split is 'holdout'"),
        ("path,label,split\n0.jpg,a,train\n1.jpg,b,train\n2.jpg,c,val\n", "line 4: the class 'c' has no training"),
        ("path,label,split\n0.jpg,a,val\n1.jpg,b,val\n", "no row whose split is train"),
        ('path,label\n0.jpg,"a\n1.jpg,b\n', "line 2: .*end of data"),
        ('path,label,note\n0.jpg,a,"two\nlines"\n1.jpg,,\n', "line 4: the label is ''"),
        ("path,label\n0.jpg," + "x" * 200_000 + "\n", "field larger"),
        ("path,label\n" + "x" * 5000 + ",a\n", "1 of 1 images are not there"),  # longer than a name can be
    ],
)
def test_csv_files_that_cannot_work(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        opened(labels=str(write_csv(tmp_path, text)))


def test_a_csv_file_of_another_encoding_or_kind(tmp_path: Path) -> None:
    file = write_csv(tmp_path, "")
    file.write_bytes("path,label\n0.jpg,café\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"not UTF-8.*Save it as UTF-8"):
        opened(labels=str(file))
    with pytest.raises(DataError, match="not a regular file"):
        opened(labels=str(tmp_path))
    with pytest.raises(DataError, match="No such file"):
        opened(labels=str(tmp_path / "none.csv"))
    with pytest.raises(ConfigError, match="for the dataset cifar10"):
        config_from({"labels": "x.csv", "dataset": "cifar10"})


def test_arrays_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "set.npz"
    np.savez_compressed(file, X_train=PIXELS, y_train=LABELS[:, None], X_test=PIXELS[:6] ^ 1, y_test=LABELS[:6])
    assert detect(str(file)) == "npz"
    dataset = opened(dataset_path=str(file), image_size=28, num_channels=1)
    assert (dataset.info.num_classes, dataset.info.num_train, dataset.info.num_validation) == (3, 24, 6)
    assert np.array_equal(dataset.train.read(np.arange(24), 0)[..., 0], PIXELS)
    assert np.array_equal(dataset.validation.read(np.arange(6), 0)[..., 0], PIXELS[:6] ^ 1)
    np.savez(file, images=PIXELS, labels=LABELS, class_names=np.array(["a", "b", "c"]))
    held_out = opened(dataset_path=str(file), validation_split=0.25)
    assert (held_out.info.class_names, held_out.info.num_train) == (("a", "b", "c"), 18)
    assert np.bincount(held_out.validation.labels).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"a": PIXELS}, "has the arrays none"),
        ({"images": PIXELS.astype(np.float32), "labels": LABELS}, "images is float32"),
        ({"images": np.zeros((2, 3, 8, 8), np.uint8), "labels": LABELS[:2]}, "channels last"),
        ({"images": PIXELS, "labels": LABELS[:5]}, r"labels is int64\[5\] for 24 images"),
        ({"images": PIXELS, "labels": LABELS - 1}, "whole numbers from 0"),
        ({"images": PIXELS, "labels": LABELS, "class_names": np.array(["a"])}, "there are 1 class names"),
        ({"images": np.array([{}], object), "labels": LABELS[:1]}, "which the file cannot hold"),
    ],
)
def test_arrays_that_are_no_images_and_labels(tmp_path: Path, arrays: dict, words: str) -> None:
    np.savez(tmp_path / "set.npz", **arrays)
    with pytest.raises(DataError, match=words):
        opened(dataset_path=str(tmp_path / "set.npz"))


def test_a_file_of_arrays_that_lies_about_its_size(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (2**40, 28, 28)})
    file = tmp_path / "set.npz"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("images.npy", header.getvalue() + bytes(100))
        archive.writestr("labels.npy", b"")
    with pytest.raises(DataError, match="which the file cannot hold"):
        opened(dataset_path=str(file))
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(DataError, match=r"not a good .npz file"):
        opened(dataset_path=str(file))


def npz_of_zeros(file: Path, **shapes: tuple[int, ...]) -> None:
    """Write a compressed file of large arrays without ever having them in memory."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, shape in shapes.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as out:
                dtype = "<U1" if name == "class_names" else "|u1"
                header = io.BytesIO()
                np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
                out.write(header.getvalue())
                left = int(np.prod(shape)) * np.dtype(dtype).itemsize
                while left > 0:
                    left -= out.write(bytes(min(left, 1 << 20)))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"images": (100 << 20, 1, 1), "labels": (5,)}, r"labels is uint8\[5\] for 104,857,600 images"),
        ({"x_train": (4, 2, 2), "y_train": (4,), "x_test": (100 << 20, 1, 1), "y_test": (2,)}, "y_test is uint8"),
        ({"images": (4, 2, 2), "labels": (100 << 20,)}, r"labels is uint8\[104857600\] for 4 images"),
        ({"images": (4, 2, 2), "labels": (4,), "class_names": (25 << 20,)}, "class_names is <U1"),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_not_unpacked(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], words: str
) -> None:
    """A hundred kilobytes stand for 100 MiB: what the headers say is compared first."""
    file = tmp_path / "set.npz"
    npz_of_zeros(file, **shapes)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=words):
            opened(dataset_path=str(file))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_an_array_that_is_not_asked_for_is_not_unpacked(tmp_path: Path) -> None:
    file = tmp_path / "set.npz"
    npz_of_zeros(file, images=(8, 24, 24), labels=(8,), x=(100 << 20, 1, 1), y=(100 << 20,))
    tracemalloc.start()
    try:
        assert len(read_npz_set(file).train) == 8
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def write_parquet(file: Path, images: list[bytes], labels: list[int], names: list[str] | None = None) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
    pictures = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {"image": pa.array([{"bytes": image} for image in images], pictures), "label": pa.array(labels)}
    table = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, file, row_group_size=4)


def test_tables_of_hugging_face(tmp_path: Path) -> None:
    images = [encode(smooth(40, 50, seed=number)) for number in range(12)]
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data/train-00000-of-00001.parquet", images[:9], [0, 1, 2] * 3, ["ant", "bee", "cat"])
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", images[9:], [0, 1, 2], ["ant", "bee", "cat"])
    dataset = opened(dataset_path=str(tmp_path))
    assert (dataset.info.name, dataset.info.class_names) == ("parquet", ("ant", "bee", "cat"))
    assert (dataset.info.num_train, dataset.info.num_validation, dataset.info.remarks) == (9, 3, ())
    small = opened(dataset_path=str(tmp_path), dataset_host_budget="1KiB", dataset_cache="raw")
    assert "a whole group of rows is decoded" in small.info.remarks[0]
    every = dataset.train.read(np.arange(9), 0)
    assert np.array_equal(every, small.train.read(np.arange(9)[::-1], 0)[::-1])
    data = (tmp_path / "data/test-00000-of-00001.parquet").read_bytes()
    (tmp_path / "data/test-00000-of-00001.parquet").write_bytes(data[:-30])
    with pytest.raises(DataError, match="not a good parquet file"):
        opened(dataset_path=str(tmp_path))


def test_a_row_is_named_by_its_place_in_its_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a.parquet": [4, 2], "b.parquet": [3, 5]}  # rows of the groups of each file

    def opened_file(file: Path) -> Any:
        groups = [SimpleNamespace(num_rows=rows) for rows in sizes[file.name]]
        return SimpleNamespace(metadata=SimpleNamespace(num_row_groups=len(groups), row_group=groups.__getitem__))

    monkeypatch.setattr(parquet, "_pyarrow", lambda file: SimpleNamespace(ParquetFile=opened_file))
    table = parquet._Table([Path(name) for name in sizes], "image", keep=True)
    assert [table.name(row) for row in (0, 5, 6, 9, 13)] == [
        *("a.parquet, row 0", "a.parquet, row 5"),
        *("b.parquet, row 0", "b.parquet, row 3", "b.parquet, row 7"),
    ]


def test_a_table_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'headrace\[parquet\]'"):
        opened(dataset_path=str(tmp_path))


def test_mean_and_deviation_of_pixels_are_options(tmp_path: Path) -> None:
    given = {"pixel_mean": [0.5], "pixel_std": [0.2, 0.3, 0.4]}
    info = describe_dataset(config_from({"dataset": "cifar10", **given}).data)
    assert (info.normalization, info.channel_mean, info.channel_std) == ("per-channel", (0.5,) * 3, (0.2, 0.3, 0.4))
    write_classes(tmp_path, {"a": 3, "b": 3})
    info = describe_dataset(config_from({"dataset": "folder", "dataset_path": str(tmp_path), **given}).data)
    assert info.channel_std == (0.2, 0.3, 0.4)
    for options, words in [
        ({"pixel_mean": [123.7]}, "less than 1"),
        ({"pixel_std": [58.4]}, "Divide the numbers by 255"),
        ({"pixel_std": [0.2], "normalization": "per-image"}, "the normalization is per-image"),
        ({"pixel_std": [0.2], "normalise_input": False}, "the normalization is centred"),
    ]:
        with pytest.raises(ConfigError, match=words):
            config_from({"dataset": "cifar10", **options})
    with pytest.raises(ConfigError, match="pixel_mean has 2 numbers, but images have 3"):
        describe_dataset(config_from({"dataset": "cifar10", "pixel_mean": [0.5, 0.5]}).data)


def test_validation_images_alone(tmp_path: Path) -> None:
    write_classes(tmp_path / "val", {"a": 2, "b": 2})
    info = describe_dataset(config_from({"dataset": "auto", "dataset_path": str(tmp_path)}).data)
    assert (info.num_train, info.num_validation, info.image_hwc) == (0, 4, (64, 64, 3))
    from headrace.run.design import design_run

    for training in (True, False):
        config = config_from({"dataset": "folder", "dataset_path": str(tmp_path), "training": training})
        if training:
            with pytest.raises(DataError, match=r"has no training images.*headrace validate"):
                design_run(config)
        else:
            assert design_run(config).plan.validation.num_samples == 4


# Columns of labels that are no classes.


def write_labels(root: Path, labels: list[str]) -> Path:
    rows = [f"{number}.jpg;{label}\n" for number, label in enumerate(labels)]
    return write_csv(root, "path;target\n" + "".join(rows), len(labels))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (
            [f"{number / 10}" for number in range(8)],
            r"line 3: the label is 0.1, and all labels are numbers.*regression",
        ),
        (["2", "1,5"] * 4, r"line 3: the label is 1,5.*add letters: x0.5"),
        (["NaN", "1e-3", "5", "2"] * 2, r"line 3: the label is 1e-3"),
        (
            [f"n{number}" for number in range(19)] + ["n0"],
            r"19 classes for 20 images: n0, n1, n10 and 16 more.*At most 0.9 classes for each image.*regression",
        ),
    ],
)
def test_a_column_that_is_no_class_is_refused(tmp_path: Path, labels: list[str], words: str) -> None:
    with pytest.raises(DataError, match=words):
        opened(labels=str(write_labels(tmp_path, labels)))


@pytest.mark.parametrize(
    "labels", [["1.0", "2.0"] * 4, ["v0.5", "v1"] * 4, ["1.2.3", "0.5"] * 4, ["1", "2"] * 4, ["0x1", "1.5"] * 4]
)
def test_whole_numbers_and_words_are_classes(tmp_path: Path, labels: list[str]) -> None:
    assert opened(labels=str(write_labels(tmp_path, labels))).info.class_names == tuple(sorted(set(labels)))


def test_more_classes_than_half_of_the_images_are_remarked(tmp_path: Path) -> None:
    labels = [f"n{number}" for number in range(6)]
    file = write_labels(tmp_path, [*labels, *labels[:5]])  # 6 of 11
    assert "6 classes for 11 images: fewer than two images for each class" in opened(labels=str(file)).info.remarks
    file = write_labels(tmp_path, labels * 2)
    assert not any("fewer than two" in remark for remark in opened(labels=str(file)).info.remarks)


def test_measured_numbers_in_arrays_are_refused(tmp_path: Path) -> None:
    labels = np.arange(24) / 7
    np.savez(tmp_path / "set.npz", images=PIXELS, labels=labels)
    with pytest.raises(DataError, match=r"labels is float64.*regression"):
        opened(dataset_path=str(tmp_path / "set.npz"))
    np.savez(tmp_path / "set.npz", images=PIXELS, labels=np.arange(24) % 23)
    with pytest.raises(DataError, match=r"23 classes for 24 images"):
        opened(dataset_path=str(tmp_path / "set.npz"))
    with pytest.raises(DataError, match=r"labels are float64.*regression"):
        headrace.Model("toy_model", input_shape=(28, 28, 1), num_classes=24).fit(PIXELS[..., None], labels)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"id": [1, 2] * 4, "label": [0.25, 0.5] * 4}, r"the column label is double.*regression"),
        ({"id": [1, 2] * 4, "target": [0.25, 0.5] * 4}, r"the column target is double.*regression"),
        ({"id": [1, 2] * 4, "label": ["cat", "dog"] * 4}, r"the column label is string.*Number the classes"),
        ({"id": [1, 2] * 4, "kind": [0, 1] * 4}, r"several columns of whole numbers: id, kind.*Rename the column"),
        ({"id": list(range(8))}, r"8 classes for 8 images"),
    ],
)
def test_the_column_of_labels_of_a_table_is_not_guessed(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [encode(smooth(16, 16, seed=number)) for number in range(8)]
    parquet.write_table(pa.table({"image": images} | columns), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=words):
        opened(dataset_path=str(tmp_path))
