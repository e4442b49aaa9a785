"""The console: a live progress line on a terminal, one plain line per record anywhere else."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from headrace.core.errors import ConfigError, did_you_mean
from headrace.telemetry.record import CheckpointRecord, Note, Record, RunEnd, RunStart, TrainRecord, ValidationRecord
from headrace.telemetry.wording import Narrator, duration, percent

_COMPILING = "compiling ..."


class ConsoleSink:
    """What the user sees. `advance` may be told of the end of every call, between records."""

    def write(self, record: Record) -> None:
        """Show one record."""

    def advance(self, step: int) -> None:
        """Show that `step` weight updates are done."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainConsole(ConsoleSink):
    """One line per record, nothing moves: for log files and pipes. Checkpoints are not worth a line here."""

    def __init__(self, stream: TextIO, past: Iterable[Record] = ()) -> None:
        self._stream, self._narrator = stream, Narrator(past)

    def write(self, record: Record) -> None:
        """Print the record's line."""
        line = self._narrator.line(record)
        if not isinstance(record, CheckpointRecord):
            print(line, file=self._stream, flush=True)


class BarConsole(ConsoleSink):
    """A live line at the bottom; start, validation results, notes and the end stay above it as permanent lines."""

    def __init__(self, stream: TextIO, past: Iterable[Record] = ()) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._narrator = Narrator(past)
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def write(self, record: Record) -> None:
        """Move the live line, or print a permanent line above it."""
        line = self._narrator.line(record)
        match record:
            case TrainRecord():
                self._show(record)
            case RunStart():
                self._print(line, "bold")
                self._begin(record)
            case RunEnd():
                self.close()
                self._print(line, "bold")
            case ValidationRecord():
                self._print(line, "green" if line.endswith("best so far") else "")
            case Note():
                self._print(line, "yellow" if record.level == "warning" else "")

    def advance(self, step: int) -> None:
        """Move the bar. Before the first record of training this says that compiling is over."""
        if self._progress is not None and self._narrator.run is not None:
            epoch = step / self._narrator.run.updates_per_epoch
            self._progress.update(self._task, completed=step, epoch=f"{epoch:.2f}/{self._narrator.run.num_epochs}")
            if self._progress.tasks[0].fields["numbers"] == _COMPILING:
                self._progress.update(self._task, numbers="first numbers come after a call ...")

    def close(self) -> None:
        """Stop the live line."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _begin(self, run: RunStart) -> None:
        self.close()
        steps = [TextColumn("step {task.completed:.0f}/{task.total:.0f}")] if self._console.width >= 100 else []
        columns = (
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=24),
            *steps,
            TextColumn("{task.fields[numbers]}"),
        )
        # Four times a second is enough for the eye and costs a two-core machine nothing.
        self._progress = Progress(*columns, console=self._console, refresh_per_second=4, transient=True)
        epoch = f"{run.step / run.updates_per_epoch:.2f}/{run.num_epochs}"
        self._task = self._progress.add_task("", total=run.total_steps, epoch=epoch, numbers=_COMPILING)
        self._progress.update(self._task, completed=run.step)
        self._progress.start()

    def _show(self, record: TrainRecord) -> None:
        parts = [f"loss {record.loss:.4f}", f"top-1 {percent(record.accuracy)}"]
        if record.images_per_second is not None:
            parts.append(f"{record.images_per_second:,.0f} img/s")
        eta = self._narrator.eta_seconds(record)
        if eta is not None:
            parts.append(f"ETA {duration(eta)}")
        if self._progress is not None:
            self._progress.update(self._task, numbers="  ".join(parts))
        self.advance(record.step)

    def _print(self, line: str, style: str) -> None:
        # a Text with its own style: a style given to print() would colour the live line as well
        self._console.print(Text(line, style=style))


_MODES: Mapping[str, Callable[[TextIO, Iterable[Record]], ConsoleSink]] = {
    "bar": BarConsole,
    "plain": PlainConsole,
    "none": lambda stream, past: ConsoleSink(),
}


def make_console(progress: str = "auto", past: Iterable[Record] = (), stream: TextIO | None = None) -> ConsoleSink:
    """Return the console for `--progress auto|bar|plain|none`; auto: a bar on a terminal, else plain lines."""
    out: TextIO = sys.stdout if stream is None else stream
    if progress == "auto":
        progress = "bar" if out.isatty() and os.environ.get("TERM", "dumb") != "dumb" else "plain"
    if progress not in _MODES:
        raise ConfigError(f"progress is {progress!r}.", remedy=did_you_mean(progress, ("auto", *_MODES)))
    return _MODES[progress](out, past)
