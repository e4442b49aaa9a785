"""Calibration, top-k, thresholds and the area under the ROC curve against numbers computed by hand or pair by pair."""

import numpy as np
import pytest

from headrace.run.calibration import area_under_roc, calibration, notable_images, threshold_table, top_k


def test_the_calibration_error_by_hand():
    """Two images at 0.9 (one right) and two at 0.6 (both right): (2 |0.5 - 0.9| + 2 |1 - 0.6|) / 4."""
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.6, 0.4]])
    found = calibration(probabilities, np.array([0, 1, 1, 0]), num_bins=10)
    assert found["ece"] == pytest.approx(0.4)
    assert [each["count"] for each in found["bins"]] == [0, 0, 0, 0, 0, 2, 0, 0, 2, 0]
    assert found["bins"][8]["accuracy"] == 0.5
    assert found["bins"][0]["accuracy"] is None


def test_the_calibration_error_image_by_image():
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(4), 300)
    labels = rng.integers(0, 4, 300)
    total = 0.0
    for low in np.arange(15) / 15:
        chosen = [k for k in range(300) if low < probabilities[k].max() <= low + 1 / 15]
        if chosen:
            right = np.mean([probabilities[k].argmax() == labels[k] for k in chosen])
            total += len(chosen) / 300 * abs(right - np.mean([probabilities[k].max() for k in chosen]))
    assert calibration(probabilities, labels)["ece"] == pytest.approx(total)


def test_top_k_counts_equal_probabilities_against():
    probabilities = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [1 / 3, 1 / 3, 1 / 3]])
    assert top_k(probabilities, np.array([0, 1, 0])) == {"1": pytest.approx(1 / 3), "2": pytest.approx(2 / 3)}


def test_thresholds_by_hand():
    score, positive = np.array([0.95, 0.7, 0.4, 0.2]), np.array([True, False, True, False])
    rows = {row["threshold"]: row for row in threshold_table(score, positive)}
    assert rows[0.5] == {"threshold": 0.5, "precision": 0.5, "recall": 0.5, "f1": 0.5, "accuracy": 0.5}
    assert rows[0.8] == {"threshold": 0.8, "precision": 1, "recall": 0.5, "f1": pytest.approx(2 / 3), "accuracy": 0.75}
    assert rows[0.05]["recall"] == 1
    assert threshold_table(score / 2, positive)[-1]["precision"] is None, "nothing was chosen"


def test_the_area_under_the_curve_is_that_of_all_pairs():
    rng = np.random.default_rng(1)
    score, positive = rng.integers(0, 10, 80) / 10, rng.random(80) < 0.3
    pairs = [(a > b) + (a == b) / 2 for a in score[positive] for b in score[~positive]]
    assert area_under_roc(score, positive) == pytest.approx(np.mean(pairs))
    assert area_under_roc(score, np.ones(80, bool)) is None


def test_mistakes_come_most_confident_first_and_right_ones_least():
    probabilities = np.array([[0.9, 0.1], [0.6, 0.4], [0.55, 0.45], [0.2, 0.8]])
    found = notable_images(probabilities, np.array([1, 1, 0, 1]))
    assert found.mistakes == [0, 1]
    assert found.hardest == [2, 3]
