"""Depthwise convolution: as shifted multiply-adds on the CPU, by kernels or the vendor's library on accelerators.

CPU (`depthwise_conv2d`): one multiply-add per weight position over shifted views of the image. As a grouped convolution
XLA takes 60 times as long (55 ms instead of 0.9; 32x32x32x64, 3x3). The gradients have the same form: that of the
images is the same convolution with the rotated window, that of the weights takes all its sums in one pass. JAX's
automatic gradient makes a pass and a program for each weight position: 188 and 223 ms instead of 42 and 62
(8x56x56x144 5x5 stride 2, 8x14x14x672 5x5), and 2 to 4 s of compilation instead of 0.5.

Accelerators (`depthwise_on_accelerator`): the kernels of depthwise_kernels.py where they are faster, else the vendor's
library: cuDNN on an H200 in bfloat16, 256x56x56x144 3x3, takes 0.25 ms forward and 0.50 ms for both gradients, shifted
views 0.44 and 1.58. Without kernels, only the forward pass of a small window with stride 2 is faster as views (0.31 ms
instead of 0.68, 256x112x112x96). In a whole EfficientNet-B0 step the library pays only with optimization barriers
around each convolution (views 6,234 img/s, library 6,853, with barriers 8,061): without them XLA recomputes the
preceding activation for each of its uses.
"""

from collections.abc import Iterator
from functools import partial, reduce
from operator import add

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from headrace.ops import depthwise_kernels as kernels
from headrace.ops.pool import Neighbours, Pads, count_phases, gradient_pads, join_phases, neighbours, out_size

_Size = tuple[int, int]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def depthwise_conv2d(x_NHWC: Array, w_HW1C: Array, stride: int, pads: Pads) -> Array:
    """Convolve each channel with its own window; sums in float32, result in the images' dtype."""
    return _forward(x_NHWC, w_HW1C, stride, pads)[0]


def depthwise_views(x_NHWC: Array, w_HW1C: Array, stride: int, pads: Pads) -> Array:
    """Convolve the same way in the images' dtype, with JAX's automatic gradient."""
    size = out_size(pads, (x_NHWC.shape[1], x_NHWC.shape[2]), (w_HW1C.shape[0], w_HW1C.shape[1]), stride)
    padded = jnp.pad(x_NHWC, ((0, 0), *pads, (0, 0)))
    window = w_HW1C.shape[0], w_HW1C.shape[1]
    products = [
        view * w_HW1C[i, j].astype(view.dtype)[None, None] for i, j, view in _views(padded, window, stride, size)
    ]
    return reduce(jnp.add, products)


def _forward(x_NHWC: Array, w_HW1C: Array, stride: int, pads: Pads) -> tuple[Array, tuple[Array, Array]]:
    size = out_size(pads, (x_NHWC.shape[1], x_NHWC.shape[2]), (w_HW1C.shape[0], w_HW1C.shape[1]), stride)
    padded = jnp.pad(x_NHWC, ((0, 0), *pads, (0, 0)))
    return _sum_views(padded, w_HW1C, stride, size).astype(x_NHWC.dtype), (x_NHWC, w_HW1C)


def _backward(stride: int, pads: Pads, kept: tuple[Array, Array], g_NHWC: Array) -> tuple[Array, Array]:
    x_NHWC, w_HW1C = kept
    window = w_HW1C.shape[0], w_HW1C.shape[1]
    around = gradient_pads(pads, window, stride, (x_NHWC.shape, g_NHWC.shape))
    inner = [(lo, hi, stride - 1) for lo, hi in around]
    dilated = lax.pad(g_NHWC, np.zeros((), g_NHWC.dtype), ((0, 0, 0), *inner, (0, 0, 0)))
    dx = _sum_views(dilated, w_HW1C[::-1, ::-1], 1, (x_NHWC.shape[1], x_NHWC.shape[2]))
    return dx.astype(x_NHWC.dtype), _weight_gradient(x_NHWC, w_HW1C, stride, pads, g_NHWC)


def _weight_gradient(x_NHWC: Array, w_HW1C: Array, stride: int, pads: Pads, g_NHWC: Array) -> Array:
    """Sum the products of the gradient with each shifted view over images and pixels, all in one reduction."""
    g = g_NHWC.astype(jnp.float32)
    padded = jnp.pad(x_NHWC, ((0, 0), *pads, (0, 0)))
    window = w_HW1C.shape[0], w_HW1C.shape[1]
    products = [view.astype(jnp.float32) * g for _, _, view in _views(padded, window, stride, g.shape[1:3])]
    # One reduction of all products: a sum for each weight position would be a pass and a program each.
    zeros = [np.float32(0)] * len(products)
    sums = lax.reduce(products, zeros, lambda a, b: [p + q for p, q in zip(a, b, strict=True)], (0, 1, 2))
    return jnp.stack(sums).reshape(w_HW1C.shape).astype(w_HW1C.dtype)


def _sum_views(padded: Array, w_HW1C: Array, stride: int, size: _Size) -> Array:
    """Sum the shifted views, each multiplied by its weights."""
    total = jnp.zeros((padded.shape[0], *size, padded.shape[3]), jnp.float32)
    window = w_HW1C.shape[0], w_HW1C.shape[1]
    for i, j, view in _views(padded, window, stride, size):
        total = total + view.astype(jnp.float32) * w_HW1C[i, j].astype(jnp.float32)[None, None]
    return total


def _views(padded: Array, window: _Size, stride: int, size: tuple[int, ...]) -> Iterator[tuple[int, int, Array]]:
    """Yield, for each position in the window, the pixels that it covers."""
    for i in range(window[0]):
        for j in range(window[1]):
            rows = slice(i, i + (size[0] - 1) * stride + 1, stride)
            columns = slice(j, j + (size[1] - 1) * stride + 1, stride)
            yield i, j, padded[:, rows, columns, :]


