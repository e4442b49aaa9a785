"""Kernels that only inference uses, where the weights are constant (tracing.py): their results have no gradients.

As in native_units.py, which has the rest, None means that XLA is to compute it. 16-bit values are widened to float32,
and results rounded once. Shapes in names: N images, H height, W width, C channels, R channels after a squeeze, O
channels out.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace.ops.native_kernels import ACTIVATIONS, Window, call_kernel, pack, uses_kernels
from headrace.ops.native_units import BatchNorm, Unit, unit_packed
from headrace.ops.tracing import constant, weights_are_constant

Dense = tuple[Array, Array]  # kernel and bias
_MOST_WEIGHTS = 2**24  # of a dense layer: 64 MB


class Gate(NamedTuple):
    """Squeeze and excitation: gate(expand(activation(reduce(means)))), with functions by their names."""

    reduce: Dense
    expand: Dense
    activation: str
    gate: str

    def is_known(self) -> bool:
        """Say whether the kernels have its functions."""
        return self.activation in ACTIVATIONS and self.gate in ("sigmoid", "hard_sigmoid")

    def weights(self) -> tuple[Array, Array]:
        """Return both layers as the kernels read them."""
        return _packed_dense(*self.reduce), _packed_dense(*self.expand)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of a call."""
        act, squeezed = np.int64(ACTIVATIONS[self.activation]), np.int64(self.reduce[0].shape[1])
        return {"activation": act, "hard": self.gate == "hard_sigmoid", "squeezed": squeezed}


@dataclass(frozen=True, kw_only=True)
class ConstantUnit:
    """A convolution with constant weights, a norm by its running statistics or a bias, and an activation."""

    window: Window
    kernel: Array
    norm: BatchNorm | None
    bias: Array | None
    activation: str | None

    def weights(self) -> tuple[Array, Array, Array]:
        """Return kernel, scale and shift."""
        if self.norm is not None:
            return self.kernel, *self.norm.affine()
        outputs = self.kernel.shape[3]
        shift_O = jnp.zeros(outputs) if self.bias is None else self.bias.astype(jnp.float32)
        return self.kernel, jnp.ones(outputs), shift_O

    def packed(self) -> Array:
        """Return the weights in panels, also those of a depthwise convolution."""
        return pack(*self.weights(), replace(self.window, x=(*self.window.x[:3], self.kernel.shape[2]), method=0))


def conv_bias(
    x_NHWC: Array, w_HWIO: Array, b_O: Array | None, window: Window, residual: Array | None, act: str | None
) -> Array:
    """Return activation(convolution + bias + residual)."""
    unit = ConstantUnit(window=window, kernel=w_HWIO, norm=None, bias=b_O, activation=act)
    return unit_packed(x_NHWC, unit.weights, residual, Unit(window=window, activation=act, epsilon=0))


def find_bottleneck(x_NHWC: Array, expansion: ConstantUnit, depthwise: ConstantUnit, gate: Gate | None) -> Array | None:
    """Return the depthwise convolution of expanded images, times their gate; float32 values alone."""
    first, second = expansion.window, depthwise.window
    is_pair = first.is_pointwise and second.is_depthwise
    if not is_pair or x_NHWC.dtype != jnp.float32 or not weights_are_constant():
        return None

    def weights() -> tuple[Array, ...]:
        return expansion.packed(), depthwise.packed(), *(() if gate is None else gate.weights())

    no_gate: dict[str, Any] = {"activation": np.int64(0), "hard": False, "squeezed": np.int64(0)}
    attributes = no_gate if gate is None else gate.attributes()
    attributes |= {"geometry": second.attributes()["geometry"]}
    attributes |= {"expansion": np.int64(ACTIVATIONS[expansion.activation])}
    attributes |= {"depthwise": np.int64(ACTIVATIONS[depthwise.activation])}
    (y,) = call_kernel("bottleneck", [second.y], x_NHWC, *constant(weights), **attributes)
    return y


def find_dense(x_NC: Array, w_CO: Array, b_O: Array, mode: str) -> Array | None:
    """Return x w + b; of float32 values, and of weights that may be kept twice."""
    n, c = x_NC.shape
    if not _can_run(x_NC, mode) or {x_NC.dtype, w_CO.dtype} != {jnp.dtype(jnp.float32)} or w_CO.size > _MOST_WEIGHTS:
        return None
    window = _dense_window(n, c, w_CO.shape[1])
    return conv_bias(x_NC[None, :, None], w_CO[None, None], b_O, window, None, None)[0, :, 0]


def find_gate(x_NHWC: Array, gate: Gate, mode: str) -> Array | None:
    """Return x times its gate."""
    if not _can_run(x_NHWC, mode) or not gate.is_known():
        return None
    arrays = x_NHWC.astype(jnp.float32), *constant(gate.weights)
    (y,) = call_kernel("gate", [x_NHWC.shape], *arrays, in_place={0: 0}, **gate.attributes())
    return y.astype(x_NHWC.dtype)


def _packed_dense(w_CO: Array, b_O: Array) -> Array:
    c, o = w_CO.shape
    wide_HWIO, wide_O = w_CO[None, None].astype(jnp.float32), b_O.astype(jnp.float32)
    return pack(wide_HWIO, jnp.ones(o), wide_O, _dense_window(1, c, o))


def _dense_window(n: int, c: int, o: int) -> Window:
    """Return a product as a convolution of one image with one column of pixels."""
    return Window(x=(1, n, 1, c), w=(1, 1, c, o), y=(1, n, 1, o), stride=1, pads=((0, 0), (0, 0)), method=0)


def _can_run(x: Array, mode: str) -> bool:
    static = all(isinstance(size, int) and size > 0 for size in x.shape)
    return static and x.dtype.itemsize <= 4 and weights_are_constant() and uses_kernels(mode)
