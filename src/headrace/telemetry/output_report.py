"""The validation reports of tasks whose labels have a number for each output: of several labels, and of numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.engine.objective import SCORES
from headrace.rows.output_metrics import average_precision, best_threshold, f1_of, r2_of
from headrace.rows.row import Scale
from headrace.rows.tasks import MULTILABEL, REGRESSION

MOST_POINTS = 400  # of a target, in a scatter plot


def label_report(sums: Mapping[str, Any], names: Sequence[str], scale: Scale) -> dict[str, Any]:
    """Return what is told of each label: its images, its average precision, and how good answers at one half are.

    `threshold` is the probability from which on to answer so that F1 is the highest on these images.
    """
    del scale
    scores, labels = sums[SCORES]["scores"], sums[SCORES]["labels"] > 0
    return {
        "task": MULTILABEL.name,
        "exact_match": float(((scores > 0) == labels).all(1).mean()) if len(labels) else None,
        "labels_per_image": float(labels.sum(1).mean()) if len(labels) else None,
        "classes": [_label_row(name, scores[:, k], labels[:, k]) for k, name in enumerate(names)],
    }


def _label_row(name: str, scores: np.ndarray, has: np.ndarray) -> dict[str, Any]:
    answered = scores > 0
    right, images, answers = int((answered & has).sum()), int(has.sum()), int(answered.sum())
    best = best_threshold(MULTILABEL.answer(scores, Scale()), has)
    return {
        "name": name,
        "num_samples": images,
        "num_predicted": answers,
        "num_correct": right,
        "recall": right / images if images else None,
        "precision": right / answers if answers else None,
        "f1": f1_of(right, images, answers),
        "average_precision": average_precision(scores, has),
        "threshold": best and best[0],
        "f1_at_threshold": best and best[1],
    }


def number_report(sums: Mapping[str, Any], names: Sequence[str], scale: Scale) -> dict[str, Any]:
    """Return what is told of each target: its errors in its own units, and points (target, answer) for a plot."""
    found = sums[SCORES]
    answers, targets = (REGRESSION.answer(found[name], scale) for name in ("scores", "labels"))
    # Spread over the set: the first ones may all be alike.
    shown = np.unique(np.linspace(0, len(targets) - 1, min(len(targets), MOST_POINTS)).astype(int))
    return {
        "task": REGRESSION.name,
        "classes": [],
        "targets": [_target_row(name, answers[:, k], targets[:, k], shown) for k, name in enumerate(names)],
    }


def _target_row(name: str, answers: np.ndarray, targets: np.ndarray, shown: np.ndarray) -> dict[str, Any]:
    error = answers - targets
    return {
        "name": name,
        "mae": float(np.abs(error).mean()) if len(error) else None,
        "rmse": float(np.sqrt(np.square(error).mean())) if len(error) else None,
        "r2": r2_of(answers, targets),
        "mean_error": float(error.mean()) if len(error) else None,
        # What a constant answer, the mean, would have.
        "deviation": float(targets.std()) if len(error) else None,
        "points": [[_short(float(targets[row])), _short(float(answers[row]))] for row in shown.tolist()],
    }


def _short(value: float) -> float:
    """Return a number with the digits that a plot shows."""
    return float(f"{value:.6g}")
