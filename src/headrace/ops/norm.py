"""Batch and group normalisation. Statistics are float32 whatever the images' dtype; the result has the images' dtype.

`stable` measures the variance in a second pass, around the mean. The one-pass form E[x^2] - E[x]^2 reads the images
once, and loses digits where the mean is much larger than the spread.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax


@dataclass(frozen=True, kw_only=True)
class Groups:
    """How channels form groups: channel c is in group c // (C / num_groups), or c mod num_groups if strided."""

    num_groups: int
    order: Literal["contiguous", "strided"] = "contiguous"


def batch_norm_train(
    x_NHWC: Array, gamma_C: Array, beta_C: Array, epsilon: float, stable: bool = False
) -> tuple[Array, Array, Array]:
    """Normalise each channel by this batch; returns (y, mean, biased variance), the last two in float32."""
    return _batch_norm(x_NHWC, gamma_C, beta_C, epsilon, stable)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _batch_norm(x_NHWC: Array, gamma_C: Array, beta_C: Array, epsilon: float, stable: bool) -> Any:
    """Compute batch norm with a gradient of our own.

    It is two sums over the images and one pass. XLA's own of the same formula made a ResNet-50 step 4.7 % slower and
    its compilation twice as long (H200, bfloat16, batch 256: 37.65 against 35.97 ms, 23 against 9 s). Both passes read
    x itself: the CPU would store the centred images first (5 % of a ResNet-8 step).
    """
    return _batch_norm_forward(x_NHWC, gamma_C, beta_C, epsilon, stable)[0]


def _batch_norm_forward(x_NHWC: Array, gamma_C: Array, beta_C: Array, epsilon: float, stable: bool):
    x = x_NHWC.astype(jnp.float32)
    mean_C, variance_C = (s.reshape(-1) for s in _moments(x, (0, 1, 2), stable))
    inverse_C = lax.rsqrt(variance_C + epsilon)
    scale_C = gamma_C.astype(jnp.float32) * inverse_C
    y = (x - _per_channel(mean_C)) * _per_channel(scale_C) + _per_channel(beta_C.astype(jnp.float32))
    return (y.astype(x_NHWC.dtype), mean_C, variance_C), (x_NHWC, gamma_C, mean_C, inverse_C)


def _batch_norm_backward(_epsilon: float, stable: bool, saved: tuple[Array, ...], cotangents: tuple[Array, ...]):
    x_NHWC, gamma_C, mean_C, inverse_C = saved
    dy_NHWC, dmean_C, dvariance_C = cotangents
    count = x_NHWC.size // x_NHWC.shape[-1]
    x, dy = x_NHWC.astype(jnp.float32), dy_NHWC.astype(jnp.float32)
    dbeta_C = jnp.sum(dy, (0, 1, 2))
    if stable:
        moment_C = jnp.sum(dy * (x - _per_channel(mean_C)), (0, 1, 2))
    else:
        moment_C = jnp.sum(dy * x, (0, 1, 2)) - mean_C * dbeta_C
    scale_C = gamma_C.astype(jnp.float32) * inverse_C
    # dx = scale (dy - mean(dy) - centred inverse^2 mean(dy centred)), and what reaches the statistics themselves
    slope_C = (2 * dvariance_C - scale_C * jnp.square(inverse_C) * moment_C) / count
    constant_C = (dmean_C - scale_C * dbeta_C) / count - mean_C * slope_C
    dx = dy * _per_channel(scale_C) + x * _per_channel(slope_C) + _per_channel(constant_C)
    dgamma_C = moment_C * inverse_C
    return dx.astype(x_NHWC.dtype), dgamma_C.astype(gamma_C.dtype), dbeta_C.astype(gamma_C.dtype)


_batch_norm.defvjp(_batch_norm_forward, _batch_norm_backward)


def _per_channel(s_C: Array) -> Array:
    return s_C[None, None, None]


def batch_norm_eval(
    x_NHWC: Array, gamma_C: Array, beta_C: Array, statistics: tuple[Array, Array], epsilon: float
) -> Array:
    """Normalise each channel by the given (mean, variance)."""
    mean_C, variance_C = (s.astype(jnp.float32)[None, None, None] for s in statistics)
    x = x_NHWC.astype(jnp.float32)
    return _scale_shift(x, mean_C, variance_C, (gamma_C, beta_C), epsilon).astype(x_NHWC.dtype)


def group_norm(
    x_NHWC: Array, gamma_C: Array, beta_C: Array, groups: Groups, epsilon: float, stable: bool = False
) -> Array:
    """Normalise each image by the statistics of its channel groups."""
    n, h, w, c = x_NHWC.shape
    split, dims = (groups.num_groups, c // groups.num_groups), (1, 2, 4)
    if groups.order == "strided":
        split, dims = split[::-1], (1, 2, 3)
    x = x_NHWC.astype(jnp.float32).reshape(n, h, w, *split)
    mean, variance = _moments(x, dims, stable)
    gamma, beta = (s.astype(jnp.float32).reshape(1, 1, 1, *split) for s in (gamma_C, beta_C))
    y = (x - mean) * (gamma / jnp.sqrt(variance + epsilon)) + beta
    return y.reshape(n, h, w, c).astype(x_NHWC.dtype)


def _moments(x: Array, dims: tuple[int, ...], stable: bool) -> tuple[Array, Array]:
    mean = jnp.mean(x, dims, keepdims=True)
    if stable:
        return mean, jnp.mean(jnp.square(x - mean), dims, keepdims=True)
    return mean, jnp.maximum(jnp.mean(jnp.square(x), dims, keepdims=True) - jnp.square(mean), 0)


def _scale_shift(x: Array, mean: Array, variance: Array, scale: tuple[Array, Array], epsilon: float) -> Array:
    gamma, beta = (s.astype(jnp.float32)[None, None, None] for s in scale)
    return (x - mean) * (gamma / jnp.sqrt(variance + epsilon)) + beta
