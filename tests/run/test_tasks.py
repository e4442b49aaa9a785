"""Several labels of an image, and numbers: from a list of images or arrays to what people are told, against NumPy."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace import Model, read_digits
from headrace.cli.main import main
from headrace.core.errors import ConfigError, DataError
from headrace.report.run_summary import read_summary
from headrace.run.fit import resume, train
from headrace.telemetry.records import RunStart, TrainRecord, ValidationRecord, read_records
from headrace.telemetry.validation_report import report_file

from .conftest import assert_same_bits, final_state

OPTIONS: dict[str, Any] = {
    "micro_batch_size": 16,
    "learning_rate": 0.02,
    "bn_momentum": 0.5,
    "progress": "none",
    "report": False,
}
COUNT = 96


def digits(count: int = COUNT, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    part = read_digits()["train"]
    return part.images[start : start + count], part.labels[start : start + count]


def tags(labels: np.ndarray) -> np.ndarray:
    """Return whether a digit is odd, whether it is above four, and whether it is a multiple of three."""
    return np.stack([labels % 2 == 1, labels > 4, labels % 3 == 0], 1).astype(np.float64)


def numbers(images: np.ndarray) -> np.ndarray:
    """Return the ink of each image, and how far down it is on average, far from a mean of 0 and a deviation of 1."""
    ink = images.astype(np.float64).sum((1, 2, 3))
    down = (images.sum((2, 3)) * np.arange(images.shape[1])).sum(1) / ink
    return np.stack([ink, 1000 + down], 1)


def mean_ap(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean of precision at each positive image, over the labels: no two scores may be equal."""
    found = []
    for k in range(labels.shape[1]):
        ranked = labels[np.argsort(-scores[:, k]), k]
        precision = np.cumsum(ranked) / np.arange(1, len(ranked) + 1)
        found.append(precision[ranked > 0].mean())
    return float(np.mean(found))


@pytest.fixture(scope="module")
def multi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any, tuple[np.ndarray, np.ndarray]]:
    images, labels = digits()
    held = digits(40, COUNT)
    model = Model("toy_model_bn", task="multilabel", class_names=["odd", "high", "third"], num_classes=3)
    run = model.fit(
        images,
        tags(labels),
        validation_data=(held[0], tags(held[1]).astype(bool)),
        epochs=2,
        log_dir=str(tmp_path_factory.mktemp("runs")),
        run_name="multi",
        ema_decay=0.0,
        **OPTIONS,
    )
    return model, run, (held[0], tags(held[1]))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any, tuple[np.ndarray, np.ndarray]]:
    images, _ = digits()
    held, _ = digits(40, COUNT)
    model = Model("toy_model_bn", task="regression", class_names=["ink", "down"], num_classes=2)
    run = model.fit(
        images,
        numbers(images),
        validation_data=(held, numbers(held)),
        epochs=2,
        log_dir=str(tmp_path_factory.mktemp("runs")),
        run_name="numbers",
        **OPTIONS,
    )
    return model, run, (held, numbers(held))


def test_several_labels_are_measured_as_by_hand(multi):
    model, run, (images, labels) = multi
    logits = model.logits(images).astype(np.float64)
    report = model.evaluate(images, labels)
    softplus = np.log1p(np.exp(-np.abs(logits))) + np.maximum(logits, 0)
    assert report["loss"] == pytest.approx(float((softplus - labels * logits).mean()), rel=1e-5)
    assert report["metrics"]["map"] == pytest.approx(mean_ap(logits, labels), abs=1e-9)
    answered = logits > 0
    assert report["metrics"]["label_accuracy"] == pytest.approx(float((answered == labels).mean()), abs=1e-6)
    both = answered.sum(0) + labels.sum(0)
    assert report["metrics"]["macro_f1"] == pytest.approx(float((2 * (answered * labels).sum(0) / both).mean()))
    assert report["exact_match"] == pytest.approx(float((answered == labels).all(1).mean()))
    row = report["classes"][1]
    assert (row["name"], row["num_samples"]) == ("high", int(labels[:, 1].sum()))
    shares = 1 / (1 + np.exp(-logits[:, 1]))
    f1 = [
        2 * (labels[:, 1] * (shares >= t)).sum() / ((shares >= t).sum() + labels[:, 1].sum()) for t in shares.tolist()
    ]
    at = shares >= row["threshold"]
    assert 2 * (at * labels[:, 1]).sum() / (at.sum() + labels[:, 1].sum()) == pytest.approx(max(f1))
    assert row["f1_at_threshold"] == pytest.approx(max(f1))
    last = run.validation["raw"]
    assert last.top1 is None
    assert last.metrics["map"] == pytest.approx(report["metrics"]["map"])
    start = next(record for record in run.records if isinstance(record, RunStart))
    assert (start.task, start.monitored.name, start.headline.title) == ("multilabel", "map", "mAP")


