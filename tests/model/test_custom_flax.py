"""Flax modules as blocks: the numbers that Flax itself gives, statistics of the batch, dropout by sample."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from headrace.core.errors import ConfigError
from headrace.model.context import Ctx, Draws
from headrace.model.custom import custom_network

IMAGES: Any = np.random.default_rng(0).normal(size=(6, 8, 8, 3)).astype(np.float32)
SAMPLES = np.array([12, 5, 900, 3, 4, 77])


class LinenBlock(linen.Module):
    rate: float = 0.0
    momentum: float = 0.9

    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.Conv(4, (3, 3), use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=self.momentum)(x)
        return linen.Dropout(self.rate, deterministic=not train)(linen.swish(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs, rate=0.0, momentum=0.9):
        self.conv = nnx.Conv(3, 4, (3, 3), use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(4, momentum=momentum, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.after = nnx.List([nnx.Linear(4, 4, rngs=rngs)])

    def __call__(self, x):
        return self.after[0](self.dropout(nnx.swish(self.bn(self.conv(x)))))


def network_of(block, **more):
    head = [("pool", lambda x: x.mean((1, 2))), ("head", linen.Dense(10))]
    return custom_network([("block", block), *head], input_shape=(8, 8, 3), num_classes=10, **more)


def ctx(samples=SAMPLES, step=1):
    return Ctx(train=True, draws=Draws(0, step, jnp.asarray(samples)))


def block_output(network, variables, images, ctx):
    return network.apply_range(0, 1, *variables, images, ctx)


def test_linen_gives_what_flax_gives():
    network = network_of(LinenBlock())
    params, stats = network.init(0)
    stats["block"]["BatchNorm_0"] = {"mean": np.full(4, 0.3, np.float32), "var": np.full(4, 2.0, np.float32)}
    variables = {"params": params["block"], "batch_stats": stats["block"]}
    y, after = block_output(network, (params, stats), IMAGES, Ctx(train=False))
    wanted: Any = LinenBlock().apply(variables, IMAGES, train=False)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
    assert after == {"block": stats["block"]}
    y, _ = block_output(network, (params, stats), IMAGES, ctx())
    wanted, _ = LinenBlock().apply(
        variables, IMAGES, train=True, mutable=["batch_stats"], rngs={"dropout": jax.random.key(0)}
    )
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


def test_nnx_gives_what_flax_gives_and_keeps_its_weights():
    module = NnxBlock(nnx.Rngs(7))
    network = network_of(module)
    params, stats = network.init(0)
    np.testing.assert_array_equal(params["block"]["conv"]["kernel"], module.conv.kernel[...])
    y, _ = block_output(network, (params, stats), IMAGES, Ctx(train=False))
    module.eval()
    np.testing.assert_allclose(y, module(IMAGES), rtol=1e-5, atol=1e-6)
    y, _ = block_output(network, (params, stats), IMAGES, ctx())
    module.train()
    np.testing.assert_allclose(y, module(IMAGES), rtol=1e-5, atol=1e-6)
    made = network_of(NnxBlock)
    first, second = (made.init(seed)[0]["block"]["conv"]["kernel"] for seed in (0, 1))
    assert abs(first.std() - 1 / np.sqrt(27)) < 0.03, "lecun normal"
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("make", [lambda m: LinenBlock(momentum=m), lambda m: lambda rngs: NnxBlock(rngs, momentum=m)])
def test_statistics_are_those_of_the_batch_whatever_the_modules_momentum(make, momentum):
    network = network_of(make(momentum))
    params, stats = network.init(0)
    running = jax.tree.map(lambda s: s + np.arange(4, dtype=np.float32), stats)
    kernel = next(leaf for leaf in jax.tree.leaves(params["block"]) if leaf.ndim == 4)
    convolved = np.asarray(
        jax.lax.conv_general_dilated(IMAGES, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        np.float64,
    )
    _, batch_stats = block_output(network, (params, running), IMAGES, ctx())
    mean, var = jax.tree.leaves(batch_stats)
    if momentum == 1:  # such a norm never moves
        np.testing.assert_array_equal(mean, jax.tree.leaves(running)[0])
        return
    np.testing.assert_allclose(mean, convolved.mean((0, 1, 2)), rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(var, convolved.var((0, 1, 2)), rtol=1e-4, atol=2e-4)
    block: Any = network.blocks[0][1]
    assert block.functions.momentums == {momentum}


@pytest.mark.parametrize(
    "dropout", [linen.Dropout(0.4), lambda rngs: nnx.Dropout(0.4, rngs=rngs), lambda rngs: nnx.Dropout(0.4)]
)
def test_dropout_is_addressed_by_sample(dropout):
    network = network_of(dropout)
    params, stats = network.init(0)
    ones = np.ones((6, 8, 8, 3), np.float32)
    whole = np.asarray(block_output(network, (params, stats), ones, ctx())[0])
    np.testing.assert_allclose(np.unique(whole), [0, 1 / 0.6], rtol=1e-6)
    assert abs((whole > 0).mean() - 0.6) < 5 * np.sqrt(0.24 / whole.size)
    for part in (slice(0, 2), slice(2, 6)):
        np.testing.assert_array_equal(
            block_output(network, (params, stats), ones[part], ctx(SAMPLES[part]))[0], whole[part]
        )
    assert not np.array_equal(block_output(network, (params, stats), ones, ctx(step=2))[0], whole)
    np.testing.assert_array_equal(block_output(network, (params, stats), ones, Ctx(train=False))[0], ones)


def test_two_dropouts_of_a_block_draw_apart():
    network = network_of(Twice())
    params, stats = network.init(0)
    kept = np.asarray(block_output(network, (params, stats), np.ones_like(IMAGES), ctx())[0]) > 0
    assert abs(kept.mean() - 0.25) < 0.05


def test_costs_are_counted():
    wanted_flops, pixels = 2 * 27 * 4 * 64, 64
    for block, extra in ((LinenBlock(), 0), (NnxBlock, 2 * 4 * 4 * pixels)):
        cost = network_of(block).costs()["block"]
        assert cost.flops == wanted_flops + extra
        assert cost.product_elements == 4 * pixels * (2 if extra else 1)
        assert cost.activation_elements == cost.product_elements + 4 * pixels
        assert cost.params == 108 + 8 + (20 if extra else 0)


class Twice(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic):
        return linen.Dropout(0.5)(linen.Dropout(0.5)(x, deterministic), deterministic)


class Counter(linen.Module):
    collection: str

    @linen.compact
    def __call__(self, x):
        self.variable(self.collection, "count", lambda: jnp.zeros(()))
        return x


class Other(nnx.Module):
    def __init__(self, rngs):
        self.cache = nnx.Cache(jnp.zeros(3))

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (Counter("cache"), "neither weights nor batch statistics: cache"),
        (Counter("batch_stats"), "batch_stats count does not belong to a Flax BatchNorm"),
        (Other, "neither weights nor batch statistics: Cache"),
        (lambda rngs: 3, "does not return an NNX module"),
        (lambda rngs: nnx.Conv(5, 4, (3, 3), rngs=rngs), "Block block does not accept inputs of 8x8x3"),
        (LinenBlock, "the class LinenBlock.*parentheses"),
    ],
)
def test_modules_that_cannot_be_blocks_are_refused(block, told):
    with pytest.raises(ConfigError, match=told):
        network_of(block)


def test_without_flax_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[flax\]'"):
        custom_network([("a", lambda rngs: None)], input_shape=(8, 8, 3), num_classes=10)
