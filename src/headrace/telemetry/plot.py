"""The plot of a run: loss and accuracy over epochs as one small SVG, written without a plotting library."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from headrace.core.errors import CheckpointError
from headrace.core.files import write_atomic
from headrace.core.units import format_duration, format_percent
from headrace.telemetry.records import (
    METRICS_FILE,
    Record,
    RunEnd,
    RunStart,
    TrainRecord,
    ValidationRecord,
    best_validation,
    monitor_of,
    read_records,
)

Points = list[tuple[float, float]]

CURVE_FILE = "curve.svg"
WIDTH, HEIGHT = 900, 384
_TOP, _BOTTOM = 108, 332  # of the plotting areas
_MOST_POINTS = 400  # per line; more than a screen can show are averaged in groups
_MOST_DOTS = 40  # with more points than this, dots would hide the line
_INK, _QUIET, _GRID = "#1f2933", "#66727f", "#e6e9ed"
_VALIDATIONS = (("raw", "validation", "#2563c9"), ("ema", "validation, EMA weights", "#e0730a"))
_FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""


_PAPER = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>'


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series of a panel."""

    label: str
    points: Points
    color: str
    width: float = 2.0
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range of values on a range of pixels, with round ticks."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        value, low, high = (math.log(v) if self.is_log else v for v in (value, self.low, self.high))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def label(self, tick: float) -> str:
        """Return a tick's number, with as many decimals as its neighbours need."""
        if self.is_log:
            return f"{tick:g}"
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else tick or 1.0
        return f"{tick:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def write_curve(run_dir: Path | str) -> None:
    """Write the plot of a run into its directory; a run with nothing to draw has none."""
    if any(isinstance(record, TrainRecord | ValidationRecord) for record in read_records(run_dir)):
        write_atomic(Path(run_dir) / CURVE_FILE, draw_run(run_dir).encode())


def draw_run(run_dir: Path | str) -> str:
    """Return the SVG text of a run's curves: training, and validation with raw and with ema weights."""
    records = read_records(run_dir)
    left, right = _lines(records, "loss", "loss"), _lines(records, "accuracy", "top1", scale=100.0)  # in percent
    if not any(line.points for line in (*left, *right)):
        raise CheckpointError(
            f"{Path(run_dir) / METRICS_FILE} has no training or validation records to draw.",
            remedy="Draw the run after its first training record.",
        )
    last_epoch = max(x for line in (*left, *right) for x, _ in line.points)
    best = best_validation(records, monitor_of(records))
    title, subtitle = headline(records, best)
    columns = [_epoch_axis(last_epoch, 64, 430), _epoch_axis(last_epoch, 506, 872)]
    losses, accuracies = loss_axis(_finite(left)), accuracy_axis(_finite(right))
    body = [
        _PAPER,
        _text(28, 34, title, size=17, color=_INK, weight=600),
        _text(28, 55, subtitle, size=12.5, color=_QUIET),
        *_legend([line for line in right if line.points]),
        *_panel("loss, logarithmic" if losses.is_log else "loss", left, columns[0], losses),
        *_panel("top-1 accuracy, %", right, columns[1], accuracies),
        *(_best_mark(best, columns[1], accuracies) if best else ()),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    label = f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}"'
    return f"{head} {label} {_FONT}>\n" + "\n".join(body) + "\n</svg>\n"


def _lines(records: Sequence[Record], train_field: str, validation_field: str, scale: float = 1.0) -> list[Line]:
    """Return the lines of a panel: of training, and of the validation of each set of weights that has any."""
    points = [(r.epoch, scale * getattr(r, train_field)) for r in records if isinstance(r, TrainRecord)]
    lines = [Line(label="training", points=points, color="#9aa5b1")]
    validations = [r for r in records if isinstance(r, ValidationRecord)]
    for weights, label, color in _VALIDATIONS:
        points = [(r.epoch, scale * getattr(r, validation_field)) for r in validations if r.weights == weights]
        if points:
            lines.append(Line(label=label, points=points, color=color, dots=len(points) <= _MOST_DOTS))
    return lines


