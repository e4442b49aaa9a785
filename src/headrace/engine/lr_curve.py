"""The learning rate as a function of the step: six curves, two warm-ups, a staircase.

A curve is a pure function of the step (a whole number, a traced scalar or an array of steps), evaluated on the device
at every step: no state, so nothing to restore. Whole numbers stay whole (floor, shift, comparison) until the last
division, because float32 counts exactly only up to 2^24. `initial_learning_rate` is per sample and is multiplied by
the global batch; `absolute_learning_rate` and the `values` of `stepped` are not.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from headrace.config.params import complete_lr
from headrace.config.schema import Learning

LrCurve = Callable[[Any], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Converts parameters given per sample and in epochs to absolute rates and steps."""

    global_batch_size: int
    updates_per_epoch: int
    num_epochs: int = 1

    def steps(self, epochs: float) -> int:
        """Return whole steps in so many epochs, rounded down (but 0.29 x 100 is 29, whatever binary fractions say)."""
        return math.floor(round(epochs * self.updates_per_epoch, 6))

    def initial(self, params: dict[str, Any]) -> float:
        """Return the absolute initial rate."""
        absolute = params.get("absolute_learning_rate")
        return params["initial_learning_rate"] * self.global_batch_size if absolute is None else absolute


def _const(params: dict[str, Any], span: Span) -> LrCurve:
    rate = span.initial(params)
    return lambda step: jnp.full_like(step, rate, dtype=jnp.float32)


def _cosine(params: dict[str, Any], span: Span) -> LrCurve:
    rate = span.initial(params)
    last = max(span.steps(params["epochs_to_total_decay"]), 1)

    def curve(step: jax.Array) -> jax.Array:
        left = (last - jnp.minimum(step, last)).astype(jnp.float32) / last
        # sin^2(pi/2 (1 - t/T)) = (1 + cos(pi t/T))/2, without its cancellation near the end of the decay
        return rate * jnp.square(jnp.sin(0.5 * math.pi * left))

    return curve


def _stepped(params: dict[str, Any], span: Span) -> LrCurve:
    boundaries = [span.steps(epoch) for epoch in params["boundaries"]]
    values = [float(value) for value in params["values"]]

    def curve(step: jax.Array) -> jax.Array:
        rate = jnp.full_like(step, values[0], dtype=jnp.float32)
        for boundary, value in zip(boundaries, values[1:], strict=True):
            rate = jnp.where(step > boundary, jnp.float32(value), rate)
        return rate

    return curve


def _drops(params: dict[str, Any], span: Span) -> LrCurve:
    """Fall by a factor at shares of the run: stepped, as the reference's first application has it."""
    rate, factor = span.initial(params), params["factor"]
    boundaries = [share * span.num_epochs for share in params["drops"]]
    values = [rate * factor**drop for drop in range(len(boundaries) + 1)]
    return _stepped({"boundaries": boundaries, "values": values}, span)


def _polynomial(params: dict[str, Any], span: Span) -> LrCurve:
    rate, power = span.initial(params), params["power"]
    end = params["end_learning_rate_ratio"] * rate
    last = max(float(params["epochs_to_total_decay"] * span.updates_per_epoch), 1.0)

    def curve(step: jax.Array) -> jax.Array:
        left = (last - jnp.minimum(step.astype(jnp.float32), last)) / last
        return (rate - end) * jnp.power(left, power) + end

    return curve


def _exponential(params: dict[str, Any], span: Span) -> LrCurve:
    rate, log_decay = span.initial(params), math.log(params["decay_rate"])
    # A drop every n/d steps (d small enough for int32), counted in integers: exact to the step, without drift.
    period = max(params["epochs_per_drop"] * span.updates_per_epoch, 1.0)
    n, d = Fraction(period).limit_denominator(max(1, min(100, math.isqrt(int(2**30 / period))))).as_integer_ratio()

    def curve(step: jax.Array) -> jax.Array:
        num_drops = step // n * d + step % n * d // n
        return rate * jnp.exp(log_decay * num_drops.astype(jnp.float32))

    return curve


CURVES: dict[str, Callable[[dict[str, Any], Span], LrCurve]] = {
    "const": _const,
    "cosine": _cosine,
    "stepped": _stepped,
    "drops": _drops,
    "polynomial": _polynomial,
    "exponential": _exponential,
}


def _warm_up(curve: LrCurve, warmup_steps: int, *, shift: bool, from_zero: bool) -> LrCurve:
    """Ramp linearly over the first steps; `shift` starts the curve after them, else it runs from the first step."""
    first, last = (0, max(1, warmup_steps)) if from_zero else (1, warmup_steps + 1)

    def warmed(step: jax.Array) -> jax.Array:
        ramp = jnp.minimum(step + first, last).astype(jnp.float32) / last
        return ramp * curve(jnp.maximum(step - warmup_steps, 0) if shift else step)

    return warmed


def make_lr_curve(learning: Learning, *, global_batch_size: int, updates_per_epoch: int, num_epochs: int) -> LrCurve:
    """Return the learning rate as a float32 function of the step (0 for the first update)."""
    params, warmup = complete_lr(learning, num_epochs)
    span = Span(global_batch_size=global_batch_size, updates_per_epoch=updates_per_epoch, num_epochs=num_epochs)
    curve = CURVES[learning.lr_schedule](params, span)
    if warmup:
        shift, from_zero = warmup["warmup_mode"] == "shift", warmup["from_zero"]
        curve = _warm_up(curve, span.steps(warmup["warmup_epochs"]), shift=shift, from_zero=from_zero)

    def lr_curve(step: Any) -> jax.Array:
        step = jnp.asarray(step).astype(jnp.int32)
        if learning.lr_staircase:
            step = step // updates_per_epoch * updates_per_epoch
        return curve(step)

    return lr_curve
