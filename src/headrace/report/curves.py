"""The curves of a run: metrics.jsonl as columns of numbers, read on from where the last reading ended, and thinned.

Columns are read without making a Record of every line: a run of 100,000 records then takes half a second, not several.
"""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.json_text import parse_json
from headrace.report.ticks import epoch_ticks, value_ticks
from headrace.rows.metrics import METRICS, OF_CLASSES
from headrace.rows.row import Metric
from headrace.rows.tasks import CLASSIFICATION
from headrace.telemetry.records import (
    METRICS_FILE,
    CurvePoint,
    Record,
    RunStart,
    TrainRecord,
    ValidationRecord,
    number_fields,
)

_WORTH_SHOWING = 0.01  # from top-1: metrics of classes that are nowhere further from it say nothing more
_KINDS: Mapping[str, type[Record]] = {kind.kind: kind for kind in (TrainRecord, CurvePoint, ValidationRecord)}
PIXELS = 600  # bins over the width of a curve that has more points than twice as many
_MOST_DOTS = 60  # with more points than these, dots would hide the line
_MOST_BYTES = 1 << 30  # of new lines read at once

Columns = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a panel: which records and field it is drawn from, and how."""

    label: str
    kind: str  # train, or validation with the weights after a slash
    field: str
    color: int
    style: str = ""  # thin, dashed
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart of lines over epochs; values are shown times `scale`, with the unit."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    scale: float = 1.0
    # zero: from there; log: logarithmic where values span much; percent: up to 100; fitted: what the values need.
    axis: str = "zero"


_SHARES: Mapping[str, Any] = {"scale": 100, "axis": "percent"}
_TRAIN, _RAW, _EMA = "train", "validation/raw", "validation/ema"


def _three(train_field: str, validation_field: str) -> tuple[Line, ...]:
    return (
        Line(label="training", kind=_TRAIN, field=train_field, color=3, style="thin"),
        Line(label="validation", kind=_RAW, field=validation_field, color=0, dots=True),
        Line(label="validation, averaged weights", kind=_EMA, field=validation_field, color=1, dots=True),
    )


def _one(field: str, color: int) -> tuple[Line, ...]:
    return (Line(label="training", kind=_TRAIN, field=field, color=color),)


def _title(row: Metric) -> str:
    return row.title if row.title[1:2].isupper() else row.title[0].upper() + row.title[1:]  # mAP stays


def metric_panel(row: Metric) -> Panel:
    """Return the chart of a metric."""
    lines = _three(row.name, row.name)
    return Panel(title=_title(row), unit=row.unit, lines=lines, **_SHARES if row.is_share else {})


PANELS = (
    Panel(title="Loss", unit="", lines=_three("loss", "loss"), axis="log"),
    Panel(title="Top-1 accuracy", unit="%", lines=_three("accuracy", "top1"), scale=100, axis="percent"),
    *(metric_panel(row) for row in OF_CLASSES),
    Panel(title="Learning rate", unit="", lines=_one("learning_rate", 2)),
    Panel(title="Throughput", unit="images/s", lines=_one("images_per_second", 0)),
    Panel(title="Waiting for input, since the previous record", unit="s", lines=_one("infeed_wait_seconds", 1)),
    Panel(title="Gradient norm", unit="", lines=_one("grad_norm", 4), axis="log"),
    Panel(title="Loss scale", unit="", lines=_one("loss_scale", 5), axis="log"),
)


def _compared(label: str, kind: str, field: str, style: str = "") -> Line:
    return Line(label=label, kind=kind, field=field, color=0, style=style, dots=kind != _TRAIN)


def _compared_panel(row: Metric) -> Panel:
    lines = _compared("", _RAW, row.name), _compared("averaged weights", _EMA, row.name, "dashed")
    return Panel(title=f"Validation, {row.title}", unit=row.unit, lines=lines, **_SHARES if row.is_share else {})


COMPARED_PANELS = (
    Panel(
        title="Validation, top-1 accuracy",
        unit="%",
        lines=(_compared("", _RAW, "top1"), _compared("averaged weights", _EMA, "top1", "dashed")),
        scale=100,
        axis="percent",
    ),
    *(_compared_panel(row) for row in OF_CLASSES),
    Panel(
        title="Validation, loss",
        unit="",
        lines=(_compared("", _RAW, "loss"), _compared("averaged weights", _EMA, "loss", "dashed")),
        axis="log",
    ),
    Panel(title="Training, loss", unit="", lines=(_compared("", _TRAIN, "loss"),), axis="log"),
    Panel(
        title="Training, top-1 accuracy",
        unit="%",
        lines=(_compared("", _TRAIN, "accuracy"),),
        scale=100,
        axis="percent",
    ),
    Panel(title="Learning rate", unit="", lines=(_compared("", _TRAIN, "learning_rate"),)),
    Panel(title="Throughput", unit="images/s", lines=(_compared("", _TRAIN, "images_per_second"),)),
)


_OF_POINTS = number_fields(CurvePoint)
_NEGLIGIBLE_WAIT = 0.0005  # a share of the time that is printed as 0.0 %


@dataclass
class Curves:
    """The columns of a run so far. `read_more` reads what was written since; a file that was replaced, all of it."""

    path: Path
    offset: int = 0
    version: int = 0  # counts the readings that changed something
    num_damaged: int = 0
    asked: dict[str, Metric] = field(default_factory=dict)  # the metrics that code, or another task, asked for
    task: str = CLASSIFICATION.name
    _file: tuple[int, int] = (0, 0)
    _parts: dict[str, list[Columns]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # a live page is asked by several threads

    def read_more(self) -> bool:
        """Read the whole lines written since the last time; return whether there were any, or the file is another."""
        with self._lock:
            return self._read_more()

    def _read_more(self) -> bool:
        try:
            with (self.path / METRICS_FILE).open("rb") as file:
                facts = os.fstat(file.fileno())
                # A resume rewinds the records into a new file, or into one that is shorter.
                if replaced := (facts.st_dev, facts.st_ino) != self._file or facts.st_size < self.offset:
                    self._forget((facts.st_dev, facts.st_ino))
                file.seek(self.offset)
                new = file.read(min(facts.st_size - self.offset, _MOST_BYTES))
        except OSError:  # not started, deleted meanwhile, or not readable: run_summary says which
            changed = self._file != (0, 0)
            self._forget((0, 0))
            self.version += changed
            return changed
        whole = new[: new.rfind(b"\n") + 1]  # a line without its end is still being written
        self.offset += len(whole)
        if whole:
            self._add(whole.split(b"\n")[:-1])
        self.version += bool(whole or replaced)
        return bool(whole or replaced)

    def _forget(self, file: tuple[int, int]) -> None:
        self.offset, self.num_damaged, self._file = 0, 0, file
        self._parts.clear()
        self.asked = {}

    def _add(self, lines: Sequence[bytes]) -> None:
        rows, damaged = _parse(lines)
        self.num_damaged += damaged
        kinds: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            kind = row.get("kind")
            if kind in (TrainRecord.kind, CurvePoint.kind):
                kinds.setdefault(kind, []).append(row)
            elif kind == ValidationRecord.kind:
                kinds.setdefault(f"{kind}/{row.get('weights', 'raw')}", []).append(row)
            elif kind == RunStart.kind:
                self._start(row)
        for kind, found in kinds.items():
            named = {
                name: _numbers([row.get(name, each.default) for row in found])
                for name, each in number_fields(_KINDS[kind.partition("/")[0]]).items()
            }
            metrics = [row["metrics"] if isinstance(row.get("metrics"), dict) else {} for row in found]
            for name in dict.fromkeys(name for each in metrics for name in each if name not in named):
                named[name] = _numbers([each.get(name) for each in metrics])
            self._parts.setdefault(kind, []).append(named)

    def _start(self, row: Mapping[str, Any]) -> None:
        """Take from the record of a process's start what code asked for; one that is damaged asked for nothing."""
        try:
            start = RunStart.from_dict(row)
        except (TypeError, ValueError):
            return
        self.task = start.task
        names = [each.get("name", "") for each in start.asked_metrics]
        self.asked = {**self.asked, **{name: start.metrics[name] for name in names if name in start.metrics}}

    def columns(self, kind: str) -> Columns:
        """Return the numbers of all records of a kind by field and metric, NaN where there is none; {} of none."""
        with self._lock:
            parts = self._parts.get(kind, [])
            if len(parts) > 1:  # joined once, so that a long run that is watched does not become many small arrays
                names = dict.fromkeys(name for part in parts for name in part)
                joined = {name: np.concatenate([_column(part, name) for part in parts]) for name in names}
                self._parts[kind] = parts = [joined]
            return parts[0] if parts else {}

    def column(self, kind: str, name: str) -> np.ndarray:
        """Return one of the columns; where no record has a number there it is NaN."""
        columns = self.columns(kind)
        return _column(columns, name) if columns else np.empty(0)

    def line(self, line: Line, *, beside: bool = False, pixels: int = PIXELS) -> dict[str, Any] | None:
        """Return a line with at most a few points per pixel, None for a value that is not finite; None if empty.

        `beside`: another line of its panel is drawn, so that this one is, too, even if it says nothing new.
        """
        x, y = self._values(line)
        always = ("loss",) if self.task != CLASSIFICATION.name else ("loss", "top1", "accuracy")
        if not np.isfinite(y).any() and not (line.field in always and len(y)):
            return None
        if not beside and self._says_nothing(line, y):
            return None
        x, y = x[np.isfinite(x)], y[np.isfinite(x)]
        found = plain_line(x, y, pixels)
        dots = line.dots and len(found["x"]) <= _MOST_DOTS
        return found | {"label": line.label, "color": line.color, "style": line.style, "dots": dots}

    def _values(self, line: Line) -> tuple[np.ndarray, np.ndarray]:
        """Return epochs and values of a line: of training the points, behind what was recorded before there were any.

        An earlier version made no points, and a run of it may have been resumed.
        """
        parts = [(line.kind, slice(None))]
        if line.kind == _TRAIN and line.field in _OF_POINTS and len(first := self.column(CurvePoint.kind, "step")[:1]):
            before = int(np.searchsorted(self.column(line.kind, "step"), first[0]))
            parts = [(line.kind, slice(before)), (CurvePoint.kind, slice(None))]
        found = []
        for kind, part in parts:
            x, y = self.column(kind, "epoch")[part], self.column(kind, line.field)[part]
            found.append((x[: len(y)], y[: len(x)]))  # another thread may have read on in between
        x, y = (np.concatenate(columns) for columns in zip(*found, strict=True))
        return x, y

    def _says_nothing(self, line: Line, y: np.ndarray) -> bool:
        """Say whether a curve is left out: a loss that is not scaled, a device that hardly waits, even classes."""
        if line.field in METRICS and not METRICS[line.field].has_field and line.field not in self.asked:
            apart = np.abs(y - self.column(line.kind, "top1")[: len(y)])
            return not bool((apart >= _WORTH_SHOWING).any())
        if line.field == "infeed_wait_seconds":
            elapsed = self.column(line.kind, "elapsed_seconds")
            return bool(np.nansum(y) <= _NEGLIGIBLE_WAIT * np.nansum(elapsed[-1:]))
        return line.field == "loss_scale" and bool((y == 1).all())


