"""Sinks: where records go. JSONL is the truth; the CSV tables and the log are made from the same records.

Accuracies are in percent here (fractions in metrics.jsonl). `step` and `iteration` are the same number, the weight
updates done; `*_batch` are means since the last row, `*_avg` means over the last epoch; `it_time` is seconds per step.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from headrace.telemetry.console import Narrator
from headrace.telemetry.records import (
    LOG_FILE,
    METRICS_FILE,
    TRAINING_FILE,
    VALIDATION_FILE,
    LineFile,
    Note,
    Record,
    TrainRecord,
    ValidationRecord,
    read_records,
    replace_file,
)

# The two CSV tables of a run, as pure functions of its records, in the reference's columns and then ours.


TRAINING_COLUMNS = (
    "step", "iteration", "epoch", "lr", "loss_batch", "loss_avg", "train_acc_batch", "train_acc_avg", "it_time",
    "img_per_sec", "total_time", "top5_batch", "grad_norm", "loss_scale", "skipped_steps", "infeed_wait",
)  # fmt: skip

VALIDATION_COLUMNS: Mapping[str, Callable[[ValidationRecord], Any]] = {
    "name": lambda r: r.checkpoint,
    "iteration": lambda r: r.step,
    "epoch": lambda r: r.epoch,
    "val_acc": lambda r: 100 * r.top1,
    "val_time": lambda r: r.seconds,
    "val_size": lambda r: r.num_samples,
    "img_per_sec": lambda r: r.images_per_second,
    "weights": lambda r: r.weights,
    "loss": lambda r: r.loss,
    "top5": lambda r: None if r.top5 is None else 100 * r.top5,
}


@dataclass
class TrainingTable:
    """Turns training records into rows; remembers the last epoch's records for the running means."""

    _window: deque[tuple[int, TrainRecord]] = field(default_factory=deque)  # (steps the record stands for, record)
    _last_step: int = 0

    def row(self, record: TrainRecord) -> list[str]:
        """Return the row of the next record."""
        self._window.append((record.step - self._last_step, record))
        self._last_step = record.step
        while self._window[0][1].epoch <= record.epoch - 1 + 1e-9:  # 1.2 - 1 is a little less than 0.2
            self._window.popleft()
        steps = sum(n for n, _ in self._window)
        loss_avg = sum(n * r.loss for n, r in self._window) / steps
        accuracy_avg = sum(n * r.accuracy for n, r in self._window) / steps
        values = (
            record.step, record.step, record.epoch, record.learning_rate, record.loss, loss_avg,
            100 * record.accuracy, 100 * accuracy_avg, record.step_seconds, record.images_per_second,
            record.elapsed_seconds, None if record.top5 is None else 100 * record.top5, record.grad_norm,
            record.loss_scale, record.skipped_steps, record.infeed_wait_seconds,
        )  # fmt: skip
        return [cell(value) for value in values]

    def rows(self, records: Iterable[Record]) -> list[list[str]]:
        """Return the rows of the training records among these."""
        return [self.row(record) for record in records if isinstance(record, TrainRecord)]


def validation_row(record: ValidationRecord) -> list[str]:
    """Return the row of a validation record."""
    return [cell(column(record)) for column in VALIDATION_COLUMNS.values()]


def cell(value: Any) -> str:
    """Return a value as a table shows it: nothing for None, seven significant digits for fractions."""
    if value is None:
        return ""
    return f"{value:.7g}" if isinstance(value, float) else str(value)


Tell = Callable[[str, str], None]  # (text, level: info | warning)


