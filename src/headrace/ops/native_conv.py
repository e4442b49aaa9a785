"""Convolutions alone on the CPU, as calls of our C++ kernels."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from headrace.ops.native_kernels import PRODUCT, Window, call_kernel


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve(x_NHWC: Array, w_HWIO: Array, window: Window) -> Array:
    """Convolve; both gradients are the kernels' too."""
    return _product(x_NHWC, w_HWIO, window)


def _product(x_NHWC: Array, w_HWIO: Array, window: Window) -> Array:
    (y,) = call_kernel("convolve", [window.y], x_NHWC, w_HWIO, packed=False, **window.call_attributes(None))
    return checkpoint_name(y, PRODUCT)


# As `symbolic_zeros` passes them: arguments that know whether their gradients are wanted, and gradients that may be 0.
Primal = jax.custom_derivatives.CustomVJPPrimal
Cotangent = Array | jax.custom_derivatives.SymbolicZero
_Gradients = tuple[Array | None, Array | None]


def _convolve_forward(x: Primal, w: Primal, window: Window) -> tuple[Array, Any]:
    return _product(x.value, w.value, window), (x.value, w.value, wanted_gradients(x, w))


def _convolve_backward(window: Window, kept: Any, dy: Cotangent) -> _Gradients:
    x, w, wanted = kept
    return gradients(window, wanted, (array(dy, x.dtype), x, w), None)


convolve.defvjp(_convolve_forward, _convolve_backward, symbolic_zeros=True)


class _Wanted(NamedTuple):
    """Which gradients are wanted, as the structure of a tree: a static value among the arrays kept."""

    weights: tuple[()] | None
    images: tuple[()] | None


def wanted_gradients(x: Primal, w: Primal) -> _Wanted:
    return _Wanted(() if w.perturbed else None, () if x.perturbed else None)


def array(cotangent: Cotangent, dtype: Any = jnp.float32) -> Array:
    is_zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return jnp.zeros(cotangent.shape, dtype) if is_zero else cotangent


def gradients(window: Window, wanted: _Wanted, arrays: tuple[Array, ...], act: str | None) -> _Gradients:
    """Return (dx, dw), None where it is not wanted. `arrays`: dy, x, w[, z, scale, mean, shift, slope, constant]."""
    shapes = [window.w] * (wanted.weights is not None) + [window.x] * (wanted.images is not None)
    if not shapes:
        return None, None
    wants = np.int64((wanted.weights is not None) + 2 * (wanted.images is not None))
    if len(arrays) > 3 and wanted.images is not None and window.needs_gradient_memory:
        shapes.append(window.y)
    results = list(call_kernel("gradients", shapes, *arrays, wants=wants, **window.call_attributes(act)))
    dw = results.pop(0) if wanted.weights is not None else None
    return results[0] if wanted.images is not None else None, dw
