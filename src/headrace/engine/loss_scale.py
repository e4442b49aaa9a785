"""Loss scaling: a factor on the loss that keeps 16-bit gradients inside their range, divided out before the update.

A static factor stays. A dynamic one grows after a number of good steps and shrinks at a step whose gradients are not
finite; that step changes no weight and is counted as skipped. A scheduled one (stepped, doubling) is a function of the
step. The state is part of the checkpoint.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from headrace.config.params import complete
from headrace.config.schema import Numerics
from headrace.rows.row import Span

LossScale = dict[str, jax.Array]
ScaleSchedule = tuple[tuple[int, float], ...]  # (the first step of a factor, the factor), from step 0; (): none
SMALLEST = 1.0  # with a scale of 1, an overflow is not caused by the scale any more


def is_dynamic(numerics: Numerics) -> bool:
    """Say whether overflows change the scale."""
    return numerics.loss_scaling == "dynamic"


def _options(numerics: Numerics) -> dict[str, Any]:
    return complete("loss_scaling", str(numerics.loss_scaling), numerics.loss_scaling_params)


def scale_schedule(numerics: Numerics, span: Span) -> ScaleSchedule:
    """Return the factors of a scheduled scale with the steps at which they begin; nothing for another scale."""
    if numerics.loss_scaling == "stepped":
        options = _options(numerics)
        return tuple(zip((0, *map(span.steps, options["boundaries"])), options["values"], strict=True))
    if numerics.loss_scaling == "doubling":
        options = _options(numerics)
        total, factor = span.num_epochs * span.updates_per_epoch, [options["initial"]]
        while factor[-1] < options["final"]:
            factor.append(2 * factor[-1])
        first = [number * total // len(factor) for number in range(len(factor))]
        return tuple(zip(first, factor, strict=True))
    return ()


def scheduled(schedule: ScaleSchedule, step: jax.typing.ArrayLike) -> jax.Array:
    """Return the factor of a step; of several that begin at one step, the last."""
    scale = jnp.float32(schedule[0][1])
    for first, factor in schedule[1:]:
        scale = jnp.where(jnp.asarray(step) >= first, jnp.float32(factor), scale)
    return scale


def init_loss_scale(numerics: Numerics) -> LossScale:
    """Return the state at the start: `scale`, `good_steps` since it last changed, `skipped` steps of the whole run."""
    # 1 when it is off: one program for both, and a product with 1 changes no bit.
    if isinstance(numerics.loss_scaling, str):
        options = _options(numerics)
        scale = options["values"][0] if "values" in options else options["initial"]
    else:
        scale = numerics.loss_scaling or 1.0
    return {"scale": jnp.float32(scale), "good_steps": jnp.int32(0), "skipped": jnp.int32(0)}


def resumed_loss_scale(state: LossScale, step: int, numerics: Numerics, schedule: ScaleSchedule) -> LossScale:
    """Return a checkpoint's state for the options of now: a dynamic scale goes on, another one is what they say."""
    if is_dynamic(numerics):
        return state
    scale = scheduled(schedule, step) if schedule else init_loss_scale(numerics)["scale"]
    return {**state, "scale": cast("jax.Array", np.float32(scale))}  # NumPy's, as all that a checkpoint holds


def next_loss_scale(
    state: LossScale,
    finite: jax.Array | bool,
    numerics: Numerics,
    schedule: ScaleSchedule = (),
    step: jax.typing.ArrayLike = 0,
) -> LossScale:
    """Return the state after `step`, whose gradients were all finite, or were not."""
    finite = jnp.asarray(finite)
    # Without dynamic scaling, too: nan_policy skip also skips steps.
    skipped = state["skipped"] + jnp.where(finite, 0, 1).astype(jnp.int32)
    if schedule:
        return {**state, "scale": scheduled(schedule, jnp.asarray(step) + 1), "skipped": skipped}
    if not is_dynamic(numerics):
        return {**state, "skipped": skipped}
    options = _options(numerics)
    good = state["good_steps"] + 1
    grows = good >= options["growth_interval"]
    grown = jnp.minimum(state["scale"] * options["growth_factor"], options["max"])
    shrunk = jnp.maximum(state["scale"] * options["backoff_factor"], SMALLEST)
    return {
        "scale": jnp.where(finite, jnp.where(grows, grown, state["scale"]), shrunk).astype(jnp.float32),
        # From 0 again after growing: the new scale is tried for a whole interval before it grows further.
        "good_steps": jnp.where(finite & ~grows, good, 0).astype(jnp.int32),
        "skipped": skipped,
    }


def overflow_expected(state: LossScale, numerics: Numerics) -> jax.Array:
    """Say whether a gradient that is not finite may be caused by the loss scale: dynamic, and above the smallest."""
    return (state["scale"] > SMALLEST) & is_dynamic(numerics)
