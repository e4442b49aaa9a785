"""Loss scaling: keep 16-bit gradients inside their range by a factor on the loss, taken out again before the update.

Static: the factor stays. Dynamic: it grows after a run of good steps and shrinks at a step whose gradients are not finite;
that step changes no weight and is counted as skipped. The state is part of the checkpoint.
"""

from typing import Any

import jax
import jax.numpy as jnp

LossScale = dict[str, jax.Array]
SMALLEST = 1.0  # under a scale of 1, an overflow is not the scale's fault any more


def is_dynamic(numerics: Any) -> bool:
    """Say whether the scale moves during the run."""
    return numerics.loss_scaling == "dynamic"


def init_loss_scale(numerics: Any) -> LossScale:
    """Return the state at the start: `scale`, `good_steps` since it last moved, `skipped` steps of the whole run."""
    if is_dynamic(numerics):
        scale = numerics.loss_scaling_params.get("initial", 32768.0)
    else:
        scale = numerics.loss_scaling or 1.0
    return {"scale": jnp.float32(scale), "good_steps": jnp.int32(0), "skipped": jnp.int32(0)}


def next_loss_scale(state: LossScale, finite: Any, numerics: Any) -> LossScale:
    """Return the state after a step whose gradients were all finite, or were not."""
    finite = jnp.asarray(finite)
    skipped = state["skipped"] + jnp.where(finite, 0, 1).astype(jnp.int32)
    if not is_dynamic(numerics):
        return {**state, "skipped": skipped}
    params = numerics.loss_scaling_params
    good = state["good_steps"] + 1
    grows = good >= params.get("growth_interval", 2000)
    largest = params.get("max", 2.0**24)
    grown = jnp.minimum(state["scale"] * params.get("growth_factor", 2.0), largest)
    shrunk = jnp.maximum(state["scale"] * params.get("backoff_factor", 0.5), SMALLEST)
    return {
        "scale": jnp.where(finite, jnp.where(grows, grown, state["scale"]), shrunk).astype(jnp.float32),
        "good_steps": jnp.where(finite & ~grows, good, 0).astype(jnp.int32),
        "skipped": skipped,
    }


def forgives(state: LossScale, numerics: Any) -> jax.Array:
    """Say whether a gradient that is not finite may be the scale's fault: dynamic, and above the smallest scale."""
    return (state["scale"] > SMALLEST) & is_dynamic(numerics)
