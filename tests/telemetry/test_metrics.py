"""The metrics of classes against published values and counting by hand, and that each gets everywhere it should."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli.runs import main as list_runs
from headrace.report.comparison import compare_results
from headrace.report.curves import Curves, draw_panels
from headrace.report.run_summary import read_summary
from headrace.rows.metrics import METRICS, OF_CLASSES, class_ratio
from headrace.telemetry.console import LineFormatter
from headrace.telemetry.records import RunStart, ValidationRecord, best_validation, parse_record
from headrace.telemetry.sinks import CsvSink, JsonlSink
from headrace.telemetry.trackers.sink import TrackerSink
from headrace.telemetry.validation_report import validation_report


def sums_of(true: list[int], predicted: list[int], num_classes: int) -> dict[str, Any]:
    confusion = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(confusion, (true, predicted), 1)
    right = float(np.trace(confusion))
    return {"confusion": confusion, "count": len(true), "top1": right, "top5": right, "loss": 0.5 * len(true)}


def test_values_are_those_that_scikit_learn_publishes() -> None:
    # The examples on the pages of sklearn.metrics.balanced_accuracy_score and f1_score.
    sums = sums_of([0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 0, 1], 2)
    assert METRICS["balanced_accuracy"].value(sums) == pytest.approx(0.625)
    sums = sums_of([0, 1, 2, 0, 1, 2], [0, 2, 1, 0, 0, 1], 3)
    assert METRICS["macro_f1"].value(sums) == pytest.approx(0.26666666)


def test_values_are_those_of_counting_images() -> None:
    rng = np.random.default_rng(0)
    true, predicted = rng.integers(0, 4, 300).tolist(), rng.integers(0, 5, 300).tolist()  # class 4 has no image, 5 none
    scores, recalls = [], []
    for k in range(6):
        hits = sum(t == p == k for t, p in zip(true, predicted, strict=True))
        images, answers = true.count(k), predicted.count(k)
        if images:
            recalls.append(hits / images)
        if images or answers:
            recall, precision = hits / max(images, 1), hits / max(answers, 1)
            scores.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    report = validation_report(sums_of(true, predicted, 6), list("abcdef"))
    assert report["balanced_accuracy"] == pytest.approx(np.mean(recalls))
    assert report["macro_f1"] == pytest.approx(np.mean(scores))
    assert [row.value(sums_of([], [], 6)) for row in METRICS.values()] == [None] * len(METRICS)
    assert (class_ratio((90, 5, 0)), class_ratio((3, 0)), class_ratio(())) == (18, None, None)


def start(**more: Any) -> RunStart:
    return RunStart(
        step=0, time="", model="net", dataset="folder", num_epochs=2, total_steps=20, updates_per_epoch=10,
        global_batch_size=8, **more,
    )  # fmt: skip


def validated(step: int, top1: float, loss: float = 0.5, weights: str = "raw", **metrics: float) -> ValidationRecord:
    return ValidationRecord(
        step=step, epoch=step / 10, weights=weights, loss=loss, top1=top1, metrics=metrics, num_samples=11, seconds=1
    )


class Kept:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def scalars(self, *rows):
        for _, values in rows:
            self.values |= values

    def image(self, step, name, pixels): ...
    def histograms(self, step, found): ...
    def summary(self, values): ...
    def close(self): ...


def test_every_metric_of_classes_gets_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, values = tmp_path / "run", {row.name: 0.5 - 0.01 * place for place, row in enumerate(OF_CLASSES)}
    records = [start(class_ratio=20.0), replace(validated(10, 0.9), metrics=values)]
    tracker = Kept()
    sinks = [JsonlSink(run), CsvSink(run), TrackerSink("kept", lambda: tracker, lambda text, level: None, run)]
    for sink in sinks:
        for record in records:
            sink.write(record)
        sink.close()
    (run / "config.json").write_text(json.dumps({"name": "", "values": {}, "origins": {}}))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (row,) = csv.DictReader(io.StringIO((run / "validation.csv").read_text()))
    formatter, curves = LineFormatter(), Curves(run)
    line = [formatter.line(record) for record in records][-1]
    curves.read_more()
    panels = {panel["title"].lower(): panel for panel in draw_panels(curves)}
    compared = compare_results([read_summary(run)])
    assert list_runs([str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    for metric in OF_CLASSES:
        value = values[metric.name]
        assert json.loads(lines[-1])["metrics"][metric.name] == value
        assert float(row[metric.column]) == pytest.approx(100 * value)
        assert tracker.values[f"validation/raw/{metric.name}"] == value
        assert f"{metric.title} {100 * value:.2f} %" in line
        assert panels[metric.title.lower()]["lines"][0]["y"] == [value]
        assert compared[metric.title] == [f"{100 * value:.2f} %"]
        assert listed[f"best_{metric.name}"] == value


def test_of_even_classes_only_top1_is_shown(tmp_path: Path) -> None:
    """Where every class has about as many images they say what top-1 says."""
    run = tmp_path / "run"
    records = [start(class_ratio=1.2), validated(10, 0.9, balanced_accuracy=0.899, macro_f1=0.9)]
    sink = JsonlSink(run)
    for record in records:
        sink.write(record)
    sink.close()
    curves, formatter = Curves(run), LineFormatter()
    curves.read_more()
    assert "balanced" not in "".join(formatter.line(record) for record in records)
    assert [panel["title"] for panel in draw_panels(curves)] == ["Loss", "Top-1 accuracy"]


def test_old_records_have_no_metrics_of_classes() -> None:
    old = parse_record(
        '{"kind": "validation", "step": 5, "epoch": 1.0, "loss": 0.5, "top1": 0.5, "num_samples": 9, "seconds": 1.0}'
    )
    assert isinstance(old, ValidationRecord)
    assert old.metric("macro_f1") is None
    assert best_validation([old], METRICS["macro_f1"]) is None
    assert best_validation([old]) == old


def test_equal_validations_are_told_apart_by_their_loss_then_by_time() -> None:
    """Of a constant answer's equal accuracies the first was the best, whatever the loss."""
    first, second, third = validated(10, 0.9, 0.43), validated(20, 0.9, 0.19), validated(30, 0.9, 0.19)
    assert best_validation([first, second, third]) == second
    assert best_validation([third, second, first]) == second
    assert best_validation([first, validated(40, 0.9, float("nan"))]) == first
    assert best_validation([second, validated(20, 0.9, 0.19, "ema")]) == second
    formatter = LineFormatter()
    lines = [formatter.line(record) for record in (first, second, third)]
    assert [line.endswith("best so far") for line in lines] == [True, True, False]


def test_the_metric_that_is_monitored_decides() -> None:
    records = [
        validated(10, 0.9, 0.3, balanced_accuracy=0.5, macro_f1=0.47),
        validated(20, 0.8, 0.5, balanced_accuracy=0.7, macro_f1=0.6),
        validated(30, 0.7, 0.2, balanced_accuracy=0.6, macro_f1=0.65),
    ]
    wanted = {"top1": 10, "balanced_accuracy": 20, "macro_f1": 30, "loss": 30}
    for monitor, step in wanted.items():
        best = best_validation(records, METRICS[monitor])
        assert best is not None
        assert best.step == step
        formatter = LineFormatter([start(monitor=monitor)])
        lines = {record.step: formatter.line(record) for record in records}
        assert max(at for at, line in lines.items() if line.endswith("best so far")) == step
    shown = LineFormatter([start(monitor="macro_f1")]).line(replace(records[0]))
    assert "macro F1 47.00 %" in shown
    assert "balanced" not in shown
