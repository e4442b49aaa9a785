"""The validation report: accuracy, loss, confusion matrix, and recall and precision of each class."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.engine.objective import metric_sums
from headrace.telemetry.records import replace_file

_MOST_CONFUSED = 10


def validation_report(sums: Mapping[str, Any], class_names: Sequence[str]) -> dict[str, Any]:
    """Return the report for sums over a validation set: loss, top1, top5, count, confusion[true class, predicted].

    Classes without samples have no recall (null) and do not enter the balanced accuracy; classes that were never
    predicted have no precision.
    """
    confusion = np.asarray(sums["confusion"], np.int64)
    count, correct = round(float(sums["count"])), round(float(sums["top1"]))
    if confusion.shape != (len(class_names), len(class_names)):
        raise ValueError(f"confusion matrix {confusion.shape} for {len(class_names)} classes")
    if confusion.sum() != count:
        raise ValueError(f"the confusion matrix holds {confusion.sum()} samples, the sums {count}")
    classes = [_class_row(name, confusion, k) for k, name in enumerate(class_names)]
    recalls = [row["recall"] for row in classes if row["recall"] is not None]
    custom = {name: float(total) / count for name, total in metric_sums(sums).items() if count}
    return {
        "num_samples": count,
        "top1": correct / count if count else None,
        "top5": float(sums["top5"]) / count if count and len(confusion) > 5 else None,  # else it is always 1
        "loss": float(sums["loss"]) / count if count else None,
        **({"metrics": custom} if custom else {}),
        "balanced_accuracy": sum(recalls) / len(recalls) if recalls else None,
        "classes_without_samples": [row["name"] for row in classes if not row["num_samples"]],
        "classes": classes,
        "most_confused": _most_confused(confusion, class_names),
        "confusion_matrix": confusion.tolist(),
    }


def write_report(path: Path | str, report: Mapping[str, Any]) -> None:
    """Write a report as a JSON file, atomically. Numbers that are not finite become null."""
    replace_file(Path(path), (_to_json(report) + "\n").encode())


def _class_row(name: str, confusion: np.ndarray, k: int) -> dict[str, Any]:
    correct, samples, predicted = int(confusion[k, k]), int(confusion[k].sum()), int(confusion[:, k].sum())
    return {
        "name": name,
        "num_samples": samples,
        "num_predicted": predicted,
        "num_correct": correct,
        "recall": correct / samples if samples else None,
        "precision": correct / predicted if predicted else None,
    }


def _most_confused(confusion: np.ndarray, class_names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the largest entries off the diagonal, largest first (then in class order)."""
    wrong = confusion - np.diag(np.diag(confusion))
    order = np.argsort(-wrong, axis=None, kind="stable")[:_MOST_CONFUSED]
    pairs = [(int(i), *divmod(int(i), len(class_names))) for i in order]
    return [
        {"true": class_names[true], "predicted": class_names[predicted], "count": int(wrong.flat[i])}
        for i, true, predicted in pairs
        if wrong.flat[i] > 0
    ]


def _to_json(value: Any, indent: str = "") -> str:
    """Return JSON with one line for each innermost list or object, so that a matrix reads as one."""
    inner = indent + " "
    if isinstance(value, Mapping) and any(isinstance(item, Mapping | list) for item in value.values()):
        rows = [f"{inner}{json.dumps(str(key))}: {_to_json(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        return "[\n" + ",\n".join(inner + _to_json(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(_finite(value), allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value