def _finite(lines: Iterable[Line]) -> list[float]:
    return [y for line in lines for _, y in line.points if math.isfinite(y)]


def headline(records: Iterable[Record], best: ValidationRecord | None) -> tuple[str, str]:
    """Return the title and the line under it: what was trained, how it came out."""
    title, facts = "Training run", []
    seconds = images_per_second = None
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
    if best is not None:
        ema = " (EMA)" if best.weights == "ema" else ""
        facts.append(f"best top-1 {format_percent(best.top1)}{ema}")
    if seconds is not None:
        facts.append(f"trained in {format_duration(seconds)}")
    if images_per_second is not None:
        facts.append(f"{images_per_second:,.0f} img/s")
    return title, "  ·  ".join(fact for fact in facts if fact)


def draw_rates(points: Points, suggested: float) -> str:
    """Return the SVG text of the loss over a growing learning rate, with a line at the suggested one."""
    rates, losses = [rate for rate, _ in points], [loss for _, loss in points]
    ticks = log_ticks(min(rates), max(rates))
    x = Axis(low=ticks[0], high=ticks[-1], start=64, end=872, ticks=ticks, is_log=True)
    y = _upright(round_ticks(min(losses), max(losses)))
    body = [
        _PAPER,
        _text(28, 34, f"suggested learning rate: {suggested:.2g}", size=17, color=_INK, weight=600),
        *_panel("smoothed loss", [Line(label="", points=points, color=_VALIDATIONS[0][2])], x, y, "learning rate"),
        _rule(x.at(suggested), _TOP, x.at(suggested), _BOTTOM, _VALIDATIONS[1][2]),
    ]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {_FONT}>' + "".join(body) + "</svg>\n"


def round_ticks(low: float, high: float, num_wanted: int = 5) -> tuple[float, ...]:
    """Return evenly spaced round numbers (1, 2 or 5 times a power of ten) from at most `low` to at least `high`."""
    span = (high - low) or abs(high) or 1.0
    raw = span / num_wanted
    power = 10.0 ** math.floor(math.log10(raw))
    # A little tolerance here and below, since 0.3 / 0.1 is less than 3.
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(k * step for k in range(first, max(last, first + 1) + 1))


