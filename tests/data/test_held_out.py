"""What is held out of each class is what is said of it, and a remedy that is followed works."""

import json
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.cli.main import main
from headrace.config.load import config_from
from headrace.core.errors import DataError
from headrace.core.rng import bits, name_id
from headrace.data.dataset import DataInfo, describe_dataset
from headrace.data.sets.held_out import held_out_mask

from .image_files import write_classes


def described(path: Path, **options: object) -> DataInfo:
    return describe_dataset(config_from({"dataset": "auto", "dataset_path": str(path), **options}).data)


def test_the_split_is_that_of_a_loop_over_the_classes() -> None:
    rng = np.random.default_rng(0)
    for count, classes, fraction in ((1, 1, 0.2), (50, 7, 0.25), (900, 400, 0.5), (900, 3, 0.0), (4000, 9, 0.15)):
        files, labels = tuple(f"{n // 2}" for n in range(count)), rng.integers(0, classes, count)
        draw = bits(name_id("validation split"), np.array([name_id(file) for file in files], np.uint32))
        want = np.zeros(count, bool)
        for label in set(labels.tolist()):
            members = [n for n in range(count) if labels[n] == label]
            kept = min(max(round(fraction * len(members)), 1 if fraction else 0), len(members) - 1)
            want[sorted(members, key=lambda n: draw[n])[:kept]] = True
        assert np.array_equal(held_out_mask(files, labels, fraction), want)


def test_adding_images_moves_few_to_the_other_side() -> None:
    files = tuple(f"a/{number}.jpg" for number in range(1000))
    labels = np.zeros(1000, np.int32)
    before = held_out_mask(files, labels, 0.1)
    after = held_out_mask((*files, "a/new.jpg"), np.zeros(1001, np.int32), 0.1)
    assert before.sum() == after.sum() == 100
    assert (before != after[:1000]).sum() <= 2


def test_the_numbers_of_small_classes_are_said(tmp_path: Path) -> None:
    write_classes(tmp_path, {f"c{number}": 2 + number % 2 for number in range(8)})
    info = described(tmp_path)
    assert (info.num_train, info.num_validation) == (12, 8), "one of each, of 4 x 2 + 4 x 3"
    assert info.place == f"{tmp_path}, 8 of 20 images held out (40 %), always the same"
    assert info.remarks == (
        "8 of 8 classes are too small for validation_split 0.1, since at least one image is held out and one trained "
        "on: 1 of 2 images of c0, 1 of 3 images of c1, 1 of 2 images of c2 and 5 more",
    )
    assert described(tmp_path, validation_split=0.4).remarks == (), "0.4 of 2 and of 3 images is one image"


def test_a_share_as_asked_for_is_said_without_a_remark(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 30, "b": 20})
    info = described(tmp_path)
    assert (info.place, info.remarks) == (f"{tmp_path}, 5 of 50 images held out (10 %), always the same", ())


def test_classes_of_one_image_are_named(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 20} | {f"single{number}": 1 for number in range(5)})
    assert described(tmp_path).remarks == (
        "5 of 6 classes have one image, which is trained on, and none to validate: single0, single1, single2 and 2 "
        "more",
    )


@pytest.mark.parametrize("kind", ["folder", "csv", "npz"])
def test_nothing_to_hold_out_is_refused_with_a_remedy_that_works(tmp_path: Path, kind: str) -> None:
    """More of a class of one image cannot be held out, so a larger share is no remedy: more images are.

    A column of labels that names every image is refused as such.
    """

    def options(images: int, **more: object) -> dict[str, object]:
        root = tmp_path / f"{kind}{images}"
        write_classes(root, {"a": images, "b": images}, hw=(24, 24))
        files = sorted(root.glob("*/*.jpg"))
        if kind == "csv":
            rows = [f"{file.relative_to(root)},{file.parent.name}\n" for file in files]
            (root / "list.csv").write_text("path,label\n" + "".join(rows))
            return {"labels": str(root / "list.csv"), **more}
        if kind == "npz":
            labels = np.repeat(np.arange(2), images)
            np.savez(root / "set.npz", images=np.zeros((len(labels), 24, 24, 3), np.uint8), labels=labels)
            return {"dataset_path": str(root / "set.npz"), **more}
        return {"dataset_path": str(root), **more}

    def describe(given: dict[str, object]) -> DataInfo:
        return describe_dataset(config_from({"dataset": "auto", **given}).data)

    for fraction in (0.1, 0.9):
        words = r"each of its 2 classes has one image alone.*two or more for each class"
        with pytest.raises(DataError, match=words if kind == "folder" else "2 classes for 2 images"):
            describe(options(1, validation_split=fraction))
    assert describe(options(2)).num_validation == 2, "the remedy"
    with pytest.raises(DataError, match=r"validation_split 0 holds nothing out.*or raise validation_split"):
        describe(options(2, validation_split=0))
    assert describe(options(2, validation_split=0.1)).num_validation == 2, "the remedy"


def test_arrays_in_python_are_held_out_alike() -> None:
    model = headrace.Model("toy_model", input_shape=(32, 32, 3), num_classes=2)
    images = np.zeros((2, 32, 32, 3), np.uint8)
    with pytest.raises(DataError, match=r"each of its 2 classes has one image alone.*or validation_data"):
        model.fit(images, [0, 1], validation_split=0.9, epochs=1)
    with pytest.raises(DataError, match="labels are float64"):
        model.fit(images, [0.0, 1.0], validation_split=0.5, epochs=1)


def test_the_plan_says_what_is_skipped_and_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_classes(tmp_path, {"a": 3, "b": 3})
    (tmp_path / "a" / "notes.txt").write_text("no image")
    for more in ([], ["--json"]):
        assert main(["plan", "--dataset-path", str(tmp_path), "--model", "cifar_resnet8", *more]) == 0
        printed = capsys.readouterr().out
        remarks = json.loads(printed)["remarks"] if more else printed.splitlines()
        assert any("1 file is skipped (.txt is not an image type)" in line for line in remarks)
        assert any("2 of 2 classes are too small for validation_split 0.1" in line for line in remarks)


def test_plan_and_train_say_the_classes_in_their_second_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_classes(tmp_path / "photos", {"ant": 10, "b\ne\x1be": 10}, hw=(32, 32))
    words = r"2 classes (ant, b\ne\x1be), 18 training and 2 validation images"
    options = ["--dataset-path", str(tmp_path / "photos"), "--model", "toy_model", "--epochs", "1"]
    assert main(["plan", *options]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if not line.startswith("note:")]
    heading, second = lines[:2]
    assert heading.startswith("toy_model on folder")
    assert second == words
    assert main(["train", *options, "--output", str(tmp_path / "run"), "--compile-only", "--no-report"]) == 0
    printed = capfd.readouterr()
    assert (printed.out + printed.err).splitlines()[1] == f"data: {words}"


def test_many_classes_are_counted_and_not_named() -> None:
    info = described_by(num_classes=13)
    assert info.size_text == "13 classes, 50,000 training and 10,000 validation images"


def described_by(**options: object) -> DataInfo:
    return describe_dataset(config_from({"dataset": "generated", **options}).data)
