"""Panels of curves as one small SVG, written without a plotting library: the plot of a run, and of lr-find."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from headrace.core.errors import CheckpointError
from headrace.core.files import write_atomic
from headrace.core.units import format_duration
from headrace.report.curves import PANELS, Curves, Panel, draw_panels, metric_panel, plain_line, plain_panel
from headrace.report.ticks import log_ticks
from headrace.rows.metrics import TOP1
from headrace.rows.row import Metric
from headrace.telemetry.records import (
    METRICS_FILE,
    Record,
    RunEnd,
    RunStart,
    ValidationRecord,
    best_validation,
    headline_of,
    monitor_of,
    read_records,
)

CURVE_FILE = "curve.svg"
WIDTH, HEIGHT = 900, 384
_TOP, _BOTTOM = 108, 332  # of the plotting areas
_COLUMNS = ((64, 430), (506, 872))
_PIXELS = 180  # bins over the width of a plotting area, each with its lowest and highest value
_DRAWN = PANELS[:2]  # loss and accuracy
_INK, _QUIET, _GRID = "#1f2933", "#66727f", "#e6e9ed"
# By the numbers that lines have: validation, of averaged weights, ..., training; as on the page, on white.
_COLORS = ("#2563c9", "#e0730a", "#00805c", "#9aa5b1", "#a6528a", "#9a6a00")
_FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range of values on a range of pixels, with ticks."""

    start: float
    end: float
    ticks: Sequence[float]
    high: float  # at the end
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        value, low, high = (math.log(v) if self.is_log else v for v in (value, self.ticks[0], self.high))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def label(self, tick: float) -> str:
        """Return a tick's number, with as many decimals as its neighbours need."""
        if self.is_log:
            return f"{tick:g}"
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else tick or 1.0
        return f"{tick:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def write_curve(run_dir: Path | str) -> None:
    """Write the plot of a run into its directory; a run with nothing to draw has none."""
    curves = _read(run_dir)
    records = read_records(run_dir)
    if panels := draw_panels(curves, _drawn(records), _PIXELS):
        write_atomic(Path(run_dir) / CURVE_FILE, _draw(records, panels).encode())


def draw_run(run_dir: Path | str) -> str:
    """Return the SVG text of a run's curves: training, and validation with raw and with averaged weights."""
    records = read_records(run_dir)
    panels = draw_panels(_read(run_dir), _drawn(records), _PIXELS)
    if not panels:
        raise CheckpointError(
            f"{Path(run_dir) / METRICS_FILE} has no training or validation records to draw.",
            remedy="Draw the run after its first training record.",
        )
    return _draw(records, panels)


def _drawn(records: Sequence[Record]) -> tuple[Panel, ...]:
    """Return the panels: loss, and the metric that tells how good the network is."""
    row = headline_of(records)
    return _DRAWN if row == TOP1 else (_DRAWN[0], metric_panel(row))


def _read(run_dir: Path | str) -> Curves:
    curves = Curves(Path(run_dir))
    curves.read_more()
    return curves


def _draw(records: Sequence[Record], panels: Sequence[dict[str, Any]]) -> str:
    best, row, drawn = best_validation(records, monitor_of(records)), headline_of(records), _drawn(records)
    title, subtitle = headline(records, best)
    body = [_text(28, 55, subtitle, size=12.5, color=_QUIET), *_legend(panels[-1]["lines"])]
    for panel, (start, end) in zip(panels, _COLUMNS, strict=True):
        x = Axis(start=start, end=end, ticks=panel["epochs"], high=panel["last"])
        y = _upright(panel)
        body += _panel(panel, x, y)
        if best and panel["title"] == drawn[1].title and best.metric(row.name) is not None:
            body += _best_mark(best, row, x, y)
    return _sheet(title, body)


def draw_rates(rates: np.ndarray, losses: np.ndarray, suggested: float) -> str:
    """Return the SVG text of the loss over a growing learning rate, with a line at the suggested one."""
    panel = plain_panel("Smoothed loss", [plain_line(rates, losses)], axis="fitted")
    ticks = log_ticks(float(rates.min()), float(rates.max()))
    x = Axis(start=_COLUMNS[0][0], end=_COLUMNS[1][1], ticks=ticks, high=ticks[-1], is_log=True)
    mark = _rule(x.at(suggested), _TOP, x.at(suggested), _BOTTOM, _COLORS[1])
    return _sheet(
        f"suggested learning rate: {suggested:.2g}", [*_panel(panel, x, _upright(panel), "learning rate"), mark]
    )


def _sheet(title: str, body: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    label = f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}"'
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>'
    heading = _text(28, 34, title, size=17, color=_INK, weight=600)
    return f"{head} {label} {_FONT}>\n" + "\n".join([paper, heading, *body]) + "\n</svg>\n"