def thin(points: Points, most: int = _MOST_POINTS) -> Points:
    """Return at most `most` points, each the mean of a group of neighbours; few points stay as they are."""
    if len(points) <= most:
        return points
    edges = [round(i * len(points) / most) for i in range(most + 1)]
    groups = [points[a:b] for a, b in pairwise(edges)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _panel(title: str, lines: Sequence[Line], x: Axis, y: Axis, below: str = "epoch") -> list[str]:
    """Return the elements of one panel: title, grid, axes, lines."""
    parts = [_text(x.start - 36, _TOP - 16, title, size=12.5, color=_INK, weight=600)]
    for tick in y.ticks:
        parts.append(_rule(x.start, y.at(tick), x.end, y.at(tick), _QUIET if tick == y.low else _GRID))
        parts.append(_text(x.start - 8, y.at(tick) + 4, y.label(tick), size=11, anchor="end"))
    for tick in x.ticks:
        parts.append(_rule(x.at(tick), _BOTTOM, x.at(tick), _BOTTOM + 4, _QUIET))
        parts.append(_text(x.at(tick), _BOTTOM + 18, x.label(tick), size=11, anchor="middle"))
    parts.append(_text((x.start + x.end) / 2, _BOTTOM + 36, below, size=12, anchor="middle"))
    return parts + [element for line in lines for element in _curve(line, x, y)]


def _epoch_axis(last_epoch: float, start: float, end: float) -> Axis:
    return Axis(low=0, high=last_epoch or 1.0, start=start, end=end, ticks=_epoch_ticks(last_epoch))


def loss_axis(values: Sequence[float]) -> Axis:
    """Return the vertical axis for losses: from zero, or logarithmic when they span more than a factor of 50."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low > 0 and high / low > 50:
        ticks = log_ticks(low, high)
        return _upright(ticks, is_log=True)
    return _upright(round_ticks(0.0, high))


def accuracy_axis(values: Sequence[float]) -> Axis:
    """Return the vertical axis for accuracies in percent, up to 100."""
    # Room below 100 even if all of them are: ticks of an empty range would go on above it.
    return _upright(round_ticks(min([99.0, *values]) if values else 0.0, 100.0))


def _upright(ticks: tuple[float, ...], is_log: bool = False) -> Axis:
    # From the bottom up: pixels count downwards.
    return Axis(low=ticks[0], high=ticks[-1], start=_BOTTOM, end=_TOP, ticks=ticks, is_log=is_log)


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return powers of ten around a range, with 2 and 5 times them when there would be few, and at most ten."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    every = max(1, math.ceil((last - first) / 8))
    ticks = [factor * 10.0**power for power in range(first, last + every, every) for factor in factors]
    below = max((tick for tick in ticks if tick <= low), default=ticks[0])
    above = min((tick for tick in ticks if tick >= high), default=ticks[-1])
    return tuple(tick for tick in ticks if below <= tick <= above)


def _epoch_ticks(last_epoch: float) -> tuple[float, ...]:
    """Return round ticks up to the last epoch: whole epochs unless there are fewer than two."""
    ticks = round_ticks(0, last_epoch, min(6, int(last_epoch)) if last_epoch >= 2 else 5)
    return tuple(tick for tick in ticks if tick <= last_epoch * 1.0001)


def _curve(line: Line, x: Axis, y: Axis) -> list[str]:
    """Return a line's path, broken where a value is not finite, and its dots."""
    path, pen_down = [], False
    places = []
    for epoch, value in thin(line.points):
        if not math.isfinite(value):
            pen_down = False
            continue
        place = f"{x.at(epoch):.1f} {y.at(value):.1f}"
        path.append(("L" if pen_down else "M") + place)
        places.append(place.split())
        pen_down = True
    stroke = f'stroke="{line.color}" stroke-width="{line.width}" stroke-linejoin="round" stroke-linecap="round"'
    elements = [f'<path d="{" ".join(path)}" fill="none" {stroke}/>'] if path else []
    if line.dots or len(places) == 1:
        elements += [f'<circle cx="{cx}" cy="{cy}" r="2.6" fill="{line.color}"/>' for cx, cy in places]
    return elements


def _legend(lines: Sequence[Line]) -> list[str]:
    """Return one legend for both panels, in a row that ends at the right edge."""
    parts, right = [], 872.0
    for line in reversed(lines):
        right -= 6.3 * len(line.label)  # about the width of a letter at this size: no font is measured here
        mark = f'stroke="{line.color}" stroke-width="3" stroke-linecap="round"'
        parts.append(_text(right, 34, line.label, size=12.5, color=_INK))
        parts.append(f'<path d="M{right - 25:.0f} 30h17" {mark}/>')
        right -= 44
    return parts


def _best_mark(best: ValidationRecord, x: Axis, y: Axis) -> list[str]:
    """Return a ring around the best validation, with its value above if there is room: no validation is there."""
    color = next(color for weights, _, color in _VALIDATIONS if weights == best.weights)
    cx, cy = x.at(best.epoch), y.at(100 * best.top1)
    anchor = "end" if cx > x.end - 90 else "start"  # to the right of a rising curve there is room
    ring = f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="5.5" fill="none" stroke="{color}" stroke-width="1.6"/>'
    height = cy - 12 if cy - 28 > _TOP else cy + 24
    text = _text(cx, height, f"best {format_percent(best.top1)}", size=12, color=color, anchor=anchor, weight=600)
    # a margin of the paper's color keeps the letters legible where a line passes
    return [ring, text.replace("<text ", '<text paint-order="stroke" stroke="#ffffff" stroke-width="4" ')]


def _rule(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{color}" stroke-width="1"/>'


def _text(
    x: float, y: float, text: str, *, size: float, color: str = _QUIET, anchor: str = "start", weight: int = 400
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{color}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
