"""Callbacks: what code or options do when a call, an epoch or a validation has ended. They may stop the run.

They run in process 0, in the thread that reads results, while the devices work on the next call. After an epoch or a
validation that a callback waits for, the next call is launched only once it has decided, so that a run stops at the
same step every time. After a call the next ones are launched already: a run stops a call or two later.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.config.schema import Run
from headrace.core.errors import ConfigError
from headrace.telemetry.records import ValidationRecord


@dataclass(frozen=True, kw_only=True)
class TrainingEvent:
    """The end of a call or of an epoch; the numbers are means over its samples."""

    directory: Path
    step: int
    epoch: float
    loss: float
    accuracy: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # those given by code


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
        """The top-1 accuracy of the better weights, from 0 to 1."""
        return max(record.top1 for record in self.results.values())


class Callback:
    """Base of callbacks: override what is needed. A returned sentence stops the run and is recorded as the reason."""

    def on_call_end(self, event: TrainingEvent) -> str | None:
        """Do something after a call of the device program, about once a second."""

    def on_epoch_end(self, event: TrainingEvent) -> str | None:
        """Do something after the last step of an epoch."""

    def on_validation_end(self, event: ValidationEvent) -> str | None:
        """Do something after a validation."""


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """Stop when `patience` validations in a row have brought no better accuracy."""

    patience: int

    def on_validation_end(self, event: ValidationEvent) -> str | None:
        """Stop if the best validation is that many validations ago; of equal ones the first counts."""
        scores: dict[int, float] = {}
        for record in event.history:
            if record.top1 == record.top1:  # a NaN is never the best
                scores[record.step] = max(scores.get(record.step, 0.0), record.top1)
        steps = sorted({record.step for record in event.history})
        best = max(scores, key=lambda step: (scores[step], -step), default=None)
        since = len(steps) if best is None else len(steps) - 1 - steps.index(best)
        if since < self.patience:
            return None
        count = f"{since} validation{'s' * (since != 1)}"
        if best is None:
            return f"early stopping: no accuracy in {count}"
        return f"early stopping: no better top-1 than {100 * scores[best]:.2f} % (step {best}) in {count}"


@dataclass(frozen=True)
class TargetAccuracy(Callback):
    """Stop at the first validation that reaches an accuracy (0 to 1)."""

    accuracy: float

    def on_validation_end(self, event: ValidationEvent) -> str | None:
        """Stop if the accuracy was reached."""
        if not event.accuracy >= self.accuracy:
            return None
        return f"target accuracy: top-1 {100 * event.accuracy:.2f} % reaches {100 * self.accuracy:g} %"


CALLBACK = "callback: "  # before a reason to stop, to tell it from the name of a signal
_EPOCH, _VALIDATION = "on_epoch_end", "on_validation_end"


class Callbacks:
    """The callbacks of a run, and the reason for which one of them wants it to stop."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)
        self.reason: str | None = None

    @property
    def wait_for_epochs(self) -> bool:
        """Whether some callback decides at the end of epochs."""
        return self._any(_EPOCH)

    def decide_after(self, *, epoch_ends: bool, validated: bool) -> bool:
        """Say whether the next call must wait for what callbacks decide after this one."""
        return (epoch_ends and self.wait_for_epochs) or (validated and self._any(_VALIDATION))

    def call_ended(self, event: TrainingEvent) -> None:
        """Run the callbacks of calls."""
        self._decide([callback.on_call_end(event) for callback in self._callbacks])

    def epoch_ended(self, event: TrainingEvent) -> None:
        """Run the callbacks of epochs."""
        self._decide([callback.on_epoch_end(event) for callback in self._callbacks])

    def validation_ended(self, event: ValidationEvent) -> None:
        """Run the callbacks of validations."""
        self._decide([callback.on_validation_end(event) for callback in self._callbacks])

    def _decide(self, reasons: Iterable[str | None]) -> None:
        for reason in reasons:
            if reason is not None and not isinstance(reason, str):
                raise ConfigError(
                    f"A callback returned {reason!r}.",
                    rule="It returns None, or the reason for which the run is to stop, as text.",
                )
            # The first reason counts: later calls may already be under way when it is given.
            self.reason = self.reason or reason

    def _any(self, method: str) -> bool:
        # Only callbacks that override a method make the run wait for it: waiting costs the overlap of two calls.
        return any(getattr(type(each), method) is not getattr(Callback, method) for each in self._callbacks)


def check_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """Return callbacks given by code; refuse anything else."""
    given = tuple(callbacks) if isinstance(callbacks, list | tuple) else (callbacks,)
    found = tuple(each for each in given if isinstance(each, Callback))
    if wrong := [each for each in given if not isinstance(each, Callback)]:
        raise ConfigError(
            f"A callback is a {type(wrong[0]).__name__}.",
            rule="Callbacks are a list of objects whose classes inherit from headrace.Callback.",
            remedy="Override on_call_end, on_epoch_end or on_validation_end.",
        )
    return found


def callbacks_of(run: Run) -> tuple[Callback, ...]:
    """Return the callbacks that options ask for."""
    stopping = () if run.early_stopping is None else (EarlyStopping(run.early_stopping),)
    return stopping if run.target_accuracy is None else (*stopping, TargetAccuracy(run.target_accuracy))
