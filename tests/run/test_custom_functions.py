"""Losses, metrics and augmentations given by code: in every plan, in the records, and against NumPy."""

import inspect
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace import Model, custom_network, read_digits
from headrace.core.errors import CheckpointError, ConfigError
from headrace.data.augmentation.mix import MixedLabels
from headrace.engine.objective import CustomObjective, metric_sums, sums_of_samples, training_loss
from headrace.run import fit
from headrace.run.callbacks import Callback
from headrace.run.custom_functions import by_sample, check_augment, check_objective, read_metrics
from headrace.run.design import CustomParts
from headrace.run.fit import resume, train
from headrace.telemetry.records import TrainRecord, ValidationRecord, read_records

from .conftest import assert_close, assert_same_bits, final_state

SMALL: dict[str, Any] = {
    "num_epochs": 2,
    "weight_updates_per_epoch": 4,
    "micro_batch_size": 8,
    "global_batch_size": 32,
    "lr_schedule_params": {"initial_learning_rate": 0.0001},
    "ema_decay": 0,
}


def anything(value: Any) -> Any:
    """Hide a wrong type from the checker."""
    return value


def cross_entropy(logits, targets):
    return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)


def focal(logits, targets):
    log_shares = jax.nn.log_softmax(logits)
    return -jnp.sum(targets * (1 - jnp.exp(log_shares)) ** 2 * log_shares, axis=-1)


def margin(logits, labels):
    """Return the logit of the label less the greatest of the others."""
    is_label = jax.nn.one_hot(labels, logits.shape[1], dtype=bool)
    return jnp.max(logits, axis=-1, where=is_label, initial=-1e9) - jnp.max(
        logits, axis=-1, where=~is_label, initial=-1e9
    )


def noise(key, images, labels):
    scale = 0.1 * (1 + labels.astype(jnp.float32))[:, None, None, None]
    return images + scale * jax.random.uniform(key, images.shape)


