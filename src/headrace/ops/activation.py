"""Element-wise functions between layers."""

import jax
from jax import Array


def relu(x: Array) -> Array:
    """Return max(x, 0), with gradient 0 at 0."""
    return jax.nn.relu(x)
