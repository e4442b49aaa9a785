"""Convolution whose gradients are again plain NHWC/HWIO convolutions.

XLA's CPU backend hands a convolution to its fast kernel only in this canonical layout. It rewrites other layouts, such
as those of JAX's own gradients, but not inside `scan`, `while` or `cond`: there a training step was 15 times slower
(1012 against 64 ms). So both gradients are written here in the canonical layout from the start.

Shapes in names: N images, H height, W width, C channels in, O channels out; k window, i input size, o output size.
"""

from functools import partial, reduce
from itertools import pairwise
from operator import add

import jax
import jax.numpy as jnp
from jax import Array, lax

from headrace.ops.window import Pads

# The weight gradient of 128 images at once took 1.5 to 2.4 times as long as that of 8 x 16 images (8x8x64: 20.3 against
# 8.6 ms of CPU time), as the turned images no longer fit the cache. More than 8 chunks would only be more to compile.
_CHUNK_IMAGES = 16
_MAX_CHUNKS = 8
_CANONICAL = ("NHWC", "HWIO", "NHWC")


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def conv2d_canonical(x_NHWC: Array, w_HWCO: Array, stride: int, pads: Pads) -> Array:
    """Convolve; no groups."""
    return _forward(x_NHWC, w_HWCO, stride, pads)[0]


def _forward(x_NHWC: Array, w_HWCO: Array, stride: int, pads: Pads) -> tuple[Array, tuple[Array, Array]]:
    # XLA's convolution itself, not `conv2d_canonical`: a pipeline stage keeps what its checkpoint policy can see.
    y_NHWO = lax.conv_general_dilated(x_NHWC, w_HWCO, (stride, stride), pads, dimension_numbers=_CANONICAL)
    return y_NHWO, (x_NHWC, w_HWCO)


def _backward(stride: int, pads: Pads, kept: tuple[Array, Array], g_NHWO: Array) -> tuple[Array, Array]:
    x_NHWC, w_HWCO = kept
    return _input_gradient(x_NHWC, w_HWCO, stride, pads, g_NHWO), _weight_gradient(x_NHWC, w_HWCO, stride, pads, g_NHWO)


def _input_gradient(x_NHWC: Array, w_HWCO: Array, stride: int, pads: Pads, g_NHWO: Array) -> Array:
    """Convolve the gradient, spread out by the stride, with the turned weights."""
    around = []
    for (lo, _), k, i, o in zip(pads, w_HWCO.shape[:2], x_NHWC.shape[1:3], g_NHWO.shape[1:3], strict=True):
        before = k - 1 - lo
        around.append((before, i - ((o - 1) * stride + 1) - before + k - 1))
    turned_HWOC = jnp.transpose(w_HWCO[::-1, ::-1], (0, 1, 3, 2))
    return lax.conv_general_dilated(
        g_NHWO, turned_HWOC, (1, 1), around, lhs_dilation=(stride, stride), dimension_numbers=_CANONICAL
    )


def _weight_gradient(x_NHWC: Array, w_HWCO: Array, stride: int, pads: Pads, g_NHWO: Array) -> Array:
    """Add up the weight gradients of a few images at a time."""
    num_images = x_NHWC.shape[0]
    num_chunks = min(_MAX_CHUNKS, -(-num_images // _CHUNK_IMAGES))
    edges = [num_images * i // num_chunks for i in range(num_chunks + 1)]
    parts = [
        _weight_gradient_of(x_NHWC[first:last], w_HWCO, stride, pads, g_NHWO[first:last])
        for first, last in pairwise(edges)
    ]
    return reduce(add, parts)


def _weight_gradient_of(x_NHWC: Array, w_HWCO: Array, stride: int, pads: Pads, g_NHWO: Array) -> Array:
    """Convolve the images (channels as batch, batch as channels) with the gradient as a window."""
    around = []
    for (lo, _), k, i, o in zip(pads, w_HWCO.shape[:2], x_NHWC.shape[1:3], g_NHWO.shape[1:3], strict=True):
        around.append((lo, (o - 1) * stride + k - i - lo))
    dw_CHWO = lax.conv_general_dilated(
        jnp.transpose(x_NHWC, (3, 1, 2, 0)),
        jnp.transpose(g_NHWO, (1, 2, 0, 3)),
        (1, 1),
        around,
        rhs_dilation=(stride, stride),
        dimension_numbers=_CANONICAL,
    )
    return jnp.transpose(dw_CHWO, (1, 2, 0, 3))


conv2d_canonical.defvjp(_forward, _backward)
