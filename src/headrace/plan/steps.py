"""Steps, calls and events: when training logs, saves, validates and changes the image size.

An event with period `x_every` happens every `x_every` steps; 0 means never. A period may be a fraction of a step: the
k-th event then happens after the whole step nearest to k periods. The last step of the run always ends with every
enabled event, so that the final weights are logged, saved and validated.

With progressive resolution, image sizes are evenly spaced and last equally long, up to a given fraction of the run. All
images of a call have one size, so a call ends where the size changes.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from headrace.core.errors import ConfigError

LOGS, CHECKPOINTS, VALIDATIONS = "--logs-per-epoch", "--ckpts-per-epoch", "--validations-per-epoch"


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """One pass over the training set in whole steps."""

    num_samples: int
    global_batch_size: int
    updates_per_epoch: int
    copies: int = 1  # of each sample within a step (repeated augmentation)

    @property
    def _used(self) -> int:
        return self.updates_per_epoch * -(-self.global_batch_size // self.copies)

    @property
    def dropped(self) -> int:
        """Samples that no step of an epoch uses; the shuffle of the next epoch drops others."""
        return max(0, self.num_samples - self._used)

    @property
    def repeated(self) -> int:
        """Samples seen beyond one pass, where more updates per epoch are requested than the dataset fills."""
        return max(0, self._used - self.num_samples)


@dataclass(frozen=True, kw_only=True)
class Events:
    """How often per epoch each event happens. None: never; 0: only at the end of the run.

    `divide_epoch`: move a frequency to the nearest that divides an epoch (below one per epoch, the run).
    """

    logs: float
    checkpoints: float | None
    validations: float | None
    checkpoint_seconds: float = 0.0
    divide_epoch: bool = False


CHECKPOINT_SECONDS = 180.0  # of work that a crash may lose where nobody says how often to save


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The run as steps. A call ends at every event; between two events it has at most `steps_per_call` steps."""

    epoch: EpochPlan
    num_epochs: int
    total_steps: int
    log_every: Fraction
    checkpoint_every: Fraction
    validate_every: Fraction
    steps_per_call: int  # at most; also the length of the arrays that a call takes and returns
    # Where nobody asked for a number of checkpoints: so long after the last one a call ends with another, and those of
    # `checkpoint_every` are written as far as they take little of the run's time. 0: all of these, and no others.
    checkpoint_seconds: float = 0.0
    warnings: tuple[str, ...] = ()

    @property
    def updates_per_epoch(self) -> int:
        return self.epoch.updates_per_epoch

    @property
    def num_calls(self) -> int:
        """Return how many calls the run has when each is as long as it may be."""
        if not self.total_steps:
            return 0
        # The events of a stretch this long come again at the same distances in the next one.
        repeats = math.lcm(*(every.numerator for every in self._periods)) if self._periods else self.total_steps
        stretch = min(self.total_steps, repeats)
        whole, rest = divmod(self.total_steps, stretch)
        return whole * self._calls_until(stretch) + self._calls_until(rest)

    def _calls_until(self, end: int) -> int:
        calls, step = 0, 0
        while step < end:
            event = min(self.next_event(step), end)
            calls, step = calls - (step - event) // self.steps_per_call, event
        return calls

    @property
    def _periods(self) -> list[Fraction]:
        return [every for every in (self.log_every, self.checkpoint_every, self.validate_every) if every]

    def next_event(self, step: int) -> int:
        """Return the first step after `step` that ends with an event: no call may go beyond it."""
        return min([self.total_steps, *(_next_event(step, every) for every in self._periods)])

    def num_events(self, every: Fraction) -> int:
        """Return how often an event with that period happens in the run."""
        # Rounded up, because the last step always ends with one.
        return math.ceil((self.total_steps - Fraction(1, 2)) / every) if every else 0

    def cut_short(self, num_steps: int) -> "StepPlan":
        """Return the plan of a trial of at most that many steps; every enabled event happens at its end."""
        last = min(num_steps, self.total_steps)

        def at_end(every: Fraction) -> Fraction:
            return Fraction(last if every else 0)

        return replace(
            self,
            total_steps=last,
            log_every=at_end(self.log_every),
            checkpoint_every=at_end(self.checkpoint_every),
            validate_every=at_end(self.validate_every),
            steps_per_call=min(last, self.steps_per_call),
        )

    def log_due(self, step: int) -> bool:
        """Return whether a record is due after `step` steps."""
        return self._due(step, self.log_every)

    def checkpoint_due(self, step: int) -> bool:
        return self._due(step, self.checkpoint_every)

    def validation_due(self, step: int) -> bool:
        return self._due(step, self.validate_every)

    def _due(self, step: int, every: Fraction) -> bool:
        # The last step counts as due even if no period ends there: final weights are always saved and validated.
        return every > 0 and step > 0 and (step == self.total_steps or _next_event(step - 1, every) == step)

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_samples": self.epoch.num_samples,
            "updates_per_epoch": self.updates_per_epoch,
            "dropped_per_epoch": self.epoch.dropped,
            "repeated_per_epoch": self.epoch.repeated,
            "num_epochs": self.num_epochs,
            "total_steps": self.total_steps,
            "log_every": _plain(self.log_every),
            "checkpoint_every": _plain(self.checkpoint_every),
            "checkpoint_seconds": self.checkpoint_seconds,
            "validate_every": _plain(self.validate_every),
            "steps_per_call": self.steps_per_call,
            "num_calls": self.num_calls,
        }


