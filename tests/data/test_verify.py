"""`verify` lists everything that is wrong, and the command says so with its exit code."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.cli.data import main
from headrace.config.load import config_from
from headrace.core.errors import ConfigError
from headrace.data.sets.catalog import MNIST
from headrace.data.sets.known_sets import locate_set
from headrace.data.verify import VerifyReport, format_report, verify, verify_found

from .small_sets import SmallSet, idx_bytes, write_cifar_binary, write_idx


def checked(name: str, path: Path) -> VerifyReport:
    return verify(config_from({"dataset": name, "dataset_path": str(path)}).data)


def test_a_good_set(small_cifar10: SmallSet, tmp_path: Path) -> None:
    write_cifar_binary(small_cifar10, tmp_path)
    report = checked("cifar10", tmp_path)
    assert report.problems == ()
    assert report.counts == {"train": (3,) * 10, "validation": (1,) * 7 + (0,) * 3}
    text = format_report(report)
    assert "No problems found." in text
    assert [line.split() for line in text.splitlines() if "horse" in line] == [["7", "horse", "3", "0"]]
    assert "all                      30           7" in text


def test_all_problems_are_listed(small_cifar10: SmallSet, tmp_path: Path) -> None:
    write_cifar_binary(small_cifar10, tmp_path)
    (tmp_path / "data_batch_1.bin").unlink()
    short, wrong = tmp_path / "data_batch_2.bin", tmp_path / "test_batch.bin"
    short.write_bytes(short.read_bytes()[: 4 * 3073 + 10])
    data = bytearray(wrong.read_bytes())
    data[0], data[3 * 3073] = 77, 88
    wrong.write_bytes(data)
    (tmp_path / "batches.meta.txt").write_text("\n".join(["plane", *small_cifar10.row.class_names[1:]]))
    report = checked("cifar10", tmp_path)
    said = "\n".join(report.problems)
    assert len(report.problems) == 6
    assert "plane for airplane" in said
    assert f"{tmp_path / 'data_batch_1.bin'}: the file is missing" in said
    assert f"{short}, byte {4 * 3073 + 10:,}" in said
    assert "2 label(s) not in 0..9: record 0 has 77 at byte 0, record 3 has 88 at byte 9,219" in said
    assert "train: images per class differ" in said
    assert "validation: images per class differ" in said
    assert sum(report.counts["train"]) == 30 - 6 - 2
    assert sum(report.counts["validation"]) == 5


def test_the_wrong_set_in_the_right_files_is_noticed(small_mnist: SmallSet, tmp_path: Path) -> None:
    write_idx(small_mnist, tmp_path)
    row = replace(small_mnist.row, check_mean=True)
    report = verify_found(locate_set(row, str(tmp_path)), row)
    assert len(report.problems) == 1
    mean = small_mnist.images["train"].mean() / 255
    assert f"the mean of the pixels is {mean:.4f}, in the published set 0.1307" in report.problems[0]
    true = replace(row, channel_mean=(float(mean),))
    assert verify_found(locate_set(true, str(tmp_path)), true).problems == ()


def test_many_wrong_labels_are_counted_exactly(small_mnist: SmallSet, tmp_path: Path) -> None:
    write_idx(small_mnist, tmp_path)
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:8] + bytes([200]) * 25)
    said = "\n".join(checked("mnist", tmp_path).problems)
    assert "25 label(s)" in said
    assert "and 5 more" in said


def test_digits_and_made_up_sets() -> None:
    report = verify(config_from({}).data)
    assert report.problems == ()
    assert {split: sum(counts) for split, counts in report.counts.items()} == {"train": 1437, "validation": 360}
    assert verify(config_from({"dataset": "synthetic"}).data).problems == ()


def test_the_command(small_mnist: SmallSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "--dataset", "mnist", "--dataset-path", str(tmp_path)]
    assert main(arguments) == 1
    assert "was not found" in capsys.readouterr().out
    write_idx(small_mnist, tmp_path)
    assert main(arguments) == 0
    assert "No problems found." in capsys.readouterr().out
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(arguments) == 1
    assert "1. " in capsys.readouterr().out
    with pytest.raises(ConfigError, match="Did you mean verify"):
        main(["verfy"])
    assert main(["--help"]) == 0


def test_a_full_size_set(tmp_path: Path) -> None:
    """Write MNIST's real sizes and class counts, with pixels of its published mean on average."""
    for prefix, counts in (("train", MNIST.train_counts), ("t10k", MNIST.validation_counts)):
        labels = np.repeat(np.arange(10, dtype=np.uint8), counts)
        images = np.full((len(labels), 28, 28), 33, np.uint8)
        images[: int(len(labels) * 0.318)] = 34
        (tmp_path / f"{prefix}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    assert checked("mnist", tmp_path).problems == ()
    for path in tmp_path.iterdir():
        path.unlink()  # 55 MB
