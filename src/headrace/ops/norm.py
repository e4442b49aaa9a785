"""Batch and group normalisation. Statistics are float32 whatever the images' dtype; the result has the images' dtype.

`stable` measures the variance in a second pass, around the mean. The one-pass form E[x^2] - E[x]^2 reads the images
once, and loses digits where the mean is much larger than the spread.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True, kw_only=True)
class Groups:
    """How channels form groups: channel c is in group c // (C / num_groups), or c mod num_groups if strided."""

    num_groups: int
    order: Literal["contiguous", "strided"] = "contiguous"


def batch_norm_train(
    x_NHWC: Array, gamma_C: Array, beta_C: Array, epsilon: float, stable: bool = False
) -> tuple[Array, Array, Array]:
    """Normalise each channel by this batch; returns (y, mean, biased variance), the last two in float32."""
    x = x_NHWC.astype(jnp.float32)
    mean_C, variance_C = _moments(x, (0, 1, 2), stable)
    y = _scale_shift(x, mean_C, variance_C, (gamma_C, beta_C), epsilon)
    return y.astype(x_NHWC.dtype), mean_C.reshape(-1), variance_C.reshape(-1)


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
