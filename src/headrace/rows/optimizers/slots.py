"""What the rules share: slots of zeros, and momentum."""

from typing import Any


def zeros(params: Any, value: float = 0.0) -> Any:
    """Return float32 arrays shaped as the weights."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda w: jnp.full(w.shape, value, jnp.float32), params)


def moved(momentum: float, velocity: Any, steps: Any) -> Any:
    """Return momentum x velocity + steps."""
    import jax

    return jax.tree.map(lambda v, s: momentum * v + s, velocity, steps)
