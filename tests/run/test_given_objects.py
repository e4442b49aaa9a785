"""Images and labels as Python objects: each kind gives the images that the same files give in class folders."""

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import headrace as hr
from headrace.core.errors import ConfigError, DataError, HeadraceError
from headrace.data.sets import objects
from headrace.run.given_data import given_data
from tests.data.image_files import smooth

NAMES = ("cat", "dog")
SMALL: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 4,
    "image_size": 32,
    "train_crop": "torchvision",
    "learning_rate": 0.1,
}


class Items:
    """A dataset of torch's kind: its length, and items by number."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.reads = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self.items):
            raise IndexError(number)
        self.reads += 1
        return self.items[number]


class Tensor:
    """As much of torch's tensor as is asked for."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, number: int) -> "Tensor":
        return Tensor(self._array[number])

    def __len__(self) -> int:
        return len(self._array)

    def detach(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return self

    def numpy(self) -> np.ndarray:
        return self._array


class Frame:
    """As much of a data frame as is asked for."""

    def __init__(self, **columns: list[Any]) -> None:
        self._values, self.columns = columns, list(columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self._values[name]

    @property
    def iloc(self) -> "_Rows":
        return _Rows(self._values)


class _Rows:
    def __init__(self, values: dict[str, list[Any]]) -> None:
        self._values = values

    def __getitem__(self, rows: list[int]) -> Frame:
        return Frame(**{name: [values[row] for row in rows] for name, values in self._values.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 6), ("val", 2)):
        for label, name in enumerate(NAMES):
            (place / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = smooth(50 + number, 60, seed=10 * number + label + (100 if split == "val" else 0))
                Image.fromarray(pixels).save(place / split / name / f"{number}.png")
    return place


@pytest.fixture
def model(tmp_path: Path) -> hr.Model:
    return hr.Model("cifar_resnet8", log_dir=str(tmp_path), progress="none", config="none")


def files_of(folder: Path, split: str) -> tuple[list[Path], list[str]]:
    files = sorted((folder / split).rglob("*.png"))
    return files, [file.parent.name for file in files]


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
    return image


def forms(files: list[Path], names: list[str]) -> dict[str, tuple[Any, Any]]:
    """Return the same labelled images in every form, as (data, labels)."""
    numbers = [NAMES.index(name) for name in names]
    pictures = [opened(file) for file in files]
    encoded = [file.read_bytes() for file in files]
    undecoded = [{"bytes": None, "path": str(file)} for file in files]
    return {
        "paths": (files, names),
        "pictures": (pictures, numbers),
        "bytes": (encoded, np.array(numbers)),
        "items": (list(zip(pictures, names, strict=True)), None),
        "dataset": (Items(list(zip(pictures, numbers, strict=True))), None),
        "dicts": (Items([{"img": a, "fine_label": b} for a, b in zip(undecoded, names, strict=True)]), None),
        "frame": (Frame(File=[str(file) for file in files], Category=names), None),
        "generator": (((image, name) for image, name in zip(encoded, names, strict=True)), None),
    }


def num_validated(run: Any) -> int:
    return run.best.num_samples


def test_every_form_trains_and_validates_as_its_files_do(folder: Path, tmp_path: Path) -> None:
    train, held = (forms(*files_of(folder, split)) for split in ("train", "val"))
    wanted = None
    for name, (data, labels) in {"folder": (str(folder), None), **train}.items():
        model = hr.Model("cifar_resnet8", log_dir=str(tmp_path), progress="none", config="none", run_name=name)
        given = held.get(name)
        validation = given if given is None or given[1] is not None else given[0]
        run = model.fit(data, labels, validation_data=validation, **SMALL)
        found = run.metrics["loss"].tolist(), run.metrics["val_loss"].tolist()
        wanted = wanted or found
        assert found == wanted, name
        if name in ("paths", "items", "dicts"):
            assert model.class_names == NAMES


def test_all_forms_are_evaluated_and_predicted_alike(folder: Path, model: hr.Model) -> None:
    files, names = files_of(folder, "val")
    model.fit(str(folder), **SMALL)
    report, logits = model.evaluate(str(folder)), model.logits(files)
    for name, (data, labels) in forms(files, names).items():
        again = model.evaluate(data, labels)
        assert (again["num_samples"], again["loss"]) == (4, pytest.approx(report["loss"], rel=1e-6)), name
        if name not in ("frame", "generator"):
            np.testing.assert_allclose(model.logits(data), logits, rtol=1e-4, atol=1e-5, err_msg=name)
    (one,) = model.predict(opened(files[3]))
    assert one.name == model.predict(files[3]).names[0]
    (one,) = model.predict(files[3].read_bytes())
    assert one.probability == pytest.approx(model.predict(files[3])[0].probability, rel=1e-4)
    assert len(model.predict(image for image in [opened(files[0])] * 3)) == 3


def test_a_resumed_fit_on_a_dataset_sees_the_images_of_an_uninterrupted_one(folder: Path, tmp_path: Path) -> None:
    files, names = files_of(folder, "train")
    data = Items([(opened(file), name) for file, name in zip(files, names, strict=True)])

    def made(name: str) -> hr.Model:
        return hr.Model("cifar_resnet8", log_dir=str(tmp_path), progress="none", config="none", run_name=name)

    options: dict[str, Any] = SMALL | {"validation_split": 0.2, "lr_schedule": "const"}
    whole, parts = made("whole"), made("parts")
    whole.fit(data, **options)
    shorter: dict[str, Any] = options | {"epochs": 1}
    first = parts.fit(data, **shorter)
    run = parts.fit(data, **options, resume=first.directory)
    assert run.outcome == "finished"
    for path, leaf in _leaves(whole.params):
        np.testing.assert_array_equal(leaf, dict(_leaves(parts.params))[path])


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(tree, dict):
        for name, inner in tree.items():
            yield from _leaves(inner, f"{path}/{name}")
    else:
        yield path, np.asarray(tree)


def test_arrays_and_tensors_of_a_dataset_are_taken_as_they_are(model: hr.Model) -> None:
    images = np.random.default_rng(1).random((12, 16, 16, 3), np.float32)
    labels = np.arange(12) % 3
    arrays = Items([(image, label) for image, label in zip(images, labels, strict=True)])
    tensors = Items(
        [(Tensor(image.transpose(2, 0, 1)), int(label)) for image, label in zip(images, labels, strict=True)]
    )
    options: dict[str, Any] = {"epochs": 1, "batch_size": 4, "learning_rate": 0.1}
    losses = []
    for data, given in (
        (images, labels),
        (arrays, None),
        (tensors, None),
        (Tensor(images.transpose(0, 3, 1, 2)), labels),
    ):
        run = hr.Model("cifar_resnet8", log_dir=str(model.config.logging.log_dir), progress="none", config="none").fit(
            data, given, validation_split=0.25, **options
        )
        losses.append((run.metrics["loss"].tolist(), run.metrics["val_loss"].tolist()))
    assert all(found == losses[0] for found in losses)


def test_one_array_is_one_image(model: hr.Model) -> None:
    images = np.random.default_rng(1).integers(0, 256, (12, 16, 16, 3)).astype(np.uint8)
    model.fit(images, np.arange(12) % 3, epochs=1, batch_size=4, learning_rate=0.1)
    several = model.logits(images[:2])
    np.testing.assert_allclose(model.logits(images[1]), several[1:], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.logits(Tensor(images[1].transpose(2, 0, 1))), several[1:], rtol=1e-5, atol=1e-6)


def test_splits_of_dicts_and_frames(folder: Path, model: hr.Model) -> None:
    train, held = (files_of(folder, split) for split in ("train", "val"))
    both = {"train": Items(list(zip(*train, strict=True))), "test": Items(list(zip(*held, strict=True)))}
    assert num_validated(model.fit(both, **SMALL)) == 4
    frame = Frame(
        path=[*train[0], *held[0]],
        label=[*train[1], *held[1]],
        split=["train"] * len(train[0]) + ["valid"] * len(held[0]),
    )
    assert num_validated(model.fit(frame, **SMALL)) == 4
    with pytest.raises(DataError, match="The column split has the value 'third'"):
        model.fit(Frame(path=held[0], label=held[1], split=["third"] * 3 + ["train"]), **SMALL)


def test_labels_beside_the_images_are_not_read_from_each(folder: Path) -> None:
    files, names = files_of(folder, "train")
    data = Items([(file, NAMES.index(name)) for file, name in zip(files, names, strict=True)])
    data.classes, data.targets = list(NAMES), [NAMES.index(name) for name in names]  # pyright: ignore[reportAttributeAccessIssue]; torchvision's
    found = objects.labelled(data)
    assert data.reads == 2, "the first and the last, to see that they are the labels of the items"
    assert found.class_names == NAMES
    data.targets = list(reversed(data.targets))  # pyright: ignore[reportAttributeAccessIssue]
    assert objects.labelled(data).labels.tolist() == found.labels.tolist(), "others are not believed"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (3, "The data is a int"),
        (Items, "The data is a type"),
        ({"images": [1], "labels": [2]}, "The data is a dict"),
        (Items([(1, 2, 3)]), "An item of the data is a tuple"),
        (Items([{"picture": 1}]), "An item of the data is a dict of picture"),
        (iter([(b"x", 1, 2)]), "An item of the data is a tuple"),
        (iter([]), "The iterable has no items"),
        (Items([]), "There are no images"),
        (Items([(b"x", 0.5), (b"y", 1.5)]), "The labels are of type float"),
        (Items([(b"x", -1)]), "Label -1 of image 0"),
        (Frame(file=["a"], price=[1]), "The columns of the frame are file, price"),
        (Items([(Tensor(np.zeros((3, 9, 3), np.float32)), 1)] * 2), "cannot be told from its sides"),
    ],
)
def test_what_is_no_data_is_refused_with_what_would_be(model: hr.Model, data: Any, words: str) -> None:
    with pytest.raises(HeadraceError, match=words) as caught:
        model.fit(data, epochs=1, batch_size=4)
    if isinstance(caught.value, ConfigError) or "An item" in words or "of type" in words:
        lines = [line for line in str(caught.value).splitlines() if line.startswith("    model.fit(")]
        assert len(lines) == 3


def test_the_lines_of_the_error_work(folder: Path, model: hr.Model, tmp_path: Path) -> None:
    files, names = files_of(folder, "train")
    dataset = [(opened(file), name) for file, name in zip(files, names, strict=True)]
    paths = list(zip(map(str, files), names, strict=True))
    for line in objects.EXAMPLE.splitlines()[1:]:
        call = line.strip().replace('[("cat.jpg", "cat"), ("dog.png", "dog")]', "paths")
        call = f"{call[:-1]}, epochs=1, batch_size=4, image_size=32, learning_rate=0.1)"
        eval(call, {"model": model, "dataset": dataset, "stream": dataset, "paths": paths})


def test_an_iterable_that_does_not_fit_memory_is_refused(monkeypatch: pytest.MonkeyPatch, model: hr.Model) -> None:
    monkeypatch.setattr(objects, "KEPT_BYTES", 100_000)
    buffer = io.BytesIO()
    Image.fromarray(smooth(90, 90)).save(buffer, "BMP")
    endless = ((buffer.getvalue(), number % 2) for number in range(10**9))
    with pytest.raises(DataError, match=r"more than 97.7 KiB of images: 4 fit") as caught:
        model.fit(endless, **SMALL)
    assert "itertools.islice" in str(caught.value)


def test_a_broken_picture_is_named(folder: Path, model: hr.Model) -> None:
    files, names = files_of(folder, "val")
    with pytest.raises(DataError, match=r"bad sample\(s\) in pictures, the last one image \d: not an image"):
        model.fit([b"nothing"] * 8, names * 2, max_bad_samples=0.0, **SMALL)
    with pytest.raises(DataError, match="4 images, but 3 labels"):
        model.fit(files, names[:3], **SMALL)


def test_the_three_lines_of_a_refusal_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, kind in (("cat.jpg", "JPEG"), ("dog.png", "PNG")):
        Image.fromarray(smooth(40, 50)).save(tmp_path / name, kind)
    pairs = [(Image.fromarray(smooth(40, 50, seed=number)), number % 2) for number in range(4)]
    taken: list[int] = []

    def fit(data: object, labels: object = None, **options: object) -> None:
        given = given_data(data, labels)
        assert given.pictures is not None
        taken.append(len(given.pictures))

    names = {"model": SimpleNamespace(fit=fit), "dataset": Items(pairs), "stream": iter(pairs)}
    for line in objects.EXAMPLE.splitlines()[1:]:
        eval(line.strip(), names)
    assert taken == [2, 4, 4]
