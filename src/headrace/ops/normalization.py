"""Batch, group and layer normalisation. Statistics are float32 and the result has the images' dtype, whatever that is.

`stable` computes the variance around the mean, in a second pass. The one-pass form E[x^2] - E[x]^2 reads the images
once, but loses digits where the mean is much larger than the standard deviation.

Shapes in names: N images, H height, W width, C channels.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from headrace.ops.pool import Windows, largest_and_place, spread_to_places
from headrace.ops.tracing import on_gpu

_IMAGES = (0, 1, 2)
# A mesh axis, and the groups of its replicas that share statistics: ("replica", ((0, 1), (2, 3))).
Shared = tuple[str, tuple[tuple[int, ...], ...]]


def batch_norm_train(
    x_NHWC: Array,
    gamma_C: Array,
    beta_C: Array,
    epsilon: float,
    stable: bool = False,
    shared: Shared | None = None,
) -> tuple[Array, Array, Array]:
    """Normalise each channel by the statistics of this batch, or of the batches of all replicas that share them.

    Returns (y, mean, biased variance), the last two in float32.
    """
    return _batch_norm(x_NHWC, gamma_C, beta_C, epsilon, stable, shared)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _batch_norm(
    x_NHWC: Array, gamma_C: Array, beta_C: Array, epsilon: float, stable: bool, shared: Shared | None
) -> Any:
    """Compute batch norm with a hand-written gradient: two sums over the images and one pass."""
    # With the automatic gradient a ResNet-50 step was 4.7 % slower (H200, bfloat16, batch 256: 37.65 instead of
    # 35.97 ms, in an earlier arrangement of the same sums).
    return _forward(x_NHWC, gamma_C, beta_C, epsilon, stable, shared)[0]


# A network has dozens of norms and a few shapes. JAX traces these once for each shape and copies the result, which is a
# tenth of the time that tracing ResNet-50 takes. `_on_gpu` is what the result depends on beside shapes.
_traced_once = partial(jax.jit, inline=True)


def _forward(x_NHWC: Array, gamma_C: Array, beta_C: Array, epsilon: float, stable: bool, shared: Shared | None):
    return _traced_forward(x_NHWC, gamma_C, beta_C, epsilon, stable, shared, on_gpu())


@partial(_traced_once, static_argnums=(3, 4, 5, 6))
def _traced_forward(
    x_NHWC: Array,
    gamma_C: Array,
    beta_C: Array,
    epsilon: float,
    stable: bool,
    shared: Shared | None,
    _on_gpu: bool,
):
    mean_C, variance_C, inverse_C, scale_C = _statistics(x_NHWC, gamma_C, epsilon, stable, shared)
    y = _normalised(x_NHWC, mean_C, scale_C, beta_C)
    return (y, mean_C, variance_C), (x_NHWC, gamma_C, mean_C, inverse_C, scale_C)


def _statistics(
    x_NHWC: Array, gamma_C: Array, epsilon: float, stable: bool, shared: Shared | None
) -> tuple[Array, ...]:
    """Return the mean, the biased variance, the inverse of the deviation, and that times gamma, of each channel."""
    mean_C, variance_C = batch_statistics(x_NHWC, stable, shared)
    inverse_C = lax.rsqrt(variance_C + epsilon)
    return _at_once(mean_C, variance_C, inverse_C, gamma_C.astype(jnp.float32) * inverse_C)


def _at_once(*vectors_C: Array) -> tuple[Array, ...]:
    """Let a GPU compute vectors in one kernel, and nothing of them again in the kernels that read them."""
    return tuple(lax.optimization_barrier(jnp.stack(vectors_C))) if on_gpu() else vectors_C


def batch_statistics(x_NHWC: Array, stable: bool, shared: Shared | None) -> tuple[Array, Array]:
    """Return the mean and the biased variance of each channel."""
    x = x_NHWC.astype(jnp.float32)
    count = _count(x, shared)
    if stable:
        mean_C = _total(jnp.sum(x, _IMAGES), shared) / count
        return mean_C, _total(jnp.sum(jnp.square(x - _wide(mean_C)), _IMAGES), shared) / count
    if on_gpu():
        # Of a convolution that is a fusion (quick tuning) XLA would read the result twice, once for each sum.
        x = lax.optimization_barrier(x_NHWC).astype(jnp.float32)
    sum_C, squares_C = totals(*channel_sums(x, jnp.square(x)), shared)
    mean_C = sum_C / count
    # Rounding may leave a difference slightly below 0 where all values are equal.
    return mean_C, jnp.maximum(squares_C / count - jnp.square(mean_C), 0)


def _normalised(x_NHWC: Array, mean_C: Array, scale_C: Array, beta_C: Array) -> Array:
    """Subtract the mean, scale and shift, in float32."""
    # The mean is subtracted first: folded into the shift, x scale - mean scale would lose digits where it is large.
    y = (x_NHWC.astype(jnp.float32) - _wide(mean_C)) * _wide(scale_C) + _wide(beta_C.astype(jnp.float32))
    return y.astype(x_NHWC.dtype)


def _backward(
    _epsilon: float, stable: bool, shared: Shared | None, saved: tuple[Array, ...], cotangents: tuple[Array, ...]
):
    return _traced_backward(stable, shared, saved, cotangents, on_gpu())


@partial(_traced_once, static_argnums=(0, 1, 4))
def _traced_backward(
    stable: bool,
    shared: Shared | None,
    saved: tuple[Array, ...],
    cotangents: tuple[Array, ...],
    _on_gpu: bool,
):
    x_NHWC, gamma_C, mean_C, inverse_C, scale_C = saved
    dy_NHWC, dmean_C, dvariance_C = cotangents
    x, dy = x_NHWC.astype(jnp.float32), dy_NHWC.astype(jnp.float32)
    # The gradients of gamma and beta stay local: the engine sums them over replicas later.
    # From x itself: given the centred images, the CPU backend would store them first (5 % of a ResNet-8 step).
    dbeta_C, moment_C = _at_once(*channel_sums(dy, dy * (x - _wide(mean_C)) if stable else dy * x, _GRADIENT))
    moment_C = moment_C if stable else moment_C - mean_C * dbeta_C
    sums = dbeta_C, moment_C, dmean_C, dvariance_C
    dx, dgamma_C, dbeta_C = _input_gradient(x_NHWC, dy, (mean_C, inverse_C, scale_C), sums, shared)
    return dx, dgamma_C.astype(gamma_C.dtype), dbeta_C.astype(gamma_C.dtype)


# Values of an array up to which each value's gradient is computed from the sums, without vectors between them.
_SMALL = 1 << 24


def _input_gradient(
    x_NHWC: Array,
    dy: Array,
    statistics: tuple[Array, ...],
    sums: tuple[Array, ...],
    shared: Shared | None,
) -> tuple[Array, Array, Array]:
    """Return the gradients of images, scale and shift.

    `sums` are those of dy and of dy times the centred images, and what reaches mean and variance themselves.
    """
    mean_C, inverse_C, scale_C = statistics
    dbeta_C, moment_C, dmean_C, dvariance_C = sums
    dgamma_C, count = moment_C * inverse_C, _count(x_NHWC, shared)
    # dx = scale (dy - mean(dy) - centred inverse^2 mean(dy centred)), plus what reaches mean and variance themselves
    slope_C = 2 * dvariance_C - scale_C * jnp.square(inverse_C) * moment_C
    constant_C = dmean_C - scale_C * dbeta_C
    slope_C, constant_C = totals(slope_C, constant_C, shared)
    x = x_NHWC.astype(jnp.float32)
    if on_gpu() and x.size <= _SMALL:
        # In this form XLA computes slope and constant for each value, and not in a kernel before it: of 53 such kernels
        # in a ResNet-50's step, 11 are left.
        others = ((x - _wide(mean_C)) * _wide(slope_C) + _wide(constant_C)) * jnp.float32(1 / count)
    else:
        slope_C, constant_C = slope_C / count, constant_C / count
        others = x * _wide(slope_C) + _wide(constant_C - mean_C * slope_C)
    dx = dy * _wide(scale_C) + others
    return dx.astype(x_NHWC.dtype), dgamma_C, dbeta_C


class _Grain(NamedTuple):
    """How sums over rows are divided on a GPU: into few parts, as long as there is work for all its processors."""

    least_blocks: int
    least_rows: int  # of a part, which is divided only if it has more
    most_rows: int


# XLA sums columns with a block of threads for every 64 channels of a part, which has 32 of its rows at a time: with few
# rows, starting and ending the blocks takes most of the time. More than 4,096 rows XLA would divide by itself, and
# badly. Percent of the bandwidth with this grain, and with 2 sqrt(rows) parts, on an H200 in bfloat16: 95 and 95
# (3,211,264 x 64), 88 and 77 (802,816 x 256), 85 and 67 (200,704 x 512), 77 and 53 (50,176 x 1,024), 90 and 43 (65,536
# x 256), 36 and 12 (4,096 x 1,024).
_STATISTICS = _Grain(256, 32, 4096)
# Of gradients there are more arrays: 90 and 72 (802,816 x 256), 66 and 59 (50,176 x 1,024), 63 and 44 (4,096 x 1,024).
# Fewer blocks are faster alone (89 and 81 for the last two with 512), but XLA then computes the activation's gradient
# in a kernel of its own: blocks of ResNet-50 move 9 to 20 % more memory.
_GRADIENT = _Grain(2048, 64, 2048)
_COLUMNS = 64
_LEAST_USE = 0.8  # of the columns
_MOST_FOLDED = 8


def channel_sums(a_NHWC: Array, b_NHWC: Array, grain: _Grain = _STATISTICS) -> tuple[Array, Array]:
    """Return the sums over images and pixels of two arrays."""
    if not on_gpu():
        return jnp.sum(a_NHWC, _IMAGES), jnp.sum(b_NHWC, _IMAGES)
    rows, channels = a_NHWC.size // a_NHWC.shape[-1], a_NHWC.shape[-1]
    parts, folded = _division(rows, channels, grain)
    # In two steps: partial sums of some rows each, then one sum for both arrays. Without the barrier XLA would merge
    # the steps again, and few blocks of threads would do all the work.
    shape = parts, rows // (parts * folded), folded * channels
    some = lax.optimization_barrier(tuple(jnp.sum(each.reshape(shape), 1) for each in (a_NHWC, b_NHWC)))
    both = jnp.sum(jnp.stack(some).reshape(2, parts * folded, channels), 1)
    return both[0], both[1]


def _division(rows: int, channels: int, grain: _Grain) -> tuple[int, int]:
    """Return the number of parts that are summed first, and how many rows beside each other are one row there."""
    folded = 1
    # Where channels leave a quarter of the columns idle: 67 instead of 52 % of the bandwidth (802,816 x 144).
    if channels > _COLUMNS and channels / (_COLUMNS * -(-channels // _COLUMNS)) < _LEAST_USE:
        while folded * channels % _COLUMNS and rows % (2 * folded) == 0 and folded < _MOST_FOLDED:
            folded *= 2
    rows, blocks, parts = rows // folded, -(-folded * channels // _COLUMNS), 1
    while rows % (2 * parts) == 0 and (
        rows // parts > grain.most_rows or (parts * blocks < grain.least_blocks and rows // parts > grain.least_rows)
    ):
        parts *= 2
    return parts, folded


def _total(sum_C: Array, shared: Shared | None) -> Array:
    """Sum over the replicas that share statistics."""
    if shared is None:
        return sum_C
    axis, groups = shared
    return lax.psum(sum_C, axis, axis_index_groups=groups)


def totals(a_C: Array, b_C: Array, shared: Shared | None) -> tuple[Array, Array]:
    """Sum both over the replicas that share statistics, in one exchange: each is small, and waiting costs the most."""
    if shared is None:
        return a_C, b_C
    both = _total(jnp.stack([a_C, b_C]), shared)
    return both[0], both[1]


def _count(x: Array, shared: Shared | None) -> int:
    """Return the number of values per channel that enter the statistics."""
    return x.size // x.shape[-1] * (1 if shared is None else len(shared[1][0]))


_batch_norm.defvjp(_forward, _backward)


def fuses_norm_pools() -> bool:
    """Return whether a batch norm, relu and max pool are faster as one operation."""
    return on_gpu()


class _NormPool(NamedTuple):
    """What such an operation depends on beside arrays."""

    epsilon: float
    shared: Shared | None
    windows: Windows
    size: tuple[int, int]  # height and width of the images


def find_norm_pool(
    x_NHWC: Array, gamma_C: Array, beta_C: Array, epsilon: float, shared: Shared | None, windows: Windows
) -> tuple[Array, Array, Array] | None:
    """Normalise by the statistics of this batch, then take the largest value of each window, at least 0.

    Returns (y, mean, biased variance) like `batch_norm_train`, or None where that is not faster in one. Of pixels that
    rounding makes equal, the largest gets the gradient, and not the first.
    """
    if not fuses_norm_pools():
        return None
    size = (x_NHWC.shape[1], x_NHWC.shape[2])
    return _norm_pool(x_NHWC, gamma_C, beta_C, _NormPool(epsilon, shared, windows, size))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _norm_pool(x_NHWC: Array, gamma_C: Array, beta_C: Array, spec: _NormPool) -> Any:
    """Pool before the norm: a norm keeps the order of a channel's pixels, or turns it round where gamma is below 0."""
    # Norm and relu then have a quarter of the pixels, and the sums of the gradient too, as every window gives its
    # gradient to one pixel. Forward and backward took 0.95 ms instead of 1.47 (256x112x112x64 in bfloat16, H200).
    return _norm_pool_forward(x_NHWC, gamma_C, beta_C, spec)[0]


