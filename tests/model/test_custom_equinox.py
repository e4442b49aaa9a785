"""Equinox modules as blocks: the module's own numbers, keys addressed by sample, refusals. Skipped without Equinox."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.core.tree import flatten_named
from headrace.model.context import Ctx, Draws
from headrace.model.custom import custom_network

from .build import compute

eqx: Any = pytest.importorskip("equinox")

IMAGES: Any = np.random.default_rng(0).normal(size=(6, 8, 8, 3)).astype(np.float32)


class Block(eqx.Module):
    conv: Any
    norm: Any

    def __init__(self, *, key):
        self.conv = eqx.nn.Conv2d(3, 4, 3, padding=1, key=key)
        self.norm = eqx.nn.GroupNorm(2, 4)

    def __call__(self, x):
        return jax.nn.relu(self.norm(self.conv(x.transpose(2, 0, 1))))


class Head(eqx.Module):
    dropout: Any
    linear: Any

    def __init__(self, key):
        self.dropout = eqx.nn.Dropout(0.5)
        self.linear = eqx.nn.Linear(4, 10, key=key)

    def __call__(self, x, key):
        return self.linear(self.dropout(x.mean((1, 2)), key=key))


def make(*blocks):
    return custom_network(blocks or [("conv", Block), ("head", Head)], input_shape=(8, 8, 3), num_classes=10)


def ctx(samples):
    return Ctx(train=True, draws=Draws(seed=1, step=2, samples=jnp.asarray(samples)))


def test_a_network_computes_what_its_modules_do():
    network = make()
    params, stats = network.init(0)
    assert not stats
    names = {f"{block}/{name}" for block, tree in params.items() for name in flatten_named(tree)}
    assert names >= {"conv/conv/weight", "conv/norm/bias", "head/linear/weight"}
    found, _ = compute(network, params, stats, IMAGES, Ctx(train=False))

    def with_weights(module, block):
        name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")  # noqa: E731
        return jax.tree_util.tree_map_with_path(lambda path, leaf: params[block].get(name(path), leaf), module)

    key = jax.random.key(0)
    first = with_weights(Block(key=key), "conv")
    second = eqx.nn.inference_mode(with_weights(Head(key), "head"))
    wanted = jax.jit(jax.vmap(lambda image: second(first(image), None)))(IMAGES)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert np.abs(params["conv"]["conv/weight"] - network.init(1)[0]["conv"]["conv/weight"]).max() > 0.01


def test_dropout_draws_by_sample_and_only_in_training():
    network = make()
    params, stats = network.init(0)
    samples = np.array([5, 9, 2, 7, 11, 3])
    whole, _ = compute(network, params, stats, IMAGES, ctx(samples))
    parts = [compute(network, params, stats, IMAGES[p], ctx(samples[p]))[0] for p in (slice(0, 2), slice(2, 6))]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-6)
    same: Any = np.broadcast_to(IMAGES[:1], IMAGES.shape)
    drawn, _ = compute(network, params, stats, same, ctx(samples))
    assert len({row.tobytes() for row in np.asarray(drawn)}) > 1
    still, _ = compute(network, params, stats, same, Ctx(train=False))
    np.testing.assert_allclose(still, np.broadcast_to(still[:1], still.shape), rtol=1e-6)


def test_a_module_keeps_the_weights_it_has():
    module = Block(key=jax.random.key(3))
    params, _ = make(("conv", module), ("head", Head)).init(0)
    np.testing.assert_array_equal(params["conv"]["conv/weight"], module.conv.weight)


class WithState(eqx.Module):
    norm: Any

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")

    def __call__(self, x):
        return x


class WithIntegers(eqx.Module):
    table: Any

    def __init__(self, key):
        self.table = jnp.arange(3)

    def __call__(self, x):
        return x[:, :, self.table]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (WithState, r"WithState holds a layer with state.*GroupNorm"),
        (WithIntegers, "neither weights nor batch statistics: table"),
        (lambda key: 3, "does not return an Equinox module"),
    ],
)
def test_what_cannot_work_is_refused(block, message):
    with pytest.raises(ConfigError, match=message):
        make(("first", block), ("head", Head))
