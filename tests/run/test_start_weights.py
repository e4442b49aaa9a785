"""Runs that start from weights of elsewhere, and runs that leave part of the network alone."""

import errno
import json
import os

import numpy as np
import pytest

from headrace.checkpoint.store import load
from headrace.cli.main import main
from headrace.config.load import resolve
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.tensor_file import write_safetensors
from headrace.data.dataset import open_dataset
from headrace.model.layers import Dense, Flatten
from headrace.model.network import Network
from headrace.model.whitening import first_convolution
from headrace.run.fit import resume, train
from headrace.telemetry.records import TrainRecord, read_records
from tests.core.file_server import FileServer, serving, without_proxies

from .conftest import QUICK, assert_same_bits, final_state

SHORT = {"num_epochs": 1, "weight_updates_per_epoch": 6, "validation": False, "ema_decay": 0.0}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A short run of the toy that the others start from."""
    places = {"log_dir": str(tmp_path_factory.mktemp("runs"))}
    return train(resolve(QUICK | SHORT | {"ema_decay": 0.5} | places, "none", environ={})).directory


def weights_of(state):
    return {name: array for name, array in state.items() if name.startswith(("params/", "stats/"))}


def test_a_run_starts_from_another_runs_weights(quick, first):
    second = train(quick(**SHORT, init_from=str(first), seed=5, lr_schedule_params={"initial_learning_rate": 0}))
    before, after = (
        {name: array for name, array in final_state(run).items() if name.startswith("params/")}
        for run in (first, second.directory)
    )
    assert_same_bits(before, after)  # the rate is 0, and the seed draws other weights
    table = json.loads((second.directory / "init.json").read_text())
    assert table["loaded_share"] == 1.0
    assert {row["status"] for row in table["tensors"]} == {"loaded"}
    assert "loaded" in (second.directory / "log.txt").read_text()


def test_the_network_comes_with_a_run_whose_checkpoints_are_elsewhere(quick, first, tmp_path):
    apart = tmp_path / "apart"
    run = train(quick(**SHORT, checkpoint_dir=str(apart))).directory
    for source in (first, run, apart):
        assert resolve({"weights": str(source)}, "none").config.model.model_name == QUICK["model_name"]


@pytest.mark.slow
def test_averaged_weights_are_taken_on_demand(quick, first):
    second = train(quick(**SHORT, init_from=str(first), init_ema=True, lr_schedule_params={"initial_learning_rate": 0}))
    state = final_state(first)
    for name, array in final_state(second.directory).items():
        if name.startswith("params/"):
            np.testing.assert_array_equal(array, state[f"ema/{name}"])
    with pytest.raises(CheckpointError, match="no averaged weights"):
        train(quick(**SHORT, init_from=str(second.directory), init_ema=True))


def test_a_file_that_does_not_fit_leaves_nothing_behind(quick, tmp_path):
    file = tmp_path / "w.safetensors"
    file.write_bytes(write_safetensors({"x": np.zeros(3, np.float32)}, {}))
    for source, told in ((file, "Only 0.0 %"), (tmp_path / "none.pth", "No such file"), (tmp_path, "not a run")):
        with pytest.raises(CheckpointError, match=told):
            train(quick(**SHORT, init_from=str(source)))
    with pytest.raises(ConfigError, match="matches no weight"):
        train(quick(**SHORT, layer_lr={"conv9": 0}))
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_without_training_the_weights_become_a_checkpoint(quick, first):
    made = train(quick(**SHORT | {"validation": True}, training=False, init_from=str(first)))
    assert made.step == 0
    assert_same_bits(weights_of(final_state(first)), weights_of(final_state(made.directory)))


def test_a_signed_address_is_in_no_file_of_a_run(first, tmp_path, monkeypatch):
    """A token in --weights stood in config.json, metrics.jsonl, the log, the report, init.json and every manifest."""
    without_proxies(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving(FileServer()) as server:
        content = write_safetensors(weights_of(final_state(first)), {})
        server.files["/w.safetensors?token=SECRETQUERY"] = content
        address = f"{server.url}/w.safetensors?token=SECRETQUERY"
        options = {name: str(value) for name, value in SHORT.items()}
        words = [word for name, value in (QUICK | options).items() for word in _words(name, value)]
        command = ["train", "--config", "none", *words, "--weights", address, "--log-dir", str(tmp_path / "runs")]
        monkeypatch.setattr("sys.argv", ["headrace", *command])
        assert main(command) == 0
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"config.json", "metrics.jsonl", "log.txt", "report.html", "init.json"} <= {file.name for file in files}
    assert [file for file in files if b"SECRETQUERY" in file.read_bytes() or "SECRET" in file.name] == []
    (config,) = tmp_path.glob("runs/*/config.json")
    assert "/w.safetensors?private=" in config.read_text()


def _words(name, value):
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return [f"--{name.replace('_', '-')}", text]


def test_a_disk_that_fails_at_the_start_ends_in_words(quick, tmp_path, monkeypatch):
    """An error of fsync or of truncating the lock was a traceback, where later ones were messages."""
    for name in ("fsync", "truncate"):
        with monkeypatch.context() as patched:

            def fail(*_: object) -> None:
                raise OSError(errno.EIO, "Input/output error")

            patched.setattr(os, name, fail)
            with pytest.raises((CheckpointError, ConfigError), match="Input/output error"):
                train(quick(**SHORT, log_dir=str(tmp_path / name)))


LARS = {"momentum": 0.9, "weight_decay": 0.01, "eeta": 0.1, "epsilon": 0}
FROZEN = ("params/conv2d_0/", "params/bn_0/", "stats/bn_0/")


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"num_pipeline_stages": 2, "micro_batch_size": 16},
        pytest.param({"num_replicas": 2, "micro_batch_size": 8}, marks=pytest.mark.slow),
        pytest.param({"precision": "16.16"}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "lars", "optimizer_params": LARS, "weight_decay": 0.1}, marks=pytest.mark.slow),
    ],
    ids=["one device", "pipeline", "replicas", "16-bit weights", "lars"],
)
def test_frozen_weights_and_norms_keep_every_bit_in_every_plan(quick, first, plan):
    """The toy's first conv and norm are frozen; its second are trained."""
    start = final_state(first)
    options = SHORT | plan | {"init_from": str(first), "freeze": ("conv2d_0", "^bn_0/")}
    after = final_state(train(quick(**options)).directory)
    for name, array in weights_of(start).items():
        same = after[name].tobytes() == array.astype(after[name].dtype).tobytes()
        assert same == name.startswith(FROZEN), name


