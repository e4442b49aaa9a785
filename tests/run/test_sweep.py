"""`headrace sweep`: which runs there are, folds, going on after an interruption, means and the page."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import headrace
from headrace.cli.main import main
from headrace.core.errors import CheckpointError, ConfigError
from headrace.data.sets.folds import fold_of
from headrace.run.sweep import SWEEP_FILE, Repeated, Sweep, gpu_of, plan_runs, read_sweep, run_sweep, save_sweep

QUICK = ["--dataset", "digits", "--model", "cifar_resnet8", "--epochs", "2", "--weight-updates-per-epoch", "2"]
QUICK += ["--batch-size", "8", "--no-report", "--progress", "plain"]


def words(values) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def test_every_combination_is_a_run():
    runs = plan_runs({"lr": ["0.1", "0.2"], "model": ["a/b", "c"]}, words)
    names = ["1-lr-0.1-model-a_b", "2-lr-0.1-model-c", "3-lr-0.2-model-a_b", "4-lr-0.2-model-c"]
    assert [run.name for run in runs] == names
    assert runs[0].argv == ("--lr=0.1", "--model=a/b")
    assert runs[3].text == "lr 0.2, model c"
    with pytest.raises(ConfigError, match="1,001 runs"):
        plan_runs({"seed": [str(k) for k in range(1001)]}, words)


def test_folds_share_out_every_class_evenly():
    labels = np.repeat([0, 1, 2], [20, 7, 3])
    names = [f"{k}.png" for k in range(30)]
    folds = fold_of(names, labels, 4)
    assert sorted(np.bincount(folds)) == [7, 7, 8, 8]
    for label, size in enumerate((20, 7, 3)):
        counts = np.bincount(folds[labels == label], minlength=4)
        assert counts.sum() == size
        assert counts.max() - counts.min() <= 1
    back = np.random.default_rng(0).permutation(30)  # the order in which files are listed changes nothing
    assert np.array_equal(fold_of([names[k] for k in back], labels[back], 4), folds[back])


def test_mean_and_spread_are_those_of_numpy():
    found = (0.5, 0.75, 0.625)
    row = Repeated(values={}, accuracies=found)
    assert (row.mean, row.spread) == pytest.approx((np.mean(found), np.std(found, ddof=1)))
    assert Repeated(values={}, accuracies=(0.5,)).spread is None


def test_simultaneous_runs_get_gpus_in_turn():
    assert gpu_of(1, {}, 2) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert gpu_of(2, {}, 2) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert gpu_of(1, {"CUDA_VISIBLE_DEVICES": "3,5"}, 2) == {"CUDA_VISIBLE_DEVICES": "5"}
    assert gpu_of(1, {}, 0) == {}


def test_a_sweep_is_read_as_it_was_written(tmp_path: Path):
    sweep = Sweep(directory=tmp_path, runs=tuple(plan_runs({"seed": ["1", "2"]}, words)), started_in=tmp_path)
    save_sweep(sweep)
    assert read_sweep(tmp_path) == sweep
    save_sweep(sweep)
    other = Sweep(directory=tmp_path, runs=sweep.runs[:1], started_in=tmp_path)
    with pytest.raises(ConfigError, match="holds another sweep"):
        save_sweep(other)
    saved = json.loads((tmp_path / SWEEP_FILE).read_text())
    saved["runs"][0]["name"] = "../elsewhere"
    for text in (json.dumps(saved), "{}", "[]", "nothing"):
        (tmp_path / SWEEP_FILE).write_text(text)
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_sweep(tmp_path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--lr 0.1", "Nothing is swept"),
        ("--lr 0.1,x", "--lr is 'x'"),
        ("--lr 0.1,,0.2", "has an empty value"),
        ("--lr 0.1,0.1", "has a value twice"),
        ("--folds 1", "--folds is 1."),
        ("--folds 3 --dataset digits", "--folds with the dataset digits."),
        ("--seed 1,2 --jobs 0", "--jobs is 0."),
        ("--seed 1,2 --resume auto", "--resume is given."),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys, line, problem):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *line.split()]) == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path):
    runs = plan_runs({"epochs": ["x", "y"]}, words)
    told: list[str] = []
    code = run_sweep(Sweep(directory=tmp_path, runs=tuple(runs), jobs=2, started_in=Path.cwd()), told.append)
    assert code == 2
    assert sum("failed with exit code 2" in line for line in told) == 2
    assert "--epochs is 'x'" in (tmp_path / f"{runs[0].name}.log").read_text()


def test_a_sweep_goes_on_after_ctrl_c_and_ends_with_a_page(tmp_path: Path):
    command = [sys.executable, "-m", "headrace"]
    environ = {**os.environ, "PYTHONPATH": str(Path(headrace.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    with (tmp_path / "out").open("wb") as out:
        line = [*command, "sweep", *QUICK, "--seed", "1,2", "--output", "sweep"]
        process = subprocess.Popen(line, cwd=tmp_path, env=environ, stdout=out, stderr=out)
    while "run directory" not in (tmp_path / "out").read_text() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 75, (tmp_path / "out").read_text()
    assert "headrace resume sweep" in (tmp_path / "out").read_text()
    line = [*command, "resume", str(tmp_path / "sweep")]
    ended = subprocess.run(line, cwd="/", env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "over 2 runs" in ended.stdout
    assert not list(tmp_path.glob("runs*"))
    page = (tmp_path / "sweep" / "comparison.html").read_text()
    assert "Means over seeds and folds" in page
    assert "2 runs compared" in page
    again = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert "2 of 2 runs are done already" in again.stdout


def test_folds_of_a_folder(tmp_path: Path, monkeypatch, capsys):
    for label in ("ants", "bees"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for k in range(6):
            Image.new("RGB", (8, 8), (k, k, k)).save(tmp_path / "photos" / label / f"{k}.png")
    started: list[Sweep] = []
    monkeypatch.setattr("headrace.run.sweep.run_sweep", lambda sweep, show: started.append(sweep) or 0)
    monkeypatch.chdir(tmp_path)
    line = ["sweep", "photos", "--folds", "3", "--lr", "0.1,0.2", "--output", "sweep"]
    assert main(line) == 0
    assert "folds: 12 images in 3 folds" in capsys.readouterr().out
    (sweep,) = started
    assert [run.values for run in sweep.runs[:2]] == [
        {"learning_rate": "0.1", "fold": "1"},
        {"learning_rate": "0.1", "fold": "2"},
    ]
    assert sweep.runs[1].argv[-2:] == ("--labels", str(tmp_path / "sweep" / "fold_2.csv"))
    validated = []
    for fold in range(3):
        rows = list(csv.DictReader((tmp_path / "sweep" / f"fold_{fold + 1}.csv").read_text().splitlines()))
        assert len(rows) == 12
        chosen = [row for row in rows if row["split"] == "val"]
        assert sorted(row["label"] for row in chosen) == ["ants", "ants", "bees", "bees"]
        validated += [row["path"] for row in chosen]
    assert len(set(validated)) == 12
    assert main([*line[:-1], "other", "--folds", "7"]) == 2
    assert "the largest class has 6 images" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
