"""A run that ends on time: how many steps are left, and where each of them is on the curve of the learning rate.

Before each call process 0 looks at the clock and says how many steps fit the time that is left. What is left of the
curve is spread over these steps evenly, so that the last one is at its end, however the speed changes on the way.
Places on the curve are counted in whole numbers; a checkpoint holds that of the step after it.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.config.field import CHOSEN
from headrace.config.load import Resolved
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.units import format_duration
from headrace.plan.duration import PASSES
from headrace.plan.plan import Plan
from headrace.plan.steps import StepPlan

END_SECONDS = 0.5  # for the last records and the report
# What is left when the last call begins: seconds, or a share of the budget.
_LAST_SECONDS, _LAST_SHARE = 0.25, 0.02
PARTS = 1024  # of a step of the curve: a call may move by less than a step
_MOST_STEPS = 2**30  # of a run whose epochs follow from its time


def refuse_unpaced(seconds: float | None, plan: Plan) -> None:
    """Refuse a time budget for plans whose programs cannot be given the rates of their steps."""
    if seconds is not None and plan.pipeline is not None and not plan.one_program:
        raise ConfigError(
            f"time_budget is {format_duration(seconds)}, and the network runs in {len(plan.pipeline.stages)} stages.",
            rule="Stages on several devices compute the learning rate from the step, which a budget does not know yet.",
            remedy="Leave out the stages, or give --num-epochs in place of --time-budget.",
        )


def open_ended(resolved: Resolved, steps: StepPlan, done: int = 0, pace: Mapping[str, Any] | None = None) -> StepPlan:
    """Return the steps that a run may have: as many as its time allows, at most those of epochs that were given."""
    if resolved.config.run.time_budget is None:
        return steps
    if pace and pace["place"] >= steps.total_steps * PARTS:  # the curve is at its end
        return replace(steps, total_steps=done)
    return replace(steps, total_steps=_MOST_STEPS) if chooses_epochs(resolved) else steps


def chooses_epochs(resolved: Resolved) -> bool:
    """Say whether the number of epochs follows from the time."""
    return resolved.config.run.time_budget is not None and resolved.origins["num_epochs"].kind == CHOSEN


def refuse_lost_pace(seconds: float | None, pace: Mapping[str, Any]) -> None:
    """Refuse to resume a run with a budget without one: its steps are not where their numbers say."""
    if pace and seconds is None:
        raise CheckpointError(
            "The run had a time budget, and is resumed without one.",
            rule="Its learning rate follows the time; by the number of steps it would jump.",
            remedy="Give the time of the whole run: --time-budget 20m.",
        )


@dataclass(frozen=True, kw_only=True)
class MeasuredPace:
    """What is known between two calls."""

    now: float  # on the performance counter
    step: int  # the last one whose results are known
    timed_steps: int  # without those of the first call
    timed_seconds: float  # that they took: waiting for input included, but no saving, validation or compiling
    validation: float = 0.0  # seconds of one
    saving: float = 0.0


@dataclass
class TimeBudget:
    """The time of a run and where it is on its curve. All processes have the same place; process 0 has the time."""

    seconds: float
    began: float  # on the performance counter
    curve_steps: int
    left: int  # steps, as decided last; at first as many as there may be
    place: int = 0  # of the next step, in parts
    spent: float = 0.0  # by earlier processes of the run
    _ends: bool = False  # whether they are one call
    _known: list[tuple[int, float]] = field(default_factory=lambda: [(0, 0.0)])  # timed steps and seconds
    _places: dict[int, int] = field(default_factory=dict)  # after how many steps

    @property
    def used(self) -> float:
        """Seconds of the whole run so far."""
        return self.spent + time.perf_counter() - self.began

    def measure(self, measured: MeasuredPace, step: int, steps: StepPlan) -> tuple[int, bool]:
        """Return how many steps from `step` on fit the time that is left, one at least, and whether the run ends with
        them. Process 0 alone is asked.
        """
        most = steps.total_steps - step
        pace = self._step_seconds(measured)
        if pace is None:  # the first call tells nothing: it loads the program
            return most, False
        # Calls that are under way end first.
        begins = self.spent + measured.now - self.began + (step - measured.step) * pace
        left = self.seconds - begins - END_SECONDS - measured.saving - measured.validation
        num_steps = math.floor(left / pace)
        every = steps.validate_every
        for _ in range(3 if every and measured.validation else 0):  # validations on the way take time, too
            last = step + max(num_steps, 1)
            on_the_way = math.floor((last - 0.5) / every) - math.floor((step + 0.5) / every)
            num_steps = min(math.floor(left / pace), math.floor((left - measured.validation * on_the_way) / pace))
        return min(most, max(1, num_steps)), left <= max(_LAST_SECONDS, _LAST_SHARE * self.seconds, 2 * pace)

    def _step_seconds(self, measured: MeasuredPace) -> float | None:
        """Return the seconds of a step, over the later half of those that were timed."""
        if measured.timed_steps > self._known[-1][0]:
            self._known.append((measured.timed_steps, measured.timed_seconds))
        steps, seconds = self._known[-1]
        if not steps:
            return None
        first = next(at for at, (known, _) in reversed([*enumerate(self._known)]) if known <= steps / 2)
        self._known = self._known[first:]
        return max(1e-7, (seconds - self._known[0][1]) / (steps - self._known[0][0]))

    def decide(self, steps_left: int, ends: bool) -> int:
        """Take what process 0 measured; return the most steps of the next call."""
        self.left, self._ends = steps_left, ends
        # Half of what is left, until it is little: a last call that is as long as the measurement is wrong would be.
        return steps_left if ends else max(1, (steps_left + 1) // 2)

    def is_last(self, num_steps: int) -> bool:
        """Say whether a call of so many steps is the last one."""
        return self._ends and num_steps >= self.left

    def places(self, step: int, num_steps: int) -> np.ndarray:
        """Return where the steps of a call that begins after `step` steps are on the curve, and go on behind them."""
        end = self.curve_steps * PARTS
        found = [self.place + number * (end - self.place) // self.left for number in range(num_steps + 1)]
        self._places[step + num_steps] = self.place = min(found[-1], end)
        return np.array([min(each, end - 1) // PARTS for each in found[:-1]], np.int32)

    def to_dict(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of that step holds."""
        return {"place": self._places.get(step, self.place), "spent": self.used}


