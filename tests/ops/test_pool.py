"""Average pools and window arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace import ops
from headrace.ops.pool import out_size, pad_pixels


def test_global_average_pool_sums_in_float32():
    x = np.full((1, 100, 100, 1), 1 + 2**-7)
    y = ops.global_average_pool(jnp.array(x, jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert float(y[0, 0]) == 1 + 2**-7


def test_images_are_materialised_before_their_mean_on_a_gpu_and_its_gradient_is_not(monkeypatch):
    monkeypatch.setattr("headrace.ops.pool.on_gpu", lambda: True)
    x = np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype(np.float32)

    def loss(x):
        return (ops.global_average_pool(x) ** 2).sum()

    assert str(jax.make_jaxpr(jax.value_and_grad(loss))(x)).count("optimization_barrier") == 1
    means = x.astype(np.float64).mean((1, 2))
    value, slope = jax.jit(jax.value_and_grad(loss))(x)
    np.testing.assert_allclose(value, (means**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(slope, np.broadcast_to(2 * means[:, None, None] / 16, x.shape), rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize(("window", "stride", "pads"), [(2, 2, ((0, 1), (0, 0))), (3, 2, ((1, 1), (1, 1)))])
def test_average_pool_counts_the_pixels_inside(window, stride, pads):
    x = np.random.default_rng(0).normal(size=(2, 5, 6, 3)).astype(np.float32)
    y = np.asarray(jax.jit(lambda x: ops.average_pool(x, window, stride, pads))(x))
    for i in range(y.shape[1]):
        for j in range(y.shape[2]):
            starts = (i * stride - pads[0][0], j * stride - pads[1][0])
            rows, columns = (slice(max(start, 0), start + window) for start in starts)
            np.testing.assert_allclose(y[:, i, j], x[:, rows, columns].mean((1, 2)), rtol=1e-5, atol=1e-6)
    assert y.shape[1:3] == out_size(pads, (5, 6), (window, window), stride)


def test_cells_of_nearly_equal_size():
    # 5 pixels in 3 cells: 0-1, 1-3, 3-4; 1 pixel in 3 cells: three times the same
    x = np.random.default_rng(0).normal(size=(2, 5, 1, 4)).astype(np.float32)
    y = np.asarray(jax.jit(lambda x: ops.resize_by_average(x, 3))(x))
    wanted = [x[:, :2].mean(1), x[:, 1:4].mean(1), x[:, 3:].mean(1)]
    for i, rows in enumerate(wanted):
        for j in range(3):
            np.testing.assert_allclose(y[:, i, j], rows[:, 0], rtol=1e-5, atol=1e-6)
