"""The learning rate as a function of the step: a curve of the table, a warm-up, a staircase; its values in advance."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.config.params import complete_lr
from headrace.config.schema import Learning
from headrace.engine.devices import host_device
from headrace.rows.curves import CURVES
from headrace.rows.row import Curve, Span

LrCurve = Callable[[jax.typing.ArrayLike], jax.Array]


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """A linear ramp over the first steps; `shift` starts the curve after them, else it runs from the first step."""

    steps: int
    shift: bool
    from_zero: bool  # the factor t/W of the reference's first application, whose first step changes nothing

    def curve(self, curve: Curve) -> Curve:
        """Return a curve with the ramp before or over it."""
        first, last = (0, max(1, self.steps)) if self.from_zero else (1, self.steps + 1)

        def warmed(step: jax.Array) -> jax.Array:
            ramp = jnp.minimum(step + first, last).astype(jnp.float32) / last
            return ramp * curve(jnp.maximum(step - self.steps, 0) if self.shift else step)

        return warmed


@dataclass(frozen=True, kw_only=True)
class RunCurve:
    """The learning rate of a run as a float32 function of the step (0 for the first update): a value, not a closure."""

    name: str
    params: tuple[tuple[str, Any], ...]
    span: Span
    warm_up: WarmUp | None
    staircase: bool

    def __call__(self, step: jax.typing.ArrayLike) -> jax.Array:
        """Return the rate of a step, or of an array of steps."""
        steps = jnp.asarray(step).astype(jnp.int32)
        if self.staircase:
            # On the step itself, so that warm-up and curve both stay constant within an epoch.
            steps = steps // self.span.updates_per_epoch * self.span.updates_per_epoch
        curve = CURVES[self.name].curve(dict(self.params), self.span)
        return (self.warm_up.curve(curve) if self.warm_up else curve)(steps)


def make_lr_curve(learning: Learning, *, global_batch_size: int, updates_per_epoch: int, num_epochs: int) -> RunCurve:
    """Return the learning rate of the options."""
    params, warmup = complete_lr(learning, num_epochs)
    span = Span(global_batch_size=global_batch_size, updates_per_epoch=updates_per_epoch, num_epochs=num_epochs)
    shift = warmup is not None and warmup["warmup_mode"] == "shift"
    warmup_steps = span.steps(warmup["warmup_epochs"]) if warmup else 0
    steps_left = num_epochs * updates_per_epoch - warmup_steps
    is_given = (learning.lr_schedule_params or {}).get("epochs_to_total_decay") is not None
    if shift and not is_given and "epochs_to_total_decay" in params and steps_left > 0:
        # All steps that the warm-up leaves. Epochs less warm-up epochs, rounded down once more, could be a step less,
        # and the last step would have a rate of zero.
        params["epochs_to_total_decay"] = steps_left / updates_per_epoch
    return RunCurve(
        name=learning.lr_schedule,
        params=pairs(params),
        span=span,
        warm_up=WarmUp(steps=warmup_steps, shift=shift, from_zero=warmup["from_zero"]) if warmup else None,
        staircase=learning.lr_staircase,
    )


def pairs(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return settings as a value that can be a key: pairs, with tuples in place of lists."""
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in settings.items())


_TABLE = 4096  # steps whose rates are computed at a time


def rate_table(lr_curve: LrCurve) -> Callable[[np.ndarray], np.ndarray]:
    """Return `rates(steps)`: the curve's values on the host, float32.

    They are an input of the program, so that a run with another curve needs no other program. Tables begin at multiples
    of their size: XLA may round a number differently by its place in a vector, and a step's rate must not depend on
    where a call begins.
    """
    tabulate = jax.jit(lambda first: lr_curve(first + jnp.arange(_TABLE, dtype=jnp.int32)))

    @functools.lru_cache(maxsize=2)
    def table(number: int) -> np.ndarray:
        with jax.default_device(host_device()):
            return np.asarray(tabulate(jnp.int32(number * _TABLE)))

    def rates(steps: np.ndarray) -> np.ndarray:
        """Return the rates of steps in ascending order."""
        parts = [table(number)[steps[steps // _TABLE == number] % _TABLE] for number in np.unique(steps // _TABLE)]
        return np.concatenate(parts)

    return rates
