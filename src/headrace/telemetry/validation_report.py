"""The validation report: accuracy, loss, confusion matrix, and recall and precision of each class."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.engine.objective import SCORES, given_sums, metric_sums
from headrace.rows.metrics import METRICS, OF_CLASSES
from headrace.rows.row import NO_SCALE, Metric, Scale, Task
from headrace.rows.tasks import CLASSIFICATION, MULTILABEL, REGRESSION
from headrace.telemetry.line_file import replace_file
from headrace.telemetry.output_report import label_report, number_report
from headrace.telemetry.records import REPORTS

_MOST_CONFUSED = 10


def validation_report(
    sums: Mapping[str, Any],
    names: Sequence[str],
    given: Iterable[Metric] = (),
    task: tuple[Task, Scale] = (CLASSIFICATION, NO_SCALE),
) -> dict[str, Any]:
    """Return the report of a task for sums over a validation set; `names` are those of the outputs.

    `given` are the metrics besides those that every classification has, of which the sums have what they need.
    """
    row, scale = task
    if row is CLASSIFICATION:
        return _class_report(sums, names, given)
    count = round(float(sums["count"]))
    values = {metric.name: given_value(metric, sums) for metric in given} if count else {}
    return {
        "num_samples": count,
        "loss": values.pop("loss", None),
        "metrics": {name: value for name, value in values.items() if value is not None},
        **_REPORTS[row.name](sums, names, scale),
    }


def _class_report(sums: Mapping[str, Any], class_names: Sequence[str], given: Iterable[Metric]) -> dict[str, Any]:
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
    exact = {**sums, "confusion": confusion, "count": count, "top1": correct}
    classes = [_class_row(name, confusion, k) for k, name in enumerate(class_names)]
    values = {row.name: given_value(row, exact) for row in given if row.name not in METRICS} if count else {}
    custom = {name: value for name, value in values.items() if value is not None}
    return {
        "num_samples": count,
        **{row.name: row.value(exact) for row in METRICS.values() if row.has_field},
        **({"metrics": custom} if custom else {}),
        **{row.name: row.value(exact) for row in OF_CLASSES},
        "classes_without_samples": [row["name"] for row in classes if not row["num_samples"]],
        "classes": classes,
        "most_confused": _most_confused(confusion, class_names),
        "confusion_matrix": confusion.tolist(),
    }


_REPORTS: Mapping[str, Callable[[Mapping[str, Any], Sequence[str], Scale], dict[str, Any]]] = {
    MULTILABEL.name: label_report,
    REGRESSION.name: number_report,
}


def given_value(row: Metric, sums: Mapping[str, Any]) -> float | None:
    """Return the value of a metric that code gave."""
    if row.per_image is not None:
        return float(metric_sums(sums)[row.name]) / float(sums["count"])
    value = row.value(sums[SCORES] if row.of_scores else {**sums, **given_sums(sums, row.name)})
    return None if value is None else float(value)


def report_file(run_dir: Path, step: int) -> Path:
    """Return the file with the report of the validation after a step, by weights; named like the checkpoint."""
    return run_dir / REPORTS / f"step_{step:08d}.json"


def write_report(path: Path | str, report: Mapping[str, object]) -> None:
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


def _to_json(value: object, indent: str = "") -> str:
    """Return JSON with one line for each innermost list or object, so that a matrix reads as one."""
    inner = indent + " "
    if isinstance(value, Mapping) and any(isinstance(item, Mapping | list) for item in value.values()):
        rows = [f"{inner}{json.dumps(str(key))}: {_to_json(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        return "[\n" + ",\n".join(inner + _to_json(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(finite_or_null(value), allow_nan=False, ensure_ascii=False)


def finite_or_null(value: object) -> Any:
    """Return a value without numbers that are not finite, which JSON does not have: they become None."""
    if isinstance(value, Mapping):
        return {key: finite_or_null(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
