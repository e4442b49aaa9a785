"""Average pool and window arithmetic."""

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
