"""2-D convolution (NHWC images, HWIO weights) in a form for each backend, and the dense layer's product.

On GPU and TPU a convolution is XLA's, except for an image stem (`conv2d_folded`) and depthwise ones (depthwise.py). On
the CPU, float32 and bfloat16 ones are our own (native_kernels.py) where those are compiled, others are `conv2d_cpu`:
XLA uses its fast CPU kernel only for the canonical layout NHWC x HWIO -> NHWC. It rewrites other layouts, such as those
of JAX's automatic gradients, but not inside `scan`, `while` or `cond`, where a ResNet-8 training step was 15 times
slower (1,012 ms instead of 64). Both gradients are therefore written in that layout.

Shapes in names: N images, H height, W width, C channels in, I channels in per group, O channels out; k window size,
i input size, o output size.
"""

from functools import partial, reduce
from itertools import pairwise
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from headrace.ops import native_conv, native_kernels
from headrace.ops.depthwise import depthwise_conv2d, depthwise_on_accelerator
from headrace.ops.pool import Padding, Pads, gradient_pads, out_size, pad_pixels
from headrace.ops.tracing import is_portable, on_cpu

# The weight gradient of 128 images at once took 1.5 to 2.4 times as long as in 8 chunks of 16 (8x8x64: 20.3 instead of
# 8.6 ms of CPU time), because the transposed images no longer fit the cache. More chunks only take longer to compile.
_CHUNK_IMAGES = 16
_MAX_CHUNKS = 8
_CANONICAL = ("NHWC", "HWIO", "NHWC")


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def conv2d_canonical(x_NHWC: Array, w_HWCO: Array, stride: int, pads: Pads) -> Array:
    """Convolve without groups; both gradients are NHWC x HWIO convolutions too."""
    return _forward(x_NHWC, w_HWCO, stride, pads)[0]


def _forward(x_NHWC: Array, w_HWCO: Array, stride: int, pads: Pads) -> tuple[Array, tuple[Array, Array]]:
    # Call XLA's convolution directly: the checkpoint policy of a pipeline stage cannot see inside a custom_vjp.
    y_NHWO = lax.conv_general_dilated(x_NHWC, w_HWCO, (stride, stride), pads, dimension_numbers=_CANONICAL)
    return y_NHWO, (x_NHWC, w_HWCO)


def _backward(stride: int, pads: Pads, kept: tuple[Array, Array], g_NHWO: Array) -> tuple[Array, Array]:
    x_NHWC, w_HWCO = kept
    return _input_gradient(x_NHWC, w_HWCO, stride, pads, g_NHWO), _weight_gradient(x_NHWC, w_HWCO, stride, pads, g_NHWO)


def _input_gradient(x_NHWC: Array, w_HWCO: Array, stride: int, pads: Pads, g_NHWO: Array) -> Array:
    """Convolve the gradient, dilated by the stride, with the rotated weights."""
    around = gradient_pads(pads, w_HWCO.shape[:2], stride, (x_NHWC.shape, g_NHWO.shape))
    rotated_HWOC = jnp.transpose(w_HWCO[::-1, ::-1], (0, 1, 3, 2))
    return lax.conv_general_dilated(
        g_NHWO, rotated_HWOC, (1, 1), around, lhs_dilation=(stride, stride), dimension_numbers=_CANONICAL
    )


