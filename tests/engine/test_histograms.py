"""Histograms of weights and gradients: the counts of NumPy, and the gradients that moved the weights."""

import jax
import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.engine.histograms import NUM_BINS, bin_edges, block_histograms, filled_bins
from headrace.model.norm import NormSpec

from ..harness import GLOBAL_BATCH, Stages, make_samples, small_residual, train_pipelined, train_steps
from .test_state_packing import spec_and_packing

RATE = 0.05
PLAIN = config_from(  # an update is the gradient times the rate, and nothing else
    {"model_name": "cifar_resnet8", "lr_schedule_params": {"initial_learning_rate": RATE / GLOBAL_BATCH}}
)
NETWORK = small_residual(NormSpec())


def counted(values):
    """Return the counts of NumPy: numbers beyond the edges are in the outer bins."""
    finite = values[np.isfinite(values)].astype(np.float64)
    edges = bin_edges()
    return np.histogram(np.clip(finite, edges[0], np.nextafter(edges[-1], 0)), edges)[0]


def joined(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_counts_are_those_of_numpy():
    rng = np.random.default_rng(0)
    values = (rng.normal(size=5000) * 2.0 ** rng.integers(-50, 25, 5000)).astype(np.float32)
    odd = np.array([0, -0.0, 1, 0.5, 1e-44, 2.0**-40, 3e38, -3e38, np.inf, -np.inf, np.nan], np.float32)
    values = np.concatenate([values, odd])
    found = jax.device_get(jax.jit(block_histograms)({"a": {"kernel": values, "bias": values[:7]}}, {"b": {}}))
    assert found.keys() == {"weights/a"}, "a block without weights has none"
    found = found["weights/a"]
    np.testing.assert_array_equal(found["counts"], counted(values) + counted(values[:7]))
    assert (found["least"], found["greatest"]) == (np.float32(-3e38), np.float32(3e38))
    assert len(bin_edges()) == NUM_BINS + 1 <= 513, "W&B takes 512"


def test_sums_and_the_bins_that_are_filled():
    values = np.random.default_rng(1).normal(size=300).astype(np.float32)
    found = jax.device_get(jax.jit(block_histograms)({}, {"a": values}))["gradients/a"]
    wanted = values.astype(np.float64)
    assert found["total"] == pytest.approx(wanted.sum(), rel=1e-5)
    assert found["squares"] == pytest.approx((wanted**2).sum(), rel=1e-5)
    counts, edges = filled_bins(found)
    assert counts[0] > 0 < counts[-1]
    assert counts.sum() == 300
    assert edges[0] <= wanted.min() < edges[1]
    assert edges[-2] <= wanted.max() < edges[-1]


@pytest.fixture(scope="module")
def trained():
    """Return state and metrics of plain gradient descent on one device."""
    return train_steps(PLAIN, NETWORK, *make_samples(), replicas=1, count=1, histograms=True)


def assert_of_state(state, metrics):
    """Check weights against the state they are of, gradients against the norm that the step computed."""
    found = metrics["histograms"]
    assert {name.partition("/")[2] for name in found} == {"conv1", "unit", "fc"}
    for name in ("conv1", "unit", "fc"):
        np.testing.assert_array_equal(found[f"weights/{name}"]["counts"], counted(joined(state["params"][name])))
    squares = sum(each["squares"] for name, each in found.items() if name.startswith("gradients/"))
    assert squares == pytest.approx(metrics["grad_norm"][-1] ** 2, rel=1e-4)


def test_gradients_are_those_that_moved_the_weights_in_the_last_step(trained):
    """The difference that a step of plain gradient descent makes, divided by the rate, has the same histogram."""
    images, labels = make_samples()
    before, _ = train_steps(PLAIN, NETWORK, images[:2], labels[:2], replicas=1, count=1)
    after, metrics = trained
    assert_of_state(after, metrics)
    for name in ("conv1", "unit", "fc"):
        moved = (joined(before["params"][name]) - joined(after["params"][name])) / RATE
        histogram = metrics["histograms"][f"gradients/{name}"]
        # A difference of weights is rounded more coarsely than a gradient, so that a few are in the next bin.
        assert np.abs(np.cumsum(histogram["counts"]) - np.cumsum(counted(moved))).max() <= 0.02 * len(moved)
        assert histogram["squares"] == pytest.approx((moved**2).sum(), rel=1e-3)
        assert histogram["total"] == pytest.approx(moved.sum(), rel=1e-2, abs=1e-4)


def test_stages_count_their_own_blocks():
    stages = Stages(count=2, replicas=2, cut=(1,), mapping=(0, 1))
    assert_of_state(*train_pipelined(PLAIN, NETWORK, make_samples(), stages, histograms=True))


def test_packed_vectors_are_counted_in_their_blocks(trained):
    _, packing = spec_and_packing(PLAIN)
    given = {"replicas": 1, "count": 1, "histograms": True, "packing": packing}
    state, metrics = train_steps(PLAIN, NETWORK, *make_samples(), **given)
    assert_of_state(state, metrics)
    for name, each in trained[1]["histograms"].items():
        counts = metrics["histograms"][name]["counts"]
        assert np.abs(counts - each["counts"]).sum() <= 2 + 0.01 * each["counts"].sum(), name
