"""Pooling over windows and over whole images."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from headrace.ops.window import Padding, Pads, pad_pixels


def max_pool(x_NHWC: Array, window: int, stride: int, padding: Padding = "VALID") -> Array:
    """Take the largest value of each window; padded pixels never win, and of equal pixels the first gets the gradient."""
    return _max_pool(x_NHWC, window, stride, pad_pixels(padding, x_NHWC.shape[1:3], (window, window), stride))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _max_pool(x_NHWC: Array, window: int, stride: int, pads: Pads) -> Array:
    """Compare strided slices, one for each place of the window, and remember the winner's place.

    XLA's gradient of a window's maximum searches the window again: a ResNet-50 step took 1.1 % longer with it (H200).
    """
    return _max_pool_forward(x_NHWC, window, stride, pads)[0]


def _max_pool_forward(x_NHWC: Array, window: int, stride: int, pads: Pads):
    best, winner = None, None
    lowest = np.array(-np.inf, x_NHWC.dtype)
    padded = lax.pad(x_NHWC, lowest, ((0, 0, 0), (*pads[0], 0), (*pads[1], 0), (0, 0, 0)))
    rows, columns = ((size - window) // stride * stride + 1 for size in padded.shape[1:3])
    for place, (i, j) in enumerate(np.ndindex(window, window)):
        pixels = padded[:, i : i + rows : stride, j : j + columns : stride]
        if best is None or winner is None:
            best, winner = pixels, jnp.zeros(pixels.shape, jnp.uint8)
        else:
            winner = jnp.where(pixels > best, np.uint8(place), winner)
            best = jnp.maximum(best, pixels)  # unlike the comparison, it passes a NaN on
    assert best is not None and window * window <= 256
    return best, (winner, x_NHWC.shape)


def _max_pool_backward(window: int, stride: int, pads: Pads, saved: tuple[Array, tuple[int, ...]], dy: Array):
    winner, shape = saved
    dx = jnp.zeros(shape, dy.dtype)
    for place, (i, j) in enumerate(np.ndindex(window, window)):
        share = jnp.where(winner == np.uint8(place), dy, np.zeros((), dy.dtype))
        around = []
        for first, size, count in zip((i - pads[0][0], j - pads[1][0]), shape[1:3], dy.shape[1:3], strict=True):
            around.append((first, size - first - (count - 1) * stride - 1, stride - 1))
        dx = dx + lax.pad(share, np.zeros((), dy.dtype), ((0, 0, 0), *around, (0, 0, 0)))
    return (dx,)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)


def global_average_pool(x_NHWC: Array) -> Array:
    """Average each channel over the image; summed in float32."""
    return jnp.mean(x_NHWC.astype(jnp.float32), axis=(1, 2)).astype(x_NHWC.dtype)
