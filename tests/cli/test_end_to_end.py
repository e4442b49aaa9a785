"""The whole product in real processes: refusals in words that leave nothing behind, and every command at work."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from tests.fork_server import run

SRC = str(Path(headrace.__file__).parent.parent)
CONTROL = re.compile(r"[^\n\x20-\x7e\u00a0-\uffff]")
TINY = ("--model-name", "toy_model_bn", "--num-epochs", "2", "--ema-decay", "0.9", "--run-name", "tiny")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("user")


def hr(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a directory, with its output in pipes."""
    environ = {key: value for key, value in os.environ.items() if key not in ("DATASETS_DIR", "DATA_DIR")}
    environ["PYTHONPATH"] = SRC
    command = [sys.executable, "-m", "headrace", *words]
    done = run(command, cwd=place, env=environ)
    assert not CONTROL.search(done.stdout + done.stderr), "control characters in a pipe"
    assert "Traceback" not in done.stderr, done.stderr
    return done


REFUSED = {
    "unknown option": (
        2,
        "--micro-batchsize 3",
        ["no option --micro-batchsize", "remedy: Did you mean --micro-batch-size?"],
    ),
    "unknown model": (2, "--model-name cifar_resnet5", ["'cifar_resnet5'", "remedy: Did you mean cifar_resnet"]),
    "missing data": (
        2,
        "--dataset cifar10",
        ["data_batch_1.bin", "test_batch", "rule: Searched", "Fetch http", "--dataset-path"],
    ),
    "wrong type in YAML": (2, "--config-path mine.yml --config mine", ["mine.yml:3: num_epochs is 'three'", "rule: "]),
    "unknown key in YAML": (2, "--config-path mine.yml --config other", ["mine.yml:5: ", "Did you mean num_epochs?"]),
    "too many images": (2, "--batch-size 3200", ["3,200 samples, the training set has 1,437", "rule: ", "remedy: "]),
    "no such device": (3, "--platform cuda", ["No device of platform cuda", "rule: ", "remedy: ", "--platform cpu"]),
    "impossible together": (
        2,
        "--no-accelerator-side-preprocess --eight-bit-transfer",
        ["eight_bit", "remedy: "],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_why_and_leaves_nothing_behind(tmp_path: Path, case: str) -> None:
    code, words, parts = REFUSED[case]
    (tmp_path / "mine.yml").write_text("mine:\n  dataset: digits\n  num_epochs: three\nother:\n  num_epocs: 3\n")
    done = hr(tmp_path, "train", *words.split())
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("headrace: ")
    for part in parts:
        assert part in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.yml", "cache"}


def test_train_then_validate(place: Path) -> None:
    done = hr(place, "train", *TINY)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(r"^epoch 2\.00/2  step 88/88  loss \d\.\d{4}  top-1 \d+\.\d\d %  lr ", done.stdout, re.MULTILINE)
    shown = re.findall(r"^validation(?: \((\w+)\))?  epoch 2.00  top-1 (.*? %) ", done.stdout, re.M)
    accuracy = {weights or "raw": share for weights, share in shown}
    assert set(accuracy) == {"raw", "ema"}
    table = dict(re.findall(r"^(\w+) +(.*)$", done.stdout.partition("\n\n")[2], re.M))
    assert list(table) == ["accuracy", "checkpoint", "time", "saving", "verdict", "report", "plot", "directory", "next"]
    assert table["directory"] == str(Path("runs", "tiny"))
    assert (place / table["plot"]).is_file()
    assert (place / table["checkpoint"] / "manifest.json").is_file()
    assert done.stdout.endswith(
        "next        headrace predict runs/tiny IMAGES\n            headrace export runs/tiny --format onnx\n"
    )
    assert done.stdout.count(table["verdict"]) == 1
    assert re.fullmatch(r"2 checkpoints written in [\d.]+ m?s; training waited [\d.]+ [mu]?s for it", table["saving"])
    end = json.loads((place / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()[-1])
    # The start of the process was no part of the run's time. Here JAX is there already (tests/fork_server.py).
    assert 0.01 < end["start"]["process"] < end["seconds"]["start"] + end["seconds"]["compile"] < end["wall_seconds"]

    damaged = place / "runs" / "tiny" / "checkpoints" / "step_00000044" / "state.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    done = hr(place, "validate", "runs/tiny", "--validation-micro-batch-size", "50")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"warning: skipped: .*step_00000044 .* truncated: .*\n", done.stderr)
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("never recognized: ", "verdict: "))]
    heading, *rows, best, reports, worst, confused = lines
    assert worst.startswith("worst classes (recall): ")
    assert confused.startswith("most confused: ")
    assert heading.split() == ["step", "epoch", "weights", "top-1", "top-5", "loss", "balanced", "images", "seconds"]
    cells = [row.split() for row in rows]
    assert [(row[:3], f"{row[3]} %", row[10]) for row in cells] == [
        (["88", "2.00", weights], accuracy[weights], "360") for weights in ("raw", "ema")
    ]
    assert len({len(row.removesuffix("  best so far")) for row in (heading, *rows)}) == 1, "the columns line up"
    assert best.startswith("best: step_00000088 (")
    assert reports.endswith(str(Path("runs", "tiny", "reports", "validate")))
    report = json.loads((place / "runs" / "tiny" / "reports" / "validate" / "step_00000088.json").read_text())
    assert sum(map(sum, report["raw"]["confusion_matrix"])) == 360
    assert report["options"] == {"validation_micro_batch_size": "50"}

    done = hr(place, "validate", "runs/tiny", "--json", "--last")
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert told["step"] == 88
    for weights, share in accuracy.items():
        assert f"{100 * told[weights]['top1']:.2f} %" == share
        assert told[weights]["num_samples"] == 360


def test_compile_only(place: Path) -> None:
    done = hr(place, "train", *TINY, "--run-name", "compiled", "--compile-only")
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^training compiled in .* \(compilation cache: .*\); one device holds \d", done.stdout, re.MULTILINE
    )
    assert "\ncompiled at epoch 0.00, step 0" in done.stdout
    assert "\nepoch " not in done.stdout


def test_the_commands_on_paper(place: Path) -> None:
    models = hr(place, "models").stdout
    assert re.search(r"^cifar_resnet8 +75,290 ", models, re.MULTILINE)
    assert re.search(r"^resnet50 +25,557,032 ", models, re.MULTILINE)
    assert hr(place, "configs").stdout.startswith("default ")
    assert re.search(
        r"^ *dataset: +digits +# recipe default\.yml:\d+$", hr(place, "configs", "show", "default").stdout, re.M
    )
    plan = json.loads(hr(place, "plan", "--json").stdout)
    assert (plan["steps"]["updates_per_epoch"], plan["steps"]["dropped_per_epoch"]) == (1437 // 32, 1437 % 32)
    data = hr(place, "data", "verify")
    assert data.returncode == 0
    assert "1,437" in data.stdout
    assert "360" in data.stdout


def test_bench_measures(place: Path) -> None:
    words = "--dataset synthetic --image-size 32 --num-classes 10 --num-samples 512 --model-name toy_model_bn --json"
    done = hr(place, "bench", *words.split(), "--steps-per-call", "4", "--num-calls", "3")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["num_calls"], told["steps_per_call"], told["global_batch_size"]) == (3, 4, 16)
    assert 0 < told["lowest"] <= told["images_per_second"] <= told["highest"]
    assert told["images_per_second"] == pytest.approx(16e3 / told["step_milliseconds"], rel=1e-6)
    assert 0 < told["final_loss"] < 100