def test_several_labels_are_predicted_one_by_one(multi):
    model, _, (images, _) = multi
    found = model.predict(images[:5])
    np.testing.assert_allclose(found.probabilities, 1 / (1 + np.exp(-model.logits(images[:5]))), rtol=1e-5)
    np.testing.assert_array_equal(found.labels, found.probabilities > 0.5)
    assert found.names[0] == tuple(np.array(["odd", "high", "third"])[found.labels[0]])
    assert list(found[0].probabilities) == sorted(found[0].probabilities, reverse=True)


def test_numbers_are_learned_on_their_scale_and_told_in_their_units(measured):
    model, run, (images, targets) = measured
    mean, std = numbers(digits()[0]).mean(0), numbers(digits()[0]).std(0)
    np.testing.assert_allclose(model.config.data.target_mean, mean, rtol=1e-12)
    np.testing.assert_allclose(model.config.data.target_std, std, rtol=1e-12)
    outputs = model.logits(images).astype(np.float64)
    answers, wanted = model.predict(images).values, mean + std * outputs
    np.testing.assert_allclose(answers, wanted, rtol=1e-6)
    report = model.evaluate(images, targets)
    assert report["loss"] == pytest.approx(float(np.square(outputs - (targets - mean) / std).mean()), rel=1e-4)
    error = wanted - targets
    assert report["metrics"]["mae"] == pytest.approx(float(np.abs(error).mean()), rel=1e-4)
    assert report["metrics"]["rmse"] == pytest.approx(float(np.sqrt(np.square(error).mean(0)).mean()), rel=1e-4)
    r2 = 1 - np.square(error).sum(0) / np.square(targets - targets.mean(0)).sum(0)
    assert report["metrics"]["r2"] == pytest.approx(float(r2.mean()), rel=1e-3, abs=1e-4)
    assert [row["r2"] for row in report["targets"]] == pytest.approx(list(r2), rel=1e-3, abs=1e-4)
    np.testing.assert_allclose([point[0] for point in report["targets"][0]["points"]], targets[:, 0], rtol=1e-5)
    trained = [record for record in run.records if isinstance(record, TrainRecord)]
    assert trained[-1].accuracy is None
    assert trained[-1].metrics["mae"] > 0
    with pytest.raises(ConfigError, match="no labels"):
        _ = model.predict(images).labels


def test_a_model_that_is_loaded_answers_the_same(measured, multi):
    for model, run, (images, labels) in (measured, multi):
        again = Model.load(run.directory)
        np.testing.assert_array_equal(again.predict(images).values, model.predict(images).values)
        assert again.evaluate(images, labels)["metrics"] == pytest.approx(model.evaluate(images, labels)["metrics"])
        saved = model.save(run.directory.parent / f"{run.directory.name}_saved")
        np.testing.assert_array_equal(Model.load(saved).predict(images).values, model.predict(images).values)


def write_list(folder: Path, header: list[str], rows: list[tuple[str, ...]], images: np.ndarray) -> Path:
    (folder / "images").mkdir(exist_ok=True)
    for number, image in enumerate(images):
        Image.fromarray(image[..., 0]).save(folder / f"images/{number}.png")
    file = folder / "list.csv"
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([header, *((f"images/{number}.png", *row) for number, row in enumerate(rows))])
    return file


def command(folder: Path, *more: str) -> list[str]:
    return [
        *("train", "--config", "none", "--labels", str(folder / "list.csv"), "--model", "toy_model_bn"),
        *("--num-channels", "1", "--image-size", "32", "--batch-size", "16", "--lr", "0.02", "--epochs", "2"),
        *("--progress", "none", "--no-report", "--log-dir", str(folder), "--run-name", "run", *more),
    ]


