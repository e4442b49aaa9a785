"""Datasets of other libraries, where they are installed: Hugging Face (streamed too), pandas, polars, torch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import headrace as hr
from tests.data.image_files import smooth

NAMES = ["cat", "dog"]
OPTIONS: dict[str, Any] = {
    "epochs": 1,
    "batch_size": 4,
    "image_size": 32,
    "learning_rate": 0.1,
    "validation_split": 0.25,
}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for number in range(8):
        Image.fromarray(smooth(40, 50, seed=number)).save(tmp_path / f"{number}.png")
    return sorted(tmp_path.glob("*.png"))


def losses(data: Any, place: Path, labels: Any = None) -> tuple[list[float], tuple[str, ...]]:
    model = hr.Model("cifar_resnet8", log_dir=str(place), progress="none", config="none")
    run = model.fit(data, labels, **OPTIONS)
    return [*run.metrics["loss"].tolist(), *run.metrics["val_loss"].tolist()], model.class_names


@pytest.mark.filterwarnings("ignore")  # of what its own library does
def test_datasets_of_hugging_face(files: list[Path], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    labels = [number % 2 for number in range(8)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    rows = {"image": [str(file) for file in files], "label": labels}
    data = datasets.Dataset.from_dict(rows, features=features)
    # Split by number there, by path here.
    wanted = losses([file.read_bytes() for file in files], tmp_path, labels)[0]
    assert losses(data, tmp_path) == (wanted, tuple(NAMES))
    assert losses(data.to_iterable_dataset(), tmp_path) == (wanted, tuple(NAMES))
    both = datasets.DatasetDict({"train": data, "test": data})
    model = hr.Model("cifar_resnet8", log_dir=str(tmp_path), progress="none", config="none")
    run: Any = model.fit(both, **{name: value for name, value in OPTIONS.items() if name != "validation_split"})
    assert run.best.num_samples == 8
    assert model.evaluate(data)["num_samples"] == 8
    assert model.predict(data).names == model.predict(files).names


def test_frames(files: list[Path], tmp_path: Path) -> None:
    names = [NAMES[number % 2] for number in range(8)]
    columns = {"path": list(map(str, files)), "label": names, "split": ["train"] * 6 + ["val"] * 2}
    found = []
    for library in ("pandas", "polars"):
        try:
            module = __import__(library)
        except ImportError:
            continue
        model = hr.Model("cifar_resnet8", log_dir=str(tmp_path), progress="none", config="none")
        options = {name: value for name, value in OPTIONS.items() if name != "validation_split"}
        run: Any = model.fit(module.DataFrame(columns), **options)
        assert run.best.num_samples == 2
        assert model.class_names == tuple(NAMES)
        found.append(run.metrics["loss"].tolist())
    if not found:
        pytest.skip("neither pandas nor polars is installed")
    assert all(one == found[0] for one in found)


def test_datasets_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    images = np.random.default_rng(0).random((8, 16, 16, 3), np.float32)
    tensors = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    labels = torch.arange(8) % 2
    model = hr.Model("cifar_resnet8", log_dir=str(tmp_path), progress="none", config="none")
    options = {name: value for name, value in OPTIONS.items() if name != "image_size"}
    first = model.fit(images, labels.numpy(), **options).metrics["loss"].tolist()
    for data, given in ((torch.utils.data.TensorDataset(tensors, labels), None), (tensors, labels)):
        model = hr.Model("cifar_resnet8", log_dir=str(tmp_path), progress="none", config="none")
        assert model.fit(data, given, **options).metrics["loss"].tolist() == first