depthwise_conv2d.defvjp(_forward, _backward)


_SMALL_WINDOW = 3


def depthwise_on_accelerator(x_NHWC: Array, w_HW1C: Array, stride: int, pads: Pads) -> Array:
    """Convolve each channel with its own window, in the images' dtype."""
    return _accelerated(x_NHWC, w_HW1C, stride, pads, (x_NHWC.shape[1], x_NHWC.shape[2]))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _accelerated(x_NHWC: Array, w_HW1C: Array, stride: int, pads: Pads, _size: _Size) -> Array:
    if kernels.suits_forward(x_NHWC, w_HW1C):
        return kernels.depthwise_forward(x_NHWC, w_HW1C, stride, pads)
    # The one case in which views are faster: 0.31 ms instead of 0.68 (256x112x112x96, H200).
    if stride > 1 and w_HW1C.shape[0] <= _SMALL_WINDOW:
        return depthwise_views(x_NHWC, w_HW1C, stride, pads)
    return _grouped(x_NHWC, w_HW1C, stride, pads)


def _accelerated_forward(
    x_NHWC: Array, w_HW1C: Array, stride: int, pads: Pads, size: _Size
) -> tuple[Array, tuple[Array, Array]]:
    inside, around = _divided(x_NHWC, w_HW1C, stride, pads)
    # Without barriers XLA recomputes the preceding activation for each of its uses (6,853 instead of 8,061 img/s).
    x = lax.optimization_barrier(jnp.pad(x_NHWC, ((0, 0), *inside, (0, 0))))
    return lax.optimization_barrier(_accelerated(x, w_HW1C, stride, around, size)), (x, w_HW1C)


def _accelerated_backward(
    stride: int, pads: Pads, size: _Size, kept: tuple[Array, Array], g_NHWC: Array
) -> tuple[Array, Array]:
    x, w_HW1C = kept
    window, g = (w_HW1C.shape[0], w_HW1C.shape[1]), lax.optimization_barrier(g_NHWC)
    around = pads if x.shape[1:3] == size else _NONE  # else they are in the images
    if kernels.suits_weights(x, w_HW1C, (g.shape[1], g.shape[2]), pads):
        dw = kernels.depthwise_weights(x, g, window[0], stride, around).astype(w_HW1C.dtype)
    else:
        dw = jax.vjp(lambda w: _grouped(x, w, stride, around), w_HW1C)[1](g)[0]
    if stride > 1 and kernels.suits_forward(x, w_HW1C):
        dx = kernels.depthwise_images(g, w_HW1C, stride, pads, size)
    elif stride > 1:
        dx = _spread(g, w_HW1C, stride, pads, size)
    else:
        dx = _accelerated(g, w_HW1C[::-1, ::-1], 1, gradient_pads(pads, window, 1, ((0, *size), g.shape)), size)
    return lax.optimization_barrier((dx, dw))


_NONE: Pads = (0, 0), (0, 0)


def _divided(x_NHWC: Array, w_HW1C: Array, stride: int, pads: Pads) -> tuple[Pads, Pads]:
    """Return the padding to be written into images, and the padding that is left to the convolution."""
    size = out_size(pads, (x_NHWC.shape[1], x_NHWC.shape[2]), (w_HW1C.shape[0], w_HW1C.shape[1]), stride)
    by_kernels = kernels.suits_forward(x_NHWC, w_HW1C) and kernels.suits_weights(x_NHWC, w_HW1C, size, pads)
    # The library pads both sides alike. Other padding is written into the image where the activation before it is
    # computed, and not in a pass of its own: 0.69 instead of 0.80 ms (256x112x112x96, H200).
    return (_NONE, pads) if by_kernels or all(lo == hi for lo, hi in pads) else (pads, _NONE)


def _spread(g_NHWC: Array, w_HW1C: Array, stride: int, pads: Pads, size: _Size) -> Array:
    """Return the images' gradient: for each pixel, the sum over the few windows that it is in, in float32."""
    # The library convolves the gradient with zeros between its pixels, which are written first: 0.89 ms instead of 0.49
    # (256x112x112x96 3x3), 0.57 instead of 0.42 (256x56x56x144 5x5), 0.21 instead of 0.11 (256x14x14x672 5x5), H200.
    window, counts = (w_HW1C.shape[0], w_HW1C.shape[1]), count_phases(size, stride)
    all_near = list(neighbours(window, stride, pads))
    # Gathered before: with the indices inside the kernel, the 5x5 above took 0.83 ms in a step, and 0.42 alone.
    weights = lax.optimization_barrier([_at_places(near, w_HW1C) for near in all_near])
    shares = (
        near.values(g_NHWC, counts).astype(jnp.float32) * each[None, None, :, None, :]
        for near, each in zip(all_near, weights, strict=True)
    )
    return join_phases(reduce(add, shares).astype(g_NHWC.dtype), size)


def _at_places(near: Neighbours, w_HW1C: Array) -> Array:
    """Return the weights [phase, phase, channel] of a pixel's places, 0 outside of the window."""
    rows, columns = (
        np.clip(place, 0, k - 1) for place, k in zip((near.rows, near.columns), w_HW1C.shape, strict=False)
    )
    inside = near.inside[:, :, None].astype(np.float32)
    return w_HW1C[rows][:, columns, 0].astype(jnp.float32) * inside


def _grouped(x_NHWC: Array, w_HW1C: Array, stride: int, pads: Pads) -> Array:
    return lax.conv_general_dilated(
        x_NHWC,
        w_HW1C,
        (stride, stride),
        pads,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x_NHWC.shape[-1],
    )


_accelerated.defvjp(_accelerated_forward, _accelerated_backward)
