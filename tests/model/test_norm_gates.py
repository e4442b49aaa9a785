"""Squeeze-excite, dropout and stochastic depth, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.core.rng import bits, name_id
from headrace.model.activations import Activation
from headrace.model.context import Ctx, Draws
from headrace.model.gates import Dropout, DropPath, SqueezeExcite

from .build import compute, small_squeeze_excite


def rng_at(name: str) -> np.random.Generator:
    return np.random.default_rng(len(name))


def ctx(samples, *, step: int = 3, train: bool = True) -> Ctx:
    draws = Draws(seed=5, step=step, samples=jnp.array(samples, jnp.uint32))
    return Ctx(train=train, draws=draws).under("block").under("drop")


def uniform(samples, count: int, step: int = 3) -> np.ndarray:
    numbers = np.array(samples, np.uint32).reshape(-1, 1)
    places = np.arange(count, dtype=np.uint32).reshape(1, -1)
    return (bits(5, name_id("block/drop"), step, numbers, places) >> np.uint32(8)) * 2.0**-24


def test_squeeze_excite():
    layer = SqueezeExcite(width=3)
    params, stats = layer.init(rng_at, (4, 5, 6))
    assert stats == {}
    assert {name: {key: leaf.shape for key, leaf in part.items()} for name, part in params.items()} == {
        "reduce": {"kernel": (6, 3), "bias": (3,)},
        "expand": {"kernel": (3, 6), "bias": (6,)},
    }
    params["reduce"]["bias"] += 0.1
    x = np.random.default_rng(0).normal(size=(2, 4, 5, 6)).astype(np.float32)
    hidden = x.mean((1, 2)) @ params["reduce"]["kernel"] + 0.1
    hidden = hidden / (1 + np.exp(-hidden))
    gate = 1 / (1 + np.exp(-(hidden @ params["expand"]["kernel"])))
    y, _ = compute(layer, params, {}, x, Ctx(train=True))
    np.testing.assert_allclose(y, x * gate[:, None, None], rtol=1e-5)
    cost = layer.cost((4, 5, 6))
    assert (cost.params, cost.flops) == (2 * 18 + 9, 2 * 36)


def test_dropout_drops_by_sample_and_place_and_keeps_the_mean():
    x, samples = np.ones((4, 50), np.float32), [7, 1, 30, 2]
    y, _ = compute(Dropout(0.3), {}, {}, x, ctx(samples))
    np.testing.assert_allclose(y, (uniform(samples, 50) >= 0.3) / 0.7, rtol=1e-6)
    assert 0.5 < np.mean(np.asarray(y) > 0) < 0.9
    for off in (compute(Dropout(0.0), {}, {}, x, ctx(samples)),
                compute(Dropout(0.3), {}, {}, x, ctx(samples, train=False))):  # fmt: skip
        np.testing.assert_array_equal(off[0], x)


def test_stochastic_depth_drops_whole_images():
    samples = list(range(64))
    x = np.random.default_rng(0).normal(size=(64, 2, 2, 3)).astype(np.float32)
    y, _ = compute(DropPath(0.75), {}, {}, x, ctx(samples))
    alive = uniform(samples, 1)[:, 0] < 0.75
    assert 0.5 < alive.mean() < 0.95
    np.testing.assert_allclose(y, np.where(alive[:, None, None, None], x / 0.75, 0), rtol=1e-5)
    off, _ = compute(DropPath(0.75), {}, {}, x, ctx(samples, train=False))
    np.testing.assert_array_equal(off, x)


def test_an_unknown_activation_is_not_built():
    with pytest.raises(AssertionError, match="unknown"):
        Activation("unknown")


def test_the_small_network_draws_the_same_for_a_sample_wherever_it_stands():
    network = small_squeeze_excite()
    params, stats = network.init(0)
    images = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype(np.float32)
    stats = jax.tree.map(jnp.asarray, stats)

    def logits(order):
        draws = Draws(seed=1, step=0, samples=jnp.array(order, jnp.uint32))
        return jax.jit(lambda x: network.apply(params, stats, x, Ctx(train=True, draws=draws))[0])(images[order])

    order = np.array([2, 0, 3, 1])
    np.testing.assert_allclose(logits(order), logits(np.arange(4))[order], rtol=1e-4, atol=1e-5)
