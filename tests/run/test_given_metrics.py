"""Metrics that code gives: everywhere that ours are, against NumPy on the logits, and refused when they cannot work."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from headrace import Metric, Model, read_digits
from headrace.cli.runs import main as list_runs
from headrace.core.errors import ConfigError
from headrace.report.comparison import compare_results
from headrace.report.curves import Curves, draw_compared, draw_panels
from headrace.report.run_report import write_run_report
from headrace.report.run_summary import read_summary
from headrace.run import fit
from headrace.run.callbacks import EarlyStopping
from headrace.run.custom_functions import check_objective, read_metrics
from headrace.run.design import CustomParts
from headrace.run.fit import train
from headrace.telemetry.records import RunStart, ValidationRecord
from headrace.telemetry.sinks import rewind
from headrace.telemetry.trackers.sink import TrackerSink

OPTIONS: dict[str, Any] = {"micro_batch_size": 8, "learning_rate": 0.001, "progress": "none"}


def anything(value: Any) -> Any:
    """Hide a wrong type from the checker."""
    return value


def rank_auc(values: dict[str, np.ndarray]) -> float:
    """Return the area under the ROC curve of class 3 against the rest, by the trapezoids of its curve."""
    score, positive = values["scores"][:, 3], values["labels"] == 3
    order = np.argsort(-score, kind="stable")
    hits = np.concatenate([[0.0], np.cumsum(positive[order])]) / max(positive.sum(), 1)
    falls = np.concatenate([[0.0], np.cumsum(~positive[order])]) / max((~positive).sum(), 1)
    return float(np.trapezoid(hits, falls))


def margin(logits, labels):
    return logits[jnp.arange(len(labels)), labels]


def squares(logits, labels, weights):
    return {"total": jnp.sum(logits.max(1) ** 2 * weights)}


GIVEN: list[Metric | str] = [
    Metric(name="auc", title="AUC of 3", unit="%", value=rank_auc, of_scores=True),
    Metric(name="own_logit", unit="nats", per_image=margin),
    Metric(name="size", better="less", sums=squares, value=lambda sums: float(sums["total"]) / sums["count"]),
    Metric(name="answered_0", unit="%", value=lambda sums: sums["confusion"][:, 0].sum() / sums["count"]),
    "macro_f1",
]


class Kept:
    """A tracker that keeps what it is given."""

    values: dict[str, float]

    def __init__(self) -> None:
        self.values = {}

    def scalars(self, *rows):
        for _, values in rows:
            self.values |= values

    def image(self, step, name, pixels): ...
    def histograms(self, step, found): ...
    def summary(self, values): ...
    def close(self): ...


def test_a_metric_of_code_gets_everywhere_that_ours_do(tmp_path: Path, capsys, monkeypatch) -> None:
    tracker = Kept()
    monkeypatch.setattr(
        fit, "make_trackers", lambda options, about, notify: [TrackerSink("kept", lambda: tracker, notify, tmp_path)]
    )
    digits = read_digits()["train"]
    images, labels = digits.images[:128], digits.labels[:128]
    held = images[100:], labels[100:]  # 28 images: the last batch is padded
    model = Model("toy_model_bn", num_classes=10, log_dir=str(tmp_path), run_name="run", **OPTIONS)
    run = model.fit(
        images, labels, validation_data=held, epochs=2, metrics=GIVEN, monitor="auc", early_stopping=5, num_replicas=2
    )
    # against the logits, and the AUC against the statistic of ranks: the share of pairs in the right order
    logits = model.logits(held[0])
    positive, negative = logits[held[1] == 3, 3], logits[held[1] != 3, 3]
    pairs = (positive[:, None] > negative).mean() + 0.5 * (positive[:, None] == negative).mean()
    wanted = {
        "auc": pairs,
        "own_logit": logits[np.arange(28), held[1]].mean(),
        "size": (logits.max(1).astype(np.float64) ** 2).mean(),
        "answered_0": (logits.argmax(1) == 0).mean(),
    }
    report = model.evaluate(*held)
    assert report["metrics"] == {name: pytest.approx(value, rel=1e-4) for name, value in wanted.items()}
    assert 0.2 < pairs < 1
    # the best is that of the highest AUC, and the model has its weights
    validations = [record for record in run.records if isinstance(record, ValidationRecord)]
    best = run.best
    assert best is not None
    assert best.metrics["auc"] == max(record.metrics["auc"] for record in validations)
    assert best.metrics["auc"] == pytest.approx(pairs)
    # records, tables, log, arrays
    place = run.directory
    kept = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    start = next(each for each in kept if each["kind"] == "run_start")
    assert start["asked_metrics"][0] == {"name": "auc", "title": "AUC of 3", "unit": "%", "better": "more"}
    last = [each for each in kept if each["kind"] == "validation"][-1]["metrics"]
    assert set(wanted) <= set(last)
    rows = list(csv.DictReader(io.StringIO((place / "validation.csv").read_text())))
    assert float(rows[-1]["auc"]) == pytest.approx(100 * last["auc"])
    assert float(rows[-1]["size"]) == pytest.approx(last["size"], rel=1e-6)
    assert list(rows[0])[-4:] == list(wanted)
    table = (place / "validation.csv").read_text()
    rewind(place, run.step)
    assert (place / "validation.csv").read_text() == table
    log = (place / "log.txt").read_text()
    assert f"AUC of 3 {100 * last['auc']:.2f} %  own logit" in log
    assert f"own logit {last['own_logit']:.4g} nats" in log
    assert f"best AUC of 3 {100 * best.metrics['auc']:.2f} %, top-1" in log
    assert f"macro F1 {100 * last['macro_f1']:.2f} %" in log, "asked for by name, although the classes are even"
    raw = [each for each in kept if each["kind"] == "validation" and each["weights"] == "raw"]
    assert run.metrics["val_auc"].tolist() == [each["metrics"]["auc"] for each in raw]
    assert {"own_logit"} == set(run.metrics) & set(wanted), "the others are of validations"
    # chart, board and report, lists, tracker
    curves, summary = Curves(place), read_summary(place)
    curves.read_more()
    panels = {panel["title"]: panel for panel in draw_panels(curves)}
    for title, name, unit in (("AUC of 3", "auc", "%"), ("Own logit", "own_logit", "nats"), ("Size", "size", "")):
        assert panels[title]["unit"] == unit
        assert panels[title]["lines"][-2 if name != "own_logit" else 1]["y"][-1] is not None
    assert {"Macro F1"} <= set(panels)
    assert panels["AUC of 3"]["scale"] == 100
    assert panels["Own logit"]["lines"][0]["label"] == "training"
    assert "Validation, AUC of 3" in {panel["title"] for panel in draw_compared({"a": curves, "b": curves})}
    page = write_run_report(place).read_text()
    assert f"best AUC of 3, epoch {best.epoch:.4g}" in page
    assert compare_results([summary])["AUC of 3"] == [f"{100 * best.metrics['auc']:.2f} %"]
    capsys.readouterr()
    assert list_runs([str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["monitor"], listed["best_auc"]) == ("auc", best.metrics["auc"])
    assert tracker.values["validation/raw/auc"] == raw[-1]["metrics"]["auc"]


def test_what_cannot_work_is_refused_before_anything_starts(quick) -> None:
    auc = Metric(name="auc", value=rank_auc, of_scores=True)

    def check(**parts: Any) -> None:
        check_objective(None, read_metrics([Metric(name="mine", **parts)]), 10, ())

    def with_auc(**options: Any) -> Any:
        return train(quick(**options), CustomParts(metrics=[auc]))

    def constant(sums: Any) -> float:
        return 30.0

    calls = [
        (check, "neither per_image nor value"),
        (lambda: check(per_image=margin, value=constant), "has per_image and value"),
        (lambda: check(sums=squares), "mine has sums"),
        (lambda: check(value=constant, sums=squares, of_scores=True), "value and sums and of_scores"),
        (lambda: check(value=constant, unit="%"), "is 30 of a made-up validation"),
        (lambda: check(value=constant, better="higher"), "better='higher'"),
        (lambda: check(value=constant, sums=lambda *given: {"all": given[0]}), "depend on the number of images"),
        (lambda: check(value=constant, sums=lambda *given: given[0]), "returns a dict of arrays"),
        (lambda: read_metrics(["f1x"]), "no metric 'f1x'.*macro_f1"),
        (lambda: read_metrics(["macro_f1", "macro_f1"]), "macro_f1 is given twice"),
        (lambda: read_metrics([Metric(name="val_acc", per_image=margin)]), "named 'val_acc'"),
        (lambda: EarlyStopping(3, "auk"), "no metric 'auk'"),
        (lambda: with_auc(monitor="auk"), "not one of the choices|there is no such metric"),
        (
            lambda: with_auc(num_pipeline_stages=2, pipeline_validation_model=True),
            "needs the scores of all images.*pipeline stages",
        ),
    ]
    for call, told in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert re.search(told, str(caught.value).replace("\n", " ")), (told, str(caught.value))
    with pytest.raises(KeyError) as error:
        check(value=lambda sums: sums["nothing"])
    assert any("failed on a made-up validation" in note for note in error.value.__notes__)


def test_a_target_needs_a_share(tmp_path: Path) -> None:
    digits = read_digits()["train"]
    model = Model("toy_model_bn", num_classes=10, log_dir=str(tmp_path), **OPTIONS)
    images, labels = digits.images[:32], digits.labels[:32]
    for monitor, told in (("size", "target accuracy is a share"), ("sise", "no such metric.*size")):
        with pytest.raises(ConfigError, match=r"(?s)" + told):
            model.fit(
                images, labels, validation_data=(images, labels), metrics=GIVEN, monitor=monitor, target_accuracy=0.5
            )
    assert not list(tmp_path.glob("*/metrics.jsonl"))


def test_records_of_metrics_survive_json() -> None:
    start = RunStart(
        step=0, time="", model="m", dataset="d", num_epochs=1, total_steps=1, updates_per_epoch=1, global_batch_size=1,
        asked_metrics=({"name": "auc", "title": "AUC", "unit": "%", "better": "less"},), monitor="auc",
    )  # fmt: skip
    again = RunStart.from_dict(json.loads(start.to_json()))
    assert again == start
    assert (again.monitored.better, again.monitored.is_share) == ("less", True)
    assert "asked_metrics" not in RunStart.from_dict({**start.to_dict(), "asked_metrics": ()}).to_dict()


def test_metrics_asked_for_by_name_are_measured_and_may_be_monitored(tmp_path):
    model = Model("toy_model_bn", log_dir=str(tmp_path), micro_batch_size=32, progress="none", config="none")
    run = model.fit("digits", epochs=2, steps_per_epoch=4, metrics=["f1", "auc", "kappa"], monitor="auc")
    digits = read_digits()["validation"]
    logits, labels = model.logits(digits.images), digits.labels
    assert run.best is not None
    step = run.best.step
    (at,) = np.flatnonzero(run.metrics["val_step"] == step)
    found = model.evaluate(digits.images, digits.labels)["metrics"]
    areas = []
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for each in range(10):
        one, rest = shares[labels == each, each], shares[labels != each, each]
        areas.append(((one[:, None] > rest).mean() + (one[:, None] >= rest).mean()) / 2)
    assert found["auc"] == pytest.approx(np.mean(areas), rel=1e-5)
    assert run.best.metrics["auc"] == pytest.approx(max(run.metrics["val_auc"]))
    assert run.history["val_kappa"][at] == pytest.approx(run.best.metrics["kappa"])


def test_history_has_an_entry_for_each_epoch(tmp_path):
    model = Model("toy_model_bn", log_dir=str(tmp_path), micro_batch_size=32, progress="none", config="none")
    options: dict[str, Any] = {"epochs": 4, "steps_per_epoch": 6, "seed": 3}
    plain = model.fit("digits", **options)
    assert plain.history["epoch"] == [1, 2, 3, 4]
    for name in ("loss", "accuracy", "learning_rate"):
        assert plain.history[name] == pytest.approx(list(plain.metrics[name]))
    assert plain.history["val_loss"] == pytest.approx(list(plain.metrics["val_loss"]))
    # four records an epoch, of 1 and 2 steps: their means are those of the epoch; validation every other epoch
    fresh = Model("toy_model_bn", log_dir=str(tmp_path), micro_batch_size=32, progress="none", config="none")
    fine = fresh.fit("digits", logs_per_epoch=4, validations_per_epoch=0.5, **options)
    assert len(fine.metrics["loss"]) == 16
    for name in ("loss", "accuracy"):
        assert fine.history[name] == pytest.approx(plain.history[name], rel=1e-5)
    assert np.isnan(fine.history["val_loss"]).tolist() == [True, False, True, False]
    assert fine.history["val_loss"][3] == pytest.approx(plain.history["val_loss"][3], rel=1e-5)
