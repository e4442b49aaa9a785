"""Sinks: where records go. JSONL is the truth; the CSV tables and the log are made from the same records."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TextIO, runtime_checkable

from headrace.telemetry.files import (
    LOG_FILE,
    METRICS_FILE,
    TRAINING_FILE,
    VALIDATION_FILE,
    LineFile,
    read_records,
    replace_file,
)
from headrace.telemetry.record import Note, Record, TrainRecord, ValidationRecord
from headrace.telemetry.table import TRAINING_COLUMNS, VALIDATION_COLUMNS, TrainingTable, validation_row
from headrace.telemetry.wording import Narrator

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
