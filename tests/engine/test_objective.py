"""The objective against NumPy float64 and sorting."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.data.augmentation.mix import MixedLabels
from headrace.engine import objective
from headrace.engine.objective import label_rank, training_loss
from headrace.engine.state import ema_decay, init_ema, next_ema

sums_of_samples = jax.jit(objective.sums_of_samples, static_argnames="label_smoothing")
cross_entropy = jax.jit(objective.cross_entropy, static_argnames="label_smoothing")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def losses_by_hand(logits, labels, smoothing):
    num_classes = logits.shape[1]
    target = np.eye(num_classes)[labels] * (1 - smoothing) + smoothing / num_classes
    return -(target * log_softmax(logits)).sum(-1)


@pytest.fixture
def batch() -> Any:
    rng = np.random.default_rng(0)
    return rng.normal(size=(64, 10)).astype(np.float32) * 3, rng.integers(0, 10, 64).astype(np.int32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_cross_entropy_matches_numpy(batch, smoothing):
    logits, labels = batch
    loss = cross_entropy(logits, labels, label_smoothing=smoothing)
    np.testing.assert_allclose(loss, losses_by_hand(logits, labels, smoothing), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_matches_numpy(batch, smoothing, threshold):
    """Mixed labels, smoothed, then cut at the threshold: each class is asked for by itself, and their mean is taken."""
    logits, labels = batch
    logits = np.concatenate([logits[:63], np.full((1, 10), 90.0, np.float32)])  # e^90 is no float32
    others, share = np.roll(labels, 1), np.linspace(0.5, 1, 64)
    mixed = MixedLabels(np.stack([labels, others], 1), np.stack([share, 1 - share], 1).astype(np.float32))
    target = share[:, None] * np.eye(10)[labels] + (1 - share)[:, None] * np.eye(10)[others]
    target = (1 - smoothing) * target + smoothing / 10
    if threshold is not None:
        target = (target > threshold).astype(float)
    x = logits.astype(np.float64)
    expected = (np.logaddexp(0, x) - target * x).mean(-1)
    custom = objective.CustomObjective(loss=objective.BinaryCrossEntropy(threshold))
    both = jax.value_and_grad(lambda x: training_loss(x, mixed, label_smoothing=smoothing, custom=custom), has_aux=True)
    (loss, sums), gradient = jax.jit(both)(logits)
    np.testing.assert_allclose(float(loss), expected.mean(), rtol=2e-6)
    np.testing.assert_allclose(float(sums["loss"]), expected.sum(), rtol=2e-6)
    np.testing.assert_allclose(gradient, (1 / (1 + np.exp(-x)) - target) / 640, atol=2e-9)


def test_uniform_logits_cost_log_c():
    loss = cross_entropy(jnp.zeros((3, 7)), jnp.array([0, 3, 6]), label_smoothing=0.1)
    np.testing.assert_allclose(loss, math.log(7), rtol=1e-6)


def test_huge_logits_stay_exact():
    """Probabilities would need clipping here; logits do not: the loss is the difference itself."""
    logits = jnp.float32([[1e4, 0.0, -1e4], [3e38, 0.0, 0.0]])
    np.testing.assert_allclose(cross_entropy(logits, jnp.array([1, 0])), [1e4, 0.0])


def test_half_logits_are_summed_in_float32(batch):
    logits, labels = batch
    half = jnp.asarray(logits, jnp.bfloat16)
    loss = cross_entropy(half, labels, label_smoothing=0.1)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, losses_by_hand(np.asarray(half).astype(np.float64), labels, 0.1), rtol=2e-6)


def test_sums_match_sorting(batch):
    logits, labels = batch
    order = np.argsort(-logits, axis=1, kind="stable")
    sums = sums_of_samples(logits, labels, None, label_smoothing=0.1)
    assert float(sums["top1"]) == np.sum(order[:, 0] == labels)
    assert float(sums["top5"]) == np.sum(order[:, :5] == labels[:, None])
    assert float(sums["count"]) == 64
    assert float(sums["loss"]) == pytest.approx(losses_by_hand(logits, labels, 0.1).sum(), rel=1e-6)


def test_ties_rank_as_a_stable_sort_does():
    rng = np.random.default_rng(1)
    logits = rng.integers(0, 3, (200, 12)).astype(np.float32)
    labels = rng.integers(0, 12, 200).astype(np.int32)
    order = np.argsort(-logits, axis=1, kind="stable")
    expected = np.argmax(order == labels[:, None], axis=1)
    np.testing.assert_array_equal(jax.jit(label_rank)(logits, labels), expected)
    _, top = jax.lax.top_k(jnp.asarray(logits), 5)
    sums = sums_of_samples(logits, labels)
    assert float(sums["top5"]) == np.sum(np.asarray(top) == labels[:, None])
    assert float(sums["top1"]) == np.sum(logits.argmax(1) == labels)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_fewer_than_five_classes_are_all_in_the_top_five(num_classes):
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(6, num_classes)), jnp.float32)
    sums = sums_of_samples(logits, jnp.zeros(6, jnp.int32), jnp.float32([1, 1, 1, 0, 0, 1]))
    assert (float(sums["top5"]), float(sums["count"])) == (4.0, 4.0)


def test_padding_counts_for_nothing_even_when_it_is_not_finite(batch):
    logits, labels = batch
    padded = np.concatenate([logits, np.full((3, 10), np.nan, np.float32)])
    mask = np.array([1] * 64 + [0] * 3, np.float32)
    sums = sums_of_samples(padded, np.append(labels, np.array([0, 0, 99], np.int32)), mask, label_smoothing=0.1)
    whole = sums_of_samples(logits, labels, None, label_smoothing=0.1)
    assert {name: float(value) for name, value in sums.items()} == {
        name: pytest.approx(float(value), rel=1e-6) for name, value in whole.items()
    }


@pytest.mark.parametrize("num_classes", [3, 5, 8])
@pytest.mark.parametrize("logit", [0.0, 9.0, np.inf])
def test_a_nan_is_never_a_hit(num_classes, logit):
    """Whether the NaN is the label's or another's, whatever the label's logit, and of few classes too."""
    logits = np.zeros((4, num_classes), np.float32)
    logits[:, 2] = logit
    logits[0, 2], logits[1, 0], logits[2] = np.nan, np.nan, np.nan
    labels = jnp.array([2, 2, 2, 2])
    sums = sums_of_samples(jnp.asarray(logits), labels)
    found = float(sums["top1"]), float(sums["top5"]), math.isnan(float(sums["loss"]))
    assert found == (float(logit > 0), 1.0, True)  # of the last row alone; of equal logits class 0 is the first
    ranks = jax.jit(label_rank)(jnp.asarray(logits), labels)
    assert ranks.tolist() == [num_classes] * 3 + [0 if logit > 0 else 2]


