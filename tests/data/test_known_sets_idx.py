"""idx files: plain, compressed, with a dot, and every kind of damage named."""

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.core.errors import DataError
from headrace.data.dataset import open_dataset

from .small_sets import SmallSet, idx_bytes, write_idx


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    source = open_dataset(config_from({"dataset": "mnist", "dataset_path": str(path)}).data, 0).train
    return source.read(np.arange(len(source)), 0), source.labels


def problem(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    return str(caught.value)


@pytest.mark.parametrize("pattern", ["{0}-{1}", "{0}.{1}", "{0}-{1}.gz", "{0}.{1}.gz"])
@pytest.mark.parametrize("place", [".", "mnist", "torch/MNIST/raw"])
def test_the_four_spellings_anywhere(small_mnist: SmallSet, tmp_path: Path, pattern: str, place: str) -> None:
    write_idx(small_mnist, tmp_path / place, pattern)
    images, labels = read(tmp_path)
    assert (images == small_mnist.images["train"]).all()
    assert labels.tolist() == small_mnist.labels["train"].tolist()


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_wrong_magic(small_mnist: SmallSet, tmp_path: Path, name: str) -> None:
    write_idx(small_mnist, tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[2] = 9
    (tmp_path / name).write_bytes(data)
    said = problem(tmp_path)
    assert f"{tmp_path / name}, byte 0" in said
    assert "0x000009" in said


def test_gzip_under_a_plain_name_is_recognised(small_mnist: SmallSet, tmp_path: Path) -> None:
    write_idx(small_mnist, tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert ".gz" in problem(tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 15, 16, 16 + 784 * 10 + 5])
def test_truncated(small_mnist: SmallSet, tmp_path: Path, keep: int) -> None:
    write_idx(small_mnist, tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:keep])
    assert f"{path}, byte {keep:,}" in problem(tmp_path)


def test_too_long(small_mnist: SmallSet, tmp_path: Path) -> None:
    write_idx(small_mnist, tmp_path)
    path = tmp_path / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes() + b"\0")
    assert f"{path}, byte {8 + 11}" in problem(tmp_path)


def test_another_count_in_the_header(small_mnist: SmallSet, tmp_path: Path) -> None:
    write_idx(small_mnist, tmp_path)
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(idx_bytes(np.zeros(24, np.uint8)))
    said = problem(tmp_path)
    assert f"{path}, byte 4" in said
    assert "24 items, not 25" in said


def test_images_of_another_size(small_mnist: SmallSet, tmp_path: Path) -> None:
    write_idx(small_mnist, tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(idx_bytes(np.zeros((25, 32, 28), np.uint8)))
    said = problem(tmp_path)
    assert f"{path}, byte 8" in said
    assert "32 x 28, not 28 x 28" in said


def test_label_out_of_range(small_mnist: SmallSet, tmp_path: Path) -> None:
    write_idx(small_mnist, tmp_path)
    path = tmp_path / "train-labels-idx1-ubyte"
    data = bytearray(path.read_bytes())
    data[8 + 13] = 10
    path.write_bytes(data)
    said = problem(tmp_path)
    assert f"{path}, byte {8 + 13}" in said
    assert "record 13 has 10" in said


@pytest.mark.parametrize("damage", ["cut", "middle", "not gzip", "checksum"])
def test_damaged_gzip(small_mnist: SmallSet, tmp_path: Path, damage: str) -> None:
    write_idx(small_mnist, tmp_path, "{0}-{1}.gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "middle":
        data[len(data) // 2 : len(data) // 2 + 400] = bytes(400)
    elif damage == "checksum":
        data[-8] ^= 0xFF
    else:
        data[:2] = b"no"
    path.write_bytes(data)
    said = problem(tmp_path)
    assert str(path) in said
    assert "gzip data is damaged" in said


def test_a_compressed_bomb_is_read_no_further_than_the_set_is_long(small_mnist: SmallSet, tmp_path: Path) -> None:
    write_idx(small_mnist, tmp_path)
    bomb = next(tmp_path.rglob("train-images*"))
    head = bomb.read_bytes()[:16]
    bomb.unlink()
    with gzip.open(bomb.with_name(bomb.name + ".gz"), "wb", 1) as file:
        file.write(head)
        for _ in range(64):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        assert "bytes, but" in problem(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
