"""Convolution, batch norm by the batch's statistics, residual and activation, as calls of our C++ kernels."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from headrace.ops import activation
from headrace.ops.native_conv import Cotangent, Primal, array, convolve, gradients, wanted_gradients
from headrace.ops.native_kernels import ACTIVATIONS, AFTER_RESIDUAL, DEPTHWISE, HALF, PRODUCT, Window, call_kernel, pack
from headrace.ops.normalization import Shared, totals
from headrace.ops.tracing import constant, weights_are_constant


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What follows a convolution."""

    window: Window
    activation: str | None
    epsilon: float
    shared: Shared | None = None

    @property
    def count(self) -> int:
        """The number of values per channel that enter the statistics."""
        return math.prod(self.window.y[:3]) * self.num_sharing

    @property
    def num_sharing(self) -> int:
        """The number of replicas that share statistics."""
        return 1 if self.shared is None else len(self.shared[1][0])


def can_fuse(activation: str | None, has_residual: bool) -> bool:
    """Say whether the kernels apply an activation, behind a residual or not."""
    return activation in (AFTER_RESIDUAL if has_residual else ACTIVATIONS)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def unit_train(
    x_NHWC: Array, w_HWIO: Array, gamma_O: Array, beta_O: Array, residual_NHWO: Array | None, unit: Unit
) -> tuple[Array, Array, Array]:
    """Return (activation(norm(convolution) + residual), mean, biased variance)."""
    return _train_values((x_NHWC, w_HWIO, gamma_O, beta_O, residual_NHWO), unit)[0]


def _train_values(arrays: tuple[Any, ...], unit: Unit) -> tuple[Any, tuple[Array, ...]]:
    x, w, gamma_O, beta_O, residual = arrays
    channels = jax.ShapeDtypeStruct(unit.window.y[3:], jnp.float32)
    attributes: dict[str, Any] = unit.window.call_attributes(None) | {"packed": False}
    z, mean_O, variance_O = call_kernel("convolve", [unit.window.y, channels, channels], x, w, **attributes)
    z = checkpoint_name(z, PRODUCT)
    if unit.shared is not None:
        # All of them in one exchange, and not sums of squares, which would lose the digits that the kernel kept.
        axis, groups = unit.shared
        means, variances = jnp.moveaxis(
            lax.all_gather(jnp.stack([mean_O, variance_O]), axis, axis_index_groups=groups), 1, 0
        )
        mean_O = jnp.mean(means, 0)
        variance_O = jnp.mean(variances + jnp.square(means - mean_O[None]), 0)
    inverse_O = lax.rsqrt(variance_O + unit.epsilon)
    scale_O = gamma_O * inverse_O
    more = () if residual is None else (residual,)
    act = np.int64(ACTIVATIONS[unit.activation])
    (y,) = call_kernel("activate", [unit.window.y], z, scale_O, mean_O, beta_O, *more, activation=act)
    return (y, mean_O, variance_O), (z, mean_O, inverse_O, scale_O, beta_O)


def _train_forward(
    x: Primal, w: Primal, gamma: Primal, beta: Primal, residual: Primal | None, unit: Unit
) -> tuple[Any, Any]:
    arrays = (x.value, w.value, gamma.value, beta.value, None if residual is None else residual.value)
    results, kept = _train_values(arrays, unit)
    y = None if residual is None else results[0]
    return results, (x.value, w.value, y, kept, wanted_gradients(x, w))


def _train_backward(
    unit: Unit, kept: Any, cotangents: tuple[Cotangent, Cotangent, Cotangent]
) -> tuple[Array | None, ...]:
    x, w, y, (z, mean_O, inverse_O, scale_O, beta_O), wanted = kept
    dy, dmean_O, dvariance_O = array(cotangents[0], z.dtype), *map(array, cotangents[1:])
    channels, act = jax.ShapeDtypeStruct(unit.window.y[3:], jnp.float32), unit.activation
    sums = [channels, channels] + [unit.window.y] * (y is not None)
    more = () if y is None else (y,)
    found = list(
        call_kernel("sums", sums, dy, z, scale_O, mean_O, beta_O, *more, activation=np.int64(ACTIVATIONS[act]))
    )
    dbeta_O, moment_O = found[:2]
    dgamma_O = moment_O * inverse_O
    # dz = scale (d - mean(d) - centred inverse^2 mean(d centred)), plus what reaches mean and variance themselves. The
    # gradients of gamma and beta stay local: the engine sums them over replicas later.
    slope_O, constant_O = totals(
        2 * dvariance_O - scale_O * jnp.square(inverse_O) * moment_O, dmean_O - scale_O * dbeta_O, unit.shared
    )
    slope_O, constant_O = slope_O / unit.count, constant_O / unit.count
    # Behind a residual the activation's slope is already in d, which is the residual's gradient.
    dresidual = None if y is None else found[2]
    d, act = (dy, act) if dresidual is None else (dresidual, None)
    dx, dw = gradients(unit.window, wanted, (d, x, w, z, scale_O, mean_O, beta_O, slope_O, constant_O), act)
    return dx, dw, dgamma_O, dbeta_O, dresidual


