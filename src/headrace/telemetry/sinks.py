"""Sinks: where records are written. metrics.jsonl is authoritative; the CSV tables and the log derive from it.

Accuracies are in percent in the tables (fractions in metrics.jsonl). `step` and `iteration` are the same number, the
weight updates done; `*_batch` are means since the last row, `*_avg` means over the last epoch; `it_time` is seconds per
step.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headrace.rows.metrics import METRICS, OF_CLASSES
from headrace.rows.row import Metric
from headrace.telemetry.console import LineFormatter
from headrace.telemetry.line_file import LineFile, Sink, replace_file
from headrace.telemetry.records import (
    LOG_FILE,
    METRICS_FILE,
    TRAINING_FILE,
    VALIDATION_FILE,
    CurvePoint,
    Note,
    Record,
    RunStart,
    TrainRecord,
    ValidationRecord,
    metrics_of,
    read_records,
)

# The columns of the reference come first, so that its scripts can read the tables.
TRAINING_COLUMNS = (
    "step", "iteration", "epoch", "lr", "loss_batch", "loss_avg", "train_acc_batch", "train_acc_avg", "it_time",
    "img_per_sec", "total_time", "top5_batch", "grad_norm", "loss_scale", "skipped_steps", "infeed_wait",
)  # fmt: skip


Columns = Mapping[str, Callable[[ValidationRecord], Any]]


def _shown(row: Metric, record: ValidationRecord) -> float | None:
    value = record.metric(row.name)
    return 100 * value if row.is_share and value is not None else value


VALIDATION_COLUMNS: Columns = {
    "name": lambda r: r.checkpoint,
    "iteration": lambda r: r.step,
    "epoch": lambda r: r.epoch,
    "val_acc": lambda r: None if r.top1 is None else 100 * r.top1,
    "val_time": lambda r: r.seconds,
    "val_size": lambda r: r.num_samples,
    "img_per_sec": lambda r: r.images_per_second,
    "weights": lambda r: r.weights,
    "loss": lambda r: r.loss,
    "top5": lambda r: None if r.top5 is None else 100 * r.top5,
} | {row.column: partial(_shown, row) for row in OF_CLASSES}


def validation_columns(records: Iterable[Record]) -> Columns:
    """Return the columns of validation.csv, with those of the metrics that code asked for at the end."""
    asked = [each for record in records if isinstance(record, RunStart) for each in record.asked_metrics]
    rows = [row for row in metrics_of(asked).values() if row.name not in METRICS]
    return {**VALIDATION_COLUMNS, **{row.column: partial(_shown, row) for row in rows}}


@dataclass
class TrainingTable:
    """Turns training records into rows; keeps the records of the last epoch for the running means."""

    _window: deque[tuple[int, TrainRecord]] = field(default_factory=deque)  # (steps the record stands for, record)
    _last_step: int = 0

    def row(self, record: TrainRecord) -> list[str]:
        """Return the row of the next record."""
        self._window.append((record.step - self._last_step, record))
        self._last_step = record.step
        while self._window[0][1].epoch <= record.epoch - 1 + 1e-9:  # 1.2 - 1 is a little less than 0.2
            self._window.popleft()
        steps = sum(n for n, _ in self._window)
        # Weighted: records may stand for different numbers of steps.
        loss_avg = sum(n * r.loss for n, r in self._window) / steps
        accuracy_avg = sum(n * (r.accuracy or 0.0) for n, r in self._window) / steps
        batch_and_mean = (None, None) if record.accuracy is None else (100 * record.accuracy, 100 * accuracy_avg)
        values = (
            record.step, record.step, record.epoch, record.learning_rate, record.loss, loss_avg,
            *batch_and_mean, record.step_seconds, record.images_per_second,
            record.elapsed_seconds, None if record.top5 is None else 100 * record.top5, record.grad_norm,
            record.loss_scale, record.skipped_steps, record.infeed_wait_seconds,
        )  # fmt: skip
        return [cell(value) for value in values]

    def rows(self, records: Iterable[Record]) -> list[list[str]]:
        """Return the rows of the training records among these."""
        return [self.row(record) for record in records if isinstance(record, TrainRecord)]


def validation_row(record: ValidationRecord, columns: Columns) -> list[str]:
    return [cell(column(record)) for column in columns.values()]


def cell(value: object) -> str:
    """Return the text of a value: empty for None, seven significant digits for a float."""
    if value is None:
        return ""
    return f"{value:.7g}" if isinstance(value, float) else str(value)


Notify = Callable[[str, str], None]  # (text, level: info | warning)


def _no_check() -> None:
    pass


class JsonlSink(Sink):
    """metrics.jsonl: one JSON record per line, appended. After a crash call `rewind` before opening it again.

    `check` raises an error when the run directory is no longer the one that was opened.
    """

    def __init__(self, run_dir: Path | str, check: Callable[[], None] = _no_check) -> None:
        self._lines = LineFile(Path(run_dir) / METRICS_FILE)
        self._check = check

    def write(self, record: Record) -> None:
        """Append the record."""
        self._check()
        self._lines.write(record.to_json())

    def points(self, points: Sequence[CurvePoint]) -> None:
        """Append the points."""
        self._check()
        self._lines.write(*(point.to_json() for point in points))

    def sync(self) -> None:
        """Wait until the disk has the records."""
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()


class CsvSink(Sink):
    """training.csv and validation.csv, rebuilt from the past records and then appended to."""

    def __init__(self, run_dir: Path | str, past: Iterable[Record] = ()) -> None:
        self._run_dir, self._past = Path(run_dir), list(past)
        self._open()

    def _open(self) -> None:
        self._table = write_tables(self._run_dir, self._past)
        self._columns = validation_columns(self._past)
        self._training = LineFile(self._run_dir / TRAINING_FILE)
        self._validation = LineFile(self._run_dir / VALIDATION_FILE)

    def write(self, record: Record) -> None:
        """Append a row for a training or validation record."""
        if isinstance(record, RunStart):
            # The first record of a process, which says what else is measured: before any row is appended.
            self._past.append(record)
            if list(validation_columns(self._past)) != list(self._columns):
                self.close()
                self._open()
        elif isinstance(record, TrainRecord):
            self._training.write(_join(self._table.row(record)))
        elif isinstance(record, ValidationRecord):
            self._validation.write(_join(validation_row(record, self._columns)))

    def sync(self) -> None:
        """Wait until the disk has both tables."""
        self._training.sync()
        self._validation.sync()

    def close(self) -> None:
        """Close both files."""
        self._training.close()
        self._validation.close()


class LogSink(Sink):
    """log.txt: the plain lines of the console, each with the time. It is never rewound."""

    def __init__(self, run_dir: Path | str, past: Iterable[Record] = (), now: Callable[[], float] = time.time) -> None:
        self._lines = LineFile(Path(run_dir) / LOG_FILE)
        self._formatter = LineFormatter(past)
        self._now = now

    def write(self, record: Record) -> None:
        """Append the record's line."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._now()))
        for line in self._formatter.line(record).splitlines():
            self._lines.write(f"{stamp}  {line}")

    def close(self) -> None:
        self._lines.close()


