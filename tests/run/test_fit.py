"""Whole runs in this process: what is written, exact resume, other plans, numbers that are not finite, refusals."""

import csv
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from headrace.checkpoint.store import list_checkpoints, load, verify
from headrace.core.errors import CheckpointError, ConfigError, RunStopped
from headrace.data.dataset import open_dataset
from headrace.data.feeding.feed import TrainFeed
from headrace.model.context import Ctx
from headrace.model.zoo import build_network
from headrace.run.fit import resume, train
from headrace.run.validation import validate
from headrace.telemetry.records import CurvePoint, RunEnd, RunStart, TrainRecord, ValidationRecord, read_records
from headrace.telemetry.sinks import Sinks

from .conftest import assert_same_bits, final_state


def records(run_dir: Path, kind: Any) -> list[Any]:
    return [record for record in read_records(run_dir) if isinstance(record, kind)]


def test_a_run_learns_and_leaves_its_whole_story(quick):
    schedule = {"lr_schedule": "cosine", "lr_schedule_params": {"initial_learning_rate": 0.001}}
    result = train(quick(num_epochs=8, micro_batch_size=16, global_batch_size=64, **schedule))
    assert result.outcome == "finished"
    assert result.step == 160
    assert (result.validation["raw"].top1 or 0) > 0.2
    assert result.validation["raw"].num_samples == 360
    trained = records(result.directory, TrainRecord)
    assert [record.step for record in trained] == list(range(20, 161, 20))
    assert trained[0].images_per_second > 0  # of all calls but the very first
    assert trained[-1].loss < 0.95 * trained[0].loss
    assert {record.weights for record in records(result.directory, ValidationRecord)} == {"raw", "ema"}
    start, end = records(result.directory, RunStart)[0], records(result.directory, RunEnd)[0]
    assert start.num_parameters == build_network(quick().config.model, 10, (32, 32, 1)).total_cost().params
    assert end.outcome == "finished"
    assert "compute-bound" in end.verdict
    assert end.seconds["compile"] > 0
    files = {path.name for path in result.directory.iterdir()}
    assert files >= {
        "config.json",
        "plan.json",
        "metrics.jsonl",
        "training.csv",
        "validation.csv",
        "log.txt",
        "curve.svg",
        "report.html",
        "machine.json",
    }
    rows = list(csv.DictReader((result.directory / "training.csv").read_text().splitlines()))
    assert len(rows) == 8
    report = json.loads((result.directory / "reports" / "step_00000160.json").read_text())
    assert np.sum(report["raw"]["confusion_matrix"]) == 360
    saved = json.loads((result.directory / "config.json").read_text())
    assert saved["origins"]["num_epochs"]["kind"] == "command line"
    assert "weight_decay" not in saved["origins"], "what is not named has its default"


def test_the_last_and_the_best_checkpoints_are_kept(quick):
    result = train(quick(num_epochs=6, weight_updates_per_epoch=4, max_ckpts_to_keep=2, keep_best=1))
    kept = list_checkpoints(result.directory / "checkpoints")
    best = json.loads((result.directory / "checkpoints" / "best.json").read_text())["best"][0]["name"]
    assert {"step_00000020", "step_00000024", best} == {path.name for path in kept}
    assert not any(problem for path in kept for problem in verify(path))


def interrupt_when(run_dir: Path, step: int) -> threading.Thread:
    """Send this process SIGTERM as soon as the run has recorded `step`."""

    def watch() -> None:
        file = run_dir / "metrics.jsonl"
        for _ in range(3000):
            if file.exists() and f'"train", "step": {step}' in file.read_text():
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(quick, tmp_path):
    # 16-bit weights with stochastic rounding, augmentation, EMA and dynamic loss scaling: all of it is restored
    options = {
        "precision": "16.16",
        "loss_scaling": "dynamic",
        "num_epochs": 4,
        "logs_per_epoch": 10,
        "ckpts_per_epoch": "1/2",
        "validation": False,
    }
    whole = train(quick(run_name="whole", **options))
    watch = interrupt_when(tmp_path / "runs" / "cut", 30)
    cut = train(quick(run_name="cut", **options))
    watch.join()
    assert cut.outcome == "interrupted"
    assert 30 <= cut.step < 80
    again = resume(cut.directory)
    assert again.outcome == "finished"
    assert_same_bits(final_state(whole.directory), final_state(cut.directory))
    for kind in (TrainRecord, CurvePoint):
        seen = [(record.step, record.loss, record.accuracy) for record in records(cut.directory, kind)]
        assert seen == [(record.step, record.loss, record.accuracy) for record in records(whole.directory, kind)]
    assert resume(cut.directory).step == 80, "a finished run has nothing left to do"