def headline(records: Iterable[Record], best: ValidationRecord | None) -> tuple[str, str]:
    """Return the title and the line under it: what was trained, how it came out."""
    title, facts = "Training run", []
    seconds = images_per_second = None
    records = list(records)
    for record in records:
        if isinstance(record, RunStart):
            title = f"{record.model} on {record.dataset}"
            facts = [
                f"{record.num_epochs} epoch" + "s" * (record.num_epochs != 1),
                f"global batch {record.global_batch_size}",
                record.device,
            ]
        elif isinstance(record, RunEnd):
            seconds, images_per_second = record.time_to_train, record.images_per_second
    row = headline_of(records)
    if best is not None:
        ema = " (EMA)" if best.weights == "ema" else ""
        facts.append(f"best {row.title} {row.text(best.metric(row.name))}{ema}")
    if seconds is not None:
        facts.append(f"trained in {format_duration(seconds)}")
    if images_per_second is not None:
        facts.append(f"{images_per_second:,.0f} img/s")
    return title, "  ·  ".join(fact for fact in facts if fact)


def _upright(panel: dict[str, Any]) -> Axis:
    # From the bottom up: pixels count downwards.
    return Axis(start=_BOTTOM, end=_TOP, ticks=panel["ticks"], high=panel["ticks"][-1], is_log=panel["is_log"])


def _panel(panel: dict[str, Any], x: Axis, y: Axis, below: str = "epoch") -> list[str]:
    """Return the elements of one panel: title, grid, axes, lines."""
    title = panel["title"] + (f", {panel['unit']}" if panel["unit"] else "") + ", logarithmic" * y.is_log
    parts = [_text(x.start - 36, _TOP - 16, title, size=12.5, color=_INK, weight=600)]
    for tick in y.ticks:
        parts.append(_rule(x.start, y.at(tick), x.end, y.at(tick), _QUIET if tick == y.ticks[0] else _GRID))
        parts.append(_text(x.start - 8, y.at(tick) + 4, y.label(tick), size=11, anchor="end"))
    for tick in x.ticks:
        parts.append(_rule(x.at(tick), _BOTTOM, x.at(tick), _BOTTOM + 4, _QUIET))
        parts.append(_text(x.at(tick), _BOTTOM + 18, x.label(tick), size=11, anchor="middle"))
    parts.append(_text((x.start + x.end) / 2, _BOTTOM + 36, below, size=12, anchor="middle"))
    return parts + [element for line in panel["lines"] for element in _curve(line, panel["scale"], x, y)]


def _curve(line: dict[str, Any], scale: float, x: Axis, y: Axis) -> list[str]:
    """Return a line's path, broken where a value is not finite, and its dots."""
    path, pen_down = [], False
    for epoch, value in zip(line["x"], line["y"], strict=True):
        if value is None:
            pen_down = False
            continue
        path.append(f"{'L' if pen_down else 'M'}{x.at(epoch):.1f} {y.at(scale * value):.1f}")
        pen_down = True
    color, width = _COLORS[line["color"]], 1.5 if line["style"] == "thin" else 2
    stroke = f'stroke="{color}" stroke-width="{width}" stroke-linejoin="round" stroke-linecap="round"'
    elements = [f'<path d="{" ".join(path)}" fill="none" {stroke}/>'] if path else []
    if line["dots"] or len(path) == 1:
        places = [place[1:].split() for place in path]
        elements += [f'<circle cx="{cx}" cy="{cy}" r="2.6" fill="{color}"/>' for cx, cy in places]
    return elements


def _legend(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return one legend for both panels, in a row that ends at the right edge."""
    parts, right = [], 872.0
    for line in reversed(lines):
        right -= 6.3 * len(line["label"])  # about the width of a letter at this size: no font is measured here
        mark = f'stroke="{_COLORS[line["color"]]}" stroke-width="3" stroke-linecap="round"'
        parts.append(_text(right, 34, line["label"], size=12.5, color=_INK))
        parts.append(f'<path d="M{right - 25:.0f} 30h17" {mark}/>')
        right -= 44
    return parts


def _best_mark(best: ValidationRecord, row: Metric, x: Axis, y: Axis) -> list[str]:
    """Return a ring around the best validation, with its value above if there is room: no validation is there."""
    color = _COLORS[best.weights == "ema"]
    value = best.metric(row.name) or 0.0
    cx, cy = x.at(best.epoch), y.at(100 * value if row.is_share else value)
    anchor = "end" if cx > x.end - 90 else "start"  # to the right of a rising curve there is room
    ring = f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="5.5" fill="none" stroke="{color}" stroke-width="1.6"/>'
    height = cy - 12 if cy - 28 > _TOP else cy + 24
    text = _text(cx, height, f"best {row.text(value)}", size=12, color=color, anchor=anchor, weight=600)
    # a margin of the paper's color keeps the letters legible where a line passes
    return [ring, text.replace("<text ", '<text paint-order="stroke" stroke="#ffffff" stroke-width="4" ')]


def _rule(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{color}" stroke-width="1"/>'


def _text(
    x: float, y: float, text: str, *, size: float, color: str = _QUIET, anchor: str = "start", weight: int = 400
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{color}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
