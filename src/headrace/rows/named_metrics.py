"""Metrics that code asks for by name, `metrics=["f1", "auc"]`, and that no run measures unasked; their other names."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.rows.row import Metric, Sums

if TYPE_CHECKING:
    import numpy as np


def _confusion(sums: Sums) -> "np.ndarray":
    import numpy as np

    return np.asarray(sums["confusion"], np.float64)


def _macro_precision(sums: Sums) -> float | None:
    """Return the mean over the classes that were answered of right / answers of the class."""
    confusion = _confusion(sums)
    answered = confusion.sum(0)
    some = answered > 0
    return float((confusion.diagonal()[some] / answered[some]).mean()) if some.any() else None


def _kappa(sums: Sums) -> float | None:
    """Return (accuracy - chance) / (1 - chance), chance from how often each class occurs and is answered."""
    confusion = _confusion(sums)
    total = confusion.sum()
    if not total:
        return None
    chance = float(confusion.sum(0) @ confusion.sum(1)) / total**2
    return (float(confusion.diagonal().sum()) / total - chance) / (1 - chance) if chance < 1 else None


def _mcc(sums: Sums) -> float | None:
    """Return Matthews' correlation of classes and answers; None where either is a single class."""
    confusion = _confusion(sums)
    true, answered, total = confusion.sum(1), confusion.sum(0), confusion.sum()
    spread = (total**2 - true @ true) * (total**2 - answered @ answered)
    return float((confusion.diagonal().sum() * total - true @ answered) / spread**0.5) if spread > 0 else None


def area_under_roc(scores: "np.ndarray", is_positive: "np.ndarray") -> float | None:
    """Return the share of pairs of a positive and another in the right order, equal scores as half; None without."""
    import numpy as np

    positives, others = int(is_positive.sum()), int((~is_positive).sum())
    if not positives or not others:
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = ((ends - counts + 1 + ends) / 2)[place]  # of equal scores their mean rank
    return float((ranks[is_positive].sum() - positives * (positives + 1) / 2) / (positives * others))


def _auc(values: Sums) -> float | None:
    """Return the mean over the classes of the area of each against the rest; of two classes that of the second."""
    import numpy as np

    logits, labels = np.asarray(values["scores"], np.float64), np.asarray(values["labels"])
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    classes = (1,) if logits.shape[1] == 2 else range(logits.shape[1])
    areas = [area_under_roc(shares[:, each], labels == each) for each in classes]
    found = [area for area in areas if area is not None]
    return sum(found) / len(found) if found else None


NAMED: Mapping[str, Metric] = {
    row.name: row
    for row in (
        Metric(
            name="auc",
            title="AUC",
            says="the mean over the classes of the area under the ROC curve, each against the rest",
            unit="%",
            value=_auc,
            of_scores=True,
        ),
        Metric(
            name="macro_precision",
            title="macro precision",
            says="the mean over the classes of the share of their answers that is right",
            unit="%",
            value=_macro_precision,
        ),
        Metric(name="kappa", title="Cohen's kappa", says="accuracy beyond that of chance", value=_kappa),
        Metric(name="mcc", title="MCC", says="Matthews' correlation of classes and answers", value=_mcc),
    )
}

# What Keras, scikit-learn and torchmetrics call them.
OTHER_NAMES: Mapping[str, str] = {
    "accuracy": "top1",
    "acc": "top1",
    "acc1": "top1",
    "top_1": "top1",
    "categorical_accuracy": "top1",
    "sparse_categorical_accuracy": "top1",
    "top_5": "top5",
    "acc5": "top5",
    "top5_accuracy": "top5",
    "top_k_categorical_accuracy": "top5",
    "sparse_top_k_categorical_accuracy": "top5",
    "crossentropy": "loss",
    "f1": "macro_f1",
    "f1_score": "macro_f1",
    "f1score": "macro_f1",
    "f1_macro": "macro_f1",
    "recall": "balanced_accuracy",
    "macro_recall": "balanced_accuracy",
    "balanced": "balanced_accuracy",
    "precision": "macro_precision",
    "roc_auc": "auc",
    "auroc": "auc",
    "cohen_kappa": "kappa",
    "matthews_corrcoef": "mcc",
}
