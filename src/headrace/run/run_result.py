"""The result of a run: how it ended and, read from its directory when asked for, its metrics, checkpoint and plot."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from headrace.checkpoint.store import newest_good
from headrace.core.errors import CheckpointError
from headrace.core.units import format_duration
from headrace.engine.state import State
from headrace.run.directory import read_run
from headrace.run.trained_model import find_weights
from headrace.telemetry.plot import draw_run
from headrace.telemetry.records import Record, RunEnd, TrainRecord, ValidationRecord, read_records

Arrays = dict[str, np.ndarray]


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
        best = max((record.top1 for record in self.validation.values()), default=None)
        accuracy = f", top-1 {100 * best:.2f} %" if best is not None else ""
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
        records = self.records
        arrays = MetricArrays(_columns(record for record in records if isinstance(record, TrainRecord)))
        for weights, start in (("raw", "val_"), ("ema", "val_ema_")):
            rows = [record for record in records if isinstance(record, ValidationRecord) and record.weights == weights]
            arrays |= {start + {"top1": "accuracy"}.get(name, name): array for name, array in _columns(rows).items()}
        return MetricArrays(arrays)

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the best validation, or the newest without one; None when none is kept."""
        try:
            return find_weights(read_run(self.directory, needed=())[0].checkpoints)[0]
        except CheckpointError:
            return None

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest good checkpoint; None when none is kept."""
        return newest_good(read_run(self.directory, needed=())[0].checkpoints)[0]

    @property
    def seconds(self) -> dict[str, float]:
        """Where the wall time of the last process of the run went, by kind; the sum is the wall time."""
        end = self._end
        return dict(end.seconds) if end else {}

    @property
    def verdict(self) -> str:
        """What limited the run: computing, input, validation or saving."""
        return self._end.verdict if self._end else ""

    @property
    def _end(self) -> RunEnd | None:
        return next((record for record in reversed(self.records) if isinstance(record, RunEnd)), None)

    def _repr_html_(self) -> str:
        """Return the plot, and below it how the run ended and where its time went, for a notebook."""
        spent = ", ".join(f"{kind} {format_duration(value)}" for kind, value in self.seconds.items() if value >= 0.05)
        lines = [repr(self).removeprefix("RunResult(").removesuffix(")"), self.reason, spent, self.verdict]
        try:
            plot = draw_run(self.directory)
        except CheckpointError:  # nothing was recorded
            plot = ""
        return plot + "".join(f"<div>{escape(line)}</div>" for line in lines if line)


def finished_result(directory: Path, step: int) -> RunResult:
    """Return the result of a run that an earlier process has finished, as its records have it."""
    records = read_records(directory)
    end = next(record for record in reversed(records) if isinstance(record, RunEnd))
    return RunResult(
        outcome="finished",
        directory=directory,
        step=step,
        validation={record.weights: record for record in records if isinstance(record, ValidationRecord)},
        images_per_second=end.images_per_second,
        time_to_train=end.time_to_train,
        can_resume=False,
        reason="before this command, which changed nothing; to train longer: "
        f"headrace resume {directory} --num-epochs N",
    )


def _columns(rows: Iterable[Record]) -> Arrays:
    """Return the numbers of records of one kind as arrays; None becomes NaN."""
    rows = list(rows)
    if not rows:
        return {}
    named: dict[str, list[Any]] = {}
    for column in fields(rows[0]):
        values = [getattr(row, column.name) for row in rows]
        if all(isinstance(value, int | float | None) for value in values):
            named[column.name] = values
    if isinstance(rows[0], TrainRecord | ValidationRecord):
        for name in rows[0].metrics:
            named[name] = [getattr(row, "metrics", {}).get(name) for row in rows]
    return {
        name: np.array(values) if all(isinstance(v, int) for v in values) else np.array(values, np.float64)
        for name, values in named.items()
    }
