"""Element-wise functions between layers. Each keeps one array for its gradient: its input, or its output."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from headrace.ops.backend import on_cpu


def relu(x: Array) -> Array:
    """Return max(x, 0), with gradient 0 at 0."""
    return relu_select(x) if on_cpu() else jax.nn.relu(x)


@jax.custom_vjp
def relu_select(x: Array) -> Array:
    """Return max(x, 0) as a choice between two values; NaN stays NaN.

    XLA on the CPU computes a cheap function of one large input again for every reader instead of storing it. With `max`
    it so recomputed the norms, additions and relus of all units before, in every weight gradient, column by column: a
    third of a ResNet-20 step. It does not duplicate a choice, which reads two large inputs.
    """
    return jnp.where(x < 0, jnp.zeros_like(x), x)


def _forward(x: Array) -> tuple[Array, Array]:
    y = relu_select(x)
    return y, y


def _backward(y: Array, dy: Array) -> tuple[Array]:
    return (jnp.where(y > 0, dy, jnp.zeros_like(dy)),)


relu_select.defvjp(_forward, _backward)


def relu6(x: Array) -> Array:
    """Return x cut to 0..6, with gradient 0 at and beyond both ends."""
    return _with_slope(x, lambda x: jnp.clip(x, 0, 6), lambda x: ((x > 0) & (x < 6)).astype(x.dtype))


def swish(x: Array) -> Array:
    """Return x * sigmoid(x), also called SiLU."""
    return _with_slope(x, lambda x: x * jax.nn.sigmoid(x), _swish_slope)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
    return _with_slope(x, jax.nn.sigmoid, lambda x: jax.nn.sigmoid(x) * jax.nn.sigmoid(-x))


def hard_sigmoid(x: Array) -> Array:
    """Return x / 6 + 1/2 cut to 0..1."""
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
    """Return 1 where the cut function rises, else 0."""
    return ((x > -3) & (x < 3)).astype(x.dtype)


def _with_slope(x: Array, value: Callable[[Array], Array], slope: Callable[[Array], Array]) -> Array:
    """Return value(x) whose gradient is computed from x again, in float32.

    JAX's own gradients keep two or three arrays of the images' size (x, the sigmoid and their product).
    """

    @jax.custom_vjp
    def function(x: Array) -> Array:
        return value(x.astype(jnp.float32)).astype(x.dtype)

    def forward(x: Array) -> tuple[Array, Array]:
        return function(x), x

    def backward(x: Array, dy: Array) -> tuple[Array]:
        return ((dy.astype(jnp.float32) * slope(x.astype(jnp.float32))).astype(x.dtype),)

    function.defvjp(forward, backward)
    return function(x)
