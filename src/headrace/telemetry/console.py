"""The console: a live progress line on a terminal and in a notebook, one plain line per record anywhere else."""

import errno
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from headrace.core.errors import ConfigError, did_you_mean
from headrace.core.process import leave_closed_pipe, leave_closed_terminal
from headrace.core.units import format_bytes, format_duration, format_percent
from headrace.rows.metrics import METRICS, TOP1
from headrace.rows.row import Metric
from headrace.telemetry.line_file import Sink
from headrace.telemetry.records import (
    CheckpointRecord,
    Note,
    Record,
    RunEnd,
    RunStart,
    TrainRecord,
    ValidationRecord,
    validation_rank,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class LineFormatter:
    """Formats records as plain lines, for the console and log.txt.

    It keeps the size of the run, its pace (for the ETA) and the best validation.
    """

    def __init__(self, past: Iterable[Record] = ()) -> None:
        self.run: RunStart | None = None
        self.best: tuple[float, ...] | None = None  # the rank of the best validation so far
        self._pace_from: TrainRecord | None = None
        self.begun = time.monotonic()
        for record in past:
            self.line(record)
        self._pace_from = None  # an earlier process may have run on another machine

    def line(self, record: Record) -> str:
        """Return the record's line (several for the run's start and end) and keep what later lines need."""
        match record:
            case RunStart():
                self.run, self.begun = record, time.monotonic()
                return run_start_line(record)
            case TrainRecord():
                self._pace_from = self._pace_from or record
                return self.train_line(record)
            case ValidationRecord():
                rank = validation_rank(record, self.run.monitored if self.run else TOP1)
                is_best = rank is not None and (self.best is None or rank > self.best)
                self.best = rank if is_best else self.best
                return validation_line(record, self.run) + ("  best so far" if is_best else "")
            case CheckpointRecord():
                return (
                    f"checkpoint  {record.name}  {format_bytes(record.num_bytes)}  ({format_duration(record.seconds)})"
                )
            case Note():
                return f"warning: {record.text}" if record.level == "warning" else record.text
            case RunEnd():
                return run_end_line(record, self.run)
            case _:
                return record.to_json()

    def train_line(self, record: TrainRecord) -> str:
        parts = [
            f"epoch {record.epoch:.2f}" + (self.run.of_epochs if self.run else ""),
            f"step {record.step}" + (f"/{self.run.total_steps}" if self.run and self.run.of_epochs else ""),
            f"loss {record.loss:.4f}",
            *([f"top-1 {format_percent(record.accuracy)}"] if record.accuracy is not None else []),
            *_metric_parts(record, self.run),
            f"lr {record.learning_rate:.4g}",
        ]
        if record.images_per_second is not None:
            parts.append(f"{record.images_per_second:,.0f} img/s")
        if record.skipped_steps:
            parts.append(f"skipped {record.skipped_steps}")
        eta = self.eta_seconds(record)
        if eta is not None:
            parts.append(f"ETA {duration(eta)}")
        return "  ".join(parts)

    def eta_seconds(self, record: TrainRecord) -> float | None:
        """Return the seconds that the steps left will take at the pace of this process, or None if it is not known."""
        if self.run is None:
            return None
        if self.run.seconds_left is not None:
            return self.run.seconds_left - (time.monotonic() - self.begun)
        left = self.run.total_steps - record.step
        if left <= 0:
            return None
        first = self._pace_from
        if first is not None and record.step > first.step:
            # This includes validation and saving between the records, but not the compilation before the first.
            return left * (record.elapsed_seconds - first.elapsed_seconds) / (record.step - first.step)
        return None if record.step_seconds is None else left * record.step_seconds


def run_start_line(run: RunStart) -> str:
    """Return the first line of a run."""
    size = f", {run.num_parameters:,} parameters" if run.num_parameters is not None else ""
    replicas = f" ({run.num_replicas} replicas)" if run.num_replicas > 1 else ""
    where = f" on {run.device or run.platform}{replicas}" if run.device or run.platform else ""
    if not run.total_steps:
        return f"validate  {run.model} on {run.dataset}{size}{where}"
    verb = f"resume from step {run.step}" if run.step else "train"
    epochs = f"{run.num_epochs} epoch{'s' * (run.num_epochs != 1)} of {run.updates_per_epoch} steps"
    if run.seconds_left is not None:
        epochs = f"for {format_duration(run.seconds_left)}, epochs of {run.updates_per_epoch} steps"
    return f"{verb}  {run.model} on {run.dataset}{size}: {epochs}, {run.global_batch_size} images each{where}"


def validation_line(record: ValidationRecord, run: RunStart | None = None) -> str:
    """Return the line of a validation; `run` says which metrics of classes it shows."""
    parts = ["validation" if record.weights == "raw" else f"validation ({record.weights})"]
    parts.append(f"epoch {record.epoch:.2f}")
    if record.top1 is not None:
        parts.append(f"top-1 {format_percent(record.top1)}")
    if record.top5 is not None:
        parts.append(f"top-5 {format_percent(record.top5)}")
    seconds = f"{record.seconds:.1f}" if record.seconds >= 0.1 else f"{record.seconds:.3f}"
    shown = run.metrics_beside if run else ()
    parts += [f"{row.title} {row.text(value)}" for row in shown if (value := record.metric(row.name)) is not None]
    parts += [f"loss {record.loss:.4f}", *_metric_parts(record, run), f"({record.num_samples:,} images, {seconds} s)"]
    return "  ".join(parts)


def _metric_parts(record: TrainRecord | ValidationRecord, run: RunStart | None) -> list[str]:
    """Return what code measured: in training; in validation, of runs that did not record what that is."""
    known = run.metrics if run else METRICS
    if isinstance(record, ValidationRecord):
        return [f"{name} {value:.4g}" for name, value in record.metrics.items() if name not in known]
    rows = {name: known.get(name) or Metric(name=name) for name in record.metrics}
    return [f"{row.title} {row.text(record.metrics[name])}" for name, row in rows.items()]


def best_text(best: Mapping[str, float | None], run: RunStart | None) -> str:
    """Return the metrics of a run's best validation: the monitored one, top-1, and those of uneven classes."""
    rows = dict.fromkeys((run.monitored, TOP1, *run.metrics_beside) if run else (TOP1,))
    texts = [f"{row.title} {row.text(value)}" for row in rows if (value := best.get(row.name)) is not None]
    return f"best {', '.join(texts)}" if texts else ""


def run_end_line(end: RunEnd, run: RunStart | None = None) -> str:
    """Return the last lines of a run: its result, how long it took, what its result and its time suffered from."""
    parts = [f"{end.outcome} at epoch {end.epoch:.2f}, step {end.step}"]
    why = f"\n{end.reason}" if end.reason else ""
    if end.best_top1 is not None or end.best:
        parts.append(best_text(end.best or {"top1": end.best_top1}, run))
    if end.outcome != "compiled":  # nothing was trained
        parts.append(f"time to train {format_duration(end.time_to_train)}")
    if end.time_to_target is not None:
        parts.append(f"time to target {format_duration(end.time_to_target)}")
    if end.images_per_second is not None:
        parts.append(f"{end.images_per_second:,.0f} img/s")
    # Where nothing was passed over, nobody needs to know.
    saving = f"saving: {end.saving_text}" if end.saving.get("passed_over") else ""
    verdicts = [verdict for verdict in (end.model_verdict, saving, end.verdict) if verdict]
    return "\n".join(["  ".join(parts) + why, *verdicts])


def duration(seconds: float) -> str:
    """Return seconds as `0:42`, `12:05` or `1:02:03`."""
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def live_line(run: RunStart, step: int, numbers: tuple[float, float | None, float | None], width: int) -> str:
    """Return the progress line: step, then (loss, img/s, seconds left in the run), as much as fits the width."""
    loss, rate, left = numbers
    total = f"/{run.total_steps}" if run.of_epochs else ""
    parts = [f"epoch {step / run.updates_per_epoch:.2f}{run.of_epochs}", f"step {step}{total}"]
    parts.append(f"loss {loss:.4f}")
    if rate:
        parts.append(f"{rate:,.0f} img/s")
        in_epoch = -step % run.updates_per_epoch
        parts.append(f"epoch {duration(in_epoch * run.global_batch_size / rate)}")
    if left is not None:
        parts.append(f"run {duration(left)} left" if rate else f"{duration(left)} left")
    return _fitted(parts, width, ("epoch ", "epoch ", "run ", "loss "))[: max(1, width - 1)]


def _fitted(parts: list[str], width: int, optional: tuple[str, ...]) -> str:
    """Join the parts of a line; where it would wrap, leave out those that begin or end so, one after the other."""
    for name in optional:
        if len("  ".join(parts)) < width:
            break
        drop = next((place for place, part in enumerate(parts) if part.startswith(name) or part.endswith(name)), -1)
        parts = [part for place, part in enumerate(parts) if place != drop]
    return "  ".join(parts)


# Parts of a line that a narrow terminal can do without, the most dispensable first.
_TRAIN_OPTIONAL = ("lr ", "step ", "ETA ", "skipped ", "img/s", "top-1 ")
_VALIDATION_OPTIONAL = ("(", "loss ", "top-5 ", "macro F1 ", "best so far")


def laid_out(line: str, record: Record, width: int) -> str:
    """Return a record's line for a terminal of that width: shortened if it has a line per epoch, else broken."""
    if isinstance(record, TrainRecord | ValidationRecord):
        optional = _TRAIN_OPTIONAL if isinstance(record, TrainRecord) else _VALIDATION_OPTIONAL
        return _fitted(line.split("  "), width, optional)
    return "\n".join(_broken(text, width) for text in line.splitlines())


def _broken(text: str, width: int) -> str:
    """Break a line between its parts or, if one is too long, between words; a path stays whole."""
    if len(text) < width:
        return text
    lines: list[str] = []
    for part in text.split("  "):
        if lines and len(lines[-1]) + 2 + len(part) < width:
            lines[-1] += f"  {part}"
        else:
            room = max(width - 1, 20)
            indent = "  " if lines else ""
            lines += textwrap.wrap(
                part,
                room,
                initial_indent=indent,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


_COMPILING = "compiling ..."


@contextmanager
def _outliving_the_terminal() -> Iterator[None]:
    """Stop printing if nobody reads: a signal asks the run to save, and a failed print must not end it before."""
    try:
        yield
    except BrokenPipeError:
        if not leave_closed_pipe():
            raise
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        leave_closed_terminal()


def _terminal(stream: TextIO) -> "Console":
    from rich.console import Console  # here: runs whose output is a file or a pipe are spared its 20 ms

    return Console(file=stream, highlight=False, soft_wrap=True, force_jupyter=False)


class PlainConsole(Sink):
    """One line per record, for log files and pipes; checkpoints get no line. On a terminal no line wraps."""

    def __init__(self, stream: TextIO, past: Iterable[Record] = ()) -> None:
        self._stream, self._formatter = stream, LineFormatter(past)
        self._terminal = _terminal(stream) if stream.isatty() else None

    def write(self, record: Record) -> None:
        """Print the record's line."""
        line = self._formatter.line(record)
        if isinstance(record, RunEnd):
            line = line.partition("\n")[0]  # the command prints what limited the run in its table
        if self._terminal is not None:
            line = laid_out(line, record, self._terminal.width)
        if not isinstance(record, CheckpointRecord):
            with _outliving_the_terminal():
                # One write: print() makes two, and a note of another thread would come between line and end of line.
                self._stream.write(f"{line}\n")
                self._stream.flush()


class BarConsole(Sink):
    """A live line at the bottom; start, validation results, notes and the end stay above it as permanent lines."""

    def __init__(self, stream: TextIO, past: Iterable[Record] = ()) -> None:
        # Lines are laid out here: rich would break them again, and color the numbers in them. Nor its widgets in a
        # notebook, where NotebookConsole has a line of its own.
        self._console = _terminal(stream)
        self._formatter = LineFormatter(past)
        self._progress: Progress | None = None
        self._task: Any = 0
        self._pace_from: tuple[int, float] | None = None  # the first step shown, and when
        self._in_epoch: list[tuple[int, TrainRecord]] = []  # (steps, record) since the last line of an epoch
        self._last_step = 0  # of the last training record

    def write(self, record: Record) -> None:
        """Move the live line, or print a permanent line above it."""
        line = self._formatter.line(record)
        match record:
            case TrainRecord():
                if summary := self._summary(record):
                    self._print(self._formatter.train_line(summary), "", summary)
                self.advance(record.step, record.loss, record.images_per_second)
            case RunStart():
                self._print(line, "bold", record)
                self._last_step = record.step
                self._begin(record)
            case RunEnd():
                self.close()
                self._print(line.partition("\n")[0], "bold", record)
            case ValidationRecord():
                self._print(line, "green" if line.endswith("best so far") else "", record)
            case Note():
                self._print(line, "yellow" if record.level == "warning" else "", record)

    def advance(self, step: int, loss: float | None = None, images_per_second: float | None = None) -> None:
        """Move the live line. Before the first call this says that compiling is over."""
        run = self._formatter.run
        if run is None:
            return
        now = time.monotonic()
        self._pace_from = self._pace_from or (step, now)
        line = "waiting for the first results ..."
        if loss is not None:
            first, since = self._pace_from
            # This includes validation and saving on the way; the rate does not.
            left = (run.total_steps - step) * (now - since) / (step - first) if step > first else None
            if run.seconds_left is not None:
                left = run.seconds_left - (now - self._formatter.begun)
            line = live_line(run, step, (loss, images_per_second, left), self._console.width)
        self._show(line)

    def _show(self, line: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, line=line)

    def close(self) -> None:
        """Stop the live line."""
        if self._progress is not None:
            with _outliving_the_terminal():
                self._progress.stop()
            self._progress = None

    def _begin(self, run: RunStart) -> None:
        from rich.progress import Progress, TextColumn
        from rich.table import Column

        self.close()
        # Four times a second is enough to follow, and its cost is not measurable on two cores.
        self._progress = Progress(
            TextColumn("{task.fields[line]}", table_column=Column(no_wrap=True, overflow="crop"), markup=False),
            console=self._console,
            refresh_per_second=4,
            transient=True,
        )
        self._task = self._progress.add_task("", total=run.total_steps, line=_COMPILING)
        self._pace_from = None
        self._progress.start()

    def _summary(self, record: TrainRecord) -> TrainRecord | None:
        """Return the record that ends an epoch, with means over all records of the epoch; None within an epoch."""
        run, before = self._formatter.run, self._last_step
        if run is None:
            return None
        self._in_epoch.append((record.step - before, record))
        self._last_step = record.step
        if record.step // run.updates_per_epoch == before // run.updates_per_epoch:
            return None
        steps = sum(count for count, _ in self._in_epoch)

        def mean(value: Callable[[TrainRecord], float]) -> float:
            return sum(count * value(one) for count, one in self._in_epoch) / max(1, steps)

        metrics = {name: mean(lambda one, name=name: one.metrics[name]) for name in record.metrics}
        summary = replace(
            record,
            loss=mean(lambda one: one.loss),
            accuracy=None if record.accuracy is None else mean(lambda one: one.accuracy or 0.0),
            metrics=metrics,
        )
        self._in_epoch = []
        return summary

    def _print(self, line: str, style: str, record: Record) -> None:
        from rich.text import Text

        # a Text with its own style: a style given to print() would colour the live line as well
        with _outliving_the_terminal():
            self._console.print(Text(laid_out(line, record, self._console.width), style=style))


class NotebookConsole(BarConsole):
    """The same in a notebook, where the live line is an output that is replaced in place, also in the saved file."""

    def __init__(self, stream: TextIO, past: Iterable[Record], display: Callable[..., Any]) -> None:
        super().__init__(stream, past)
        self._stream, self._display, self._handle = stream, display, None

    def close(self) -> None:
        """Leave the line as it is."""
        self._handle = None

    def _begin(self, run: RunStart) -> None:
        self._pace_from = None
        self._handle = self._display(_text(_COMPILING), raw=True, display_id=True)

    def _show(self, line: str) -> None:
        if self._handle is not None:
            self._handle.update(_text(line), raw=True)

    def _print(self, line: str, style: str, record: Record) -> None:
        print(laid_out(line, record, _NOTEBOOK_WIDTH), file=self._stream, flush=True)


_NOTEBOOK_WIDTH = 110  # characters of an output in Jupyter's default font and window


def _text(line: str) -> dict[str, str]:
    return {"text/plain": line}


def _notebook_display() -> Callable[..., Any] | None:
    """Return IPython's function for outputs if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return ipython.display.display if ipython is not None and hasattr(shell, "kernel") else None


_MODES: Mapping[str, Callable[[TextIO, Iterable[Record]], Sink]] = {
    "bar": BarConsole,
    "plain": PlainConsole,
    "none": lambda stream, past: Sink(),
}


def make_console(progress: str = "auto", past: Iterable[Record] = (), stream: TextIO | None = None) -> Sink:
    """Return the console for `--progress auto|bar|plain|none`; auto: a bar where one can be shown, else lines."""
    out: TextIO = sys.stdout if stream is None else stream
    display = _notebook_display() if stream is None and progress in ("auto", "bar") else None
    if display is not None:
        return NotebookConsole(out, past, display)
    if progress == "auto":
        # A dumb terminal, such as an editor's, prints the movements of the cursor as text.
        progress = "bar" if out.isatty() and os.environ.get("TERM", "dumb") != "dumb" else "plain"
    if progress not in _MODES:
        raise ConfigError(f"progress is {progress!r}.", remedy=did_you_mean(progress, ("auto", *_MODES)))
    return _MODES[progress](out, past)
