"""A model that is useless is called so: uneven classes at the start, one answer and a diverged loss at the end."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.cli.main import main
from headrace.telemetry.records import Note, RunEnd, RunStart, ValidationRecord, read_records
from tests.data.image_files import write_classes

TINY = [
    "--config",
    "none",
    "--model",
    "toy_model_bn",
    "--image-size",
    "32",
    "--micro-batch-size",
    "5",
    "--lr-schedule",
    "const",
    "--lr",
    "0",
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with many ants and few bees, and validation images."""
    path = tmp_path_factory.mktemp("photos")
    write_classes(path / "train", {"ants": 40, "bees": 4})
    write_classes(path / "val", {"ants": 10, "bees": 1}, first_seed=100)
    return path


def records(run: Path, kind: Any) -> list[Any]:
    return [record for record in read_records(run) if isinstance(record, kind)]


def biased(photos: Path, out: Path, *words: str) -> list[str]:
    """Return the command of a run whose rate is 0 and whose weights favour no class by much."""
    return ["train", *TINY, "--dataset-path", str(photos), "--output", str(out), "--progress", "plain", *words]


def test_uneven_classes_are_said_before_a_run_with_the_remedy(photos, tmp_path, capsys):
    assert main(biased(photos, tmp_path / "run")) == 0
    out = capsys.readouterr().out
    (said,) = [line for line in out.splitlines() if "classes are uneven" in line]
    assert said.startswith("warning: ")
    for part in ("ants has 40 training images, bees 4", "90.91 %", "--class-weights balanced or --balanced-sampling"):
        assert part in said
    (start,) = records(tmp_path / "run", RunStart)
    assert (start.num_train, start.num_validation, start.num_classes, start.class_ratio) == (44, 11, 2, 10)
    # Beside top-1, in the lines of validations and in the table at the end.
    assert sum("balanced accuracy" in line and "macro F1" in line for line in out.splitlines()) >= 3
    assert main(["plan", *TINY, "--dataset-path", str(photos)]) == 0
    assert "classes are uneven: ants" in capsys.readouterr().out.replace("\n", " ")
    main(["data", "verify", "--dataset-path", str(photos)])
    assert "note: The classes are uneven: ants has 40 training images, bees 4" in capsys.readouterr().out


@pytest.mark.parametrize("remedy", ["--class-weights=balanced", "--balanced-sampling"])
def test_nothing_is_said_to_who_evens_them_out(photos, capsys, remedy):
    assert main(["plan", *TINY, "--dataset-path", str(photos), remedy]) == 0
    assert "uneven" not in capsys.readouterr().out


def test_evening_out_twice_is_refused_and_warned_of_where_a_file_says_so(photos, tmp_path, capsys):
    words = ["--class-weights", "balanced", "--balanced-sampling"]
    assert main(["plan", *TINY, "--dataset-path", str(photos), *words]) == 2
    assert "A rare class would count more twice" in capsys.readouterr().err
    (tmp_path / "both.yml").write_text("both:\n  class_weights: balanced\n  balanced_sampling: true\n")
    given = ["--config-path", str(tmp_path / "both.yml"), "--config", "both", *TINY[2:]]
    assert main(["plan", *given, "--dataset-path", str(photos)]) == 0
    found = capsys.readouterr()
    assert "A rare class would count more twice" in (found.out + found.err).replace("\n", " ")


def constant_run(directory: Path, **options: Any) -> hr.RunResult:
    """Fit arrays whose images are all equal: whatever is learned, one class is the answer to all."""
    images = np.full((55, 32, 32, 3), 90, np.uint8)
    labels = np.array([0] * 40 + [1] * 4 + [0] * 10 + [1])
    model = hr.Model("toy_model_bn", num_classes=2, input_shape=(32, 32, 3))
    given = {"epochs": 2, "batch_size": 11, "normalization": "zero-one", "output": directory} | options
    return model.fit(images[:44], labels[:44], validation_data=(images[44:], labels[44:]), **given)