def _weight_gradient(x_NHWC: Array, w_HWCO: Array, stride: int, pads: Pads, g_NHWO: Array) -> Array:
    """Sum the weight gradients of chunks of images that fit the cache."""
    num_images = x_NHWC.shape[0]
    num_chunks = min(_MAX_CHUNKS, -(-num_images // _CHUNK_IMAGES))
    edges = [num_images * i // num_chunks for i in range(num_chunks + 1)]
    parts = [
        _chunk_weight_gradient(x_NHWC[first:last], w_HWCO, stride, pads, g_NHWO[first:last])
        for first, last in pairwise(edges)
    ]
    return reduce(add, parts)


def _chunk_weight_gradient(x_NHWC: Array, w_HWCO: Array, stride: int, pads: Pads, g_NHWO: Array) -> Array:
    """Convolve the images, with batch and channels swapped, with the gradient as the window."""
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


def conv2d(
    x_NHWC: Array,
    w_HWIO: Array,
    stride: int = 1,
    padding: Padding = "SAME",
    groups: int = 1,
    kernels: str = "auto",
) -> Array:
    """Convolve images with weights of the same dtype, which is also the dtype of the result.

    `kernels` says when the CPU's are our own instead of XLA's.
    """
    is_half = x_NHWC.dtype.itemsize == 2 and on_cpu()
    if is_half:
        half = native_kernels.find_window(x_NHWC, w_HWIO, stride, padding, groups, kernels)
        if half is not None:
            return native_conv.convolve(x_NHWC, w_HWIO, half)
    # 16-bit values are exact in float32, and their products are summed there by XLA, too: the result is rounded once.
    wide_NHWC, wide_HWIO = (a.astype(jnp.float32) if is_half else a for a in (x_NHWC, w_HWIO))
    window = native_kernels.find_window(wide_NHWC, wide_HWIO, stride, padding, groups, kernels)
    if window is not None:
        y: Any = native_conv.convolve(wide_NHWC, wide_HWIO, window)
        return y.astype(x_NHWC.dtype)
    height, width = x_NHWC.shape[1:3]
    pads = pad_pixels(padding, (height, width), (w_HWIO.shape[0], w_HWIO.shape[1]), stride)
    # An exported program may be compiled on another machine: both forms are in it, and that machine's is chosen there.
    if is_portable():
        return lax.platform_dependent(
            x_NHWC,
            w_HWIO,
            cpu=lambda x, w: conv2d_cpu(x, w, stride, pads, groups),
            default=lambda x, w: conv2d_plain(x, w, stride, pads, groups),
        )
    if not on_cpu():
        if groups == 1 and _is_image_stem(x_NHWC, w_HWIO, stride):
            return conv2d_folded(x_NHWC, w_HWIO, pads)
        if _is_depthwise(w_HWIO, groups):
            return depthwise_on_accelerator(x_NHWC, w_HWIO, stride, pads)
        return conv2d_plain(x_NHWC, w_HWIO, stride, pads, groups)
    return conv2d_cpu(x_NHWC, w_HWIO, stride, pads, groups)


def conv2d_plain(x_NHWC: Array, w_HWIO: Array, stride: int, pads: Pads, groups: int) -> Array:
    """Leave everything to XLA, which is the right choice on GPU and TPU."""
    return lax.conv_general_dilated(
        x_NHWC, w_HWIO, (stride, stride), pads, dimension_numbers=_CANONICAL, feature_group_count=groups
    )


def _is_depthwise(w_HWIO: Array, groups: int) -> bool:
    return groups > 1 and w_HWIO.shape[2] == 1 and w_HWIO.shape[3] == groups


def _is_image_stem(x_NHWC: Array, w_HWIO: Array, stride: int) -> bool:
    _, height, width, channels = x_NHWC.shape
    odd_window = w_HWIO.shape[0] % 2 == 1 and w_HWIO.shape[1] % 2 == 1 and w_HWIO.shape[0] > 1
    return channels <= 4 and stride == 2 and height % 2 == 0 and width % 2 == 0 and odd_window


def conv2d_folded(x_NHWC: Array, w_HWIO: Array, pads: Pads) -> Array:
    """Convolve with stride 2 and an odd window by folding pixels into channels; the sums are the same.

    Two rows and two columns are folded, or four columns with two outputs as channels, which lie beside each other.
    """
    # Three input channels leave most of a matrix unit idle; twelve do not. Without folding, a ResNet-50 step took 4.4 %
    # longer (H200, bfloat16). Four columns make more products with zero, but fill a tile with outputs: 0.34 instead of
    # 0.73 ms forward and 0.59 instead of 0.54 for the gradient (256x224x224x3, 7x7, 64 outputs), 0.18 instead of 0.31
    # and 0.22 instead of 0.24 (3x3, 32 outputs).
    n, height, width, channels = x_NHWC.shape
    kh, kw, _, filters = w_HWIO.shape
    wide = 4 if width % 4 == 0 else 2
    phases = wide // 2
    # A row of zeros makes the window even, on the side that makes it start at an even pixel; columns of zeros make it
    # start and end where a fold does, for each phase of the outputs.
    (top, _), (left, _) = pads
    rows, before = (kh + 1) // 2, -(-left // wide)
    folds = before + (wide - 2 - left + kw - 1) // wide + 1
    leads = [wide * before + 2 * phase - left for phase in range(phases)]
    w = jnp.stack(
        [jnp.pad(w_HWIO, ((top % 2, 1 - top % 2), (lead, wide * folds - lead - kw), (0, 0), (0, 0))) for lead in leads],
        3,
    )
    w = w.reshape(rows, 2, folds, wide, channels, phases * filters).transpose(0, 2, 1, 3, 4, 5)
    w = w.reshape(rows, folds, 2 * wide * channels, phases * filters)
    x = x_NHWC.reshape(n, height // 2, 2, width // wide, wide, channels).transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(n, height // 2, width // wide, 2 * wide * channels)
    # Filled up with zeros: cuDNN's matrix kernels take multiples of eight, and it would copy twelve into sixteen itself
    # for the convolution and for its gradient (2 % of that step); 32 channels are faster than 24 (0.34 and 0.52 ms).
    missing = -2 * wide * channels % (8 * phases * phases)
    x, w = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))), jnp.pad(w, ((0, 0), (0, 0), (0, missing), (0, 0)))
    high, across = out_size(pads, (height, width), (kh, kw), 2)
    above, columns = (top + 1) // 2, -(-across // phases)
    around = (above, high - 1 - above + rows - height // 2), (before, columns - 1 - before + folds - width // wide)
    y = conv2d_plain(x, w, 1, around, 1).reshape(n, high, columns * phases, filters)
    return y[:, :, :across]


def conv2d_cpu(x_NHWC: Array, w_HWIO: Array, stride: int, pads: Pads, groups: int) -> Array:
    """Pick the form whose forward and backward passes XLA's CPU backend runs fast, inside loops as well."""
    if groups == 1:
        return conv2d_canonical(x_NHWC, w_HWIO, stride, pads)
    if _is_depthwise(w_HWIO, groups):
        return depthwise_conv2d(x_NHWC, w_HWIO, stride, pads)
    # XLA's gradient of a grouped convolution took 197 ms, one convolution per group 5 ms (64 channels, 4 groups).
    return conv2d_grouped(x_NHWC, w_HWIO, stride, pads, groups)


# Merge small groups. Forward and backward of 32 groups of 4 channels (8x56x56x128) took 861 ms as 32 convolutions,
# 348 ms as 4 and 1,412 ms as one; 6 groups of 16 (8x28x28x96) took 28 ms as 6 and 10 ms as 3 (two busy
# cores). Fewer convolutions also compile faster.
_MAX_MERGED_CHANNELS = 32


def conv2d_grouped(x_NHWC: Array, w_HWIO: Array, stride: int, pads: Pads, groups: int) -> Array:
    """Convolve a few neighbouring groups at a time as one, with zero weights between different groups."""
    inputs, outputs = w_HWIO.shape[2], w_HWIO.shape[3] // groups
    together = max(1, _MAX_MERGED_CHANNELS // inputs)
    parts = []
    for first in range(0, groups, together):
        last = min(first + together, groups)  # the last may have fewer: 55 groups are 13 times 4 and once 3
        w = _block_diagonal(w_HWIO[..., first * outputs : last * outputs], last - first)
        parts.append(conv2d_canonical(x_NHWC[..., first * inputs : last * inputs], w, stride, pads))
    return jnp.concatenate(parts, axis=3)


def _block_diagonal(w_HWIO: Array, groups: int) -> Array:
    """Return the weights of one convolution that computes several groups."""
    if groups == 1:
        return w_HWIO
    height, width, inputs, outputs = w_HWIO.shape
    w = w_HWIO.reshape(height, width, 1, inputs, groups, outputs // groups)
    same_group = jnp.eye(groups, dtype=w.dtype).reshape(1, 1, groups, 1, groups, 1)
    return (w * same_group).reshape(height, width, groups * inputs, outputs)


def dense(x_NC: Array, w_CO: Array, b_O: Array, *, half_sums: bool = False) -> Array:
    """Multiply and add the bias; sums and result are float32 whatever the dtype of the inputs.

    With `half_sums` the product has the dtype of the inputs, and an accelerator may accumulate in it; CPUs never do.
    """
    halved = half_sums and not on_cpu() and not is_portable()
    product_NO = lax.dot(x_NC, w_CO, preferred_element_type=x_NC.dtype if halved else jnp.float32).astype(jnp.float32)
    return product_NO + b_O.astype(jnp.float32)[None, :]