def _norm_pool_forward(x_NHWC: Array, gamma_C: Array, beta_C: Array, spec: _NormPool):
    mean_C, variance_C, inverse_C, scale_C = _statistics(x_NHWC, gamma_C, spec.epsilon, False, spec.shared)
    sign = _wide(jnp.where(gamma_C < 0, -1, 1).astype(x_NHWC.dtype))
    largest, place = largest_and_place(x_NHWC * sign, spec.windows)
    chosen = largest * sign
    y = jnp.maximum(_normalised(chosen, mean_C, scale_C, beta_C), 0)
    return (y, mean_C, variance_C), (x_NHWC, chosen, place, gamma_C, beta_C, mean_C, inverse_C, scale_C)


def _norm_pool_backward(spec: _NormPool, saved: tuple[Array, ...], cotangents: tuple[Array, ...]):
    x_NHWC, chosen, place, gamma_C, beta_C, mean_C, inverse_C, scale_C = saved
    dy_NHWC, dmean_C, dvariance_C = cotangents
    y = _normalised(chosen, mean_C, scale_C, beta_C)
    dy = jnp.where(y > 0, dy_NHWC, jnp.zeros_like(dy_NHWC))
    wide = dy.astype(jnp.float32)
    dbeta_C, moment_C = _at_once(*channel_sums(wide, wide * chosen.astype(jnp.float32), _GRADIENT))
    sums = dbeta_C, moment_C - mean_C * dbeta_C, dmean_C, dvariance_C
    spread = spread_to_places(dy, place, spec.windows, spec.size, jnp.float32)
    dx, dgamma_C, dbeta_C = _input_gradient(x_NHWC, spread, (mean_C, inverse_C, scale_C), sums, spec.shared)
    return dx, dgamma_C.astype(gamma_C.dtype), dbeta_C.astype(gamma_C.dtype)


