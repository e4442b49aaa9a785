"""The main test: every plan gives the weights of one device on the same normalisation groups, to float32 rounding."""

from types import SimpleNamespace
from typing import cast

import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.engine.objective import CustomObjective, Objective, loss_named
from headrace.engine.step import StepSpec, statistics_momentum
from headrace.model.cost import Cost
from headrace.model.network import Network
from headrace.model.norm import NormSpec
from headrace.model.zoo import build_network

from .harness import OPTIONS, assert_close, make_samples, small_residual, train_steps


@pytest.fixture(scope="module")
def samples():
    return make_samples()


@pytest.fixture(scope="module")
def group_norm_reference(samples):
    config = config_from(OPTIONS)
    network = small_residual(NormSpec(kind="group", num_groups=4))
    return config, network, train_steps(config, network, *samples, replicas=1, count=1)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_replicas_and_accumulation_give_the_same_weights_with_group_norm(
    samples, group_norm_reference, replicas, count
):
    config, network, (wanted, wanted_metrics) = group_norm_reference
    state, metrics = train_steps(config, network, *samples, replicas=replicas, count=count)
    for part in ("params", "opt", "ema"):
        assert_close(state[part], wanted[part], 2e-5)
    np.testing.assert_allclose(metrics["loss"], wanted_metrics["loss"], rtol=2e-5)
    np.testing.assert_array_equal(metrics["count"], wanted_metrics["count"])


@pytest.mark.parametrize("model", ["small", pytest.param("cifar_resnet8", marks=pytest.mark.slow)])
def test_batch_norm_agrees_on_equal_normalisation_groups(samples, model):
    config = config_from(OPTIONS)
    network = small_residual(NormSpec()) if model == "small" else build_network(config.model, 10, (16, 16, 3))
    if model != "small":
        samples = tuple(array[:1] for array in samples)
    plans = ((1, 4), (2, 2), (4, 1)) if model == "small" else ((1, 4), (4, 1))
    results = [train_steps(config, network, *samples, replicas=r, count=g)[0] for r, g in plans]
    for other in results[1:]:
        for part in ("params", "stats", "opt", "ema"):
            assert_close(other[part], results[0][part], 2e-5)
    # another cut is another computation: the test above can fail
    if model != "small":
        return
    whole, _ = train_steps(config, network, *samples, replicas=1, count=1)
    with pytest.raises(AssertionError):
        assert_close(whole["params"], results[0]["params"], 1e-3)


@pytest.mark.parametrize("stable", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_distributed_batch_norm_is_batch_norm_of_the_larger_batch(samples, stable):
    """Statistics over groups of 2 of 4 replicas, micro-batch 2, equal those of 2 replicas with micro-batch 4."""
    config = config_from(OPTIONS | {"stable_norm": stable})
    network = small_residual(NormSpec())
    # Replicas 0 and 1 of a group hold what one replica of twice the micro-batch holds: the same order of samples.
    wanted, _ = train_steps(config, network, *samples, replicas=2, count=2)
    found, _ = train_steps(config, network, *samples, replicas=4, count=2, norm_group_size=2)
    for part in ("params", "stats", "opt"):
        assert_close(found[part], wanted[part], 5e-5)
    apart, _ = train_steps(config, network, *samples, replicas=4, count=2)
    with pytest.raises(AssertionError):
        assert_close(apart["params"], wanted["params"], 1e-3)


@pytest.mark.parametrize(("start", "kept"), [(None, 0.9), (0.25, 0.25)])
def test_running_statistics_are_the_mean_over_micro_batches(samples, start, kept):
    """Stem statistics after one step against NumPy: mean and unbiased variance per micro-batch, then their mean."""
    config = config_from(OPTIONS | {"lr_schedule_params": {"initial_learning_rate": 0.0}})
    network = small_residual(NormSpec())
    images, labels = samples
    state, _ = train_steps(config, network, images[:1], labels[:1], replicas=2, count=2, bn_momentum_start=start)
    kernel = network.init(0)[0]["conv1"]["conv"]["kernel"]
    padded = np.pad(images[0].astype(np.float64), ((0, 0), (0, 1), (0, 1), (0, 0)))  # SAME at stride 2, even size
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))[:, ::2, ::2]
    outputs = np.einsum("nhwcij,ijco->nhwo", windows, kernel.astype(np.float64))
    micros = outputs.reshape(4, -1, outputs.shape[-1])
    mean = micros.mean(1).mean(0)
    variance = micros.var(1, ddof=1).mean(0)
    stats = state["stats"]["conv1"]["norm"]
    np.testing.assert_allclose(stats["mean"], (1 - kept) * mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats["variance"], kept + (1 - kept) * variance, rtol=1e-4)


