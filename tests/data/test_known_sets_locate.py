"""Where sets are looked for, and what is said when they are not there."""

from pathlib import Path

import pytest

from headrace.core.errors import DataError
from headrace.data.sets import known_sets as find
from headrace.data.sets.catalog import KNOWN_SETS
from headrace.data.sets.get import datasets_directory
from headrace.data.sets.known_sets import locate_set, search_roots

CIFAR10, MNIST, FASHION = (KNOWN_SETS[name] for name in ("cifar10", "mnist", "fashion_mnist"))


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in find.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(find, "SYSTEM_DIRECTORY", tmp_path / "system")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin", "a/cifar-10-batches-bin", "a/b/cifar-10-batches-bin"])
def test_the_path_itself_or_a_named_sub_directory(tmp_path: Path, place: str) -> None:
    file = touch(tmp_path / "sets" / place / "data_batch_1.bin")
    found = locate_set(CIFAR10, str(tmp_path / "sets"))
    assert found.directory == file.parent
    assert found.layout.kind == "cifar-binary"
    assert found.missing == (
        "data_batch_2.bin",
        "data_batch_3.bin",
        "data_batch_4.bin",
        "data_batch_5.bin",
        "test_batch.bin",
    )


def test_a_link_to_itself_hides_nothing(tmp_path: Path) -> None:
    file = touch(tmp_path / "sets" / "cifar-10-batches-bin" / "data_batch_1.bin")
    (tmp_path / "sets" / "a link").symlink_to("a link")
    assert locate_set(CIFAR10, str(tmp_path / "sets")).directory == file.parent


@pytest.mark.parametrize("place", ["a/b/c/cifar-10-batches-bin", "other", ".hidden/cifar-10-batches-bin"])
def test_not_too_deep_not_elsewhere_not_hidden(tmp_path: Path, place: str) -> None:
    touch(tmp_path / "sets" / place / "data_batch_1.bin")
    with pytest.raises(DataError):
        locate_set(CIFAR10, str(tmp_path / "sets"))


def test_binary_comes_before_python_and_near_before_far(tmp_path: Path) -> None:
    touch(tmp_path / "sets" / "cifar-10-batches-py" / "data_batch_1")
    assert locate_set(CIFAR10, str(tmp_path / "sets")).layout.kind == "cifar-python"
    touch(tmp_path / "sets" / "cifar-10-batches-bin" / "data_batch_1.bin")
    touch(tmp_path / "sets" / "a" / "cifar-10-batches-bin" / "data_batch_1.bin")
    assert locate_set(CIFAR10, str(tmp_path / "sets")).directory == tmp_path / "sets" / "cifar-10-batches-bin"


def test_mnist_and_fashion_mnist_are_told_apart_by_their_directories(tmp_path: Path) -> None:
    touch(tmp_path / "sets" / "fashion-mnist" / "train-images-idx3-ubyte.gz")
    assert locate_set(FASHION, str(tmp_path / "sets")).directory.name == "fashion-mnist"
    with pytest.raises(DataError):
        locate_set(MNIST, str(tmp_path / "sets"))


@pytest.mark.parametrize("name", ["fashion-mnist", "dataset-fashion-mnist", "FashionMNIST/raw"])
def test_names_of_fashion_mnist(tmp_path: Path, name: str) -> None:
    touch(tmp_path / "sets" / name / "t10k-labels.idx1-ubyte")
    assert locate_set(FASHION, str(tmp_path / "sets")).directory == tmp_path / "sets" / name


def test_a_plain_file_comes_before_a_compressed_one(tmp_path: Path) -> None:
    touch(tmp_path / "sets" / "train-images-idx3-ubyte.gz")
    plain = touch(tmp_path / "sets" / "train-images-idx3-ubyte")
    assert locate_set(MNIST, str(tmp_path / "sets")).train_files[0] == plain


def test_environment_and_system_only_when_no_path_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "system" / "fashion-mnist" / "train-images-idx3-ubyte.gz")
    assert locate_set(FASHION, ".").directory == tmp_path / "system" / "fashion-mnist"
    touch(tmp_path / "data" / "train-images-idx3-ubyte.gz")
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    assert locate_set(FASHION, ".").directory == tmp_path / "data"
    touch(tmp_path / "sets" / "train-images-idx3-ubyte.gz")
    monkeypatch.setenv("DATASETS_DIR", str(tmp_path / "sets"))
    assert locate_set(FASHION, ".").directory == tmp_path / "sets"
    assert locate_set(FASHION, str(tmp_path / "data")).directory == tmp_path / "data"  # as the configuration gives it
    touch(tmp_path / "here" / "train-images-idx3-ubyte.gz")
    assert locate_set(FASHION, ".").directory == Path()
    assert search_roots(str(tmp_path / "sets")) == (
        tmp_path / "sets",
        tmp_path / "data",
        datasets_directory(),
        tmp_path / "system",
    )
    (tmp_path / "empty").mkdir()
    assert search_roots(str(tmp_path / "empty")) == (tmp_path / "empty",)
    with pytest.raises(DataError):
        locate_set(FASHION, str(tmp_path / "empty"))


def test_the_error_says_what_where_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASETS_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(DataError) as caught:
        locate_set(CIFAR10, ".")
    said = str(caught.value)
    for word in (
        "data_batch_1.bin",
        "test_batch",
        str(tmp_path / "here"),
        f"{tmp_path / 'nowhere'} (does not exist)",
        "cifar-10-batches-py",
        "cifar-10-binary.tar.gz",
        "--dataset-path",
    ):
        assert word in said


def test_an_archive_given_as_path_is_recognised(tmp_path: Path) -> None:
    archive = touch(tmp_path / "cifar-10-binary.tar.gz")
    with pytest.raises(DataError, match="unpack it first"):
        locate_set(CIFAR10, str(archive))


def test_a_huge_tree_is_not_walked_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "MAX_DIRECTORIES", 10)
    for number in range(12):
        touch(tmp_path / "sets" / f"d{number:02}" / "cifar-10-batches-bin" / "data_batch_1.bin")
    with pytest.raises(DataError):
        locate_set(CIFAR10, str(tmp_path / "sets"))