def draw_panels(curves: Curves, panels: Sequence[Panel] | None = None, pixels: int = PIXELS) -> list[dict[str, Any]]:
    """Return the charts of one run as plain values; those without any line are left out."""
    charts = []
    given = [metric_panel(row) for row in curves.asked.values() if row.name not in METRICS]
    for panel in (*PANELS[:2], *given, *PANELS[2:]) if panels is None else panels:
        shown = any(curves.line(line) for line in panel.lines)
        if lines := [found for line in panel.lines if (found := curves.line(line, beside=shown, pixels=pixels))]:
            charts.append(plain_panel(panel.title, lines, unit=panel.unit, scale=panel.scale, axis=panel.axis))
    return charts


def draw_compared(runs: Mapping[str, Curves]) -> list[dict[str, Any]]:
    """Return charts with the same curve of several runs in each, a color for each run."""
    charts = []
    asked = {name: row for curves in runs.values() for name, row in curves.asked.items() if name not in METRICS}
    for panel in (COMPARED_PANELS[0], *map(_compared_panel, asked.values()), *COMPARED_PANELS[1:]):
        lines, shown = [], any(curves.line(line) for curves in runs.values() for line in panel.lines)
        for number, (name, curves) in zip(count(), runs.items(), strict=False):
            for line in panel.lines:
                if found := curves.line(line, beside=shown):
                    label = f"{name}, {line.label}" if line.label else name
                    lines.append(found | {"label": label, "color": number % 6})
        if lines:
            charts.append(plain_panel(panel.title, lines, unit=panel.unit, scale=panel.scale, axis=panel.axis))
    return charts


