"""Metrics by name: their values beside definitions written out image by image, and their other names."""

import itertools

import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.rows.metrics import METRICS
from headrace.rows.named_metrics import NAMED, OTHER_NAMES
from headrace.run.custom_functions import metric, read_metrics

DRAW = np.random.default_rng(3)
LABELS = DRAW.integers(0, 4, 60)
LOGITS = DRAW.normal(0, 1, (60, 4)) + 1.5 * np.eye(4)[LABELS]
LOGITS[:10] = LOGITS[10:20]  # equal scores
ANSWERS = LOGITS.argmax(1)


def confusion() -> np.ndarray:
    made = np.zeros((4, 4), np.int64)
    for label, answer in zip(LABELS, ANSWERS, strict=True):
        made[label, answer] += 1
    return made


def pairs(scores: np.ndarray, positive: np.ndarray) -> float:
    """The share of pairs in the right order, one by one."""
    won = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in itertools.product(scores[positive], scores[~positive])]
    return sum(won) / len(won)


def test_values_are_those_of_the_definitions():
    shares = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
    by_hand = {
        "auc": np.mean([pairs(shares[:, c], np.equal(LABELS, c)) for c in range(4)]),
        "macro_precision": np.mean([np.mean(LABELS[c == ANSWERS] == c) for c in range(4)]),
    }
    chance = sum(np.mean(c == LABELS) * np.mean(c == ANSWERS) for c in range(4))
    by_hand["kappa"] = (np.mean(LABELS == ANSWERS) - chance) / (1 - chance)
    # Matthews' correlation is that of the one-hot rows
    true, answered = np.eye(4)[LABELS], np.eye(4)[ANSWERS]
    true, answered = true - true.mean(0), answered - answered.mean(0)
    by_hand["mcc"] = (true * answered).sum() / np.sqrt((true**2).sum() * (answered**2).sum())
    sums = {"confusion": confusion(), "scores": LOGITS.astype(np.float32), "labels": LABELS}
    assert {name: row.value(sums) for name, row in NAMED.items()} == pytest.approx(by_hand, rel=1e-6)


def test_two_classes_and_missing_classes():
    two = {"scores": LOGITS[:, :2], "labels": LABELS % 2}
    assert NAMED["auc"].value(two) == pytest.approx(pairs(LOGITS[:, 1] - LOGITS[:, 0], LABELS % 2 == 1))
    alone = {"scores": LOGITS, "labels": np.zeros(60, np.int64), "confusion": np.diag([60, 0, 0, 0])}
    assert [NAMED[name].value(alone) for name in ("auc", "kappa", "mcc")] == [None] * 3
    assert NAMED["macro_precision"].value(alone) == 1


def test_names_of_other_libraries_are_names_of_ours():
    known = {**METRICS, **NAMED}
    assert set(OTHER_NAMES.values()) <= set(known)
    assert not set(OTHER_NAMES) & set(known)
    assert [row.name for row in read_metrics(["F1", "ROC AUC", "top-5"])] == [
        "macro_f1",
        "auc",
        "top5",
    ]
    assert [row.name for row in read_metrics("accuracy")] == ["top1"]
    with pytest.raises(ConfigError, match=r"no metric 'aucc'.*Did you mean auc"):
        metric("aucc")