@pytest.mark.slow  # tests/run/test_pipelined_run.py restores from two replicas and two stages onto one of each
def test_a_checkpoint_restores_on_another_number_of_replicas(quick, tmp_path):
    norm = {"norm_layer": {"name": "group_norm", "num_groups": 2}, "num_epochs": 4, "weight_updates_per_epoch": 5}
    whole = train(quick(run_name="whole", **norm))
    train(quick(run_name="cut", **norm, num_replicas=2))
    for path in list_checkpoints(tmp_path / "runs" / "cut" / "checkpoints")[-2:]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    result = resume(tmp_path / "runs" / "cut", {"num_replicas": 4, "micro_batch_size": 2})
    assert result.step == 20
    first, second = final_state(whole.directory), final_state(result.directory)
    for name, array in first.items():
        if name.startswith("params/"):
            np.testing.assert_allclose(second[name], array, rtol=2e-4, atol=2e-5, err_msg=name)


def test_a_damaged_checkpoint_is_named_and_passed_over(quick):
    whole = train(quick(run_name="whole", num_epochs=3, validation=False))
    before = final_state(whole.directory)
    newest = list_checkpoints(whole.directory / "checkpoints")[-1]
    tensors = bytearray((newest / "state.safetensors").read_bytes())
    tensors[-100] ^= 1
    (newest / "state.safetensors").write_bytes(tensors)
    again = resume(whole.directory)
    assert again.step == 60
    log = (whole.directory / "log.txt").read_text()
    assert "step_00000060 was skipped" in log
    assert "resume from step 40" in log
    assert_same_bits(before, final_state(whole.directory))
    assert [record.step for record in records(whole.directory, TrainRecord)] == [20, 40, 60]


PLANS = [(50, 1, "auto"), (7, 3, "auto"), (64, 4, "host"), (360, 1, "auto")]


@pytest.mark.parametrize(("micro", "replicas", "cache"), PLANS)
def test_validation_is_exact_for_any_batch_and_replicas(quick, micro, replicas, cache):
    options = {"validation_micro_batch_size": micro, "validation_num_replicas": replicas, "dataset_cache": cache}
    resolved = quick(training=False, **options)
    result = train(resolved)
    dataset = open_dataset(resolved.config.data, 0)
    network = build_network(resolved.config.model, 10, (32, 32, 1))
    params, stats = network.init(0)
    images = dataset.validation.read(np.arange(360), 0).astype(np.float64)
    flat = images.reshape(360, -1)
    images = {
        "per-image": (images - flat.mean(1)[:, None, None, None]) / flat.std(1)[:, None, None, None],
        "zero-one": images / 255,
    }[dataset.info.normalization].astype(np.float32)
    logits, _ = jax.jit(lambda x: network.apply(params, stats, x, Ctx(train=False)))(images)
    logits, labels = np.asarray(logits, np.float64), dataset.validation.labels
    loss = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(360), labels])
    report = json.loads((result.directory / "reports" / "step_00000000.json").read_text())["raw"]
    assert report["num_samples"] == 360
    assert report["top1"] == np.mean(logits.argmax(1) == labels)
    np.testing.assert_allclose(report["loss"], loss, rtol=1e-5)
    confusion = np.zeros((10, 10), int)
    np.add.at(confusion, (labels, logits.argmax(1)), 1)
    np.testing.assert_array_equal(report["confusion_matrix"], confusion)


def test_validate_gives_each_checkpoint_the_accuracy_it_had_in_the_run(quick):
    result = train(quick(num_epochs=3))
    during = {(r.step, r.weights): r.top1 for r in records(result.directory, ValidationRecord)}
    found = list(validate(result.directory, {"validation_micro_batch_size": 33}))
    assert [item.step for item in found] == [20, 40, 60]
    assert {(item.step, name): report["top1"] for item in found for name, report in item.reports.items()} == during
    one = list(validate(list_checkpoints(result.directory / "checkpoints")[1]))
    assert [item.step for item in one] == [40]