NEVER = Fraction(0)


def _next_event(step: int, every: Fraction) -> int:
    """Return the first whole step after `step` that is nearest to a multiple of the period, which is 1 or more."""
    half = Fraction(1, 2)
    return math.floor(math.ceil((step + half) / every) * every + half)


def _plain(every: Fraction) -> float:
    return int(every) if every.denominator == 1 else float(every)


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, in ascending order."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def nearest_divisor(number: int, target: float) -> int:
    """Return the divisor of `number` nearest to `target`; of two equally near, the larger (more events)."""
    return min(divisors(number), key=lambda d: (abs(d - target), -d))


def make_epoch_plan(
    *, num_samples: int, global_batch_size: int, weight_updates_per_epoch: int, copies: int = 1
) -> EpochPlan:
    """Count the steps of an epoch: the whole global batches of the dataset, or the requested number (unless -1)."""
    # Otherwise an epoch would have no whole step.
    if global_batch_size > num_samples:
        raise ConfigError(
            f"One step takes {global_batch_size:,} samples, the training set has {num_samples:,}.",
            rule="A step may not see a sample twice.",
            remedy="Make --batch-size smaller (or --micro-batch-size, --num-replicas, --gradient-accumulation-count).",
        )
    assert weight_updates_per_epoch == -1 or weight_updates_per_epoch > 0, weight_updates_per_epoch
    updates = num_samples // global_batch_size if weight_updates_per_epoch == -1 else weight_updates_per_epoch
    return EpochPlan(
        num_samples=num_samples, global_batch_size=global_batch_size, updates_per_epoch=updates, copies=copies
    )


def event_period(option: str, per_epoch: float, updates_per_epoch: int, num_epochs: int) -> tuple[Fraction, str | None]:
    """Return the steps from one event to the next, and a warning if that is not the requested frequency."""
    # In fractions: multiples of a binary number would drift, and events fall a step too early.
    wanted = Fraction(per_epoch).limit_denominator(10_000)  # 0.3 is 3/10; what is nearly never is 0
    total = Fraction(updates_per_epoch * num_epochs)
    if wanted == 0:
        return total, None
    period = updates_per_epoch / wanted
    if period >= 1:
        return min(period, total), None
    warning = f"{option} {frequency(per_epoch)}: an epoch has {updates_per_epoch:,} steps, so each step has one."
    return Fraction(1), warning