def report_of(run: Path) -> dict[str, Any]:
    """Return the report of the best validation, whose weights are used."""
    best = read_summary(run).best
    assert best is not None
    return json.loads(report_file(run, best.step).read_text())[best.weights]


def test_a_list_of_images_with_numbers(tmp_path, capsys):
    images, labels = digits(64)
    ink = [(f"{value / 1000:.4f}", str(label)) for value, label in zip(numbers(images)[:, 0], labels, strict=True)]
    write_list(tmp_path, ["file", "ink", "digit"], ink, images)
    assert main(command(tmp_path, "--task", "regression")) == 0
    run = tmp_path / "run"
    saved = json.loads((run / "config.json").read_text())["values"]
    held = report_of(run)
    assert saved["loss"] == "mse"
    assert saved["monitor"] == "r2"
    assert [row["name"] for row in held["targets"]] == ["ink", "digit"]
    assert len(saved["target_std"]) == 2
    capsys.readouterr()
    some = [str(tmp_path / f"images/{number}.png") for number in range(3)]
    assert main(["predict", str(run), *some, "--format", "csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    wanted = Model.load(run).predict(some).values
    np.testing.assert_allclose([[float(row["ink"]), float(row["digit"])] for row in rows], wanted, rtol=1e-6)
    assert main(["validate", str(run), "--best", "--json"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["raw"]["r2"] == pytest.approx(held["metrics"]["r2"], abs=1e-5)
    assert main(["explain", str(run), some[0], "--class", "digit", "-o", str(tmp_path / "why.png")]) == 0
    assert main(["data", "verify", "--labels", str(tmp_path / "list.csv"), "--task", "regression"]) == 0
    assert main(["report", str(run), "--images"]) == 0
    page = (run / "report.html").read_text()
    assert "ink: answer by target" in page
    assert page.count("<circle") >= 2 * held["num_samples"]
    runs = [record for record in read_records(run) if isinstance(record, ValidationRecord)]
    assert held["metrics"]["mae"] in [record.metrics["mae"] for record in runs]


def test_a_list_of_images_with_several_labels(tmp_path, capsys):
    images, labels = digits(64)
    names = [[name for name, has in zip(("odd", "high", "third"), row, strict=True) if has] for row in tags(labels)]
    write_list(tmp_path, ["path", "tags"], [("; ".join(each),) for each in names], images)
    assert main(command(tmp_path, "--task", "multilabel", "--mixup-alpha", "0.2")) == 0
    run = tmp_path / "run"
    report = report_of(run)
    assert [row["name"] for row in report["classes"]] == ["high", "odd", "third"]
    capsys.readouterr()
    some = [str(tmp_path / f"images/{number}.png") for number in range(4)]
    assert main(["predict", str(run), *some, "--format", "json", "--threshold", "tuned"]) == 0
    tuned = {row["name"]: 0.5 if row["threshold"] is None else row["threshold"] for row in report["classes"]}
    for row in json.loads(capsys.readouterr().out):
        assert row["labels"] == [name for name, share in row["probabilities"].items() if share >= tuned[name]]
    assert main(["predict", str(run), *some, "--threshold", "1.5"]) != 0
    assert "--threshold is 1.5" in capsys.readouterr().err


def test_columns_of_0_and_1_are_labels(tmp_path):
    images, labels = digits(32)
    rows = [tuple(str(int(each)) for each in row) for row in tags(labels)]
    write_list(tmp_path, ["path", "odd", "high", "third"], rows, images)
    chosen = command(tmp_path, "--task", "multilabel", "--label-column", "third,odd")
    assert main(chosen) == 0
    config = json.loads((tmp_path / "run/config.json").read_text())["values"]
    assert config["loss"] == "bce"
    report = report_of(tmp_path / "run")
    assert [row["name"] for row in report["classes"]] == ["third", "odd"]


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_an_export_tells_the_same(tmp_path, task, multi, measured):
    runtime = pytest.importorskip("onnxruntime")
    model, _, (images, _) = multi if task == "multilabel" else measured
    file = model.export(tmp_path / "model.onnx")
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    name = "probabilities" if task == "multilabel" else "values"
    (found,) = session.run([name], {"images": images[:3]})
    np.testing.assert_allclose(found, model.predict(images[:3]).values, rtol=1e-4, atol=1e-4)
    described = json.loads(file.with_name("model.onnx.json").read_text())
    assert described["task"] == task


def test_a_file_of_arrays_and_a_resume_to_the_same_bits(tmp_path, quick):
    images, _ = digits(64)
    file = tmp_path / "numbers.npz"
    np.savez(file, train_images=images[:48], train_labels=numbers(images)[:48, 0], val_images=images[48:],
             val_labels=numbers(images)[48:, 0], class_names=["ink"])  # fmt: skip
    options = {"dataset": "npz", "dataset_path": str(file), "task": "regression", "num_channels": 1, "loss": "huber"}
    options |= {"weight_updates_per_epoch": 3, "image_size": 32}
    whole = train(quick(**options, run_name="whole", num_epochs=2))
    part = train(quick(**options, run_name="part", num_epochs=1))
    again = resume(part.directory, {"num_epochs": 2})
    assert_same_bits(final_state(again.directory), final_state(whole.directory))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"task": "regression", "mixup_alpha": 0.2}, "mixup_alpha 0.2 .* with task regression .* not known"),
        ({"task": "regression", "label_smoothing": 0.1}, "label_smoothing 0.1"),
        ({"task": "multilabel", "class_weights": "balanced"}, "class_weights balanced .* with task multilabel"),
        ({"task": "multilabel", "balanced_sampling": True}, "balanced_sampling"),
        ({"task": "regression", "loss": "bce"}, "loss bce .* regression: mse, mae, huber"),
        ({"task": "multilabel", "monitor": "r2"}, "monitor r2"),
        ({"task": "regression", "target_accuracy": 0.9}, "target_accuracy"),
        ({"target_mean": [1.0]}, "target_mean 1 .* with task classification"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, what):
    with pytest.raises(ConfigError, match=what):
        Model("toy_model_bn", **options)


def test_labels_that_fit_no_task_are_refused(tmp_path, capsys):
    images, labels = digits(8)
    model = Model("toy_model_bn", task="multilabel", num_classes=3)
    with pytest.raises(DataError, match=re.escape("an array [images, labels] of 0 and 1")):
        model.fit(images, tags(labels) * 2)
    with pytest.raises(DataError, match="3 outputs"):
        model.fit(images, tags(labels)[:, :2])
    with pytest.raises(DataError, match="finite"):
        Model("toy_model_bn", task="regression").fit(images, np.full(8, np.nan))
    with pytest.raises(DataError, match="same value in every training image"):
        Model("toy_model_bn", task="regression").fit(images, np.ones(8))
    with pytest.raises(DataError, match="task='regression'"):
        Model("toy_model_bn").fit(images, labels + 0.5)
    with pytest.raises(ConfigError, match="task is regression, and the dataset digits has classes"):
        Model("toy_model_bn", task="regression").fit("digits")
    write_list(tmp_path, ["path", "ink"], [("1.5",), ("many",)] * 4, images)
    assert main(command(tmp_path, "--task", "regression")) != 0
    assert "line 3: ink is 'many'" in capsys.readouterr().err
    write_list(tmp_path, ["path", "label"], [("0.5",)] * 8, images)
    assert main(command(tmp_path)) != 0
    assert "Add --task regression" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_features_are_what_the_last_layer_scores(multi, tmp_path, capsys):
    model, run, (images, _) = multi
    found = model.features(images[:5])
    (head,) = [name for name, tree in model.params.items() if "kernel" in tree and tree["kernel"].ndim == 2][-1:]
    weights = model.params[head]
    np.testing.assert_allclose(
        found @ weights["kernel"] + weights["bias"], model.logits(images[:5]), rtol=1e-4, atol=1e-5
    )
    for number, image in enumerate(images[:3]):
        Image.fromarray(image[..., 0]).save(tmp_path / f"{number}.png")
    files = [str(tmp_path / f"{number}.png") for number in range(3)]
    assert main(["predict", str(run.directory), *files, "--features", "--output", str(tmp_path / "f.npz")]) == 0
    with np.load(tmp_path / "f.npz") as written:
        np.testing.assert_allclose(written["features"], model.features(files), rtol=1e-6)
        assert written["files"].tolist() == files
    capsys.readouterr()
    assert main(["predict", str(run.directory), *files, "--features"]) != 0
    assert "Add --output features.npz" in capsys.readouterr().err
