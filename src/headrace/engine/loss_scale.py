"""Loss scaling: a factor on the loss that keeps 16-bit gradients inside their range, divided out before the update.

A static factor stays. A dynamic one grows after a number of good steps and shrinks at a step whose gradients are not
finite; that step changes no weight and is counted as skipped. A scheduled one (stepped, doubling) is a function of the
step. The state is part of the checkpoint.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How a dynamic scale moves."""

    growth_interval: int  # good steps before it grows
    growth_factor: float
    backoff_factor: float  # after a step whose gradients are not finite
    max: float


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """The loss scale of a run: where it starts, and what moves it."""

    initial: float = 1.0  # 1 when it is off: one program for both, and a product with 1 changes no bit
    growth: Growth | None = None  # of a dynamic scale
    schedule: ScaleSchedule = ()


def make_loss_scaling(numerics: Numerics, span: Span) -> LossScaling:
    """Return the loss scale of the options in a run of this span."""
    if not isinstance(numerics.loss_scaling, str):
        return LossScaling(initial=numerics.loss_scaling or 1.0)
    options = complete("loss_scaling", numerics.loss_scaling, numerics.loss_scaling_params)
    if numerics.loss_scaling == "dynamic":
        initial = options.pop("initial")
        return LossScaling(initial=initial, growth=Growth(**options))
    schedule = _schedule(numerics.loss_scaling, options, span)
    return LossScaling(initial=schedule[0][1], schedule=schedule)


def _schedule(name: str, options: dict[str, Any], span: Span) -> ScaleSchedule:
    """Return the factors of a scheduled scale with the steps at which they begin."""
    if name == "stepped":
        return tuple(zip((0, *map(span.steps, options["boundaries"])), options["values"], strict=True))
    if name == "doubling":
        total, factor = span.num_epochs * span.updates_per_epoch, [options["initial"]]
        while factor[-1] < options["final"]:
            factor.append(2 * factor[-1])
        first = [number * total // len(factor) for number in range(len(factor))]
        return tuple(zip(first, factor, strict=True))
    raise AssertionError(name)


def scheduled(schedule: ScaleSchedule, step: jax.typing.ArrayLike) -> jax.Array:
    """Return the factor of a step; of several that begin at one step, the last."""
    scale = jnp.float32(schedule[0][1])
    for first, factor in schedule[1:]:
        scale = jnp.where(jnp.asarray(step) >= first, jnp.float32(factor), scale)
    return scale


def init_loss_scale(scaling: LossScaling) -> LossScale:
    """Return the state at the start: `scale`, `good_steps` since it last changed, `skipped` steps of the whole run."""
    return {"scale": jnp.float32(scaling.initial), "good_steps": jnp.int32(0), "skipped": jnp.int32(0)}


def resumed_loss_scale(state: LossScale, step: int, scaling: LossScaling) -> LossScale:
    """Return a checkpoint's state for the options of now: a dynamic scale goes on, another one is what they say."""
    if scaling.growth is not None:
        return state
    scale = scheduled(scaling.schedule, step) if scaling.schedule else scaling.initial
    return {**state, "scale": cast("jax.Array", np.float32(scale))}  # NumPy's, as all that a checkpoint holds


def next_loss_scale(
    state: LossScale,
    finite: jax.Array | bool,
    scaling: LossScaling,
    step: jax.typing.ArrayLike = 0,
) -> LossScale:
    """Return the state after `step`, whose gradients were all finite, or were not."""
    finite = jnp.asarray(finite)
    # Without dynamic scaling, too: nan_policy skip also skips steps.
    skipped = state["skipped"] + jnp.where(finite, 0, 1).astype(jnp.int32)
    if scaling.schedule:
        return {**state, "scale": scheduled(scaling.schedule, jnp.asarray(step) + 1), "skipped": skipped}
    growth = scaling.growth
    if growth is None:
        return {**state, "skipped": skipped}
    good = state["good_steps"] + 1
    grows = good >= growth.growth_interval
    grown = jnp.minimum(state["scale"] * growth.growth_factor, growth.max)
    shrunk = jnp.maximum(state["scale"] * growth.backoff_factor, SMALLEST)
    return {
        "scale": jnp.where(finite, jnp.where(grows, grown, state["scale"]), shrunk).astype(jnp.float32),
        # From 0 again after growing: the new scale is tried for a whole interval before it grows further.
        "good_steps": jnp.where(finite & ~grows, good, 0).astype(jnp.int32),
        "skipped": skipped,
    }


def overflow_expected(state: LossScale, scaling: LossScaling) -> jax.Array:
    """Say whether a gradient that is not finite may be caused by the loss scale: dynamic, and above the smallest."""
    return (state["scale"] > SMALLEST) & (scaling.growth is not None)
