"""A dataset is found once: what options make of it follows from what was found."""

import ast
import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import headrace.data.dataset as dataset
from headrace.config.load import resolve
from headrace.config.schema import Data
from headrace.core.errors import DataError
from headrace.data.dataset import LISTED, describe_dataset, find_set, open_dataset
from headrace.run.design import NOTHING, design_run, open_data, with_set
from headrace.run.fit import train

from .image_files import write_classes


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_classes(tmp_path / "photos", {"a": 10, "b": 10})
    return tmp_path / "photos"


def test_facts_and_parts_are_those_of_a_set_that_is_found_anew(photos: Path) -> None:
    data = Data(dataset="auto", dataset_path=str(photos))
    found = find_set(data)
    for changed in (
        data,
        replace(data, image_size=24, num_channels=1),
        replace(data, decode_once="on", train_crop="torchvision"),
    ):
        assert found.is_of(changed)
        assert found.info(changed) == describe_dataset(changed)
        mine, anew = found.open(changed, 3), open_dataset(changed, 3)
        assert mine.info == anew.info
        np.testing.assert_array_equal(mine.train.labels, anew.train.labels)
        assert mine.validation.read(np.array([0]), 0).tobytes() == anew.validation.read(np.array([0]), 0).tobytes()


@pytest.mark.parametrize(
    "change",
    [{"validation_split": 0.5}, {"dataset": "folder"}, {"dataset_path": "elsewhere"}, {"label_pattern": "(.)"}],
)
def test_options_that_list_other_images_find_another_set(photos: Path, change: dict) -> None:
    data = Data(dataset="auto", dataset_path=str(photos))
    assert not find_set(data).is_of(replace(data, **change))


def test_a_list_is_the_same_under_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_classes(tmp_path, {"a": 4, "b": 4})
    (tmp_path / "all.csv").write_text("path,label\n" + "".join(f"{c}/{k}.jpg,{c}\n" for c in "ab" for k in range(4)))
    data = Data(dataset="csv", labels="all.csv", dataset_path=".")
    assert find_set(data).is_of(replace(data, labels=str(tmp_path / "all.csv")))


def test_what_lists_a_set_reads_no_other_option() -> None:
    """A set found before would otherwise be taken for that of options which list other images."""
    sets = Path(dataset.__file__).parent / "sets"
    options = {field.name for field in dataclasses.fields(Data)}
    for file in (*(sets / "formats").glob("*.py"), sets / "image_sets.py", sets / "table_set.py"):
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
        names = {node.attr for node in nodes if ast.unparse(node.value) == "data"}
        assert names & options <= {*LISTED, "labels"}, file.name


def test_a_run_lists_its_images_once(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = []
    ours = dataset.open_image_set
    monkeypatch.setattr(dataset, "open_image_set", lambda *given: listed.append(given) or ours(*given))
    options = {"model": "toy_model", "image_size": 32, "dry_run_steps": 1, "progress": "none", "num_epochs": 1}
    train(resolve(options | {"dataset_path": str(photos), "output": str(tmp_path / "run")}, environ={}))
    assert len(listed) == 1


def test_an_imagenet_that_is_not_there_is_planned_and_not_trained_on(tmp_path: Path) -> None:
    options = {"dataset": "imagenet", "dataset_path": str(tmp_path), "model": "resnet18", "micro_batch_size": 8}
    config = resolve(options, "none", environ={}).config
    parts = with_set(config, NOTHING, absent_ok=True)
    assert design_run(config, parts, absent_ok=True).info.num_train == 1_281_167
    with pytest.raises(DataError, match="holds no images"):
        design_run(config, parts)


def test_opened_is_what_the_design_found(photos: Path) -> None:
    config = resolve({"dataset_path": str(photos), "micro_batch_size": 4, "model": "toy_model"}, environ={}).config
    design = design_run(config)
    assert design.custom.found is not None
    assert open_data(design).info.class_names == design.info.class_names == ("a", "b")
