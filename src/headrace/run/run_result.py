"""The result of a run: how it ended and, read from its directory when asked for, its metrics, checkpoint and plot."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from headrace.checkpoint.store import checkpoint_name, newest_good
from headrace.core.errors import CheckpointError
from headrace.core.units import format_duration, format_percent
from headrace.engine.state import State
from headrace.report.curve_svg import draw_run
from headrace.report.curves import Curves
from headrace.report.run_files import best_report
from headrace.report.run_summary import read_summary
from headrace.run.directory import checkpoints_of
from headrace.run.read_weights import find_checkpoint
from headrace.telemetry.model_verdict import never_recognized
from headrace.telemetry.records import (
    Record,
    RunEnd,
    TrainRecord,
    ValidationRecord,
    best_validation,
    monitor_of,
    number_fields,
    read_records,
)

Arrays = dict[str, np.ndarray]
_ROUNDED = 1e-9  # of an epoch: 4 steps of 44 are 0.0909..., and eleven times that may be a little more than 1


class MetricArrays(dict[str, np.ndarray]):
    """The metrics of a run as arrays by name, with one entry per record."""

    def __repr__(self) -> str:
        records, validations = (len(self.get(name, ())) for name in ("step", "val_step"))
        names = ", ".join(name for name in self if not name.startswith("val_"))
        return f"MetricArrays({records} training records and {validations} validations; {names}, val_..., val_ema_...)"


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """The result of a run.

    `outcome` is finished, stopped (by a callback, early stopping or a target: `reason`), interrupted (resume continues
    from its checkpoint) or compiled.
    """

    outcome: str
    directory: Path
    step: int
    validation: dict[str, ValidationRecord]  # the last one of each set of weights: raw, ema
    images_per_second: float | None
    time_to_train: float
    can_resume: bool  # there is more to train, and resuming loses nothing
    reason: str = ""
    state: State | None = None  # after the last step, on its devices; for code that trains without a Model

    def __repr__(self) -> str:
        last = max((record.top1 for record in self.validation.values() if record.top1 is not None), default=None)
        accuracy = f", top-1 {format_percent(last)} at the end" if last is not None else ""
        for record in [] if last is not None else list(self.validation.values())[:1]:
            accuracy = "".join(f", {name} {value:.4g}" for name, value in record.metrics.items()) + " at the end"
        return f"RunResult({self.outcome} at step {self.step}{accuracy}, {self.directory})"

    @property
    def records(self) -> list[Record]:
        """All records of the run, oldest first."""
        return read_records(self.directory)

    @property
    def metrics(self) -> MetricArrays:
        """The run's metrics as NumPy arrays.

        `epoch`, `step`, `loss`, `accuracy`, `learning_rate` and so on have one entry per training record; those that
        begin with `val_` one per validation, and with `val_ema_` one per validation of averaged weights.
        """
        curves = Curves(self.directory)
        curves.read_more()
        if curves.num_damaged or not curves.offset:
            read_records(self.directory)  # says what is wrong with the file
        arrays = _arrays(curves, "train", TrainRecord)
        for weights, start in (("raw", "val_"), ("ema", "val_ema_")):
            found = _arrays(curves, f"validation/{weights}", ValidationRecord)
            arrays |= {start + {"top1": "accuracy"}.get(name, name): array for name, array in found.items()}
        return MetricArrays(arrays)

    @property
    def history(self) -> dict[str, list[float]]:
        """The run's numbers by name as lists with one entry per epoch, as Keras has them: loss, accuracy, val_loss, ...

        Where records are rarer than epochs, one entry per record; NaN where an epoch had no validation.
        """
        return by_epoch(self.records)

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the best validation, or the newest without one; None when none is kept."""
        try:
            return find_checkpoint(checkpoints_of(self.directory))[0].path
        except CheckpointError:
            return None

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest good checkpoint; None when none is kept."""
        return newest_good(checkpoints_of(self.directory))[0]

    @property
    def seconds(self) -> dict[str, float]:
        """Where the wall time of the last process of the run went, by kind; the sum is the wall time."""
        end = self._end
        return dict(end.seconds) if end else {}

    @property
    def verdict(self) -> str:
        """Why the result is useless, if it is; and what limited the run: computing, input, validation or saving."""
        end = self._end
        return "\n".join(text for text in (end.model_verdict, end.verdict) if text) if end else ""

    @property
    def best(self) -> ValidationRecord | None:
        """The best validation of the run, by the metric that it monitored; None without a validation."""
        records = self.records
        return best_validation(records, monitor_of(records))

    @property
    def problems(self) -> tuple[str, ...]:
        """What makes the result doubtful or useless: a loss that diverged, one answer for all, classes never found."""
        summary = read_summary(self.directory)
        if summary.is_trial:
            return ()
        missed = never_recognized(best_report(summary))
        end = self._end
        return tuple(
            text for text in (end.model_verdict if end else "", f"never recognized: {missed}" if missed else "") if text
        )

    @property
    def _end(self) -> RunEnd | None:
        return next((record for record in reversed(self.records) if isinstance(record, RunEnd)), None)

    def _repr_html_(self) -> str:
        """Return the plot, and below it how the run ended and where its time went, for a notebook."""
        spent = ", ".join(f"{kind} {format_duration(value)}" for kind, value in self.seconds.items() if value >= 0.05)
        lines = [repr(self).removeprefix("RunResult(").removesuffix(")"), self.reason, spent]
        lines += [*self.problems, self._end.verdict if self._end else ""]
        try:
            plot = draw_run(self.directory)
        except CheckpointError:  # nothing was recorded
            plot = ""
        return plot + "".join(f"<div>{escape(line)}</div>" for line in lines if line)


def ended_result(directory: Path) -> RunResult:
    """Return the result of a run that an earlier process has finished or stopped, as its records have it."""
    records = read_records(directory)
    end = next(record for record in reversed(records) if isinstance(record, RunEnd))
    stopped = end.outcome == "stopped"
    change = "with another --target-accuracy, --early-stopping or --monitor" if stopped else "--num-epochs N"
    return RunResult(
        outcome=end.outcome,
        directory=directory,
        step=end.step,
        validation={record.weights: record for record in records if isinstance(record, ValidationRecord)},
        images_per_second=end.images_per_second,
        time_to_train=end.time_to_train,
        can_resume=stopped and (checkpoints_of(directory) / checkpoint_name(end.step)).is_dir(),
        reason=f"before this command, which changed nothing{': ' * stopped}{end.reason}; to train longer: "
        f"headrace resume {directory} {change}",
    )


def by_epoch(records: Sequence[Record]) -> dict[str, list[float]]:
    """Return the means over each epoch that ended with a training record, and what the last validation in it found."""
    found: dict[str, list[float]] = {}
    steps: list[int] = []  # at which entries end
    gathered: list[tuple[int, TrainRecord]] = []  # the records of an epoch, each with its number of steps
    training = [record for record in records if isinstance(record, TrainRecord)]
    before = 0
    for record, after in zip(training, [*training[1:], None], strict=True):
        gathered.append((record.step - before, record))
        before = record.step
        if after is not None and math.ceil(after.epoch - _ROUNDED) == math.ceil(record.epoch - _ROUNDED):
            continue
        total = sum(number for number, _ in gathered)
        rows = {"epoch": record.epoch, "learning_rate": record.learning_rate}
        for name in ("loss", "accuracy"):
            rows[name] = sum(number * getattr(each, name) for number, each in gathered) / total
        for name in record.metrics:
            rows[name] = sum(number * each.metrics.get(name, math.nan) for number, each in gathered) / total
        for name, value in rows.items():
            found.setdefault(name, []).append(value)
        steps.append(record.step)
        gathered = []
    for record in records:
        if isinstance(record, ValidationRecord) and steps:
            start = "val_" if record.weights == "raw" else f"val_{record.weights}_"
            entry = bisect.bisect_left(steps, record.step)
            for name, value in {"loss": record.loss, "accuracy": record.top1, **record.metrics}.items():
                row = found.setdefault(start + name, [math.nan] * len(steps))
                row[min(entry, len(steps) - 1)] = value
    return found


def _arrays(curves: Curves, kind: str, record: type[Record]) -> Arrays:
    """Return the numbers of records of one kind as arrays; None becomes NaN."""
    whole = {name for name, each in number_fields(record).items() if each.is_whole}
    return {name: array.astype(np.int64) if name in whole else array for name, array in curves.columns(kind).items()}