def test_statistics_follow_the_number_of_steps():
    spec = cast(StepSpec, SimpleNamespace(bn_momentum=0.9, bn_momentum_start=0.5))
    kept = [float(statistics_momentum(spec, step)) for step in (0, 119, 179, 299, 599, 10**6)]
    assert kept == pytest.approx([0.5, 0.5, 1 - 60 / 180, 0.8, 0.9, 0.9])
    assert statistics_momentum(cast(StepSpec, SimpleNamespace(bn_momentum=0.97, bn_momentum_start=None)), 3) == 0.97


class OneWeight:
    """y = w x with w = 1 at the start."""

    def shape(self, hwc):
        return (1,)

    def init(self, rng_at, hwc):
        return {"w": np.ones((1,), np.float32)}, {}

    def apply(self, params, stats, x, ctx):
        return params["w"][None, :] * x.reshape(-1, 1), {}

    def cost(self, hwc):
        return Cost()


def squared_error(y, target):
    loss = ((y[:, 0] - target) ** 2).mean()
    return loss, {"loss": loss * len(target), "count": jnp.float32(len(target))}


@pytest.mark.parametrize(("replicas", "count"), [(1, 1), (1, 4), (4, 1), (2, 2), (4, 4)])
def test_the_reference_value_of_one_weight(replicas, count):
    """w = 1, x = linspace(0, 1, 16), target 0, mean squared error, learning rate 1: w becomes 0.3111111."""
    network = Network(name="one", blocks=(("one", OneWeight()),), input_hwc=(1, 1, 1), num_classes=1)
    config = config_from({"lr_schedule_params": {"initial_learning_rate": 1 / 16}})
    x = np.linspace(0, 1, 16, dtype=np.float32).reshape(1, 16, 1, 1, 1)
    state, _ = train_steps(
        config, network, x, np.zeros((1, 16), np.float32), replicas=replicas, count=count, objective=squared_error
    )
    np.testing.assert_allclose(state["params"]["one"]["w"], [0.3111111], rtol=1e-6)


@pytest.mark.parametrize("task", ["multilabel", "regression"])
@pytest.mark.parametrize(("replicas", "count"), [(2, 2), (4, 1)])
def test_labels_with_a_number_for_each_output_give_the_same_weights(samples, task, replicas, count):
    config = config_from(OPTIONS | {"label_smoothing": 0.0})
    network, rng = small_residual(NormSpec(kind="group", num_groups=4)), np.random.default_rng(2)
    numbers = rng.normal(size=(*samples[1].shape, 10))
    labels = (numbers > 0).astype(np.uint8) if task == "multilabel" else numbers.astype(np.float32)
    loss = loss_named("bce" if task == "multilabel" else "huber")
    objective = Objective(custom=CustomObjective(task=task, loss=loss))
    wanted, wanted_metrics = train_steps(config, network, samples[0], labels, replicas=1, count=1, objective=objective)
    found, metrics = train_steps(
        config, network, samples[0], labels, replicas=replicas, count=count, objective=objective
    )
    for part in ("params", "opt", "ema"):
        assert_close(found[part], wanted[part], 2e-5)
    np.testing.assert_allclose(metrics["loss"], wanted_metrics["loss"], rtol=2e-5)
