"""Activation functions. Each saves a single array for its gradient: its input or its output."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from headrace.ops.tracing import on_cpu

_GAUSSIAN_PEAK = 1 / math.sqrt(2 * math.pi)
_SQRT_HALF = math.sqrt(0.5)


def relu(x: Array) -> Array:
    """Return max(x, 0), with gradient 0 at 0."""
    return relu_select(x) if on_cpu() else jax.nn.relu(x)


@jax.custom_vjp
def relu_select(x: Array) -> Array:
    """Return max(x, 0), written as a select; NaN stays NaN."""
    # XLA's CPU backend duplicates a cheap function of one large input into each of its consumers instead of storing the
    # result. With `max`, every weight gradient recomputed the norms, additions and relus of all earlier units, which
    # took a third of a ResNet-20 step. A select reads two large inputs and is not duplicated.
    return jnp.where(x < 0, jnp.zeros_like(x), x)


def _forward(x: Array) -> tuple[Array, Array]:
    y = relu_select(x)
    # The output is enough for the gradient, and the next layer keeps it anyway.
    return y, y


def _backward(y: Array, dy: Array) -> tuple[Array]:
    return (jnp.where(y > 0, dy, jnp.zeros_like(dy)),)


relu_select.defvjp(_forward, _backward)


def relu6(x: Array) -> Array:
    """Return x clipped to 0..6; the gradient is 0 at both ends and beyond."""
    return _with_slope(x, lambda x: jnp.clip(x, 0, 6), lambda x: ((x > 0) & (x < 6)).astype(x.dtype))


def swish(x: Array) -> Array:
    """Return x * sigmoid(x), also called SiLU."""
    return _with_slope(x, lambda x: x * jax.nn.sigmoid(x), _swish_slope)


def mish(x: Array) -> Array:
    """Return x * tanh(softplus(x))."""
    return _with_slope(x, lambda x: x * _mish_gate(x), _mish_slope)


def _mish_gate(x: Array) -> Array:
    """Return tanh(log(1 + e^x)) as a quotient with e^x (e^x + 2) on top, which is 1 to rounding from 20 on."""
    e = jnp.exp(jnp.minimum(x, 20))
    return e * (e + 2) / (e * (e + 2) + 2)


def _mish_slope(x: Array) -> Array:
    gate = _mish_gate(x)
    return gate + x * (1 - gate * gate) * jax.nn.sigmoid(x)


def gelu(x: Array) -> Array:
    """Return x times the normal distribution's probability of at most x."""
    return _with_slope(x, lambda x: x * _normal(x), lambda x: _normal(x) + x * jnp.exp(-x * x / 2) * _GAUSSIAN_PEAK)


def _normal(x: Array) -> Array:
    """Return the normal distribution's probability of at most x."""
    # Not `jax.scipy.special.ndtr`, which keeps the digits of probabilities near 0 by computing erf and erfc both: here
    # they are multiplied by x and added to others. An H200 took 1.12 ms for ndtr's GELU and 0.46 for this one, and 1.29
    # and 0.64 for the gradients (256x56x56x384 in bfloat16), which was a seventh of a ConvNeXt-T step.
    return (1 + lax.erf(x * _SQRT_HALF)) / 2


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
    return _with_slope(x, jax.nn.sigmoid, lambda x: jax.nn.sigmoid(x) * jax.nn.sigmoid(-x))


def hard_sigmoid(x: Array) -> Array:
    """Return x / 6 + 1/2, clipped to 0..1."""
    return _with_slope(x, lambda x: jnp.clip(x + 3, 0, 6) / 6, lambda x: _inside(x) / 6)


def hard_swish(x: Array) -> Array:
    """Return x * hard_sigmoid(x)."""
    return _with_slope(
        x, lambda x: x * jnp.clip(x + 3, 0, 6) / 6, lambda x: jnp.where(x >= 3, 1, _inside(x) * (2 * x + 3) / 6)
    )


def _swish_slope(x: Array) -> Array:
    s = jax.nn.sigmoid(x)
    return s * (1 + x * (1 - s))


def _inside(x: Array) -> Array:
    """Return 1 between the two clipping points, else 0."""
    return ((x > -3) & (x < 3)).astype(x.dtype)


def _with_slope(x: Array, value: Callable[[Array], Array], slope: Callable[[Array], Array]) -> Array:
    """Return value(x), with a gradient that is recomputed from x in float32."""

    # Only x is saved. JAX's automatic gradients would save two or three arrays (x, the sigmoid and their product).
    @jax.custom_vjp
    def function(x: Array) -> Array:
        return value(x.astype(jnp.float32)).astype(x.dtype)

    def forward(x: Array) -> tuple[Array, Array]:
        return function(x), x

    def backward(x: Array, dy: Array) -> tuple[Array]:
        return ((dy.astype(jnp.float32) * slope(x.astype(jnp.float32))).astype(x.dtype),)

    function.defvjp(forward, backward)
    return function(x)