def test_one_answer_for_all_is_the_verdict_also_from_python(tmp_path, capsys):
    result = constant_run(tmp_path / "run", progress="plain")
    out = capsys.readouterr().out
    (end,) = records(tmp_path / "run", RunEnd)
    answer, share = ("class 0", 10 / 11) if (result.validation["raw"].top1 or 0) > 0.5 else ("class 1", 1 / 11)
    assert end.model_verdict.startswith(f"constant: {answer} is the answer to all 11 validation images")
    assert result.verdict.startswith(end.model_verdict + "\n")
    assert f"warning: {end.model_verdict}" in out
    assert "warning: never recognized: class" in out
    assert [note.text for note in records(tmp_path / "run", Note) if "classes are uneven" in note.text]
    # The numbers, of the result and of the records.
    assert result.best is not None
    assert result.best.metrics["balanced_accuracy"] == 0.5
    assert result.best.metrics["macro_f1"] == pytest.approx(share / (1 + share))  # F1 of one class, halved
    assert result.metrics["val_balanced_accuracy"].tolist() == [0.5, 0.5]
    assert end.best["balanced_accuracy"] == 0.5
    # Equal accuracies: the checkpoint with the lower loss is the best.
    lowest = min(records(tmp_path / "run", ValidationRecord), key=lambda record: record.loss)
    assert end.best_checkpoint == lowest.checkpoint
    (best,) = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())["best"]
    assert (best["name"], best["loss"]) == (lowest.checkpoint, lowest.loss)
    assert "constant: " in (tmp_path / "run" / "report.html").read_text()
    capsys.readouterr()
    constant_run(tmp_path / "quiet", progress="none")
    assert capsys.readouterr().out == ""


def test_validate_says_so_too(photos, tmp_path, capsys):
    assert main(biased(photos, tmp_path / "run", "--epochs", "1")) == 0
    (end,) = records(tmp_path / "run", RunEnd)
    missed = end.model_verdict.startswith("constant")
    capsys.readouterr()
    assert main(["validate", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert ("verdict: constant: " in out) == missed
    assert ("never recognized: " in out) == missed


def test_a_loss_that_diverged_is_the_verdict(tmp_path, capsys):
    words = "--config none --model toy_model_bn --dataset digits --micro-batch-size 4 --weight-updates-per-epoch 3"
    rate = ["--lr-schedule", "const", "--lr", "1000", "--epochs", "1", "--progress", "plain"]
    assert main(["train", *words.split(), *rate, "--output", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    (end,) = records(tmp_path / "run", RunEnd)
    assert end.model_verdict.startswith("diverged: the training loss is ")
    table = out.splitlines()
    assert next(line for line in table if line.startswith("verdict")).split(maxsplit=1)[1].startswith("diverged: ")


def test_monitor_decides_what_is_kept_and_what_stops_and_resume_keeps_it(photos, tmp_path, capsys):
    words = ["--monitor", "loss", "--epochs", "4", "--early-stopping", "1"]
    # Without a rate the loss stays, but for the running statistics: it never improves once those are there.
    assert main(biased(photos, tmp_path / "run", *words, "--bn-momentum", "1")) == 0
    (end,) = records(tmp_path / "run", RunEnd)
    assert end.outcome == "stopped"
    assert end.reason.startswith("early stopping: no better loss than ")
    assert main(["resume", str(tmp_path / "run"), "--early-stopping", "9"]) == 0
    again = records(tmp_path / "run", RunStart)[-1]
    assert again.monitor == "loss"
    lowest = min(record.loss for record in records(tmp_path / "run", ValidationRecord))
    (best,) = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())["best"]
    assert best["score"] == -lowest
    capsys.readouterr()
    target = ["--monitor", "balanced", "--target-accuracy", "0.4", "--epochs", "3"]
    assert main(biased(photos, tmp_path / "target", *target)) == 0
    (end,) = records(tmp_path / "target", RunEnd)
    assert end.reason.startswith("target accuracy: balanced accuracy ")
    assert end.time_to_target is not None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--monitor loss --target-accuracy 0.9", "with monitor loss"),
        ("--monitor f1 --no-validation", "with validation off"),
        ("--monitor top5", "has 2 classes"),
    ],
)
def test_a_monitor_that_cannot_be_meant_is_refused(photos, tmp_path, capsys, words, problem):
    assert main(biased(photos, tmp_path / "run", *words.split())) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_callbacks_from_code_refuse_such_monitors_too():
    with pytest.raises(hr.ConfigError, match="monitor 'loss'"):
        hr.TargetAccuracy(0.9, monitor="loss")
    with pytest.raises(hr.ConfigError, match="no metric 'val_loss'"):
        hr.EarlyStopping(3, monitor="val_loss")
