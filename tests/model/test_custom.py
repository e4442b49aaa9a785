"""Own blocks from plain functions: applied as given, traced for shape and cost, refused where they cannot work."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.model.composite import Chain
from headrace.model.context import Ctx, Draws
from headrace.model.custom import custom_network
from headrace.model.layers import Conv, Dense, Flatten, GlobalAveragePool, MaxPool, Relu
from headrace.model.network import Network
from tests.fork_server import run

from .build import compute


def conv_init(channels):
    return lambda rng, shape: {"w": 0.1 * jax.random.normal(rng, (3, 3, shape[-1], channels))}


def conv_apply(params, x):
    y = jax.lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y)


def dense_init(rng, shape):
    return [jax.random.normal(rng, (*shape, 10)), jnp.zeros(10)]


def dense_apply(params, x):
    return x @ params[0] + params[1][None]


def centre_init(rng, shape):
    return (), {"mean": jnp.zeros(shape[-1])}


def centre_apply(params, x, *, stats, train):
    assert params == ()
    mean = x.mean((0, 1, 2)) if train else stats["mean"]
    return x - mean[None, None, None], {"mean": mean}


BLOCKS = [
    ("conv", conv_init(6), conv_apply),
    ("centre", centre_init, centre_apply),
    ("pool", lambda x: x.mean((1, 2))),
    ("head", dense_init, dense_apply),
]
IMAGES: Any = np.random.default_rng(0).normal(size=(5, 8, 8, 3)).astype(np.float32)


def make(blocks=None, **changes):
    return custom_network(blocks or BLOCKS, **{"input_shape": (8, 8, 3), "num_classes": 10, **changes})


def test_the_functions_are_applied_one_after_the_other():
    network = make()
    params, stats = network.init(4)
    assert params["conv"]["w"].shape == (3, 3, 3, 6)
    assert set(params) == {"conv", "head"}
    stats = {"centre": {"mean": np.arange(6, dtype=np.float32)}}
    logits, after = network.apply(params, stats, IMAGES, Ctx(train=False))
    features = np.asarray(conv_apply(params["conv"], IMAGES)) - np.arange(6)
    weight, bias = params["head"]["value"]
    np.testing.assert_allclose(logits, features.mean((1, 2)) @ weight + bias, rtol=1e-4, atol=1e-5)
    assert after == stats
    _, batch_stats = compute(network, params, stats, IMAGES, Ctx(train=True))
    convolved = np.asarray(conv_apply(params["conv"], IMAGES))
    np.testing.assert_allclose(batch_stats["centre"]["mean"], convolved.mean((0, 1, 2)), rtol=1e-5)


def test_initial_weights_depend_on_seed_and_name_alone():
    params, _ = make().init(4)
    again, _ = make([("first", conv_init(3), conv_apply), *BLOCKS]).init(4)
    np.testing.assert_array_equal(params["head"]["value"][0], again["head"]["value"][0])
    assert not np.array_equal(params["conv"]["w"], make().init(5)[0]["conv"]["w"])
    assert abs(np.std(params["conv"]["w"]) - 0.1) < 0.02


def test_costs_are_those_of_the_same_layers():
    layers = (
        ("conv", Chain((("conv", Conv(channels=6)), ("relu", Relu())))),
        ("pool", MaxPool(window=2, stride=2)),
        ("flat", Flatten()),
        ("head", Dense(features=10, logits=True)),
    )
    wanted = Network(name="layers", blocks=layers, input_hwc=(8, 8, 3), num_classes=10).costs()
    pool = lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")  # noqa: E731
    blocks = [BLOCKS[0], ("pool", pool), ("flat", lambda x: x.reshape(len(x), -1)), BLOCKS[3]]
    assert make(blocks).costs() == wanted
    assert wanted["conv"].flops == 2 * 9 * 3 * 6 * 64
    assert wanted["head"].params == 96 * 10 + 10


@pytest.mark.parametrize(
    ("function", "flops", "elements"),
    [
        (jax.nn.gelu, 0, 192),
        (jax.nn.relu6, 0, 192),
        (lambda x: jax.lax.scan(lambda c, w: (c @ w, None), x, jnp.ones((7, 3, 3)))[0], 7 * 2 * 3 * 192, 7 * 192),
        (jax.jit(jax.checkpoint(lambda y: y @ jnp.ones((3, 5)))), 2 * 3 * 320, 320),
        (lambda x: jax.lax.cond(True, lambda y: y @ jnp.ones((3, 3)), lambda y: y, x), 2 * 3 * 192, 192),
        (
            lambda x: jax.lax.conv_general_dilated(
                x,
                jnp.ones((3, 3, 1, 6)),
                (2, 2),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=3,
            ),
            2 * 9 * 6 * 16,
            96,
        ),
    ],
)
def test_costs_inside_calls_and_loops(function, flops, elements):
    head = ("head", lambda x: x.reshape(len(x), -1)[:, :10])
    cost = make([("block", function), head]).costs()["block"]
    assert (cost.flops, cost.activation_elements) == (flops, elements)


def test_random_numbers_are_addressed_by_sample_and_only_given_in_training():
    def noisy(params, x, rng, train):
        assert train == (rng is not None)
        return x + jax.random.normal(rng, x.shape) if train else x

    network = make([("noise", lambda rng, shape: None, noisy), *BLOCKS[2:]], input_shape=(8, 8, 3))
    params, stats = network.init(0)
    samples = np.array([9, 4, 100, 7, 3])
    whole = compute(network, params, stats, IMAGES, Ctx(train=True, draws=Draws(0, 2, jnp.asarray(samples))))[0]
    part = compute(network, params, stats, IMAGES[2:4], Ctx(train=True, draws=Draws(0, 2, jnp.asarray(samples[2:4]))))[
        0
    ]
    np.testing.assert_allclose(part, whole[2:4], rtol=1e-5, atol=1e-6)
    quiet = compute(network, params, stats, IMAGES, Ctx(train=False))[0]
    assert np.abs(whole - quiet).max() > 0.1


def test_layers_of_headrace_stand_beside_functions():
    network = make([("stem", Conv(channels=4)), *BLOCKS[:1], ("gap", GlobalAveragePool()), ("fc", Dense(features=10))])
    assert network.shapes() == ((8, 8, 3), (8, 8, 4), (8, 8, 6), (6,), (10,))


def test_half_precision_reaches_the_functions():
    seen = []

    def apply(params, x):
        seen.append((params["w"].dtype, x.dtype))
        return conv_apply(params, x)

    network = make([("conv", conv_init(6), apply), *BLOCKS[2:]])
    params, stats = network.init(0)
    logits, _ = compute(network, params, stats, IMAGES, Ctx(train=False, compute_dtype=jnp.bfloat16))
    assert seen[-1] == (jnp.bfloat16, jnp.bfloat16)
    assert logits.dtype == jnp.float32
    _, batch_stats = compute(make(), *make().init(0), IMAGES, Ctx(train=True, compute_dtype=jnp.bfloat16))
    assert batch_stats["centre"]["mean"].dtype == jnp.float32


def bad(init=lambda rng, shape: {}, apply=lambda params, x: x):
    return [("bad", init, apply), *BLOCKS]


@pytest.mark.parametrize(
    ("blocks", "told"),
    [
        (BLOCKS[:2], "returns 8x8x6 for an image.*Pool or flatten"),
        (BLOCKS[:3], "returns 6 for an image, not one number for each of 10 classes.*num_classes=6"),
        ([BLOCKS[0], BLOCKS[3]], "Block head does not accept inputs of 8x8x6: Incompatible types for matmul"),
        ([BLOCKS[2], ("conv", conv_init(6), conv_apply)], "Block conv does not accept inputs of 3: "),
        ([("a", Dense(features=10))], "Block a does not accept 8x8x3"),
        (bad(apply=lambda params, x: x[0]), "Block bad returns .* for 3 images"),
        (bad(apply=lambda params, x: x.astype(jnp.int32)), "int32"),
        (bad(apply=lambda params, x: (x, x)), "tuple"),
        (bad(apply=lambda params, x, train: x[:, :4] if train else x), "in training and"),
        (bad(apply=lambda params, x, stats: (x, {"a": x.sum()})), r"init must return \(params, stats\)"),
        (
            bad(lambda rng, shape: ({}, {"a": jnp.zeros(3)}), lambda params, x, stats: (x, {})),
            "returns statistics none",
        ),
        (bad(lambda rng, shape: ({}, {"a": jnp.zeros(3)}), lambda params, x, stats: x), r"must return \(y, stats\)"),
        (bad(lambda rng, shape: {"n": jnp.zeros(3, jnp.int32)}), "params.*'n'.* is int32"),
        (bad(lambda rng, shape: 1 / 0), "Block bad does not accept inputs of 8x8x3: division by zero"),
        (bad(apply=lambda params, x, mask: x), "has a parameter 'mask'"),
        (BLOCKS[:1] * 2, "Two blocks are named conv"),
        ([("a/b", lambda x: x)], "cannot be named 'a/b'"),
        ([("a", 3)], "Block a: It is int"),
        ([("a", Conv)], "the class Conv"),
        ([lambda x: x], "Block 0 is"),
        ("blocks", "list of blocks"),
    ],
)
def test_what_cannot_work_is_refused(blocks, told):
    with pytest.raises(ConfigError, match=told):
        make(blocks)


def test_a_shape_that_is_no_image_is_refused():
    with pytest.raises(ConfigError, match="input_shape is"):
        make(input_shape=(8, 8))
    with pytest.raises(ConfigError, match="cannot be named"):
        make(name="my net")


def test_making_a_network_touches_no_device():
    code = (
        "from tests.model.test_custom import make\n"
        "import jax._src.xla_bridge as bridge\n"
        "network = make(); network.total_cost()\n"
        "assert not bridge._backends, bridge._backends\n"
    )
    run([sys.executable, "-c", code], check=True)
