"""Max pooling on the CPU by our C++ kernels (`native/pool.hh`), float32 and bfloat16, with its gradient.

XLA compares one strided slice for each place of the window, and computes the places of the maxima again for each of the
windows that a pixel is in: in bfloat16 the gradient of ResNet-50's pool took 50 ms of a step of 690 at batch 8.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace.ops.native_kernels import call_kernel, uses_kernels
from headrace.ops.pool import Padding, Windows, out_size, pad_pixels
from headrace.ops.tracing import weights_are_constant

_MOST_PLACES = 256  # of a window: a place is a byte


def find_max_pool(x_NHWC: Array, window: int, stride: int, padding: Padding, mode: str) -> Array | None:
    """Return the largest values of windows that have at least one pixel of the image; None where XLA is to do it.

    Among equal pixels the first gets the gradient.
    """
    if not uses_kernels(mode) or x_NHWC.dtype not in (jnp.float32, jnp.bfloat16) or window**2 > _MOST_PLACES:
        return None
    size = (x_NHWC.shape[1], x_NHWC.shape[2])
    if not all(isinstance(each, int) for each in x_NHWC.shape):  # a program for any batch size
        return None
    pads = pad_pixels(padding, size, (window, window), stride)
    if min(*out_size(pads, size, (window, window), stride), *x_NHWC.shape) < 1 or max(pads[0] + pads[1]) >= window:
        return None
    windows = Windows(window, stride, pads)
    if weights_are_constant():
        shape, geometry = _geometry(x_NHWC.shape, windows)
        (y,) = call_kernel("max_pool", [shape], x_NHWC, geometry=geometry)
        return y
    return _max_pool(x_NHWC, x_NHWC.shape, windows)


def _geometry(shape: tuple[int, ...], windows: Windows) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the shape of the result, and the sizes as kernels take them."""
    (n, height, width, c), (k, stride, pads) = shape, windows
    rows, columns = out_size(pads, (height, width), (k, k), stride)
    sizes = [n, height, width, c, k, k, c, stride, pads[0][0], pads[1][0], rows, columns, c]
    return (n, rows, columns, c), np.array(sizes, np.int64)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _max_pool(x_NHWC: Array, shape: tuple[int, ...], windows: Windows) -> Array:
    return _forward(x_NHWC, shape, windows)[0]


def _forward(x_NHWC: Array, shape: tuple[int, ...], windows: Windows) -> tuple[Array, Array]:
    result, geometry = _geometry(shape, windows)
    places = jax.ShapeDtypeStruct(result, jnp.uint8)
    y, winner = call_kernel("max_pool", [result, places], x_NHWC, geometry=geometry)
    return y, winner


def _backward(shape: tuple[int, ...], windows: Windows, winner: Array, dy: Array) -> tuple[Array]:
    (dx,) = call_kernel("max_pool_gradient", [shape], dy, winner, geometry=_geometry(shape, windows)[1])
    return (dx,)


_max_pool.defvjp(_forward, _backward)
