"""CIFAR from both layouts: exact contents, and every kind of damage named."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.core.errors import DataError
from headrace.data.dataset import DataSet, open_dataset
from headrace.data.sets.cifar import read_binary, read_class_names, read_python

from .small_sets import SmallSet, planes, python2_dumps, python3_dumps, write_cifar_binary, write_cifar_python


def opened(name: str, path: Path) -> DataSet:
    return open_dataset(config_from({"dataset": name, "dataset_path": str(path)}).data, 0)


def assert_same(dataset: DataSet, small: SmallSet) -> None:
    for split, source in (("train", dataset.train), ("validation", dataset.validation)):
        assert source.labels.tolist() == small.labels[split].tolist()
        assert (source.read(np.arange(len(source)), 0) == small.images[split]).all()


def test_cifar10_binary(small_cifar10: SmallSet, tmp_path: Path) -> None:
    write_cifar_binary(small_cifar10, tmp_path / "cifar-10-batches-bin")
    assert_same(opened("cifar10", tmp_path), small_cifar10)


def test_cifar100_binary_takes_the_fine_label(small_cifar100: SmallSet, tmp_path: Path) -> None:
    write_cifar_binary(small_cifar100, tmp_path / "cifar-100-binary")
    dataset = opened("cifar100", tmp_path)
    assert_same(dataset, small_cifar100)
    assert dataset.train.labels.max() == 99


@pytest.mark.parametrize("dumps", [python2_dumps, python3_dumps, pickle.dumps])
def test_cifar10_python(small_cifar10: SmallSet, tmp_path: Path, dumps: Any) -> None:
    write_cifar_python(small_cifar10, tmp_path / "cifar-10-batches-py", dumps)
    assert_same(opened("cifar10", tmp_path), small_cifar10)


def test_cifar100_python(small_cifar100: SmallSet, tmp_path: Path) -> None:
    write_cifar_python(small_cifar100, tmp_path / "cifar-100-python")
    assert_same(opened("cifar100", tmp_path), small_cifar100)


def test_a_missing_file_is_named(small_cifar10: SmallSet, tmp_path: Path) -> None:
    write_cifar_binary(small_cifar10, tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"lacks data_batch_3.bin, test_batch.bin"):
        opened("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("keep", "offset", "words"),
    [
        (6 * 3073 - 1, 6 * 3073 - 1, "ends 3,072 bytes into record 5"),
        (2 * 3073, 2 * 3073, "ends after record 1"),
        (0, 0, "0 bytes"),
    ],
)
def test_a_truncated_file_is_named_with_the_offset(
    small_cifar10: SmallSet, tmp_path: Path, keep: int, offset: int, words: str
) -> None:
    write_cifar_binary(small_cifar10, tmp_path)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError) as caught:
        opened("cifar10", tmp_path)
    assert f"{path}, byte {offset:,}" in str(caught.value)
    assert words in str(caught.value)


def test_bytes_too_many_are_an_error(small_cifar10: SmallSet, tmp_path: Path) -> None:
    write_cifar_binary(small_cifar10, tmp_path)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(path.read_bytes() + b"xy")
    part = read_binary(path, small_cifar10.row, 6)
    assert part.findings[0].offset == 6 * 3073
    assert "2 bytes too many" in part.findings[0].problem


def test_labels_out_of_range_are_named_with_their_offsets(small_cifar10: SmallSet, tmp_path: Path) -> None:
    write_cifar_binary(small_cifar10, tmp_path)
    path = tmp_path / "data_batch_4.bin"
    data = bytearray(path.read_bytes())
    data[2 * 3073], data[5 * 3073] = 10, 255
    path.write_bytes(data)
    (finding,) = read_binary(path, small_cifar10.row, 6).findings
    assert finding.offset == 2 * 3073
    assert "record 2 has 10 at byte 6,146, record 5 has 255 at byte 15,365" in finding.problem
    with pytest.raises(DataError, match=r"not in 0\.\.9"):
        opened("cifar10", tmp_path)


def test_coarse_labels_are_checked(small_cifar100: SmallSet, tmp_path: Path) -> None:
    write_cifar_binary(small_cifar100, tmp_path)
    path = tmp_path / "test.bin"
    data = bytearray(path.read_bytes())
    data[7 * 3074] = 20
    path.write_bytes(data)
    (finding,) = read_binary(path, small_cifar100.row, 100).findings
    assert (finding.offset, "coarse" in finding.problem) == (7 * 3074, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({b"labels": None}, "list of whole numbers"),
        ({b"labels": [0, 1, 2, 3, 4, 2.5]}, "list of whole numbers"),
        ({b"labels": [0, 1, 2]}, "6 images and 3 labels"),
        ({b"labels": [0, 1, 2, 3, 4, 11]}, "record 5 has 11"),
        ({b"labels": [0, 1, 2, 3, 4, -1]}, "record 5 has -1"),
        ({b"data": b"pixels"}, "not an array"),
        ({b"data": np.zeros((6, 3071), np.uint8)}, "3,072 bytes"),
        ({b"data": np.zeros((5, 3072), np.uint8)}, "5 images and 6 labels"),
        ({b"data": np.zeros((6, 3072), np.int32)}, "uint8"),
    ],
)
def test_wrong_python_batches(small_cifar10: SmallSet, tmp_path: Path, change: dict[bytes, Any], words: str) -> None:
    batch = {b"labels": [0, 1, 2, 3, 4, 5], b"data": planes(small_cifar10.images["train"][:6])} | change
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(batch, 2))
    findings = read_python(path, small_cifar10.row, 6).findings
    assert words in "; ".join(map(str, findings))
    assert str(path) in str(findings[0])


def test_a_malicious_batch_is_a_data_error(small_cifar10: SmallSet, tmp_path: Path) -> None:
    write_cifar_python(small_cifar10, tmp_path)
    (tmp_path / "data_batch_5").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(DataError, match=r"data_batch_5.*os\.system"):
        opened("cifar10", tmp_path)


def test_class_names_come_from_the_set(small_cifar100: SmallSet, tmp_path: Path) -> None:
    write_cifar_binary(small_cifar100, tmp_path)
    assert opened("cifar100", tmp_path).info.class_names[:2] == ("apple", "aquarium_fish")
    names = [f"name{label}" for label in range(100)]
    (tmp_path / "fine_label_names.txt").write_text("\n".join(names) + "\n\n")
    assert opened("cifar100", tmp_path).info.class_names == tuple(names)


def test_class_names_from_a_pickle(tmp_path: Path) -> None:
    meta = tmp_path / "meta"
    meta.write_bytes(python2_dumps({b"fine_label_names": [b"apple", b"worm"], b"coarse_label_names": [b"fruit"]}))
    assert read_class_names(meta, 2) == ("apple", "worm")
    assert read_class_names(meta, 3) is None
    meta.write_bytes(b"cos\nsystem\n.")
    assert read_class_names(meta, 2) is None
