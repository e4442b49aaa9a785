"""Trackers: what TensorBoard's files and W&B's offline runs hold, read back; failures that do not stop a run."""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import sqlite3
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace.cli.report import report as report_command
from headrace.core.errors import ConfigError
from headrace.run.fit import resume, train
from headrace.telemetry.records import CurvePoint, Note, Record, RunEnd, TrainRecord, ValidationRecord, read_records
from headrace.telemetry.trackers.sink import TrackerSink, refuse_missing

from .conftest import final_state

QUICK = {"num_epochs": 2, "weight_updates_per_epoch": 4}


def scalars_of(directory: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for step, value in values_of(directory, "events.*"):
        if value.HasField("simple_value"):
            found.setdefault(value.tag, {})[step] = value.simple_value
    return found


def values_of(directory: Path, pattern: str) -> list[tuple[int, Any]]:
    """Read event files by their format (length, checksum, Event, checksum), as TensorBoard does.

    The start of a session hides what came before it with its step or a later one.
    """
    found: list[tuple[int, Any]] = []
    event_of: Any = importlib.import_module("tensorboardX.proto.event_pb2").Event.FromString
    for path in sorted(directory.glob(pattern), key=lambda path: path.stat().st_mtime):
        data, place = path.read_bytes(), 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            event = event_of(data[place + 12 : place + 12 + length])
            place += 16 + length
            if event.session_log.status == event.session_log.START:
                found = [(step, value) for step, value in found if step < event.step]
            found += ((event.step, value) for value in event.summary.value)
    return found


def losses_of(records: list[Record]) -> dict[int, float]:
    """Return the losses that curves are drawn from, by step."""
    return {record.step: record.loss for record in records if isinstance(record, CurvePoint)}


def test_tensorboard_has_every_number_of_the_records(quick):
    result = train(quick(**QUICK, tensorboard=True, histograms=True))
    found = scalars_of(result.directory / "tensorboard")
    records = read_records(result.directory)
    assert found["train/loss"] == pytest.approx(losses_of(records)), "each of so few steps"
    trained = {record.step: record.grad_norm for record in records if isinstance(record, TrainRecord)}
    assert found["train/grad_norm"] == pytest.approx(trained)
    validated = [record for record in records if isinstance(record, ValidationRecord)]
    for weights in ("raw", "ema"):
        wanted = {record.step: record.top1 for record in validated if record.weights == weights}
        assert found[f"validation/{weights}/top1"] == pytest.approx(wanted)
    (end,) = [record for record in records if isinstance(record, RunEnd)]
    assert found["run/time_to_train"] == pytest.approx({8: end.time_to_train})
    assert "time_to_train" not in found, "one number in one unit"
    _histograms(result.directory)
    _images_and_options(result.directory)


def _images_and_options(run: Path) -> None:
    report_command([str(run), "--images"])
    images = {
        value.tag: value.image for _, value in values_of(run / "tensorboard", "events.*") if value.HasField("image")
    }
    mistakes = json.loads((run / "images.json").read_text())["mistakes"]
    assert sum(tag.startswith("mistakes/") for tag in images) == len(mistakes) > 0
    with Image.open(io.BytesIO(images["validation/raw/confusion_matrix"].encoded_image_string)) as drawn:
        pixels = np.asarray(drawn.convert("RGB")).astype(int)
    report = json.loads((run / "reports" / "step_00000008.json").read_text())["raw"]
    matrix, side = np.array(report["confusion_matrix"]), 36
    margin = pixels.shape[0] - side * len(matrix)
    middle = pixels[margin + side // 2 :: side, margin + side // 2 :: side]
    is_white = (middle == 255).all(-1)
    np.testing.assert_array_equal(is_white, matrix == 0)
    plugins = [
        value.metadata.plugin_data.plugin_name for _, value in values_of(run / "tensorboard", "options/events.*")
    ]
    assert "hparams" in plugins


def test_tensorboard_goes_on_after_a_resume(quick, monkeypatch):
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now)  # both parts begin in the same second
    first = train(quick(**QUICK, tensorboard=True))
    resume(first.directory, {"num_epochs": 3, "tensorboard": True})
    found = scalars_of(first.directory / "tensorboard")
    assert sorted(found["train/loss"]) == list(range(1, 13))
    assert sorted(found["train/grad_norm"]) == [4, 8, 12]


def _histograms(run: Path) -> None:
    """Weights are those of the last checkpoint, counted by NumPy."""
    found: dict[tuple[str, int], Any] = {}
    for step, value in values_of(run / "tensorboard", "events.*"):
        if value.HasField("histo"):
            found[value.tag, step] = value.histo
    weights: dict[str, list[np.ndarray]] = {}
    for name, array in final_state(run).items():
        if name.startswith("params/"):
            weights.setdefault(name.split("/")[1], []).append(array.ravel())
    assert found.keys() == {
        (f"{kind}/{name}", step) for kind in ("weights", "gradients") for name in weights for step in (4, 8)
    }
    for name, arrays in weights.items():
        values, histogram = np.concatenate(arrays).astype(np.float64), found[f"weights/{name}", 8]
        edges = np.array([histogram.min, *histogram.bucket_limit])
        np.testing.assert_array_equal(np.histogram(values, edges)[0], histogram.bucket)
        assert (histogram.min, histogram.max, histogram.num) == (values.min(), values.max(), len(values))
        assert histogram.sum == pytest.approx(values.sum(), rel=1e-4, abs=1e-5)
        assert histogram.sum_squares == pytest.approx((values**2).sum(), rel=1e-4)
    _read_by_tensorboard(run / "tensorboard", found)


def _read_by_tensorboard(directory: Path, written: dict[tuple[str, int], Any]) -> None:
    """Compare with what TensorBoard's own reader finds, where TensorBoard is installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(directory), size_guidance={"histograms": 0, "scalars": 0})
    events.Reload()
    read = {
        (tag, event.step): event.histogram_value
        for tag in events.Tags()["histograms"]
        for event in events.Histograms(tag)
    }
    assert read.keys() == written.keys()
    for key, value in read.items():
        assert list(value.bucket) == list(written[key].bucket)
        assert value.max == written[key].max
    assert [event.value for event in events.Scalars("train/loss")] == list(scalars_of(directory)["train/loss"].values())


def test_histograms_without_a_tracker_are_refused(quick):
    with pytest.raises(ConfigError, match="without --tensorboard or --wandb or --trackio"):
        quick(histograms=True)


def wandb_run(directory: Path) -> dict[str, Any]:
    """Read the file of an offline run by its format, in a process of its own."""
    script = """
import json, sys
import struct
from wandb.proto import wandb_internal_pb2 as pb
def records(data):  # LevelDB's log format: blocks of 32 kB, chunks of a checksum, a length, a kind and bytes
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""
history, summary, run = [], {}, {}
for data in records(open(sys.argv[1], "rb").read()):
    record = pb.Record.FromString(data)
    kind = record.WhichOneof("record_type")
    if kind == "history":
        history.append({(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item})
    if kind == "summary":
        summary |= {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.summary.update}
    if kind == "run":
        run = {"name": record.run.display_name, "project": record.run.project, "tags": list(record.run.tags),
               "config": {i.key: json.loads(i.value_json) for i in record.run.config.update}}
print(json.dumps({"history": history, "summary": summary, "run": run}))
"""
    (path,) = directory.glob("wandb/offline-run-*/*.wandb")
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_wandb_offline_has_options_plan_metrics_and_the_time_to_train(quick, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    given = {"wandb_project": "mills", "wandb_tags": ("a", "b"), "wandb_run_name": "wheel", "histograms": True}
    result = train(quick(**QUICK, wandb=True, **given))
    found = wandb_run(result.directory)
    assert (found["run"]["name"], found["run"]["project"], found["run"]["tags"]) == ("wheel", "mills", ["a", "b"])
    assert found["run"]["config"]["options"]["num_epochs"] == 2
    assert found["run"]["config"]["plan"]["steps"]["total_steps"] == 8
    records = read_records(result.directory)
    losses = [row["train/loss"] for row in found["history"] if "train/loss" in row]
    assert losses == pytest.approx(list(losses_of(records).values()))
    raw = [record for record in records if isinstance(record, ValidationRecord) and record.weights == "raw"]
    name = "validation/raw/top1"
    assert [row[name] for row in found["history"] if name in row] == pytest.approx([record.top1 for record in raw])
    counted = {name for row in found["history"] for name, value in row.items() if "histogram" in str(value)}
    assert {name.partition("/")[0] for name in counted} == {"weights", "gradients"}
    (end,) = [record for record in records if isinstance(record, RunEnd)]
    assert found["summary"]["run/time_to_train"] == pytest.approx(end.time_to_train)
    (text,) = [record.text for record in records if isinstance(record, Note) and "wandb sync" in record.text]
    assert text.startswith(f"wandb: WANDB_MODE is offline; the run is kept offline in {result.directory}")


def test_without_a_login_the_run_is_kept_offline_and_says_so(quick, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    result = train(quick(**QUICK, wandb=True))
    assert result.outcome == "finished"
    notes = [record.text for record in read_records(result.directory) if isinstance(record, Note)]
    assert any("nobody is logged in" in text and "wandb sync" in text for text in notes)


def test_a_tracker_that_fails_is_told_once_and_left_alone():
    told = []

    class Broken:
        def scalars(self, *rows):
            raise OSError("no space left on device")

        def image(self, step, name, pixels):
            raise AssertionError

        def histograms(self, step, found):
            raise AssertionError

        def summary(self, values):
            raise AssertionError

        def close(self):
            raise AssertionError

    sink = TrackerSink("broken", Broken, lambda text, level: told.append((text, level)), Path("reports"))
    record = TrainRecord(step=1, epoch=1, loss=1, accuracy=0, learning_rate=1, elapsed_seconds=1)
    sink.write(record)
    sink.write(record)
    sink.close()
    assert told == [("broken failed (OSError: no space left on device); the run continues without it", "warning")]


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(quick, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for option in ("wandb", "tensorboard", "mlflow", "trackio"):
        with pytest.raises(ConfigError, match=rf"pip install 'headrace\[{option}\]'"):
            refuse_missing(quick(**{option: True}).config.logging)


def test_mlflow_is_told_every_number_and_a_resume_continues_its_run(quick, monkeypatch):
    """With a stand-in for the package, which is too large for the tests; the next test reads what the package wrote."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    class Client:
        def __init__(self, tracking_uri):
            calls.append(("open", (tracking_uri,), {}))

        def __getattr__(self, name):
            def called(*given, **named):
                calls.append((name, given, named))
                made = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
                return {"create_run": made, "create_experiment": "7"}.get(name)

            return called

    def entity(*given):
        return given

    package, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    vars(package)["MlflowClient"] = Client
    vars(entities).update(Metric=entity, Param=entity)
    package.__spec__ = importlib.util.spec_from_loader("mlflow", None)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")
    result = train(quick(**QUICK, mlflow=True))
    assert calls[0] == ("open", ((result.directory / "mlflow").resolve().as_uri(),), {})
    batches = [named for name, _, named in calls if name == "log_batch"]
    assert all(len(batch.get("params", ())) <= 100 for batch in batches)
    options = {key: value for batch in batches for key, value in batch.get("params", ())}
    assert options["num_epochs"] == "2"
    assert "momentum" in options, "what a mapping states is a column"
    told = {(key, step): value for batch in batches for key, value, _, step in batch.get("metrics", ())}
    for record in read_records(result.directory):
        if isinstance(record, CurvePoint):
            assert told["train/loss", record.step] == record.loss
        if isinstance(record, ValidationRecord):
            assert told[f"validation/{record.weights}/macro_f1", record.step] == record.metrics["macro_f1"]
    assert told["run/time_to_train", 8] > 0, "at the last step"
    assert ("set_tag", ("r1", "outcome", "finished"), {}) in calls
    assert calls[-1] == ("set_terminated", ("r1",), {})
    calls.clear()
    resume(result.directory, {"num_epochs": 3, "mlflow": True})
    assert "create_run" not in {name for name, _, _ in calls}
    assert calls[1] == ("set_terminated", ("r1", "RUNNING"), {})


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="MLflow is not installed")
def test_mlflow_files_have_the_numbers(quick, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")
    result = train(quick(**QUICK, mlflow=True))
    (place,) = (result.directory / "mlflow").glob("*/*/metrics")
    lines = (place / "train" / "loss").read_text().splitlines()  # of each: time, value, step
    losses = [
        (record.loss, record.step) for record in read_records(result.directory) if isinstance(record, TrainRecord)
    ]
    assert [(float(line.split()[1]), int(line.split()[2])) for line in lines] == losses
    assert (place.parent / "params" / "num_epochs").read_text() == "2"
    assert list((place.parent / "artifacts").glob("validation/raw/confusion_matrix/*.png"))
    assert not [r for r in read_records(result.directory) if isinstance(r, Note) and "failed" in r.text]


def test_trackio_is_told_every_number_and_a_resume_continues_its_run(quick, monkeypatch, capsys):
    """With a stand-in for the package, which is too large for the tests; the next test reads what the package wrote."""
    calls: list[tuple[str, dict[str, Any], Any]] = []

    class Run:
        name = "wheel"

        def log(self, values, step):
            calls.append(("log", values, step))

        def finish(self):
            print("* Run finished.")
            calls.append(("finish", {}, None))

    def init(**named):
        print("* Trackio project initialized")
        calls.append(("init", named, None))
        return Run()

    package = ModuleType("trackio")
    vars(package).update(
        init=init,
        Image=lambda pixels: pixels,
        Histogram=lambda np_histogram: np_histogram,
        utils=SimpleNamespace(TRACKIO_DIR="place"),
    )
    package.__spec__ = importlib.util.spec_from_loader("trackio", None)
    monkeypatch.setitem(sys.modules, "trackio", package)
    for name in ("TRACKIO_PROJECT", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    result = train(quick(**QUICK, trackio=True, histograms=True))
    assert "* " not in capsys.readouterr().out, "what it prints stays out of the progress line"
    kind, about, _ = calls[0]
    assert (kind, about["project"], about["name"], about["resume"]) == (
        "init",
        "headrace",
        result.directory.name,
        "never",
    )
    assert about["config"]["options"]["num_epochs"] == 2
    told = {(key, step): value for kind, values, step in calls if kind == "log" for key, value in values.items()}
    for record in read_records(result.directory):
        if isinstance(record, CurvePoint):
            assert told["train/loss", record.step] == record.loss
        if isinstance(record, ValidationRecord):
            assert told[f"validation/{record.weights}/macro_f1", record.step] == record.metrics["macro_f1"]
            assert told[f"validation/{record.weights}/confusion_matrix", record.step].shape[2] == 3
    assert told["run/time_to_train", 8] > 0, "at the last step"
    assert told["outcome", 8] == "finished"
    assert any(name.startswith("gradients/") for name, _ in told)
    assert calls[-1][0] == "finish"
    notes = [record.text for record in read_records(result.directory) if isinstance(record, Note)]
    assert any("trackio show --project headrace" in text for text in notes)
    calls.clear()
    resume(result.directory, {"num_epochs": 3, "trackio": True})
    assert (calls[0][1]["name"], calls[0][1]["resume"]) == ("wheel", "allow")


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="Trackio is not installed")
def test_trackio_files_have_the_numbers(tmp_path):
    """In a process of its own, as the package reads its directory when it is imported."""
    script = f"""
import headrace as hr
run = hr.Model("toy_model_bn", micro_batch_size=32, log_dir={str(tmp_path)!r}, trackio=True, histograms=True)
result = run.fit("digits", epochs=2, steps_per_epoch=4, progress="none")
run.fit("digits", epochs=3, steps_per_epoch=4, progress="none", resume=result.directory)
print("kept in", result.directory)
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "place"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment, timeout=200
    )
    (place,) = (line.removeprefix("kept in ") for line in done.stdout.splitlines() if line.startswith("kept in "))
    records = read_records(Path(place))
    losses = losses_of(records)
    with contextlib.closing(sqlite3.connect(tmp_path / "place" / "headrace.db")) as database:
        rows = database.execute("select step, metrics, run_name from metrics order by step").fetchall()
    found = {step: json.loads(values)["train/loss"] for step, values, _ in rows if "train/loss" in json.loads(values)}
    assert found == losses
    assert len({name for _, _, name in rows}) == 1, "the resumed run is the same one"
    assert not [record for record in records if isinstance(record, Note) and "failed" in record.text]
