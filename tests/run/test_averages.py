"""Averages of checkpoints against NumPy in float64, and what cannot be averaged."""

import json
import shutil
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.checkpoint.store import checkpoint_name, save
from headrace.cli.main import main, run_script
from headrace.core.errors import CheckpointError, ConfigError
from headrace.run.averages import average, choose
from tests.run.conftest import QUICK

COUNT = 5


@pytest.fixture
def folder(tmp_path):
    """Five checkpoints with weights, statistics, averages and slots of an optimizer."""
    rng = np.random.default_rng(0)
    for step in range(1, COUNT + 1):
        arrays = {
            "params/a/kernel": rng.normal(size=(3, 4)).astype(np.float32) + 1000,
            "params/b": rng.normal(size=7).astype(ml_dtypes.bfloat16),
            "stats/a/mean": rng.normal(size=4).astype(np.float32),
            "ema/params/a/kernel": np.full((3, 4), step, np.float32),
            "opt/velocity/a": np.zeros(3, np.float32),
        }
        save(tmp_path, checkpoint_name(step), arrays, {"step": step})
        plain: dict[str, Any] = {name.replace("/", "|"): np.asarray(a, np.float64) for name, a in arrays.items()}
        np.savez(tmp_path / f"{step}.npz", **plain)
    return tmp_path


def values(folder, name):
    return [np.load(folder / f"{step}.npz")[name.replace("/", "|")] for step in range(1, COUNT + 1)]


@pytest.mark.parametrize(("last", "discard"), [(None, 0), (3, 0), (2, 1), (1, 4)])
def test_the_mean_of_the_last(folder, last, discard):
    paths, damaged = choose(folder, last, discard)
    found = average(paths)
    assert found.keys() == {"params/a/kernel", "params/b", "stats/a/mean"}
    for name, array in found.items():
        chosen = values(folder, name)[: COUNT - discard][-(last or COUNT) :]
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, np.mean(chosen, axis=0).astype(np.float32), err_msg=name)
    assert damaged == []


def test_the_exponential_average_starts_with_the_first(folder):
    found = average(choose(folder, None)[0], "exponential", 0.9)
    first, *rest = values(folder, "params/a/kernel")
    for later in rest:
        first = 0.9 * first + 0.1 * later
    np.testing.assert_array_equal(found["params/a/kernel"], first.astype(np.float32))
    ema = average(choose(folder, 2)[0], weights="ema")
    np.testing.assert_array_equal(ema["params/a/kernel"], np.full((3, 4), 4.5))


def test_what_cannot_be_averaged_is_refused(folder):
    with pytest.raises(CheckpointError, match=r"average of 6 checkpoints.*has 5"):
        choose(folder, 6)
    with pytest.raises(CheckpointError, match="has 0 good ones after discarding 5"):
        choose(folder, None, 5)
    with pytest.raises(CheckpointError, match="has 0 good ones after discarding 7"):
        choose(folder, None, 7)
    with pytest.raises(ConfigError, match="no average 'median'"):
        average(choose(folder, 2)[0], "median")
    with pytest.raises(ConfigError, match="decay"):
        average(choose(folder, 2)[0], "exponential", 1.0)
    save(folder, checkpoint_name(6), {"params/other": np.zeros(2, np.float32)}, {"step": 6})
    with pytest.raises(CheckpointError, match="different tensors"):
        average(choose(folder, 2)[0])
    with pytest.raises(CheckpointError, match="no ema weights"):
        average(choose(folder, 1)[0], weights="ema")


def test_damaged_ones_are_passed_over_and_named(folder):
    file = folder / checkpoint_name(5) / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    paths, damaged = choose(folder, 2)
    assert [path.name for path in paths] == [checkpoint_name(3), checkpoint_name(4)]
    assert [path.name for path, _ in damaged] == [checkpoint_name(5)]


def test_a_run_is_averaged_where_its_checkpoints_are_and_again_when_it_is_resumed(tmp_path):
    options = QUICK | {"weight_updates_per_epoch": 2, "num_epochs": 2, "average_last_epochs": 1, "report": False}
    options |= {"output": tmp_path / "run", "checkpoint_dir": tmp_path / "of_current_time", "validation": False}
    written = {name: json.dumps(value) if isinstance(value, dict) else str(value) for name, value in options.items()}
    arguments = [word for name, value in written.items() for word in (f"--{name}", value)]

    def members():
        manifest = json.loads((tmp_path / "run" / "averages" / "weight_avg_N_1" / "manifest.json").read_text())
        return manifest["averaged"]["of"]

    assert main(["train", "--config", "none", *arguments]) == 0
    assert members() == [checkpoint_name(2), checkpoint_name(4)]
    assert main(["resume", str(tmp_path / "run"), "--num-epochs", "3"]) == 0
    assert members() == [checkpoint_name(4), checkpoint_name(6)]


def averaged(folder, name):
    return load_file(next((folder.parent / "averages" / name).glob("*.safetensors")))["params/a/kernel"]


@pytest.mark.reference
def test_the_training_options_for_averages_mean_the_same_afterwards(folder, capsys, monkeypatch):
    """`weight_avg.py --weight-avg-exp 0.9 0.5` takes these exponential averages, and no other one is written."""
    monkeypatch.chdir(folder)
    run = ["--restore-path", str(folder), "--no-validate"]
    assert run_script("weight_avg", [*run, "--weight-avg-exp", "0.9", "0.5"]) == 0
    assert "no effect" not in capsys.readouterr().err
    for decay in (0.9, 0.5):
        first, *rest = values(folder, "params/a/kernel")
        for later in rest:
            first = decay * first + (1 - decay) * later
        found = averaged(folder, f"exponential-{decay}-5-{checkpoint_name(COUNT)}")
        np.testing.assert_array_equal(found, first.astype(np.float32))
    shutil.rmtree(folder.parent / "averages")
    for words, told in {
        "--weight-avg-N 2": "counts epochs",
        "--weight-avg-exp 0.9 --mode mean": "--mode mean",
        "--weight-avg-exp 0.9 --decay 0.9": "--decay 0.9",
        "--weight-avg-exp 0.9 0.8 --filename a": "--filename",
        "--weight-avg-exp 1.5": "1.5",
    }.items():
        assert run_script("weight_avg", [*run, *words.split()]) == 2
        assert told in capsys.readouterr().err
    assert not (folder.parent / "averages").exists()