@pytest.mark.slow
def test_frozen_batch_norm_works_as_in_evaluation(quick, first):
    """With every norm frozen, the loss of a step at rate 0 is the loss that evaluation gives: the same mode."""
    again = {"init_from": str(first), "lr_schedule_params": {"initial_learning_rate": 0}, "shuffle": False}
    frozen = train(quick(**SHORT | again, freeze=("bn_",)))
    both = train(quick(**SHORT | again, freeze=("bn_", "conv")))
    losses = [r.loss for run in (frozen, both) for r in read_records(run.directory) if isinstance(r, TrainRecord)]
    assert len(losses) == 2
    assert losses[0] == losses[1]
    free = train(quick(**SHORT | again))
    stats = [final_state(run.directory) for run in (frozen, free)]
    moved = [not np.array_equal(s["stats/bn_1/mean"], final_state(first)["stats/bn_1/mean"]) for s in stats]
    assert moved == [False, True]


@pytest.mark.slow
def test_a_resumed_run_needs_the_file_no_more(quick, first, tmp_path):
    file = tmp_path / "w.safetensors"
    state = final_state(first)
    file.write_bytes(write_safetensors(weights_of(state), {}))
    second = train(quick(**SHORT | {"ckpts_per_epoch": 1}, init_from=str(file), freeze=("conv2d_0",)))
    file.unlink()
    longer = resume(second.directory, {"num_epochs": "2"})
    assert longer.step == 12
    frozen = load(longer.directory / "checkpoints" / "step_00000012")[0]["params/conv2d_0/conv/kernel"]
    np.testing.assert_array_equal(frozen, state["params/conv2d_0/conv/kernel"])
    with pytest.raises(CheckpointError, match="weights"):
        resume(second.directory, {"num_epochs": "3", "init_from": str(first)})


def test_a_first_convolution_from_patches_of_the_training_images(quick):
    """Its outputs have the unit matrix as second moments, by sums over patches; frozen, it stays so."""
    settled = quick(**SHORT, whiten_images=300, freeze="conv2d_0/conv/kernel", normalization="zero-one")
    state = final_state(train(settled).directory)
    name = "params/conv2d_0/conv/kernel"
    kernel = state[name].astype(np.float64)
    size, _, channels, features = kernel.shape
    images = open_dataset(settled.config.data, 0).train
    chosen = [round(float(at)) for at in np.floor(np.linspace(0, len(images) - 1, 300))]
    patches = [
        image[i : i + size, j : j + size].astype(np.float64).ravel() / 255
        for image in images.read(np.array(chosen), 0)
        for i in range(image.shape[0] - size + 1)
        for j in range(image.shape[1] - size + 1)
    ]
    outputs = np.array(patches) @ kernel.reshape(-1, features)
    moments = outputs.T @ outputs / len(outputs)
    variances = sorted(np.linalg.eigvalsh(np.array(patches).T @ np.array(patches) / len(patches)))[::-1][:features]
    assert features < size * size * channels
    wanted = np.diag([each / (each + 5e-4) for each in variances])
    np.testing.assert_allclose(moments, wanted, atol=1e-4)


def test_filters_from_images_are_refused_where_they_have_no_place(quick, first):
    with pytest.raises(ConfigError, match="Weights that are given have filters already"):
        quick(**SHORT, whiten_images=10, weights=str(first))
    flat = Network(
        name="flat",
        blocks=(("flatten", Flatten()), ("fc", Dense(features=10, logits=True))),
        input_hwc=(8, 8, 1),
        num_classes=10,
    )
    with pytest.raises(ConfigError, match=r"flat begins with Flatten \(flatten\)"):
        first_convolution(flat)
