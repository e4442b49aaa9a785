"""The validation report against counting by hand, sample by sample."""

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import CheckpointError
from headrace.telemetry.validation_report import validation_report, write_report


def sums_of(true: np.ndarray, predicted: np.ndarray, num_classes: int) -> dict:
    confusion = np.zeros((num_classes, num_classes), np.int64)
    for t, p in zip(true, predicted, strict=True):
        confusion[t, p] += 1
    right = float((true == predicted).sum())
    return {
        "confusion": confusion,
        "count": float(len(true)),
        "top1": right,
        "top5": right + 1,
        "loss": 0.5 * len(true),
    }


def test_numbers_are_those_of_counting_samples() -> None:
    rng = np.random.default_rng(0)
    true = rng.integers(0, 5, 400)
    predicted = np.where(rng.random(400) < 0.7, true, rng.integers(0, 5, 400))
    report = validation_report(sums_of(true, predicted, 6), list("abcdef"))
    assert report["num_samples"] == 400
    assert report["top1"] == (true == predicted).mean()
    assert report["top5"] == ((true == predicted).sum() + 1) / 400
    assert report["loss"] == 0.5
    recalls = []
    for k, row in enumerate(report["classes"][:5]):
        assert row["num_samples"] == (true == k).sum()
        assert row["recall"] == (predicted[true == k] == k).mean()
        assert row["precision"] == (true[predicted == k] == k).mean()
        recalls.append(row["recall"])
    assert report["balanced_accuracy"] == pytest.approx(np.mean(recalls))
    assert report["classes"][5] == {
        "name": "f", "num_samples": 0, "num_predicted": 0, "num_correct": 0, "recall": None, "precision": None
    }  # fmt: skip
    assert report["classes_without_samples"] == ["f"]


def test_balanced_accuracy_differs_from_accuracy_on_uneven_classes() -> None:
    true, predicted = np.array([0] * 90 + [1] * 10), np.zeros(100, int)
    report = validation_report(sums_of(true, predicted, 2), ["common", "rare"])
    assert (report["top1"], report["balanced_accuracy"]) == (0.9, 0.5)
    assert report["classes"][1]["recall"] == 0.0
    assert report["classes"][1]["precision"] is None
    assert report["most_confused"] == [{"true": "rare", "predicted": "common", "count": 10}]


def test_the_most_confused_pairs_come_first() -> None:
    confusion = np.array([[5, 2, 0], [7, 5, 1], [0, 0, 5]])
    sums = {"confusion": confusion, "count": 25, "top1": 15, "top5": 25, "loss": 1.0}
    pairs = validation_report(sums, ["a", "b", "c"])["most_confused"]
    assert [(p["true"], p["predicted"], p["count"]) for p in pairs] == [("b", "a", 7), ("a", "b", 2), ("b", "c", 1)]


def test_sums_that_contradict_each_other_are_refused() -> None:
    sums = sums_of(np.array([0, 1]), np.array([0, 1]), 2)
    with pytest.raises(ValueError, match="holds 2 samples, the sums 3"):
        validation_report(sums | {"count": 3.0}, ["a", "b"])
    with pytest.raises(ValueError, match="for 3 classes"):
        validation_report(sums, ["a", "b", "c"])


def test_the_file_is_json_with_a_readable_matrix(tmp_path: Path) -> None:
    report = validation_report(sums_of(np.array([0, 1, 1]), np.array([0, 1, 0]), 2), ["nought", 'o"ne'])
    path = tmp_path / "reports" / "step_00000044.json"
    write_report(path, {"raw": report, "ema": report | {"loss": float("nan")}})
    text = path.read_text()
    assert "[1, 1]" in text  # a row of the matrix stands on one line
    found = json.loads(text, parse_constant=pytest.fail)
    assert found["raw"] == report
    assert found["ema"]["loss"] is None
    assert [p.name for p in path.parent.iterdir()] == ["step_00000044.json"]


def test_a_report_that_cannot_be_written_is_an_error_for_people(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("")
    with pytest.raises(CheckpointError, match="Cannot write"):
        write_report(tmp_path / "reports" / "x.json", {})