def dividing_period(
    option: str, per_epoch: float, updates_per_epoch: int, num_epochs: int
) -> tuple[Fraction, str | None]:
    """Return a period that divides the epoch or, with fewer than one event per epoch, the run; and a warning.

    This is the rule of the reference's second application, whose calls all have the same length.
    """
    span, target, where = updates_per_epoch, per_epoch, "per epoch"
    if per_epoch < 1:
        span, target, where = updates_per_epoch * num_epochs, round(per_epoch * num_epochs), f"in {num_epochs} epochs"
    if target == 0:
        return Fraction(span), None
    count = nearest_divisor(span, target)
    period = span // count
    if count == target:
        return Fraction(period), None
    return Fraction(period), (
        f"{option} {frequency(per_epoch)} would fall inside a step: {target:g} does not divide the {span:,} steps. "
        f"The nearest that does is {count:,} {where}, every {period:,} steps."
    )


def frequency(per_epoch: float) -> str:
    """Format a frequency the way people write it: 2, 0.3, 1/3."""
    near = Fraction(per_epoch).limit_denominator(100)
    if near.denominator in (1, 2, 4, 5, 10) or not math.isclose(near, per_epoch, rel_tol=1e-6):
        return f"{per_epoch:g}"
    return str(near)


def make_step_plan(epoch: EpochPlan, num_epochs: int, events: Events, max_steps_per_call: int | None) -> StepPlan:
    """Derive total steps, the three periods and the length of a call.

    `max_steps_per_call` limits calls whose images are sent to the devices; None if the dataset is already there.
    """
    assert num_epochs > 0, num_epochs
    periods, warnings = _periods(events, epoch.updates_per_epoch, num_epochs)
    total = epoch.updates_per_epoch * num_epochs
    # A call ends at every event, so that a longer one could never be used in full.
    first_event = steps_per_call = min(math.ceil(every) for every in periods.values() if every)
    if max_steps_per_call is not None:
        steps_per_call = min(steps_per_call, max(1, max_steps_per_call))
    if events.logs == 0 and first_event == total:
        warnings.append(
            f"--logs-per-epoch 0: the whole run of {total:,} steps goes without an event; nothing is logged"
            f"{' ' if events.checkpoint_seconds else ', saved '}or validated before its end."
        )
    return StepPlan(
        epoch=epoch,
        num_epochs=num_epochs,
        total_steps=total,
        log_every=periods[LOGS],
        checkpoint_every=periods[CHECKPOINTS],
        validate_every=periods[VALIDATIONS],
        steps_per_call=steps_per_call,
        checkpoint_seconds=events.checkpoint_seconds,
        warnings=tuple(warnings),
    )


def _periods(events: Events, updates_per_epoch: int, num_epochs: int) -> tuple[dict[str, Fraction], list[str]]:
    make_period = dividing_period if events.divide_epoch else event_period
    wanted = {LOGS: events.logs, CHECKPOINTS: events.checkpoints, VALIDATIONS: events.validations}
    periods: dict[str, Fraction] = {}
    warnings: list[str] = []
    for option, per_epoch in wanted.items():
        period, warning = NEVER, None
        if per_epoch is not None:
            period, warning = make_period(option, per_epoch, updates_per_epoch, num_epochs)
        periods[option] = period
        # an event as frequent as the logs would repeat their warning
        if warning and (option == LOGS or per_epoch != events.logs):
            warnings.append(warning)
    return periods, warnings


def no_steps(num_samples: int, global_batch_size: int, num_epochs: int) -> StepPlan:
    """Return the plan of a run that does not train."""
    epoch = EpochPlan(
        num_samples=num_samples,
        global_batch_size=global_batch_size,
        updates_per_epoch=max(1, num_samples // global_batch_size),
    )
    return StepPlan(
        epoch=epoch,
        num_epochs=num_epochs,
        total_steps=0,
        log_every=NEVER,
        checkpoint_every=NEVER,
        validate_every=NEVER,
        steps_per_call=0,
    )
