"""Swish and its like: values and slopes against NumPy in float64, and what they keep for the backward pass."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace import ops

X = np.array([-20.0, -3.0, -2.9, -1.0, -1e-3, 0.0, 1e-3, 0.5, 2.9, 3.0, 5.9, 6.0, 20.0])


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


WANTED = {
    "swish": lambda x: x * _sigmoid(x),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2,
    "sigmoid": _sigmoid,
    "relu6": lambda x: np.minimum(np.maximum(x, 0), 6),
    "hard_sigmoid": lambda x: np.minimum(np.maximum(x + 3, 0), 6) / 6,
    "hard_swish": lambda x: x * np.minimum(np.maximum(x + 3, 0), 6) / 6,
}


@pytest.mark.parametrize("name", WANTED)
def test_values(name):
    np.testing.assert_allclose(jax.jit(getattr(ops, name))(X.astype(np.float32)), WANTED[name](X), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", WANTED)
def test_slopes_away_from_corners(name):
    x = X[[0, 2, 3, 4, 6, 7, 8, 10, 12]] + 1e-4
    slope = (WANTED[name](x + 1e-6) - WANTED[name](x - 1e-6)) / 2e-6
    got = jax.jit(jax.grad(lambda x: getattr(ops, name)(x).sum()))(x.astype(np.float32))
    np.testing.assert_allclose(got, slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", WANTED)
def test_half_precision_is_rounded_once(name):
    x = jnp.array(X, jnp.bfloat16)
    y = getattr(ops, name)(x)
    assert y.dtype == jnp.bfloat16
    wanted = WANTED[name](np.asarray(x, np.float64))
    np.testing.assert_allclose(np.asarray(y, np.float64), wanted, rtol=2**-8, atol=1e-7)


@pytest.mark.parametrize("name", ["swish", "mish", "gelu", "hard_swish", "relu6"])
def test_one_array_is_kept_for_the_backward_pass(name):
    x = jnp.ones((64, 64))
    _, vjp = jax.vjp(getattr(ops, name), x)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(vjp)) <= x.nbytes


def test_relu_and_its_gradient():
    x = jnp.array([-2.0, -0.0, 0.0, 2**-100, 3.0, -np.inf, np.inf])
    np.testing.assert_array_equal(ops.relu(x), [0, 0, 0, 2**-100, 3, 0, np.inf])
    np.testing.assert_array_equal(jax.grad(lambda x: (ops.relu(x) * 2).sum())(x), [0, 0, 0, 2, 2, 0, 2])
    assert np.isnan(ops.relu(jnp.array(np.nan)))


def test_relu_keeps_half_precision():
    assert ops.relu(jnp.array([-1, 1], jnp.bfloat16)).dtype == jnp.bfloat16