_norm_pool.defvjp(_norm_pool_forward, _norm_pool_backward)


def batch_norm_eval(
    x_NHWC: Array, gamma_C: Array, beta_C: Array, statistics: tuple[Array, Array], epsilon: float
) -> Array:
    """Normalise each channel by the given (mean, variance)."""
    gamma_C, beta_C, mean_C, variance_C = (s.astype(jnp.float32) for s in (gamma_C, beta_C, *statistics))
    scale_C = gamma_C * lax.rsqrt(variance_C + epsilon)
    y = (x_NHWC.astype(jnp.float32) - _wide(mean_C)) * _wide(scale_C) + _wide(beta_C)
    return y.astype(x_NHWC.dtype)


def _wide(s_C: Array) -> Array:
    return s_C[None, None, None]


_PIXELS = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """How channels form groups: channel c is in group c // (C / num_groups), or c mod num_groups if strided."""

    num_groups: int
    order: str = "contiguous"  # or "strided"


def group_norm(
    x_NHWC: Array, gamma_C: Array, beta_C: Array, groups: Groups, epsilon: float, stable: bool = False
) -> Array:
    """Normalise each image by the statistics of its channel groups."""
    return _group_norm(x_NHWC, gamma_C, beta_C, groups, epsilon, stable)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _group_norm(x_NHWC: Array, gamma_C: Array, beta_C: Array, groups: Groups, epsilon: float, stable: bool) -> Any:
    """Compute group norm with a hand-written gradient, both from sums over the channels of each image."""
    # As in batch norm, the images are read twice and written once, and they are never reshaped into groups. The plain
    # formula doubled the time of a ResNet-8 step on two CPU cores.
    return _group_forward(x_NHWC, gamma_C, beta_C, groups, epsilon, stable)[0]


