"""Callbacks: what code or options do when a run begins or ends, or a call, an epoch or a validation has ended.

They may stop the run.

They run in process 0 (in all processes where a callback says so), in the thread that reads results, while the devices
work on the next call. After an epoch or a validation that a callback waits for, the next call is launched only once it
has decided, so that a run stops at the same step every time. After a call the next ones are launched already: a run
stops a call or two later.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.config.schema import Run
from headrace.core.errors import ConfigError
from headrace.rows.metrics import METRICS
from headrace.rows.row import Metric
from headrace.run.custom_functions import metric
from headrace.telemetry.records import ValidationRecord


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """The beginning of the training of a run, or its end: then `outcome` is finished, stopped or interrupted."""

    directory: Path
    step: int
    epoch: float
    num_epochs: int
    steps_per_epoch: int
    outcome: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingEvent:
    """The end of a call or of an epoch; the numbers are means over its samples."""

    directory: Path
    step: int
    epoch: float
    loss: float
    accuracy: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # those given by code
    validation_follows: bool = False  # on this step, whose results come with on_validation_end


@dataclass(frozen=True, kw_only=True)
class ValidationEvent:
    """The end of a validation: its result for each set of weights (raw, ema), and all results of the run so far."""

    directory: Path
    step: int
    epoch: float
    results: Mapping[str, ValidationRecord]
    history: tuple[ValidationRecord, ...]

    @property
    def accuracy(self) -> float:
        """The top-1 accuracy of the better weights, from 0 to 1; NaN of a task without classes."""
        return max((record.top1 for record in self.results.values() if record.top1 is not None), default=math.nan)


class Callback:
    """Base of callbacks: override what is needed. A returned sentence stops the run and is recorded as the reason.

    In a job they are called in process 0; with `every_process` in all of them. What process 0 returns counts, and the
    `history` of the others begins where the run was resumed.
    """

    every_process = False

    def on_train_begin(self, event: RunEvent) -> str | None:
        """Do something before the first call, once the programs are compiled."""

    def on_train_end(self, event: RunEvent) -> None:
        """Do something after the last step and its validation, however the run ended but by an error."""

    def on_call_end(self, event: TrainingEvent) -> str | None:
        """Do something after a call of the device program, about once a second."""

    def on_step(self, event: TrainingEvent) -> str | None:
        """Do something after a step, while its call runs; with `stream_results`, on a thread of the devices: be quick.

        A reason stops the run after the call. There are no metrics given by code.
        """

    def on_epoch_end(self, event: TrainingEvent) -> str | None:
        """Do something after the last step of an epoch."""

    def on_validation_end(self, event: ValidationEvent) -> str | None:
        """Do something after a validation."""


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """Stop when `patience` validations in a row have brought no better value of the metric `monitor` (or its name)."""

    patience: int
    monitor: str | Metric = "top1"

    def __post_init__(self) -> None:
        """Refuse a metric that does not exist."""
        metric(self.monitor)

    def on_validation_end(self, event: ValidationEvent) -> str | None:
        """Stop if the best validation is that many validations ago; of equal ones the first counts."""
        row = metric(self.monitor)
        merits: dict[int, float] = {}
        for record in event.history:
            value = record.metric(row.name)
            if value is not None and value == value:  # a NaN is never the best
                merits[record.step] = max(merits.get(record.step, -math.inf), row.merit(value))
        steps = sorted({record.step for record in event.history})
        best = max(merits, key=lambda step: (merits[step], -step), default=None)
        since = len(steps) if best is None else len(steps) - 1 - steps.index(best)
        if since < self.patience:
            return None
        count = f"{since} validation{'s' * (since != 1)}"
        if best is None:
            return f"early stopping: no {'accuracy' if row.is_share else row.title} in {count}"
        return (
            f"early stopping: no better {row.title} than {row.text(row.merit(merits[best]))} (step {best}) in {count}"
        )


@dataclass(frozen=True)
class TargetAccuracy(Callback):
    """Stop at the first validation whose accuracy (0 to 1) reaches a target: top-1, or the metric `monitor`."""

    accuracy: float
    monitor: str | Metric = "top1"

    def __post_init__(self) -> None:
        """Refuse a metric that is no accuracy."""
        row = metric(self.monitor)
        if not row.is_share:
            raise ConfigError(
                f"TargetAccuracy was given monitor {row.name!r}.",
                rule="A target is a share from 0 to 1.",
                remedy=f"Choose one of {', '.join(name for name, row in METRICS.items() if row.is_share)}.",
            )

    def on_validation_end(self, event: ValidationEvent) -> str | None:
        """Stop if the accuracy was reached."""
        row = metric(self.monitor)
        values = [record.metric(row.name) for record in event.results.values()]
        reached = max((value for value in values if value is not None), default=-math.inf)
        if not reached >= self.accuracy:
            return None
        return f"target accuracy: {row.title} {row.text(reached)} reaches {100 * self.accuracy:g} %"


CALLBACK = "callback: "  # before a reason to stop, to tell it from the name of a signal
_EPOCH, _VALIDATION = "on_epoch_end", "on_validation_end"


class Callbacks:
    """The callbacks of a run, and the reason for which one of them wants it to stop."""

    def __init__(self, callbacks: Sequence[Callback] = (), *, is_first: bool = True) -> None:
        self._callbacks, self._is_first = tuple(callbacks), is_first
        self._called = tuple(each for each in callbacks if is_first or each.every_process)
        self.reason: str | None = None

    @property
    def wait_for_epochs(self) -> bool:
        """Whether some callback decides at the end of epochs."""
        return self._any(_EPOCH)

    def decide_after(self, *, epoch_ends: bool, validated: bool) -> bool:
        """Say whether the next call must wait for what callbacks decide after this one."""
        return (epoch_ends and self.wait_for_epochs) or (validated and self._any(_VALIDATION))

    @property
    def wait_for_steps(self) -> bool:
        """Whether some callback looks at single steps."""
        return self._any("on_step")

    def train_begins(self, event: RunEvent) -> None:
        self._decide([callback.on_train_begin(event) for callback in self._called])

    def train_ended(self, event: RunEvent) -> None:
        for callback in self._called:
            callback.on_train_end(event)

    def step_ended(self, event: TrainingEvent) -> None:
        self._decide([callback.on_step(event) for callback in self._called])

    def call_ended(self, event: TrainingEvent) -> None:
        self._decide([callback.on_call_end(event) for callback in self._called])

    def epoch_ended(self, event: TrainingEvent) -> None:
        self._decide([callback.on_epoch_end(event) for callback in self._called])

    def validation_ended(self, event: ValidationEvent) -> None:
        self._decide([callback.on_validation_end(event) for callback in self._called])

    def _decide(self, reasons: Iterable[str | None]) -> None:
        for reason in reasons:
            if reason is not None and not isinstance(reason, str):
                raise ConfigError(
                    f"A callback returned {reason!r}.",
                    rule="It returns None, or the reason for which the run is to stop, as text.",
                )
            # The first reason counts: later calls may already be under way when it is given.
            self.reason = self.reason or (reason if self._is_first else None)

    def _any(self, method: str) -> bool:
        # Only callbacks that override a method make the run wait for it: waiting costs the overlap of two calls.
        return any(overrides(each, method) for each in self._callbacks)


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def overrides(callback: Callback, event: str) -> bool:
    """Say whether a callback has a method of its own for an event, in its class or as an attribute."""
    return getattr(getattr(callback, event), "__func__", None) is not getattr(Callback, event)


def callbacks_of(run: Run, monitor: Metric) -> tuple[Callback, ...]:
    """Return the callbacks that options ask for."""
    stopping = () if run.early_stopping is None else (EarlyStopping(run.early_stopping, monitor),)
    return stopping if run.target_accuracy is None else (*stopping, TargetAccuracy(run.target_accuracy, monitor))