def numpy_focal(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    return -np.sum(targets * (1 - shares) ** 2 * np.log(shares), axis=1)


def numpy_margin(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    others = logits.astype(np.float64).copy()
    others[np.arange(len(labels)), labels] = -np.inf
    return logits[np.arange(len(labels)), labels] - others.max(1)


def test_sums_follow_the_functions_with_smoothed_mixed_and_uncounted_labels():
    rng, custom = np.random.default_rng(0), CustomObjective(loss=focal, metrics={"margin": margin})
    logits = rng.normal(0, 3, (6, 4)).astype(np.float32)
    labels, weights = rng.integers(0, 4, (6, 2)).astype(np.int32), rng.dirichlet((1, 1), 6).astype(np.float32)
    targets = 0.9 * np.einsum("nk,nkc->nc", weights, np.eye(4)[labels]) + 0.1 / 4
    mixed = MixedLabels(jnp.asarray(labels), jnp.asarray(weights))
    loss, sums = jax.jit(partial(training_loss, label_smoothing=0.1, custom=custom))(logits, mixed)
    assert set(sums) == set(custom.sum_names)
    np.testing.assert_allclose(loss, numpy_focal(logits, targets).mean(), rtol=1e-5)
    # metrics are measured against the label that the image had before it was mixed, as the accuracy is
    np.testing.assert_allclose(metric_sums(sums)["margin"], numpy_margin(logits, labels[:, 0]).sum(), rtol=1e-5)
    logits[-1] = np.nan  # of padding, which does not count
    mask = np.array([1, 1, 1, 1, 1, 0], np.float32)
    sums = jax.jit(partial(sums_of_samples, custom=custom))(logits, labels[:, 0], mask)
    one_hot = np.eye(4)[labels[:5, 0]]
    np.testing.assert_allclose(sums["loss"], numpy_focal(logits[:5], one_hot).sum(), rtol=1e-5)
    np.testing.assert_allclose(metric_sums(sums)["margin"], numpy_margin(logits[:5], labels[:5, 0]).sum(), rtol=1e-5)


def test_a_cross_entropy_by_code_in_stages_and_replicas_is_the_one_built_in(quick):
    targets = {"label_smoothing": 0.1, "mixup_alpha": 0.4}
    plain = train(quick(run_name="plain", **SMALL, **targets), CustomParts(metrics={"margin": margin}, augment=noise))
    custom = CustomParts(loss=cross_entropy, metrics={"margin": margin}, augment=noise)
    stages = {"num_pipeline_stages": 2, "num_replicas": 2}
    staged = train(quick(run_name="staged", **SMALL, **targets, **stages), custom)
    assert_close(final_state(staged.directory), final_state(plain.directory), 5e-4)
    for kind in (TrainRecord, ValidationRecord):
        # Each kind by itself: when the thread that saves a checkpoint records it depends on the clock.
        of_runs = ([r for r in read_records(run.directory) if isinstance(r, kind)] for run in (plain, staged))
        found = list(zip(*of_runs, strict=True))
        assert found
        for one, other in found:
            assert one.metrics["margin"] == pytest.approx(other.metrics["margin"], rel=1e-3)
            assert one.loss == pytest.approx(other.loss, rel=1e-4)


class Stop(Callback):
    """Collects the metrics of epochs, and stops after the first."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []

    def on_epoch_end(self, event):
        self.metrics.append(event.metrics)
        return "enough" if event.epoch == 1 else None


def test_metrics_are_recorded_and_a_resumed_run_has_the_same_bits(tmp_path):
    digits = read_digits()["train"]
    images, labels = digits.images[:128], digits.labels[:128]
    options = {"micro_batch_size": 8, "epochs": 2, "logs_per_epoch": 0.5, "learning_rate": 0.001, "progress": "none"}
    given: dict[str, Any] = {"loss": focal, "metrics": {"margin": margin}, "augment": noise}
    held: Any = {"validation_data": (images[:20], labels[:20])}

    def fresh(name: str) -> Model:
        return Model("toy_model_bn", num_classes=10, log_dir=str(tmp_path), run_name=name, **options)

    model, stop = fresh("whole"), Stop()
    whole = model.fit(images, labels, **held, **given)
    cut = fresh("cut").fit(images, labels, **held, **given, callbacks=[stop])
    assert (cut.outcome, cut.step) == ("stopped", 16)
    for missing in ("loss", "metrics", "augment"):
        parts = {name: part for name, part in given.items() if name != missing}
        with pytest.raises(CheckpointError, match=f"This run's {missing} (was|were) given by code"):
            fresh("cut").fit(images, labels, **held, **parts, resume=cut.directory)
    again = fresh("cut").fit(images, labels, **held, **given, resume=cut.directory)
    assert_same_bits(final_state(again.directory), final_state(whole.directory))
    # one record of both epochs, of which the first is in the checkpoint's sums
    assert again.metrics["margin"][-1] == pytest.approx(2 * whole.metrics["margin"][0] - stop.metrics[0]["margin"])
    # the best validation, and evaluate, against NumPy
    logits = model.logits(images[:20])
    report = model.evaluate(images[:20], labels[:20])
    assert report["loss"] == pytest.approx(numpy_focal(logits, np.eye(10)[labels[:20]]).mean(), rel=1e-4)
    assert report["metrics"] == {"margin": pytest.approx(numpy_margin(logits, labels[:20]).mean(), rel=1e-4)}
    assert whole.best is not None
    assert whole.best.metrics["margin"] == pytest.approx(report["metrics"]["margin"], rel=1e-5)
    assert "  margin " in (whole.directory / "log.txt").read_text()
    plain = Model.load(whole.directory).evaluate(images[:20], labels[:20])
    shares = model.predict(images[:20]).probabilities
    assert plain["loss"] == pytest.approx(-np.log(shares[np.arange(20), labels[:20]]).mean(), rel=1e-4)
    assert "metrics" not in plain


def test_an_augmentation_depends_on_seed_epoch_and_sample_alone():
    images, labels = jnp.zeros((4, 2, 2, 1)), jnp.arange(4, dtype=jnp.int32)
    samples, order = jnp.asarray([7, 3, 9, 1], jnp.int32), np.array([2, 0, 3, 1])
    drawn = by_sample(noise, 5)(images, labels, samples, 1)
    moved = by_sample(noise, 5)(images, labels[order], samples[order], 1)
    np.testing.assert_array_equal(moved, drawn[order])
    for other in (by_sample(noise, 6)(images, labels, samples, 1), by_sample(noise, 5)(images, labels, samples, 2)):
        assert not np.any(np.asarray(other) == np.asarray(drawn))


def test_what_cannot_be_traced_into_a_step_is_refused(quick, tmp_path):
    def objective(loss: Any = None, weights: Any = (), **metrics: Any) -> None:
        check_objective(loss, read_metrics(metrics), 10, weights)

    calls = [
        (lambda: objective(anything("focal")), "The loss is a str"),
        (lambda: objective(lambda logits, targets: jnp.mean(focal(logits, targets))), r"float32 \[\].*for each image"),
        (lambda: objective(lambda logits, targets: -targets * logits), r"returned float32 \[N, C\]"),
        (lambda: objective(lambda logits, targets: (logits > 0).any(1)), r"returned bool \[N\]"),
        (lambda: objective(focal, weights=("balanced",)), "class_weights is given beside a custom loss"),
        (lambda: objective(margin=lambda logits, labels: {"a": 1}), "metric margin returned a dict"),
        (lambda: objective(loss_scale=margin), "A metric is named 'loss_scale'"),
        (lambda: objective(margin=lambda logits, labels: logits), r"metric margin returned float32 \[N, C\]"),
        (lambda: read_metrics(anything([margin])), "A metric is a function"),
        (lambda: read_metrics(anything(margin)), "metrics is a function"),
        (lambda: check_augment(anything(3), (8, 8, 1)), "The augment is a int"),
        (
            lambda: check_augment(lambda key, images, labels: images[:, 1:], (8, 8, 1)),
            r"\[3, 7, 8, 1\].*\[N, 8, 8, 1\]",
        ),
        (lambda: train(quick(), CustomParts(loss=lambda logits, targets: logits)), r"\[N, C\]"),
    ]
    for call, told in calls:
        with pytest.raises(ConfigError, match=told):
            call()
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        objective(lambda logits, targets: logits[:, 0] if logits[0, 0] > 0 else targets[:, 0])
    assert any("the loss failed while JAX traced it" in note for note in caught.value.__notes__)
    with pytest.raises(CheckpointError, match="did not come from code"):
        resume(train(quick(num_epochs=1, weight_updates_per_epoch=2)).directory, {}, CustomParts(loss=focal))


def test_devices_are_chosen_before_functions_of_a_network_use_jax(quick, monkeypatch):
    order, start = [], fit.start_run_devices

    def init(key, _shape):
        order.append("init")
        return {"w": 0.1 * jax.random.normal(key, (64, 10))}

    def apply(params, x):
        return x[:, ::4, ::4, 0].reshape(-1, 64) @ params["w"]

    def start_late(*args: Any) -> Any:
        time.sleep(0.2)
        order.append("devices")
        return start(*args)

    network = custom_network([("dense", init, apply)], input_shape=(32, 32, 1), num_classes=10)
    order.clear()  # its shapes were traced
    monkeypatch.setattr(fit, "start_run_devices", start_late)
    train(quick(num_epochs=1, weight_updates_per_epoch=1, validation=False), CustomParts(network=network))
    assert order == ["devices", "init"]


def _by_numpy(logits):
    return np.sqrt(logits)


def _uses_numpy(logits, labels):
    return _by_numpy(logits).mean(1)


def test_an_error_of_a_function_is_pointed_at_its_line():
    """Also where the line is in another function of the file, and the last frames are not those of JAX or ours."""
    with pytest.raises(Exception, match="traced array") as caught:
        check_objective(None, read_metrics({"mine": _uses_numpy}), 10, ())
    note, instead = caught.value.__notes__[-2:]
    line = inspect.getsourcelines(_by_numpy)[1] + 1
    assert note.endswith(f"test_custom_functions.py, line {line}, in _by_numpy: return np.sqrt(logits)")
    assert "use jax.numpy" in instead
    with pytest.raises(TypeError) as caught:
        check_objective(lambda logits, targets: logits @ targets, (), 10, ())
    assert "in <lambda>: check_objective(lambda logits, targets: logits @ targets" in caught.value.__notes__[-1]
    with pytest.raises(Exception, match="traced array") as caught:
        check_augment(lambda key, images, labels: images if labels[0] > 1 else -images, (8, 8, 3))
    assert "use jnp.where" in caught.value.__notes__[-1]