def test_sums_add_up_over_micro_batches(batch):
    logits, labels = batch
    whole = sums_of_samples(logits, labels, None, label_smoothing=0.1)
    parts = [sums_of_samples(logits[i::4], labels[i::4], None, label_smoothing=0.1) for i in range(4)]
    for name, value in whole.items():
        assert float(value) == pytest.approx(sum(float(part[name]) for part in parts), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradient_is_softmax_minus_target_over_the_micro_batch(batch, smoothing):
    logits, labels = batch
    differentiate = jax.jit(jax.value_and_grad(training_loss, has_aux=True), static_argnums=2)
    (loss, sums), grad = differentiate(logits, labels, smoothing)
    target = np.eye(10)[labels] * (1 - smoothing) + smoothing / 10
    np.testing.assert_allclose(grad, (np.exp(log_softmax(logits)) - target) / 64, atol=1e-7)
    assert float(loss) == pytest.approx(losses_by_hand(logits, labels, smoothing).mean(), rel=1e-6)
    assert float(sums["loss"]) == pytest.approx(64 * float(loss), rel=1e-6)


# ------------------------------------------------------------------------------------------------------------------ EMA
def test_ema_decay_warms_up():
    """(1 + t)/(10 + t): 0.1 at 0, 0.5 at 8, 0.9 at 80, then the decay itself."""
    seen = [float(ema_decay(t, 0.99)) for t in (0, 8, 80, 890, 10**6)]
    assert seen == pytest.approx([0.1, 0.5, 0.9, 0.99, 0.99], rel=1e-6)


def test_ema_matches_numpy_on_weights_and_statistics():
    rng = np.random.default_rng(3)
    values = rng.normal(size=(20, 5)).astype(np.float32)
    first = np.arange(5, dtype=np.float32)
    ema = init_ema({"params": jnp.asarray(first, jnp.bfloat16), "stats": jnp.asarray(first)})
    expected = first.astype(np.float64)
    for t, value in enumerate(values):
        ema = next_ema(ema, {"params": jnp.asarray(value), "stats": jnp.asarray(value)}, t, 0.6)
        decay = min(0.6, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * value
    for leaf in ema.values():
        assert leaf.dtype == jnp.float32
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)


def test_ema_starts_as_a_copy_of_its_own():
    weights = jnp.ones(3)
    ema = init_ema({"w": weights})
    weights.delete()
    np.testing.assert_array_equal(ema["w"], 1.0)


def soft_target(num_classes: int, mixed: MixedLabels, smoothing: float) -> np.ndarray:
    target = np.zeros((len(mixed.labels), num_classes))
    for column in range(mixed.labels.shape[1]):
        np.add.at(target, (np.arange(len(target)), mixed.labels[:, column]), mixed.weights[:, column])
    return target * (1 - smoothing) + smoothing / num_classes


def some_mixed(count: int, columns: int) -> MixedLabels:
    rng = np.random.default_rng(columns)
    weights = rng.dirichlet(np.ones(columns), count).astype(np.float32)
    labels = rng.integers(0, 10, (count, columns)).astype(np.int32)
    labels[0] = 4  # all the same class
    return MixedLabels(labels, weights)


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_mixed_labels_and_weights_of_classes_match_numpy(batch, columns, smoothing, weighted):
    logits, _ = batch
    mixed = some_mixed(64, columns)
    class_weights = tuple(np.linspace(0.0, 2.0, 10).tolist()) if weighted else None
    loss = jax.jit(lambda z, y: objective.cross_entropy(z, y, smoothing, class_weights))(logits, mixed)
    target = soft_target(10, mixed, smoothing) * (1.0 if class_weights is None else np.array(class_weights))
    np.testing.assert_allclose(loss, -(target * log_softmax(logits)).sum(-1), rtol=3e-6, atol=1e-6)


def test_one_label_with_the_whole_share_is_that_label(batch):
    logits, labels = batch
    mixed = MixedLabels(
        np.stack([labels, labels[::-1]], 1), np.stack([np.ones(64), np.zeros(64)], 1).astype(np.float32)
    )
    for smoothing in (0.0, 0.1):
        plain = cross_entropy(logits, labels, label_smoothing=smoothing)
        np.testing.assert_array_equal(cross_entropy(logits, mixed, label_smoothing=smoothing), plain)


def test_hits_are_counted_against_the_own_label(batch):
    logits, labels = batch
    other = np.argmax(logits, axis=1).astype(np.int32)
    mixed = MixedLabels(np.stack([labels, other], 1), np.tile(np.array([0.1, 0.9], np.float32), (64, 1)))
    _, sums = training_loss(logits, mixed)
    assert float(sums["top1"]) == np.sum(other == labels)


def test_gradient_with_mixed_labels_and_weights_of_classes(batch):
    """d/dz of -sum w t log p is (sum w t) p - w t, over the micro-batch."""
    logits, _ = batch
    mixed, weights = some_mixed(64, 4), tuple(np.linspace(0.5, 2.0, 10).tolist())
    grad = jax.jit(jax.grad(lambda z: training_loss(z, mixed, 0.1, weights)[0]))(logits)
    target = soft_target(10, mixed, 0.1) * np.array(weights)
    expected = (target.sum(1, keepdims=True) * np.exp(log_softmax(logits)) - target) / 64
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-7)


def test_a_class_of_weight_0_teaches_nothing(batch):
    logits, _ = batch
    labels = jnp.full(64, 3, jnp.int32)
    weights = tuple(float(label != 3) for label in range(10))
    loss, sums = training_loss(logits, labels, 0.0, weights)
    assert (float(loss), float(sums["loss"]), float(sums["count"])) == (0.0, 0.0, 64.0)