def plain_panel(
    title: str, lines: list[dict[str, Any]], *, unit: str = "", scale: float = 1.0, axis: str = "zero"
) -> dict[str, Any]:
    """Return a chart as plain values, with the ticks of both axes."""
    values = [scale * value for line in lines for value in line["y"] if value is not None]
    ticks, is_log = value_ticks(axis, values)
    last = max((x for line in lines for x in line["x"]), default=0.0) or 1.0
    facts = {"title": title, "unit": unit, "scale": scale, "lines": lines}
    return facts | {"ticks": ticks, "is_log": is_log, "last": last, "epochs": epoch_ticks(last)}


def plain_line(x: np.ndarray, y: np.ndarray, pixels: int = PIXELS) -> dict[str, Any]:
    """Return a line as plain values, thinned."""
    kept = thin(x, y, pixels)
    facts = {"label": "", "color": 0, "style": "", "dots": False}
    return facts | {"x": x[kept].tolist(), "y": _finite_or_none(y[kept])}


def _column(columns: Columns, name: str) -> np.ndarray:
    return columns[name] if name in columns else np.full(len(columns["step"]), np.nan)


def thin(x: np.ndarray, y: np.ndarray, pixels: int = PIXELS) -> np.ndarray:
    """Return the points to draw, as sorted indices: the lowest, the highest and one non-finite value of each pixel.

    Only recorded values are drawn, and no peak is lost, which means would flatten.
    """
    if len(x) <= 2 * pixels:
        return np.arange(len(x))
    low, high = x.min(), x.max()
    bins = ((x - low) / ((high - low) or 1.0) * (pixels - 1e-9)).astype(np.int64)
    finite = np.flatnonzero(np.isfinite(y))
    # Sorted by bin and then by value, so that the first and the last of a bin are its lowest and highest.
    order = finite[np.lexsort((y[finite], bins[finite]))]
    edges = np.flatnonzero(np.diff(bins[order])) + 1
    lowest, highest = (
        order[np.concatenate([[0], edges])[: len(order)]],
        order[np.concatenate([edges - 1, [-1]])[: len(order)]],
    )
    gaps = np.flatnonzero(~np.isfinite(y))
    _, first = np.unique(bins[gaps], return_index=True)
    ends = finite[[0, -1]] if len(finite) else finite
    return np.unique(np.concatenate([lowest, highest, gaps[first], ends]))


def _parse(lines: Sequence[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of JSON lines, and how many lines are damaged."""
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")  # one call is three times as fast as one for each line
        if len(rows) == len(lines) and all(type(row) is dict for row in rows):
            return rows, 0
    except (ValueError, RecursionError):
        pass
    rows = []
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows, len(lines) - len(rows)


def _numbers(values: list[Any]) -> np.ndarray:
    """Return values as numbers: null is NaN, "NaN" and "Infinity" what they say; anything else is NaN."""
    try:
        found = np.array(values, np.float64)
        if found.ndim == 1:  # else they are lists
            return found
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([_number(value) for value in values], np.float64)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _finite_or_none(values: np.ndarray) -> list[float | None]:
    return [value if ok else None for value, ok in zip(values.tolist(), np.isfinite(values).tolist(), strict=True)]
