"""Loss scaling: keep 16-bit gradients inside their range by a factor on the loss, taken out again before the update.

Static: the factor stays. Dynamic: it grows after a run of good steps and shrinks at a step whose gradients are not
finite; that step changes no weight and is counted as skipped. The state is part of the checkpoint.
"""

from typing import Any

import jax
import jax.numpy as jnp

from headrace.config.params import complete
from headrace.config.schema import Numerics

LossScale = dict[str, jax.Array]
SMALLEST = 1.0  # under a scale of 1, an overflow is not the scale's fault any more


def is_dynamic(numerics: Numerics) -> bool:
    """Say whether the scale moves during the run."""
    return numerics.loss_scaling == "dynamic"


def _options(numerics: Numerics) -> dict[str, Any]:
    return complete("loss_scaling", "dynamic", numerics.loss_scaling_params)


def init_loss_scale(numerics: Numerics) -> LossScale:
    """Return the state at the start: `scale`, `good_steps` since it last moved, `skipped` steps of the whole run."""
    scale = _options(numerics)["initial"] if is_dynamic(numerics) else numerics.loss_scaling or 1.0
    return {"scale": jnp.float32(scale), "good_steps": jnp.int32(0), "skipped": jnp.int32(0)}


def next_loss_scale(state: LossScale, finite: Any, numerics: Numerics) -> LossScale:
    """Return the state after a step whose gradients were all finite, or were not."""
    finite = jnp.asarray(finite)
    skipped = state["skipped"] + jnp.where(finite, 0, 1).astype(jnp.int32)
    if not is_dynamic(numerics):
        return {**state, "skipped": skipped}
    options = _options(numerics)
    good = state["good_steps"] + 1
    grows = good >= options["growth_interval"]
    grown = jnp.minimum(state["scale"] * options["growth_factor"], options["max"])
    shrunk = jnp.maximum(state["scale"] * options["backoff_factor"], SMALLEST)
    return {
        "scale": jnp.where(finite, jnp.where(grows, grown, state["scale"]), shrunk).astype(jnp.float32),
        "good_steps": jnp.where(finite & ~grows, good, 0).astype(jnp.int32),
        "skipped": skipped,
    }


def forgives(state: LossScale, numerics: Numerics) -> jax.Array:
    """Say whether a gradient that is not finite may be the scale's fault: dynamic, and above the smallest scale."""
    return (state["scale"] > SMALLEST) & is_dynamic(numerics)
