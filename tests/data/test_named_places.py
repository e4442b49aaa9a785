"""Sets by name and by pattern: what each finds, beside the files given as they are; and what is refused."""

import importlib.util
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from headrace.cli.main import main
from headrace.config.load import config_from, resolve
from headrace.core.errors import ConfigError, DataError, DownloadError
from headrace.data.dataset import describe_dataset, open_dataset
from headrace.data.sets.named_places import named_place
from tests.core.file_server import serving, without_proxies
from tests.data.image_files import encode, smooth
from tests.weights.hub_server import Hub

HAS_ARROW = importlib.util.find_spec("pyarrow") is not None


@pytest.fixture(autouse=True)
def _cache() -> Iterator[None]:
    named_place.cache_clear()
    yield
    named_place.cache_clear()


def write_shards(folder: Path, names: list[str], first: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    for place, name in enumerate(names):
        with tarfile.open(folder / name, "w") as archive:
            for number in range(4):
                key = first + 4 * place + number
                label = str(number % 2).encode()
                for suffix, data in ((".jpg", encode(smooth(40, 50, seed=key))), (".cls", label)):
                    member = tarfile.TarInfo(f"{key:04d}{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


def opened(**options: Any) -> tuple[list[str], list[int], str]:
    """Return the names of the training images, their labels and the place of a set."""
    named = {} if "dataset" in options else {"dataset": "auto"}
    data = config_from({**named, "image_size": 32, **options}).data
    found = open_dataset(data, 0)
    assert found.train.name is not None
    names = [Path(found.train.name(number)).name for number in range(len(found.train))]
    return names, found.train.labels.tolist(), found.info.place


def test_braces_and_stars_name_shards(tmp_path):
    folder = tmp_path / "shards"
    write_shards(folder, [f"train-{number:04d}.tar" for number in range(3)])
    write_shards(folder, ["val-0000.tar"], first=50)
    (folder / "classes.txt").write_text("ant\nbee\n")
    whole = opened(dataset_path=str(folder))
    for pattern in ("{train-0000,train-0001,train-0002,val-0000}.tar", "*.tar"):
        names, labels, place = opened(dataset_path=f"{folder}/{pattern}")
        assert (names, labels) == whole[:2]
        assert place.startswith(f"{folder}/{pattern}, 3 and 1 shards")
    names, labels, _ = opened(dataset_path=f"{folder}/{{train-000[01],val-*}}.tar")
    assert len(labels) == 8
    data = config_from({"dataset": "auto", "dataset_path": f"{folder}/train-{{0000..0001}}.tar"}).data
    assert describe_dataset(data).class_names == ("ant", "bee"), "classes.txt beside the shards"


def test_what_a_pattern_lacks_is_named(tmp_path):
    folder = tmp_path / "shards"
    write_shards(folder, ["train-0000.tar", "train-0002.tar"])
    with pytest.raises(
        DataError, match=r"2 of the 4 files of .*train-\{0000\.\.0003\}\.tar are not there: .*train-0001"
    ):
        opened(dataset_path=f"{folder}/train-{{0000..0003}}.tar")
    with pytest.raises(DataError, match="No file has a name like"):
        opened(dataset_path=f"{folder}/test-*.tar")
    with pytest.raises(DataError, match="is no range of files"):
        opened(dataset_path=f"{folder}/train-{{0003..0000}}.tar")
    with pytest.raises(DataError, match=r"names 1,000,000,000,000 files|is no range"):
        opened(dataset_path=f"{folder}/{{000000..999999}}{{000000..999999}}.tar")
    write_shards(tmp_path / "more", ["train-0000.tar"])
    with pytest.raises(DataError, match="two files of one name"):
        opened(dataset_path=f"{tmp_path}/*/train-0000.tar")
    literal = tmp_path / "a[1]"
    write_shards(literal, ["train-0000.tar", "val-0000.tar"])
    assert len(opened(dataset_path=str(literal))[1]) == 4, "what is there is a path"


def test_a_pattern_is_trained_on_by_the_command(tmp_path, monkeypatch, capsys):
    write_shards(tmp_path / "shards", ["train-0.tar", "train-1.tar", "val-0.tar"])
    monkeypatch.chdir(tmp_path)
    words = ["--model", "toy_model_bn", "--image-size", "32", "--batch-size", "4", "--output", "run", "--epochs", "1"]
    assert main(["plan", "shards/{train,val}-7.tar", *words]) == 2
    assert "2 of the 2 files of shards/{train,val}-7.tar are not there" in capsys.readouterr().err
    assert main(["train", "shards/*-{0,1}.tar", *words, "--progress", "plain"]) == 0
    assert "shards/*-{0,1}.tar, 2 and 1 shards" in capsys.readouterr().out
    values = json.loads((tmp_path / "run/config.json").read_text())["values"]
    assert values["dataset_path"] == "shards/*-{0,1}.tar"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub()) as server:
        without_proxies(monkeypatch)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield server


def table(count: int, first: int = 0) -> bytes:
    import pyarrow as pa  # pyright: ignore[reportMissingImports]
    import pyarrow.parquet  # pyright: ignore[reportMissingImports]

    images = [{"bytes": encode(smooth(40, 50, seed=first + number)), "path": None} for number in range(count)]
    info = {"info": {"features": {"label": {"names": ["ant", "bee"], "_type": "ClassLabel"}}}}
    rows = pa.table({"image": images, "label": pa.array([number % 2 for number in range(count)], pa.int64())})
    file = io.BytesIO()
    pyarrow.parquet.write_table(rows.replace_schema_metadata({"huggingface": json.dumps(info)}), file)
    return file.getvalue()


@pytest.mark.skipif(not HAS_ARROW, reason="pyarrow is not installed")
def test_a_dataset_of_the_hub_is_read_and_then_found_without_it(hub, monkeypatch):
    hub.repositories |= {
        "datasets/me/bugs/data/train-00000-of-00002.parquet": table(6),
        "datasets/me/bugs/data/train-00001-of-00002.parquet": table(6, 10),
        "datasets/me/bugs/data/test-00000-of-00001.parquet": table(4, 20),
        "datasets/me/bugs/README.md": b"A card.",
    }
    config = resolve({"dataset": "hf:me/bugs", "image_size": 32}, None, None, {}).config.data
    assert (config.dataset, config.dataset_path) == ("auto", "hf:me/bugs")
    found = open_dataset(config, 0)
    assert (len(found.train), len(found.validation), found.info.class_names) == (12, 4, ("ant", "bee"))
    assert found.info.place.startswith("hf:me/bugs")
    assert found.train.read(np.arange(2), 0).shape == (2, 32, 32, 3)
    asked = len(hub.asked)
    named_place.cache_clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(open_dataset(config, 0).train) == 12
    assert len(hub.asked) == asked, "what is cached is not asked for"


@pytest.mark.skipif(not HAS_ARROW, reason="pyarrow is not installed")
def test_tables_that_the_hub_made_of_folders_and_subsets(hub):
    hub.repositories |= {
        "datasets/me/photos/train/ant/1.jpg": b"",
        "datasets/me/photos/default/train/0000.parquet": table(6),
        "datasets/me/photos/default/validation/0000.parquet": table(4, 9),
        "datasets/me/two/small/train-0.parquet": table(6),
        "datasets/me/two/small/val-0.parquet": table(2, 7),
        "datasets/me/two/large/train-0.parquet": table(8),
        "datasets/me/none/1.jpg": b"",
    }
    data = config_from({"dataset": "auto", "image_size": 32, "dataset_path": "hf:me/photos"}).data
    found = open_dataset(data, 0)
    assert (len(found.train), len(found.validation)) == (6, 4)
    data = config_from({"dataset": "auto", "image_size": 32, "dataset_path": "hf:me/two/small"}).data
    assert len(open_dataset(data, 0).train) == 6
    for name, kind, message in (
        ("hf:me/two", ConfigError, "has tables in 2 folders: large, small"),
        ("hf:me/two/tiny", ConfigError, "has no folder tiny: large, small"),
        ("hf:me/none", DataError, "hf:me/none has no parquet files"),
        ("hf:me/absent", DownloadError, "needs a token"),
        ("hf:absent", DownloadError, "names no repository"),
    ):
        with pytest.raises(kind, match=message):
            named_place(name)


def test_a_set_of_tfds_needs_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="tensorflow_datasets is not installed"):
        named_place("tfds:mnist")
    with pytest.raises(ConfigError, match="names no dataset"):
        named_place("tfds:mni st")


def test_a_set_of_tfds_is_prepared_once(tmp_path, monkeypatch):
    """With a stand-in for the package, which needs TensorFlow to prepare images; what it prepares is read elsewhere."""
    done: list[str] = []

    class Builder:
        data_path = tmp_path / "shards"

        def is_prepared(self) -> bool:
            return self.data_path.exists()

        def download_and_prepare(self) -> None:
            done.append("prepared")
            write_shards(self.data_path, ["train-0.tar", "val-0.tar"])

    def builder(name: str) -> Builder:
        if name != "bugs":
            raise ValueError(f"Dataset {name} was not found.\nIt may be elsewhere.")
        return Builder()

    package = ModuleType("tensorflow_datasets")
    vars(package)["builder"] = builder
    package.__spec__ = importlib.util.spec_from_loader("tensorflow_datasets", None)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", package)
    assert len(opened(dataset_path="tfds:bugs")[1]) == 4
    named_place.cache_clear()
    assert len(opened(dataset="tfds:bugs")[1]) == 4
    assert done == ["prepared"]
    with pytest.raises(DataError, match=r"TFDS cannot prepare moths: Dataset moths was not found\."):
        named_place("tfds:moths")