class WarningSink(Sink):
    """Prints the warnings of a process that writes no records on standard error, with the process number."""

    def __init__(self, process: int) -> None:
        self._head = f"process {process}: "

    def write(self, record: Record) -> None:
        """Print a warning; process 0 reports everything else."""
        if isinstance(record, Note) and record.level == "warning":
            print(self._head + record.text, file=sys.stderr, flush=True)


class Sinks(Sink):
    """Several sinks as one, for several threads."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        # The thread that reads results writes beside the main one, which records what was compiled while the run
        # trains.
        self._lock = threading.RLock()

    def write(self, record: Record) -> None:
        """Write the record to every sink, in order."""
        with self._lock:
            for sink in self._sinks:
                sink.write(record)

    def points(self, points: Sequence[CurvePoint]) -> None:
        """Write points of the curves to the sinks that keep them."""
        with self._lock:
            for sink in self._sinks if points else ():
                sink.points(points)

    def advance(self, step: int, loss: float | None = None, images_per_second: float | None = None) -> None:
        """Show progress on the console after a call: steps done, mean loss, rate. Nothing is recorded."""
        with self._lock:
            for sink in self._sinks:
                sink.advance(step, loss, images_per_second)

    def histograms(self, step: int, found: Mapping[str, Any]) -> None:
        """Give histograms to the trackers."""
        with self._lock:
            for sink in self._sinks:
                sink.histograms(step, found)

    def sync(self) -> None:
        """Wait until the disk has the records and tables."""
        with self._lock:
            for sink in self._sinks:
                sink.sync()

    def close(self) -> None:
        """Close every sink even if one fails; the first failure is raised."""
        failure: Exception | None = None
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                failure = failure or error
        if failure:
            raise failure


def open_sinks(
    run_dir: Path | str,
    *others: Sink,
    trackers: Callable[[Notify], Iterable[Sink]] = lambda notify: (),
    check: Callable[[], None] = _no_check,
) -> Sinks:
    """Return the file sinks of a run directory, continuing its records, followed by `others` (the console).

    `trackers(notify)` makes sinks that come last; their messages become notes in all the other sinks. `check` is called
    before each record and raises an error when the directory is no longer the one that was opened.
    """
    past = read_records(run_dir)
    main = Sinks([JsonlSink(run_dir, check), CsvSink(run_dir, past), LogSink(run_dir, past), *others])
    return Sinks([main, *trackers(lambda text, level: main.write(Note(level=level, text=text)))])


def write_tables(run_dir: Path, records: list[Record]) -> TrainingTable:
    """Write both CSV files from scratch, each atomically; return the table, ready for the next row."""
    table = TrainingTable()
    training = [list(TRAINING_COLUMNS), *table.rows(records)]
    columns = validation_columns(records)
    rows = (validation_row(record, columns) for record in records if isinstance(record, ValidationRecord))
    validation = [list(columns), *rows]
    for name, rows in ((TRAINING_FILE, training), (VALIDATION_FILE, validation)):
        replace_file(run_dir / name, "".join(_join(row) + "\n" for row in rows).encode())
    return table


def _join(cells: Iterable[str]) -> str:
    """Return a CSV row. No cell contains a comma, a quote or a newline: they are numbers and checkpoint names."""
    return ",".join(cells)


def rewind(run_dir: Path | str, step: int) -> tuple[Record, ...]:
    """Drop the records after the step that was restored, and a half-written tail; rebuild the tables; return the rest.

    metrics.jsonl is replaced first, atomically; so after a crash in here a second rewind repairs the tables.
    """
    run_dir = Path(run_dir)
    kept = [record for record in read_records(run_dir) if record.step <= step]
    replace_file(run_dir / METRICS_FILE, "".join(record.to_json() + "\n" for record in kept).encode())
    write_tables(run_dir, kept)
    return tuple(kept)