class Sink(Protocol):
    """Takes records one by one; `close` may be called more than once."""

    def write(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


@runtime_checkable
class ShowsProgress(Protocol):
    """A sink that can also show where the run is between two records."""

    def advance(self, step: int) -> None:
        """Show that `step` weight updates are done."""
        ...


class JsonlSink:
    """metrics.jsonl: one JSON record per line, appended. After a crash call `rewind` before opening it again."""

    def __init__(self, run_dir: Path | str) -> None:
        self._lines = LineFile(Path(run_dir) / METRICS_FILE)

    def write(self, record: Record) -> None:
        """Append the record."""
        self._lines.write(record.to_json())

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class CsvSink:
    """training.csv and validation.csv, made anew from the past records and then appended to."""

    def __init__(self, run_dir: Path | str, past: Iterable[Record] = ()) -> None:
        run_dir = Path(run_dir)
        self._table = write_tables(run_dir, list(past))
        self._training = LineFile(run_dir / TRAINING_FILE)
        self._validation = LineFile(run_dir / VALIDATION_FILE)

    def write(self, record: Record) -> None:
        """Append a row for a training or validation record."""
        if isinstance(record, TrainRecord):
            self._training.write(_join(self._table.row(record)))
        elif isinstance(record, ValidationRecord):
            self._validation.write(_join(validation_row(record)))

    def close(self) -> None:
        """Close both files."""
        self._training.close()
        self._validation.close()


class LogSink:
    """log.txt: what the console says in plain lines, each with the time; a diary that is never rewound."""

    def __init__(self, run_dir: Path | str, past: Iterable[Record] = (), now: Callable[[], float] = time.time) -> None:
        self._lines = LineFile(Path(run_dir) / LOG_FILE)
        self._narrator = Narrator(past)
        self._now = now

    def write(self, record: Record) -> None:
        """Append the record's sentence."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._now()))
        for line in self._narrator.line(record).splitlines():
            self._lines.write(f"{stamp}  {line}")

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class WarningSink:
    """The warnings of a process that keeps no records, on standard error, each with the number of the process."""

    def __init__(self, process: int, stream: TextIO | None = None) -> None:
        self._head, self._stream = f"process {process}: ", stream

    def write(self, record: Record) -> None:
        """Print a warning; everything else is process 0's to tell."""
        if isinstance(record, Note) and record.level == "warning":
            print(self._head + record.text, file=self._stream or sys.stderr, flush=True)

    def close(self) -> None:
        """Do nothing: the stream is not ours."""


class Sinks:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, record: Record) -> None:
        """Hand the record to every sink, the first (the truth) first."""
        for sink in self._sinks:
            sink.write(record)

    def advance(self, step: int) -> None:
        """Tell those that show progress (the console) that `step` weight updates are done; nothing is recorded."""
        for sink in self._sinks:
            if isinstance(sink, ShowsProgress):
                sink.advance(step)

    def close(self) -> None:
        """Close every sink, also when one of them fails; the first failure is raised."""
        failure: Exception | None = None
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                failure = failure or error
        if failure:
            raise failure


def open_sinks(run_dir: Path | str, *others: Sink, guests: Callable[[Tell], Iterable[Sink]] = lambda tell: ()) -> Sinks:
    """Return the file sinks of a run directory, going on from its records, and `others` (the console) behind them.

    `guests(tell)` makes sinks that come last; what they tell is written down by all the others.
    """
    past = read_records(run_dir)
    hosts = Sinks([JsonlSink(run_dir), CsvSink(run_dir, past), LogSink(run_dir, past), *others])
    return Sinks([hosts, *guests(lambda text, level: hosts.write(Note(level=level, text=text)))])


def write_tables(run_dir: Path, records: list[Record]) -> TrainingTable:
    """Write both CSV files anew from records, each in one move; return the table, ready for the next row."""
    table = TrainingTable()
    training = [list(TRAINING_COLUMNS), *table.rows(records)]
    validation = [list(VALIDATION_COLUMNS), *(validation_row(r) for r in records if isinstance(r, ValidationRecord))]
    for name, rows in ((TRAINING_FILE, training), (VALIDATION_FILE, validation)):
        replace_file(run_dir / name, "".join(_join(row) + "\n" for row in rows).encode())
    return table


def _join(cells: Iterable[str]) -> str:
    """Return a CSV row. No cell holds a comma, a quote or a line's end: they are numbers and checkpoint names."""
    return ",".join(cells)


# Rewind: bring the records of a run back to the step that was restored, after a crash or by choice.


@dataclass(frozen=True, kw_only=True)
class Rewound:
    """What a rewind left: the records kept, how many were dropped, and the bytes of a half-written tail."""

    records: tuple[Record, ...]
    num_dropped: int
    tail_bytes: int


def rewind(run_dir: Path | str, step: int) -> Rewound:
    """Drop the records beyond `step` and a half-written tail, and make the CSV tables anew from what is left.

    metrics.jsonl is replaced in one move, first; so a crash in here leaves files that a second rewind sets right.
    """
    run_dir = Path(run_dir)
    path = run_dir / METRICS_FILE
    size = path.stat().st_size if path.exists() else 0
    everything = read_records(run_dir)
    kept = tuple(record for record in everything if record.step <= step)
    replace_file(path, _text(kept))
    write_tables(run_dir, list(kept))
    tail = max(0, size - len(_text(tuple(everything))))
    return Rewound(records=kept, num_dropped=len(everything) - len(kept), tail_bytes=tail)


def _text(records: tuple[Record, ...]) -> bytes:
    return "".join(record.to_json() + "\n" for record in records).encode()
