"""Layers that no network here shows in full: bias, groups, padding, hidden dense layers, shortcuts."""

import jax.numpy as jnp
import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.model.composite import Chain, Residual, SubsampleShortcut
from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.model.initial import VarianceScaling
from headrace.model.layers import Conv, Dense, Flatten, MaxPool, Relu, ZeroPad

from .build import compute

TRAIN = Ctx(train=True)


def rng_at(name: str) -> np.random.Generator:
    return np.random.default_rng(len(name))


def test_convolution_with_bias_and_groups():
    conv = Conv(channels=6, kernel=1, groups=2, bias=True)
    params, _ = conv.init(rng_at, (3, 3, 4))
    assert params["kernel"].shape == (1, 1, 2, 6)
    assert conv.cost((3, 3, 4)) == Cost(params=12 + 6, flops=2 * 12 * 9, activation_elements=54, product_elements=54)
    x = np.random.default_rng(0).normal(size=(2, 3, 3, 4)).astype(np.float32)
    params["bias"] += np.arange(6, dtype=np.float32)
    y, _ = compute(conv, params, {}, x, TRAIN)
    w = params["kernel"][0, 0]
    wanted = np.concatenate([x[..., :2] @ w[:, :3], x[..., 2:] @ w[:, 3:]], -1) + np.arange(6)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


def test_groups_must_divide_channels():
    with pytest.raises(ConfigError, match="from 4 to 6 channels cannot have 4 groups"):
        Conv(channels=6, groups=4).shape((8, 8, 4))


@pytest.mark.parametrize("layer", [MaxPool(window=5, stride=5), Conv(channels=1, kernel=5, padding="VALID")])
def test_a_window_must_fit(layer):
    assert layer.shape((5, 5, 1)) == (1, 1, 1)
    with pytest.raises(ConfigError, match="gets only 4x9 pixels"):
        layer.shape((4, 9, 1))


def test_zero_pad_and_flatten():
    pad = ZeroPad(pads=((1, 0), (2, 1)))
    x = np.arange(4, dtype=np.float32).reshape(1, 2, 2, 1) + 1
    y, _ = compute(pad, {}, {}, x, TRAIN)
    assert y.shape[1:] == pad.shape((2, 2, 1)) == (3, 5, 1)
    np.testing.assert_array_equal(y[0, :, :, 0], [[0, 0, 0, 0, 0], [0, 0, 1, 2, 0], [0, 0, 3, 4, 0]])
    flat, _ = compute(Flatten(), {}, {}, x, TRAIN)
    np.testing.assert_array_equal(flat, [[1, 2, 3, 4]])


def test_a_hidden_dense_layer_has_the_compute_dtype():
    params, _ = Dense(features=3).init(rng_at, (4,))
    x, ctx = jnp.ones((2, 4), jnp.bfloat16), Ctx(train=True, compute_dtype=jnp.bfloat16)
    assert Dense(features=3).apply(params, {}, x, ctx)[0].dtype == jnp.bfloat16
    assert Dense(features=3, logits=True).apply(params, {}, x, ctx)[0].dtype == jnp.float32


def test_the_shortcut_without_parameters():
    x = np.random.default_rng(0).normal(size=(2, 5, 4, 3)).astype(np.float32)
    shortcut = SubsampleShortcut(channels=8)
    y, _ = compute(shortcut, {}, {}, x, TRAIN)
    assert y.shape[1:] == shortcut.shape((5, 4, 3)) == (3, 2, 8)
    np.testing.assert_array_equal(y[..., :3], x[:, ::2, ::2])
    assert not np.array(y[..., 3:]).any()


def test_a_residual_adds_and_refuses_equal_names():
    x = np.random.default_rng(0).normal(size=(1, 2, 2, 3)).astype(np.float32)
    unit = Residual(body=Chain((("relu", Relu()),)))
    np.testing.assert_array_equal(compute(unit, {}, {}, x, TRAIN)[0], np.maximum(x, 0) + x)
    with pytest.raises(AssertionError):
        Residual(body=Chain((("a", Relu()),)), shortcut=Chain((("a", Relu()),)))


def test_variance_scaling_by_fan_out():
    kernel = VarianceScaling(scale=2.0, fan="out").sample(rng_at("x"), (3, 3, 40, 80))
    assert kernel.std() == pytest.approx(np.sqrt(2 / (9 * 80)), rel=0.01)
