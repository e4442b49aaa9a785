"""Depthwise convolution as one multiply-add per weight position, over shifted views of the image.

On the CPU XLA runs the grouped convolution it would otherwise be 60 times slower (0.9 against 55 ms, 32x32x32x64, 3x3).
"""

import jax.numpy as jnp
from jax import Array

from headrace.ops.window import Pads, out_size


def depthwise_conv2d(x_NHWC: Array, w_HW1C: Array, stride: int, pads: Pads) -> Array:
    """Convolve each channel with its own window; sums in float32, returns the images' dtype."""
    kernel_h, kernel_w = w_HW1C.shape[:2]
    height, width = out_size(pads, (x_NHWC.shape[1], x_NHWC.shape[2]), (kernel_h, kernel_w), stride)
    x = jnp.pad(x_NHWC, ((0, 0), *pads, (0, 0))).astype(jnp.float32)
    w = w_HW1C.astype(jnp.float32)
    total = jnp.zeros((x.shape[0], height, width, x.shape[3]), jnp.float32)
    for i in range(kernel_h):
        for j in range(kernel_w):
            rows = slice(i, i + (height - 1) * stride + 1, stride)
            columns = slice(j, j + (width - 1) * stride + 1, stride)
            total = total + x[:, rows, columns, :] * w[i, j][None, None]
    return total.astype(x_NHWC.dtype)