def test_numbers_that_are_not_finite_stop_the_run_with_the_last_checkpoint_good(quick, tmp_path):
    hot = {"initial_learning_rate": 1e30}
    with pytest.raises(RunStopped, match=r"Step \d+ gave numbers that are not finite") as caught:
        train(quick(run_name="hot", lr_schedule_params=hot, ema_decay=0, validation=False))
    assert caught.value.exit_code == 3
    assert records(tmp_path / "runs" / "hot", RunEnd)[0].outcome == "failed"
    assert not list_checkpoints(tmp_path / "runs" / "hot" / "checkpoints"), "a state after bad steps is not saved"


def test_fp_exceptions_names_the_first_layer(quick):
    with pytest.raises(RunStopped, match=r"first in the output of bn_0"):
        train(quick(lr_schedule_params={"initial_learning_rate": 1e30}, fp_exceptions=True, validation=False))


def test_nan_policy_skip_leaves_bad_steps_out(quick, monkeypatch):
    shown = []
    monkeypatch.setattr(Sinks, "advance", lambda _self, _step, loss=None, _rate=None: shown.append(loss))
    result = train(quick(lr_schedule_params={"initial_learning_rate": 1e30}, nan_policy="skip", num_epochs=2))
    assert any(loss is not None and np.isfinite(loss) for loss in shown), "also of calls with a bad step in them"
    skipped = records(result.directory, RunEnd)[0].skipped_steps
    assert 0 < skipped < 40, "the first step was good, a later one was not"
    assert all(np.isfinite(array).all() for name, array in final_state(result.directory).items() if "params" in name)


def test_dynamic_loss_scaling_skips_and_counts_overflows(quick):
    scaling = {"initial": 2.0**24, "growth_interval": 1000, "max": 2.0**24}
    options = {"precision": "16.32", "half_type": "float16", "loss_scaling": "dynamic", "loss_scaling_params": scaling}
    result = train(quick(num_epochs=2, validation=False, **options))
    state = final_state(result.directory)
    skipped = int(state["loss_scale/skipped"])
    assert 0 < skipped < 20
    assert float(state["loss_scale/scale"]) == 2.0 ** (24 - skipped)
    assert records(result.directory, RunEnd)[0].skipped_steps == skipped


def test_compile_only_compiles_and_stops(quick, monkeypatch):
    monkeypatch.setattr(TrainFeed, "next", lambda *_: pytest.fail("waited for images"))
    result = train(quick(compile_only=True))
    assert (result.outcome, result.step) == ("compiled", 0)
    assert "compiled in" in (result.directory / "log.txt").read_text()


def test_host_and_device_preprocessing_train_alike(quick):
    options = {"num_epochs": 1, "train_augmentation": "flip-crop", "validation": False}
    device = train(quick(run_name="device", **options))
    host = train(quick(run_name="host", accelerator_side_preprocess=False, **options))
    streamed = train(quick(run_name="streamed", dataset_cache="host", **options))
    wanted = final_state(device.directory)
    for other in (host, streamed):
        for name, array in final_state(other.directory).items():
            if name.startswith(("params/", "stats/")):
                np.testing.assert_allclose(array, wanted[name], rtol=2e-3, atol=2e-4, err_msg=name)


def test_refusals_leave_nothing_behind(quick, tmp_path):
    with pytest.raises(ConfigError, match="toy_model_bm"):
        train(quick(model_name="toy_model_bm"))
    assert len(jax.devices()) == 8  # as the tests start them; the first run could still have others
    with pytest.raises(RunStopped, match="9 devices are needed, but there are 8"):
        train(quick(num_replicas=9, global_batch_size=144))
    assert not (tmp_path / "runs").exists()
    result = train(quick(run_name="mine", num_epochs=1, validation=False))
    with pytest.raises(ConfigError, match="already holds files"):
        train(quick(run_name="mine"))
    with pytest.raises(CheckpointError, match="not a run directory"):
        resume(tmp_path)
    with pytest.raises(CheckpointError, match="another model_name"):
        resume(result.directory, {"model_name": "toy_model"})
    with pytest.raises(CheckpointError, match="global batch size"):
        resume(result.directory, {"global_batch_size": 32})
    assert load(list_checkpoints(result.directory / "checkpoints")[-1])[1]["step"] == 20


def test_resume_with_more_epochs_goes_on(quick):
    result = train(quick(num_epochs=2))
    assert resume(result.directory, {"num_epochs": 3}).step == 60