def _group_forward(x_NHWC: Array, gamma_C: Array, beta_C: Array, groups: Groups, epsilon: float, stable: bool):
    x = x_NHWC.astype(jnp.float32)
    mean_NC = _group_mean(jnp.mean(x, _PIXELS), groups)
    if stable:
        variance_NC = _group_mean(jnp.mean(jnp.square(x - _wide_NC(mean_NC)), _PIXELS), groups)
    else:
        squares_NC = _group_mean(jnp.mean(jnp.square(x), _PIXELS), groups)
        variance_NC = jnp.maximum(squares_NC - jnp.square(mean_NC), 0)
    inverse_NC = lax.rsqrt(variance_NC + epsilon)
    scale_NC = gamma_C.astype(jnp.float32)[None] * inverse_NC
    y = (x - _wide_NC(mean_NC)) * _wide_NC(scale_NC) + beta_C.astype(jnp.float32)[None, None, None]
    return y.astype(x_NHWC.dtype), (x_NHWC, gamma_C, mean_NC, inverse_NC)


def _group_backward(groups: Groups, _epsilon: float, stable: bool, saved: tuple[Array, ...], dy_NHWC: Array):
    x_NHWC, gamma_C, mean_NC, inverse_NC = saved
    x, dy = x_NHWC.astype(jnp.float32), dy_NHWC.astype(jnp.float32)
    sum_NC = jnp.sum(dy, _PIXELS)
    moment_NC = (
        jnp.sum(dy * (x - _wide_NC(mean_NC)), _PIXELS) if stable else jnp.sum(dy * x, _PIXELS) - mean_NC * sum_NC
    )
    num_pixels = x.shape[1] * x.shape[2]
    gamma_1C = gamma_C.astype(jnp.float32)[None]
    # dx = inverse (gamma dy - mean(gamma dy) - centred inverse^2 mean(gamma dy centred)), means over the group
    slope_NC = -(inverse_NC**3) * _group_mean(gamma_1C * moment_NC, groups) / num_pixels
    constant_NC = -inverse_NC * _group_mean(gamma_1C * sum_NC, groups) / num_pixels - mean_NC * slope_NC
    dx = dy * _wide_NC(gamma_1C * inverse_NC) + x * _wide_NC(slope_NC) + _wide_NC(constant_NC)
    dgamma_C, dbeta_C = jnp.sum(moment_NC * inverse_NC, 0), jnp.sum(sum_NC, 0)
    return dx.astype(x_NHWC.dtype), dgamma_C.astype(gamma_C.dtype), dbeta_C.astype(gamma_C.dtype)


