"""Class folders: found, listed in order, split the same way every time; what cannot be right is told."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from headrace.config.load import config_from, resolve
from headrace.core.errors import ConfigError, DataError
from headrace.data.dataset import describe_dataset, open_dataset
from headrace.data.sets import duplicates
from headrace.data.sets.formats.folder import list_classes, read_folders
from headrace.data.sets.image_sets import detect
from headrace.data.verify import format_report, verify

from .image_files import encode, smooth, write_classes


def test_train_and_val_folders(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"dog": 3, "cat": 2, "cow": 4})
    write_classes(tmp_path / "val", {"cat": 1, "dog": 2}, first_seed=50)
    (tmp_path / "train" / "cat" / "more").mkdir()
    (tmp_path / "train" / "cat" / "more" / "B.JPEG").write_bytes(encode(smooth(20, 20)))
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".hidden").mkdir()
    found = read_folders(tmp_path, 0.1)
    assert found.class_names == ("cat", "cow", "dog")
    assert found.train.labels.tolist() == [0] * 3 + [1] * 4 + [2] * 3
    assert found.validation.labels.tolist() == [0, 2, 2]
    names = [found.train.name(sample).removeprefix(f"{tmp_path}/train/") for sample in range(3)]
    assert names == ["cat/0.jpg", "cat/1.jpg", "cat/more/B.JPEG"]
    assert found.validation.content(0).image == (tmp_path / "val" / "cat" / "0.jpg").read_bytes()


def test_one_folder_is_split_by_name_and_class(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 20, "b": 7, "c": 2, "d": 1})
    found = read_folders(tmp_path, 0.25)
    assert np.bincount(found.validation.labels).tolist() == [5, 2, 1]
    assert np.bincount(found.train.labels).tolist() == [15, 5, 1, 1]
    train = {found.train.name(sample) for sample in range(len(found.train))}
    held_out = {found.validation.name(sample) for sample in range(len(found.validation))}
    assert len(train) + len(held_out) == 30
    assert not train & held_out
    again = read_folders(tmp_path, 0.25)
    assert {again.validation.name(sample) for sample in range(len(again.validation))} == held_out


def test_the_directories_of_runs_are_no_classes(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 3, "b": 3, "runs/one/reports": 1, "run/checkpoints": 0})
    for run in ("runs/one", "run"):
        for name in ("config.json", "plan.json"):
            (tmp_path / run / name).write_text("{}")
    found = list_classes(tmp_path)
    assert found.class_names == ("a", "b")
    assert len(found.files) == 6, "an image in a run's directory is none of the set's"
    assert not found.skipped
    (tmp_path / "run" / "plan.json").unlink()
    with pytest.raises(DataError, match="hold no image: run"):
        list_classes(tmp_path)


def test_a_changed_folder_is_listed_again(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 2, "b": 2})
    assert len(read_folders(tmp_path, 0.5).train) == 2
    (tmp_path / "a" / "9.jpg").write_bytes(encode(smooth(8, 8)))
    os.utime(tmp_path / "a", ns=(1, 10**18))
    assert len(read_folders(tmp_path, 0.5).train) + len(read_folders(tmp_path, 0.5).validation) == 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: write_classes(root, {"a": 2, "b": 0}), "1 class folder.s. of .* hold no image: b"),
        (lambda root: write_classes(root, {"cat": 2, "Cat": 2}), "same name but for case or spaces: 'Cat' and 'cat'"),
        (lambda root: write_classes(root, {"only": 3}), "only one class folder: only"),
        (lambda root: (root / "1.jpg").write_bytes(encode(smooth(8, 8))), "1 image.s. are directly in it"),
        (lambda root: write_classes(root, {"a": 1, "b": 1}), "each of its 2 classes has one image"),
    ],
)
def test_doubtful_folders_are_refused(tmp_path: Path, make, words: str) -> None:
    make(tmp_path)
    with pytest.raises(DataError, match=words):
        read_folders(tmp_path, 0.1)


def test_validation_may_not_have_other_classes(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"a": 2, "b": 2})
    write_classes(tmp_path / "val", {"a": 2, "c": 2})
    with pytest.raises(DataError, match="that training has not: c"):
        read_folders(tmp_path, 0.1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "a").chmod(0)
    with pytest.raises(DataError, match="Permission denied"):
        read_folders(tmp_path, 0.1)


def test_the_kind_is_found_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_classes(tmp_path / "train", {"a": 2, "b": 2})
    assert detect(str(tmp_path)) == "folder"
    with pytest.raises(DataError, match="does not exist"):
        detect(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no known dataset"):
        detect(str(tmp_path / "empty"))
    with pytest.raises(DataError, match=f"2 images are in it.*if a is a class, give --dataset-path '{tmp_path}/train'"):
        detect(str(tmp_path / "train" / "a"))
    with pytest.raises(DataError, match="is one file"):
        detect(str(next((tmp_path / "train" / "a").iterdir())))
    monkeypatch.chdir(tmp_path / "train" / "a")
    with pytest.raises(DataError, match=r"if a is a class, give --dataset-path '\.\.'"):
        detect(".")


def test_a_known_set_below_the_folder_is_named(tmp_path: Path) -> None:
    place = tmp_path / "cifar-10-batches-bin"
    place.mkdir()
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        (place / name).touch()
    with pytest.raises(DataError, match=r"cifar-10-batches-bin in it is cifar10.*or add --dataset cifar10"):
        detect(str(tmp_path))
    assert detect(str(place)) == "cifar10"


@pytest.mark.parametrize(
    ("hw", "size", "varies", "augmentation"),
    [((40, 50), 64, False, "flip-crop"), ((100, 130), 128, True, "flip"), ((300, 260), 224, True, "flip")],
)
def test_size_and_recipe_fit_the_images(tmp_path: Path, hw, size: int, varies: bool, augmentation: str) -> None:
    write_classes(tmp_path, {"a": 2, "b": 3}, hw)
    info = describe_dataset(config_from({"dataset": "auto", "dataset_path": str(tmp_path)}).data)
    assert (info.image_hwc, info.varies or info.decoded_once, info.augmentation) == (
        (size, size, 3),
        varies,
        augmentation,
    )
    assert (info.name, info.num_classes, info.class_names) == ("folder", 2, ("a", "b"))
    assert (info.num_train, info.num_validation) == (3, 2)
    assert info.channel_mean == (0.485, 0.456, 0.406)
    told = describe_dataset(config_from({"dataset": "folder", "dataset_path": str(tmp_path), "image_size": 48}).data)
    assert told.image_hwc == (48, 48, 3)


def test_a_path_alone_chooses_the_recipe_for_images() -> None:
    resolved = resolve({"dataset_path": "somewhere"}, environ={})
    assert (resolved.name, resolved.config.data.dataset) == ("images", "auto")
    assert resolve({"dataset_path": "x", "dataset": "cifar10"}, environ={}).name == "default"
    assert resolve({"dataset": "folder"}, environ={}).name == "images"
    assert resolve({}, environ={"DATASETS_DIR": "x"}).config.data.dataset == "digits"
    assert resolve({"dataset_path": "x"}, "cifar10_resnet20", environ={}).config.data.dataset == "cifar10"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": "cifar10", "train_crop": "valid"}, "train_crop"),
        ({"dataset": "digits", "max_bad_samples": 0.5}, "max_bad_samples"),
        ({"dataset": "folder", "num_channels": 4}, "3 channels"),
        ({"dataset": "folder", "num_classes": 4}, "num_classes"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from(options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"crop_area": [0.5, 0.1]}, "crop_area is 0.5 0.1"),
        ({"crop_area": [0.5, 1.5]}, "at most 1"),
        ({"crop_aspect": [1]}, "two numbers"),
        ({"crop_area": [0.1, 0.2], "train_crop": "valid"}, "nothing is cropped at random"),
        ({"eval_resize_size": 100}, "the image size is 128"),
        ({"dataset_cache": "device"}, None),
    ],
)
def test_impossible_crops_are_refused(tmp_path: Path, options: dict, words: str | None) -> None:
    write_classes(tmp_path, {"a": 2, "b": 3}, (100, 130))
    data = config_from({"dataset": "folder", "dataset_path": str(tmp_path)} | options).data
    if words is not None:
        with pytest.raises(ConfigError, match=words):
            open_dataset(data, 0)


def test_files_that_are_not_read_are_counted_by_reason(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 3, "b": 2})
    (tmp_path / "a" / "x.bmp").write_bytes(encode(smooth(9, 9), "BMP"))
    for name in ("notes.txt", "b/more.txt", "a/Thumbs.db", "a/.DS_Store", "__pycache__/x.pyc", "b/plain"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    os.mkfifo(tmp_path / "a" / "pipe.jpg")
    (tmp_path / "b" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (tmp_path / "b" / "self").symlink_to("self")
    (tmp_path / "b" / "loop").symlink_to(".")
    (tmp_path / "a" / "to_b").symlink_to("../b")
    (tmp_path / "b" / "to_a").symlink_to("../a")
    (tmp_path / os.fsdecode(b"b/caf\xe9.jpg")).write_bytes(encode(smooth(9, 9)))
    found = read_folders(tmp_path, 0.2)
    assert found.class_names == ("a", "b")
    names = [found.train.name(n) for n in range(len(found.train))]
    assert str(tmp_path / "a/x.bmp") in [*names, *(found.validation.name(n) for n in range(len(found.validation)))]
    reasons = {row.reason: row.count for row in found.skipped}
    # each class is walked through the links too: b, a/to_b and once more where b/to_a/to_b leads back
    assert reasons == {
        "a link to a folder above it": 4,
        ".txt is not an image type": 2,
        "no extension": 2,
        "not a regular file": 2,
        "a link that leads nowhere": 4,
        "the name is not UTF-8": 2,
    }
    assert "2 files are skipped (not a regular file): " in "\n".join(map(str, found.skipped))


def test_a_class_folder_whose_name_is_not_unicode(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 2, os.fsdecode(b"caf\xe9"): 2})
    with pytest.raises(DataError, match=r"not UTF-8: b'caf\\xe9'.*Rename"):
        read_folders(tmp_path, 0.2)


def test_a_pipe_that_appears_after_the_listing_does_not_block(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"a": 2, "b": 2}, (100, 130))
    write_classes(tmp_path / "val", {"a": 2, "b": 2}, (100, 130))
    data = config_from({"dataset": "folder", "dataset_path": str(tmp_path), "max_bad_samples": 0.5}).data
    dataset = open_dataset(data, 0)
    for file in tmp_path.glob("val/*/0.jpg"):
        file.unlink()
        os.mkfifo(file)
    dataset.validation.read(np.arange(len(dataset.validation)), 0)
    assert dataset.bad is not None
    assert {row["problem"] for row in dataset.bad.rows} == {"not a regular file"}


def test_the_same_image_in_two_places_is_remarked(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"a": 3, "b": 3})
    write_classes(tmp_path / "val", {"a": 2, "b": 2}, first_seed=50)
    options = {"dataset": "folder", "dataset_path": str(tmp_path)}
    assert open_dataset(config_from(options).data, 0).info.remarks == ()
    shutil.copy(tmp_path / "train/a/0.jpg", tmp_path / "val/a/copy.jpg")
    shutil.copy(tmp_path / "train/a/1.jpg", tmp_path / "train/b/copy.jpg")
    shutil.copy(tmp_path / "train/a/2.jpg", tmp_path / "train/a/again.jpg")
    leaked, confused = open_dataset(config_from(options).data, 0).info.remarks
    assert leaked.startswith("1 validation image(s) are also in training")
    assert leaked.endswith(f"{tmp_path}/val/a/copy.jpg = {tmp_path}/train/a/0.jpg")
    assert confused.startswith("1 image(s) are in more than one class: ")
    report = verify(config_from(options).data)
    assert report.problems == ()
    assert report.duplicates == (leaked, confused)
    assert report.notes == ("1 image(s) repeat another one of their class and split",)
    assert "2 problem(s):\n  1. 1 validation" in format_report(report)


def test_links_to_one_image_are_compared_without_reading_it_again(tmp_path: Path, monkeypatch) -> None:
    write_classes(tmp_path / "train", {"a": 2, "b": 2})
    write_classes(tmp_path / "val", {"a": 1, "b": 1}, first_seed=50)
    for number in range(5):
        os.link(tmp_path / "train/a/0.jpg", tmp_path / f"val/a/hard{number}.jpg")
        (tmp_path / f"val/b/soft{number}.jpg").symlink_to(tmp_path / "train/a/1.jpg")
    read = []
    monkeypatch.setattr(duplicates, "_whole", lambda path: read.append(path) or Path(path).read_bytes())
    data = config_from({"dataset": "folder", "dataset_path": str(tmp_path)}).data
    leaked, confused = open_dataset(data, 0).info.remarks
    assert leaked.startswith("10 validation image(s) are also in training")
    assert confused.startswith("1 image(s) are in more than one class")
    assert len(read) == 2


def test_validation_images_in_another_place(tmp_path: Path) -> None:
    """All images of the dataset are then for training; classes must be the same, with or without a folder val."""
    write_classes(tmp_path / "photos", {"cat": 3, "dog": 2})
    write_classes(tmp_path / "more" / "val", {"dog": 2, "cat": 1}, first_seed=50)
    options = {"dataset_path": str(tmp_path / "photos"), "dataset": "folder", "image_size": 16}
    for place in (tmp_path / "more", tmp_path / "more" / "val"):
        found = open_dataset(config_from(options | {"validation_path": str(place)}).data, 0)
        assert found.train.labels.tolist() == [0] * 3 + [1] * 2
        assert found.validation.labels.tolist() == [0, 1, 1]
    with pytest.raises(DataError, match=r"no folder .*nowhere"):
        describe_dataset(config_from(options | {"validation_path": str(tmp_path / "nowhere")}).data)
    with pytest.raises(ConfigError, match="validation_path"):
        config_from({"dataset": "digits", "validation_path": "x"})
    write_classes(tmp_path / "others", {"cow": 2, "dog": 2})
    with pytest.raises(DataError, match="cow"):
        describe_dataset(config_from(options | {"validation_path": str(tmp_path / "others")}).data)
