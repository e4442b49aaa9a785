"""ArrayRecords beside TFRecords of the same examples; damage; what TFDS itself prepares."""

import importlib
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace.config.load import config_from
from headrace.core.errors import DataError
from headrace.data.dataset import open_dataset
from headrace.data.sets.formats import array_record
from headrace.data.sets.tf_example import write_example
from tests.data.image_files import encode, smooth

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("array_record") is None, reason="array_record is not installed"
)
FEATURES = {
    "featuresDict": {
        "features": {
            "picture": {"pythonClassName": "tensorflow_datasets.core.features.image_feature.Image"},
            "kind": {"pythonClassName": "tensorflow_datasets.core.features.class_label_feature.ClassLabel"},
        }
    }
}


def example(number: int, label: int | None = None) -> bytes:
    given = number % 2 if label is None else label
    return write_example({"picture": [encode(smooth(40, 50, seed=number))], "kind": [given]})


def write(file: Path, records: list[bytes]) -> None:
    module: Any = importlib.import_module("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(file), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "1.0.0"
    place.mkdir()
    (place / "features.json").write_text(json.dumps(FEATURES))
    (place / "label.labels.txt").write_text("ant\nbee\n")
    write(place / "bugs-train.array_record-00000-of-00002", [example(number) for number in range(5)])
    write(place / "bugs-train.array_record-00001-of-00002", [example(number) for number in range(5, 8)])
    write(place / "bugs-test.array_record-00000-of-00001", [example(number) for number in range(20, 24)])
    return place


def test_each_record_is_its_picture(folder):
    data = config_from({"dataset": "auto", "dataset_path": str(folder), "image_size": 32, "train_crop": "valid"}).data
    found = open_dataset(data, 0)
    assert (found.info.name, found.info.class_names) == ("array_record", ("ant", "bee"))
    assert found.train.labels.tolist() == [number % 2 for number in range(8)]
    assert found.validation.labels.tolist() == [0, 1, 0, 1]

    pixels = found.validation.read(np.array([2]), 0)[0]
    whole = Image.open(io.BytesIO(encode(smooth(40, 50, seed=22))))
    shorter = whole.resize((round(50 * 32 / 40), 32), Image.Resampling.BILINEAR)
    expected = np.asarray(shorter)[:, 4:36]
    assert np.abs(pixels.astype(int) - expected).mean() < 3
    again = open_dataset(data, 0)  # with the index that was kept
    np.testing.assert_array_equal(again.train.read(np.arange(8), 0), found.train.read(np.arange(8), 0))


def test_damage_is_named(folder, monkeypatch):
    data = config_from({"dataset": "auto", "dataset_path": str(folder), "image_size": 32}).data
    write(folder / "bugs-train.array_record-00001-of-00002", [example(5, label=7)])
    with pytest.raises(DataError, match="A label is 7, but there are 2 class names"):
        open_dataset(data, 0)
    write(folder / "bugs-train.array_record-00001-of-00002", [b"no example"])
    with pytest.raises(DataError, match=r"records from 0: they cannot be read|the label in kind is None"):
        open_dataset(data, 0)
    (folder / "bugs-train.array_record-00001-of-00002").write_bytes(b"no array record at all")
    with pytest.raises(DataError, match="is no good ArrayRecord"):
        open_dataset(data, 0)
    (folder / "bugs-train.array_record-00001-of-00002").unlink()
    with pytest.raises(DataError, match="lacks 1 of 2 train shards"):
        open_dataset(data, 0)

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(array_record.importlib, "import_module", missing)
    with pytest.raises(DataError, match="array_record is not installed"):
        array_record._reader(folder / "bugs-test.array_record-00000-of-00001")