unit_train.defvjp(_train_forward, _train_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def unit_eval(
    x_NHWC: Array, w_HWIO: Array, scale_O: Array, shift_O: Array, residual_NHWO: Array | None, unit: Unit
) -> Array:
    """Return activation(convolution scale + shift + residual), computed in one pass unless it is differentiated."""
    more = () if residual_NHWO is None else (residual_NHWO,)
    attributes: dict[str, Any] = unit.window.call_attributes(unit.activation) | {"packed": False}
    (y,) = call_kernel("convolve", [unit.window.y], x_NHWC, w_HWIO, scale_O, shift_O, *more, **attributes)
    return y


def unit_packed(
    x_NHWC: Array, weights: Callable[[], tuple[Array, Array, Array]], residual_NHWO: Array | None, unit: Unit
) -> Array:
    """Return the same for constant weights, (kernel, scale, shift): the kernel times the scale is packed once.

    For bfloat16 products the scale stays apart: a product with it would have to be rounded again.
    """
    window = unit.window

    def prepare() -> tuple[Array, ...]:
        w_HWIO, scale_O, shift_O = weights()
        if window.method != HALF:
            return (pack(w_HWIO.astype(jnp.float32), scale_O, shift_O, window),)
        geometry = window.attributes()["geometry"]
        (packed,) = call_kernel("pack", [(window.packed_size(0),)], w_HWIO, geometry=geometry)
        return packed, scale_O, shift_O

    more = () if residual_NHWO is None else (residual_NHWO,)
    # Where the residual was, its values are in the cache. A depthwise convolution computes some pixels twice.
    in_place = {2: 0} if more and window.method not in (DEPTHWISE, HALF) else None
    attributes = window.call_attributes(unit.activation) | {"packed": True}
    arrays = (x_NHWC, *constant(prepare), *more)
    (y,) = call_kernel("convolve", [window.y], *arrays, in_place=in_place, **attributes)
    return y


def _eval_in_parts(x: Array, w: Array, scale_O: Array, shift_O: Array, residual: Array | None, unit: Unit) -> Array:
    product: Any = convolve(x, w, unit.window)
    y = product * scale_O[None, None, None] + shift_O[None, None, None]
    y = y if residual is None else y + residual
    return y if unit.activation is None else getattr(activation, unit.activation)(y)


def _eval_forward(*arguments: Any) -> tuple[Array, Any]:
    *arrays, unit = arguments
    return jax.vjp(partial(_eval_in_parts, unit=unit), *arrays)


unit_eval.defvjp(_eval_forward, lambda _unit, vjp, dy: vjp(dy))


@dataclass(frozen=True, kw_only=True)
class BatchNorm:
    """A batch norm behind a convolution. With `running` (mean, variance) it does not look at the batch."""

    gamma: Array
    beta: Array
    epsilon: float
    running: tuple[Array, Array] | None = None
    shared: Shared | None = None

    def affine(self) -> tuple[Array, Array]:
        """Return the scale and the shift that the running statistics make of it."""
        assert self.running is not None
        gamma_O, beta_O, mean_O, variance_O = (a.astype(jnp.float32) for a in (self.gamma, self.beta, *self.running))
        scale_O = gamma_O * lax.rsqrt(variance_O + self.epsilon)
        return scale_O, beta_O - mean_O * scale_O


def conv_unit(
    x_NHWC: Array, w_HWIO: Array, window: Window, norm: BatchNorm, residual: Array | None, act: str | None
) -> tuple[Array, Array | None, Array | None]:
    """Return (activation(norm(convolution) + residual), mean, biased variance of the batch); None for running ones."""
    unit = Unit(window=window, activation=act, epsilon=norm.epsilon, shared=norm.shared)
    if norm.running is None:
        gamma_O, beta_O = norm.gamma.astype(jnp.float32), norm.beta.astype(jnp.float32)
        return unit_train(x_NHWC, w_HWIO, gamma_O, beta_O, residual, unit)
    if weights_are_constant():
        return unit_packed(x_NHWC, lambda: (w_HWIO, *norm.affine()), residual, unit), None, None
    return unit_eval(x_NHWC, w_HWIO, *norm.affine(), residual, unit), None, None
