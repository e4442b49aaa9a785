"""Max pooling by the kernels for CPUs, in every compiled variant and both dtypes, against the definition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.ops.native_pool import find_max_pool
from headrace.ops.pool import pad_pixels
from headrace.ops.tracing import collecting

from .test_native_units import variant  # noqa: F401  (the fixture runs each test with each library)

POOLS = pytest.mark.parametrize(
    ("shape", "window", "stride", "padding"),
    [
        ((2, 9, 7, 20), 3, 2, ((1, 1), (1, 1))),
        ((1, 8, 8, 16), 2, 2, "VALID"),
        ((3, 5, 6, 5), 3, 1, "SAME"),
        ((1, 60, 40, 33), 5, 3, ((2, 1), (0, 2))),  # in bands of rows
        ((2, 9, 9, 3), 2, 3, "VALID"),  # pixels between windows, and after the last
        ((1, 20, 20, 1), 16, 2, "SAME"),  # as many places as a byte can tell apart
    ],
)
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])


def pool(x: Any, dy: Any, window: int, stride: int, padding: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest values of windows, and the gradient: to the first largest pixel of each, in float64."""
    x, dy = (None if each is None else np.asarray(each, np.float64) for each in (x, dy))
    n, height, width, c = x.shape
    (top, bottom), (left, right) = pad_pixels(padding, (height, width), (window, window), stride)
    padded = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)), constant_values=-np.inf)
    rows, columns = ((size - window) // stride + 1 for size in padded.shape[1:3])
    y, dx = np.zeros((n, rows, columns, c)), np.zeros(padded.shape)
    for i, r, q, k in np.ndindex(*y.shape):
        at = np.s_[i, r * stride : r * stride + window, q * stride : q * stride + window, k]
        y[i, r, q, k] = padded[at].max()
        if dy is not None:
            first = np.unravel_index(padded[at].argmax(), (window, window))
            dx[at][first] += dy[i, r, q, k]
    return y, dx[:, top : top + height, left : left + width]


@POOLS
@DTYPES
def test_the_largest_value_of_each_window_and_its_gradient(shape, window, stride, padding, dtype) -> None:
    rng = np.random.default_rng(7)
    x = jnp.array(rng.integers(-9, 9, shape), dtype)  # many equal values
    found, gradient = jax.vjp(lambda x: find_max_pool(x, window, stride, padding, "on"), x)
    assert found is not None
    dy = jnp.array(rng.integers(-9, 9, found.shape), dtype)  # sums of at most 256 of them are exact
    y, dx = pool(x, dy, window, stride, padding)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found, np.float64), y)
    (found_dx,) = gradient(dy)
    assert found_dx.dtype == dtype
    # A pixel that is the largest of many windows has a sum of more than the eight bits that bfloat16 keeps.
    np.testing.assert_array_equal(np.asarray(found_dx, np.float64), np.asarray(jnp.array(dx, dtype), np.float64))


@POOLS
@DTYPES
def test_inference_pools_alike_and_passes_a_nan_on(shape, window, stride, padding, dtype) -> None:
    x = jnp.array(np.random.default_rng(7).standard_normal(shape), dtype).at[0, 1, 1, 0].set(jnp.nan)
    with collecting():
        found = find_max_pool(x, window, stride, padding, "on")
    y, _ = pool(x, None, window, stride, padding)
    assert np.isnan(y).any()
    np.testing.assert_array_equal(np.asarray(found, np.float64), y)
    np.testing.assert_array_equal(np.asarray(find_max_pool(x, window, stride, padding, "on"), np.float64), y)


def test_other_pools_are_left_to_xla() -> None:
    x = jnp.zeros((1, 4, 4, 8))
    assert find_max_pool(x, 2, 2, "VALID", "off") is None
    assert find_max_pool(x, 2, 2, ((2, 0), (0, 0)), "on") is None  # windows of nothing but padding
    assert find_max_pool(x, 17, 1, "SAME", "on") is None  # more places than a byte can tell apart
    assert find_max_pool(x, 5, 1, "VALID", "on") is None  # no window fits
    assert find_max_pool(x.astype(jnp.float16), 2, 2, "VALID", "on") is None
