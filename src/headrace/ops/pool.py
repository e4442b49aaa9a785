"""Pooling over windows and over whole images."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from headrace.ops.window import Padding, pad_pixels


def max_pool(x_NHWC: Array, window: int, stride: int, padding: Padding = "VALID") -> Array:
    """Take the largest value of each window; padded pixels never win."""
    pads = pad_pixels(padding, (x_NHWC.shape[1], x_NHWC.shape[2]), (window, window), stride)
    lowest = np.array(-np.inf, x_NHWC.dtype)
    return lax.reduce_window(
        x_NHWC, lowest, lax.max, (1, window, window, 1), (1, stride, stride, 1), ((0, 0), *pads, (0, 0))
    )


def global_average_pool(x_NHWC: Array) -> Array:
    """Average each channel over the image; summed in float32."""
    return jnp.mean(x_NHWC.astype(jnp.float32), axis=(1, 2)).astype(x_NHWC.dtype)