def make_budget(
    resolved: Resolved, planned: StepPlan, running: StepPlan, began: float, done: int, pace: Mapping[str, Any]
) -> TimeBudget | None:
    """Return the budget of a run that has one; one that is resumed after `done` steps goes on from its pace."""
    seconds = resolved.config.run.time_budget
    if seconds is None:
        return None
    return TimeBudget(
        seconds=seconds,
        began=began,
        curve_steps=planned.total_steps,
        left=max(1, running.total_steps - done),
        place=int(pace.get("place", done * PARTS)),
        spent=float(pace.get("spent", 0.0)),
    )


def seconds_of_validation(num_images: int, images_per_step: int, step_seconds: float | None) -> float:
    """Return about how long a validation takes before the first was measured."""
    return 0.0 if step_seconds is None else num_images * step_seconds / images_per_step / PASSES


def describe_late(budget: TimeBudget) -> str:
    """Say that little time is left for training, if that is so."""
    used = budget.used - budget.spent
    if used < (budget.seconds - budget.spent) / 2:
        return ""
    return (
        f"time budget {format_duration(budget.seconds)}: {format_duration(used)} went by before the first step; "
        "what was compiled in them the next start finds done"
    )


def describe_end(budget: TimeBudget, step: int, epoch: float) -> str:
    """Say what a run did with its time."""
    return (
        f"time budget {format_duration(budget.seconds)}: {step:,} steps ({epoch:.2f} epochs) in "
        f"{format_duration(budget.used)}"
    )