_group_norm.defvjp(_group_forward, _group_backward)


def _group_mean(s_NC: Array, groups: Groups) -> Array:
    """Return, for each channel, the mean of its group."""
    n, c = s_NC.shape
    split, dim = (n, groups.num_groups, c // groups.num_groups), 2
    if groups.order == "strided":
        split, dim = (n, c // groups.num_groups, groups.num_groups), 1
    mean = jnp.mean(s_NC.reshape(split), dim, keepdims=True)
    return jnp.broadcast_to(mean, split).reshape(n, c)


def _wide_NC(s_NC: Array) -> Array:
    return s_NC[:, None, None]


def layer_norm(x: Array, gamma_C: Array, beta_C: Array, epsilon: float) -> Array:
    """Normalise the channels (last dim) of each pixel; the variance is always taken around the mean."""
    return _layer_norm(x, gamma_C, beta_C, epsilon)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _layer_norm(x: Array, gamma_C: Array, beta_C: Array, epsilon: float) -> Array:
    """Compute layer norm with a hand-written gradient, which saves x and two numbers per pixel."""
    return _layer_forward(x, gamma_C, beta_C, epsilon)[0]


def _layer_forward(x_in: Array, gamma_C: Array, beta_C: Array, epsilon: float):
    x = x_in.astype(jnp.float32)
    mean = jnp.mean(x, -1, keepdims=True)
    inverse = lax.rsqrt(jnp.mean(jnp.square(x - mean), -1, keepdims=True) + epsilon)
    y = (x - mean) * inverse * _last(gamma_C, x) + _last(beta_C, x)
    return y.astype(x_in.dtype), (x_in, gamma_C, mean, inverse)


def _layer_backward(_epsilon: float, saved: tuple[Array, ...], dy_in: Array):
    x_in, gamma_C, mean, inverse = saved
    dy, normal = dy_in.astype(jnp.float32), (x_in.astype(jnp.float32) - mean) * inverse
    pixels = tuple(range(dy.ndim - 1))
    scaled = dy * _last(gamma_C, dy)
    # dx = inverse (g - mean(g) - normal mean(g normal)) with g = gamma dy, means over the channels
    slope = jnp.mean(scaled * normal, -1, keepdims=True)
    dx = (scaled - jnp.mean(scaled, -1, keepdims=True) - normal * slope) * inverse
    dgamma_C, dbeta_C = jnp.sum(dy * normal, pixels), jnp.sum(dy, pixels)
    return dx.astype(x_in.dtype), dgamma_C.astype(gamma_C.dtype), dbeta_C.astype(gamma_C.dtype)


_layer_norm.defvjp(_layer_forward, _layer_backward)


def _last(s_C: Array, like: Array) -> Array:
    return s_C.astype(jnp.float32).reshape((1,) * (like.ndim - 1) + (-1,))
