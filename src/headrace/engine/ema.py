"""The exponential moving average of the weights and of batch norm's running statistics, in float32.

The decay warms up with the step, so that the average does not remember the initial weights for long.
"""

from typing import Any

import jax
import jax.numpy as jnp


def init_ema(values: Any) -> Any:
    """Return the average at the start: a float32 copy (a real one, because the state is donated)."""
    return jax.tree.map(lambda value: jnp.array(value, jnp.float32, copy=True), values)


def ema_decay(step: Any, decay: float) -> jax.Array:
    """Return the decay at a step: min(decay, (1 + step) / (10 + step))."""
    step = jnp.asarray(step).astype(jnp.float32)
    return jnp.minimum(jnp.float32(decay), (1.0 + step) / (10.0 + step))


def next_ema(ema: Any, values: Any, step: Any, decay: float) -> Any:
    """Return the average after a step whose new weights and statistics are `values`."""
    kept = ema_decay(step, decay)
    return jax.tree.map(lambda old, new: kept * old + (1.0 - kept) * new.astype(jnp.float32), ema, values)
