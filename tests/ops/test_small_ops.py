"""Relu, dense, average pool and window arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace import ops
from headrace.ops.pool import out_size, pad_pixels


def test_relu_and_its_gradient():
    x = jnp.array([-2.0, -0.0, 0.0, 2**-100, 3.0, -np.inf, np.inf])
    np.testing.assert_array_equal(ops.relu(x), [0, 0, 0, 2**-100, 3, 0, np.inf])
    np.testing.assert_array_equal(jax.grad(lambda x: (ops.relu(x) * 2).sum())(x), [0, 0, 0, 2, 2, 0, 2])
    assert np.isnan(ops.relu(jnp.array(np.nan)))


def test_relu_keeps_half_precision():
    assert ops.relu(jnp.array([-1, 1], jnp.bfloat16)).dtype == jnp.bfloat16


def test_dense_sums_in_float32():
    x = np.full((1, 4096), 1 + 2**-7)
    w, b = np.full((4096, 2), 2**-12), np.array([1.0, -1.0])
    y = ops.dense(jnp.array(x, jnp.bfloat16), jnp.array(w, jnp.bfloat16), jnp.array(b))
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, x @ w + b[None], rtol=1e-6)


def test_global_average_pool_sums_in_float32():
    x = np.full((1, 100, 100, 1), 1 + 2**-7)
    y = ops.global_average_pool(jnp.array(x, jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert float(y[0, 0]) == 1 + 2**-7


@pytest.mark.parametrize(
    ("padding", "size", "window", "stride", "pads", "out"),
    [
        ("SAME", 32, 3, 1, (1, 1), 32),
        ("SAME", 32, 3, 2, (0, 1), 16),
        ("SAME", 33, 3, 2, (1, 1), 17),
        ("SAME", 224, 7, 2, (2, 3), 112),
        ("SAME", 8, 1, 2, (0, 0), 4),
        ("VALID", 32, 3, 1, (0, 0), 30),
        ("VALID", 30, 5, 5, (0, 0), 6),
        ("VALID", 4, 5, 5, (0, 0), 0),
        (((3, 3), (3, 3)), 224, 7, 2, (3, 3), 112),
    ],
)
def test_windows(padding, size, window, stride, pads, out):
    assert pad_pixels(padding, (size, size), (window, window), stride) == (pads, pads)
    assert out_size(padding, (size, size), (window, window), stride) == (out, out)
