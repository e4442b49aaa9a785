"""Schedules in time: simulated from an order of actions or measured, as text, SVG, PNG and Chrome trace."""

import colorsys
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from headrace.core.errors import ConfigError
from headrace.core.files import write_atomic
from headrace.core.units import format_list
from headrace.plan.schedule import Action, Node, Op, Order, Work, make_order, mapping_text, needs


class Cell(NamedTuple):
    """An action with its device, start and end. Simulated times are in ticks, measured ones in seconds."""

    start: float
    end: float
    device: int
    action: Action


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells sorted by start, then device. Made by simulate(), or from measured times."""

    cells: tuple[Cell, ...]
    work: Work
    unit: str = "ticks"  # or "seconds"

    def in_order(self) -> Iterator[tuple[int, Action]]:
        """Yield (device, action) in the order to dispatch them: what an action needs always comes before it."""
        return ((cell.device, cell.action) for cell in self.cells)

    @cached_property
    def total_time(self) -> float:
        """From the first start to the last end."""
        return max(cell.end for cell in self.cells) - min(cell.start for cell in self.cells)

    @property
    def bubble(self) -> float:
        """The fraction of the devices' time that is idle."""
        busy = sum(cell.end - cell.start for cell in self.cells)
        return 1 - busy / (self.total_time * self.work.num_devices)

    @property
    def num_ticks(self) -> int:
        """The number of distinct start times; with all durations 1, the total time."""
        return len({cell.start for cell in self.cells})

    def peak_by_node(self) -> dict[Node, int]:
        """Return the largest number of micro batches that each node holds between their forward and backward passes."""
        return {node: int(self._peak(lambda n, node=node: n == node)) for node in self.work.device_of}

    def peak_by_stage(self) -> tuple[int, ...]:
        """Return the largest number of micro batches that each stage holds (in any of its functions)."""
        peaks = self.peak_by_node()
        return tuple(max(peaks[node] for node in nodes) for nodes in self.work.stages)

    def peak_by_device(self, size_of: Callable[[Node], float] = lambda node: 1) -> tuple[float, ...]:
        """Return the most that each device holds, where a micro batch of a node counts `size_of(node)`."""
        device_of = self.work.device_of
        return tuple(
            self._peak(lambda node, device=device: size_of(node) if device_of[node] == device else 0)
            for device in range(self.work.num_devices)
        )

    def _peak(self, size_of: Callable[[Node], float]) -> float:
        """Return the peak: a forward pass stores, a backward pass frees. Inference stores nothing."""
        stored = peak = 0
        for cell in self.cells if self.work.training else ():
            size = size_of(cell.action.node)
            stored += size if cell.action.op is Op.F else -size
            peak = max(peak, stored)
        return peak

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain values, for records and tests."""
        return {
            "num_stages": self.work.num_stages,
            "num_devices": self.work.num_devices,
            "num_micros": self.work.num_micros,
            "training": self.work.training,
            "unit": self.unit,
            "total_time": self.total_time,
            "bubble": self.bubble,
            "peak_by_stage": list(self.peak_by_stage()),
            "peak_by_device": list(self.peak_by_device()),
            "cells": [[cell.start, cell.end, cell.device, str(cell.action)] for cell in self.cells],
        }


# A schedule as text for the terminal. The SVG and the Chrome trace show the same cells.


MAX_WIDTH = 100
_CUT = " ... "
MAX_COLUMNS = 500


def draw_timeline(table: Table, title: str = "", max_width: int = MAX_WIDTH) -> str:
    """Return the table as one row per device over time, with a legend; the middle of a long one is omitted."""
    lines = _rows(table.cells, table.work, max_width)
    return "\n".join([*([title] if title else []), *lines, _legend(table.work), f"{summary(table)}."])


def summary(table: Table) -> str:
    """Return a sentence with the time, the idle fraction and the peaks of a table."""
    text = f"{table.total_time:,.4g} {table.unit}, idle {table.bubble:.1%}"
    if not table.work.training:
        return text
    return f"{text}, stored at most by stage: {' '.join(map(str, table.peak_by_stage()))} micro batches"


def label(action: Action, work: Work) -> str:
    """Return the label of an action: without the stage where each device has only one."""
    return str(action) if len(work.device_of) > work.num_devices else f"{action.op}{action.micro}"


def _rows(cells: Sequence[Cell], work: Work, max_width: int) -> list[str]:
    """Return one line per device and, if columns are omitted, a note on which; the table may be incomplete."""
    origin, unit = min(cell.start for cell in cells), _unit(cells)
    starts = {cell: _column(cell.start - origin, unit) for cell in cells}
    # A measured action may be so short that it rounds to zero columns; it still gets one.
    columns = {cell: (start, max(_column(cell.end - origin, unit), start + 1)) for cell, start in starts.items()}
    num_columns = max(end for _, end in columns.values())
    width = max(len(label(cell.action, work)) for cell in cells)
    heads = [f"dev {device}" for device in range(work.num_devices)]
    head_width = max(map(len, heads))
    room = (max_width - head_width - 2) // (width + 1)
    cut = None
    if num_columns > room:
        room = (max_width - head_width - 2 - len(_CUT) - 1) // (width + 1)
        cut = (math.ceil(room / 2), num_columns - room // 2)
    lines = []
    for device, head in enumerate(heads):
        texts = ["|" + ".".ljust(width)] * num_columns
        for cell, (start, end) in columns.items():
            if cell.device == device:
                texts[start] = "|" + label(cell.action, work).ljust(width, " " if end == start + 1 else "-")
                texts[start + 1 : end] = ["-" * (width + 1)] * (end - start - 1)
        visible = texts if cut is None else [*texts[: cut[0]], "|" + _CUT, *texts[cut[1] :]]
        lines.append(f"{head:<{head_width}} {''.join(visible)}|")
    return lines if cut is None else [*lines, f"Columns {cut[0] + 1} to {cut[1]} of {num_columns} are left out."]


def _unit(cells: Sequence[Cell]) -> float:
    """Return the duration of one column: the gcd of all times if they are integers, else the shortest action."""
    times = {time for cell in cells for time in (cell.start, cell.end)}
    if all(float(time).is_integer() for time in times):
        return math.gcd(*(int(time) for time in times)) or 1
    # Slightly less, so that rounding leaves every action at least one column; measured actions may take almost no time.
    shortest = min(cell.end - cell.start for cell in cells)
    return max(shortest, (max(times) - min(times)) / MAX_COLUMNS) * (1 - 1e-9)


def _column(time: float, unit: float) -> int:
    return math.floor(time / unit + 0.5)


def _legend(work: Work) -> str:
    if len(work.device_of) == work.num_devices:
        stages = "" if all(node.stage == device for node, device in work.device_of.items()) else _stage_devices(work)
        example = f"{Op.F}0 forward of micro batch 0" + (f", {Op.B}0 its backward" if work.training else "")
        return f"{example}, . idle. {stages or 'Stage s is on dev s.'}"
    node = work.stages[-1][0]
    example = f"{node}{Op.F}0 stage {node} forward on micro batch 0"
    return f"{example}{f', {node}{Op.B}0 backward' if work.training else ''}, . idle. {_stage_devices(work)}"


def _stage_devices(work: Work) -> str:
    return f"Devices of the stages: {mapping_text(work.device_mapping)}."


# Simulate an order of actions: each starts as soon as its device is free and its inputs have arrived.
#
# This models an asynchronous engine: a device runs its actions in order and waits only for their inputs, not for ticks
# common to all devices. An order that cannot be executed raises ConfigError with a diagram of how far it got.


Durations = Callable[[Action], float]

BACKWARD_PER_FORWARD = 2  # a backward pass computes two gradients, each with about the FLOPs of the forward pass

RULE = "An order runs every action of the work exactly once, on its own device, after what it needs."


def equal_stages(forward: float = 1, backward: float = 1) -> Durations:
    """Return durations that are equal for all stages."""
    return lambda action: forward if action.op is Op.F else backward


def per_stage(forward: Sequence[float], backward: Sequence[float]) -> Durations:
    """Return durations from one list per direction, with one number per stage."""
    return lambda action: (forward if action.op is Op.F else backward)[action.stage]


def by_shares(shares: Sequence[float]) -> Durations:
    """Return durations from each stage's share of the network's time, whose forward pass takes 1."""
    # A stage without work worth counting (a flatten, say) still has its place in the schedule.
    forward = [max(share, 1e-9) for share in shares]
    return per_stage(forward, [BACKWARD_PER_FORWARD * time for time in forward])


def make_table(schedule: str, work: Work, durations: Durations | None = None, transfer: float = 0) -> Table:
    """Simulate the schedule with that name."""
    return simulate(make_order(schedule, work), durations, transfer)


def simulate(order: Order, durations: Durations | None = None, transfer: float = 0) -> Table:
    """Return when each action runs (durations are 1 if None); `transfer` is the time between two devices.

    Repeated, missing or misplaced actions and deadlocks raise ConfigError.
    """
    durations = durations or equal_stages()
    _check_complete(order)
    work, device_of = order.work, order.work.device_of
    cells: dict[Action, Cell] = {}
    # Whole numbers where there are no transfers: ticks are then exact, and draw as one column each.
    head, free = [0] * len(order.rows), [0.0 if transfer else 0] * len(order.rows)
    moved = True
    # Devices in turn, each as far as it can get; a round without progress is a deadlock.
    while moved:
        moved = False
        for device, row in enumerate(order.rows):
            while head[device] < len(row) and all(need in cells for need in needs(row[head[device]], work)):
                action = row[head[device]]
                arrivals = [
                    cells[need].end + (transfer if device_of[need.node] != device else 0)
                    for need in needs(action, work)
                ]
                start, duration = max([free[device], *arrivals]), durations(action)
                if duration <= 0:
                    raise ValueError(f"{action} takes {duration}: durations are above 0")
                cells[action] = Cell(start, start + duration, device, action)
                free[device], head[device], moved = start + duration, head[device] + 1, True
    if any(head[device] < len(row) for device, row in enumerate(order.rows)):
        raise _deadlock(order, head, cells)
    return Table(cells=_by_start(cells), work=work)


def _by_start(cells: dict[Action, Cell]) -> tuple[Cell, ...]:
    return tuple(sorted(cells.values(), key=lambda cell: (cell.start, cell.device)))


def _check_complete(order: Order) -> None:
    """Raise ConfigError unless the order consists of exactly the actions of its work."""
    work = order.work
    wanted = set(work.actions())
    seen: dict[Action, str] = {}
    for device, row in enumerate(order.rows):
        for position, action in enumerate(row):
            where = f"device {device}, position {position}"
            if action not in wanted:
                raise _refusal(f"{action} ({where}) is not part of the work", order)
            if action in seen:
                raise _refusal(f"{action} runs twice: {seen[action]}, and again on {where}", order)
            if work.device_of[action.node] != device:
                raise _refusal(f"{action} ({where}) belongs to device {work.device_of[action.node]}", order)
            seen[action] = where
    missing = [action for action in work.actions() if action not in seen]
    if missing:
        names = format_list(missing, 8)
        devices = Counter(work.device_of[action.node] for action in missing)
        where = ", ".join(f"{count} on device {device}" for device, count in sorted(devices.items()))
        raise _refusal(f"The order omits {len(missing)} of {len(wanted)} actions ({where}): {names}", order)


def _refusal(problem: str, order: Order) -> ConfigError:
    """Return the error with the order as it was given."""
    lines = [f"dev {device} |" + "|".join(map(str, row[:24])) for device, row in enumerate(order.rows)]
    return ConfigError(f"{problem}.", rule=RULE, remedy="The order:\n" + "\n".join(lines))


def _deadlock(order: Order, head: list[int], cells: dict[Action, Cell]) -> ConfigError:
    """Return an error that explains which device waits for which, and shows how far the order got."""
    waits = []
    for device, row in enumerate(order.rows):
        if head[device] == len(row):
            continue
        action = row[head[device]]
        missing = next(need for need in needs(action, order.work) if need not in cells)
        owner = order.work.device_of[missing.node]
        ahead = order.rows[owner].index(missing) - head[owner]
        behind = f"device {owner} must first run {ahead} other action{'s' * (ahead != 1)}"
        waits.append(f"device {device} waits with {action} for {missing}, and {behind}")
    diagram = "\n".join(_rows(_by_start(cells), order.work, MAX_WIDTH)) if cells else "(nothing could run)"
    return ConfigError(
        f"The order deadlocks after {len(cells)} of {sum(map(len, order.rows))} actions: {'; '.join(waits)}.",
        rule=RULE,
        remedy=f"Move the actions that others wait for to the front. It got this far:\n{diagram}",
    )


# Schedule diagrams as files: SVG, PNG, text, and a Chrome trace for chrome://tracing or ui.perfetto.dev.
#
# A diagram is first a list of marks (boxes and texts), which SVG and PNG then render. All formats take several tables
# by title, to compare schedules, or the planned times with the measured ones.


# Sizes in pixels.
MARGIN, HEAD, ROW, GAP, TITLE, AXIS = 16, 52, 26, 4, 30, 30
MAX_TIME_WIDTH, COLUMN = 1100, 34
LETTER = {11: 7.0, 9: 5.8}  # font size -> approximate character width: labels are drawn only where they fit

HUES = {Op.F: 0.59, Op.B: 0.08}  # blue and orange, which color-blind readers can tell apart
NUM_SHADES = 4
MICROSECONDS = {"ticks": 1e3, "seconds": 1e6}  # a tick is shown as a millisecond
INK, FAINT, LINE = "#24292f", "#6e7781", "#d0d7de"
PAPER, WASH = "#ffffff", "#f6f8fa"


@dataclass(frozen=True, kw_only=True)
class Box:
    """A filled rectangle; `tip` appears when the pointer is over it."""

    x: float
    y: float
    width: float
    height: float = ROW
    fill: str
    stroke: str | None = None
    radius: int = 3
    tip: str = ""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A line of text; `anchor` says which part of it is at x."""

    x: float
    y: float
    text: str
    size: int = 11
    fill: str = INK
    anchor: str = "start"


Mark = Box | Text
Tables = Mapping[str, Table]  # by title


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A diagram: its size in pixels and its marks, later ones on top."""

    width: float
    height: float
    marks: tuple[Mark, ...]


def draw_marks(tables: Tables) -> Drawing:
    """Return a diagram with one panel for each table; tables with the same unit have the same scale."""
    parts: list[Mark] = []
    top, width = MARGIN, 0.0
    scales: dict[str, float] = {}
    for table in tables.values():
        # Measured actions may take almost no time: their boxes are then too narrow for labels.
        shortest = max(min(cell.end - cell.start for cell in table.cells), table.total_time / 500)
        scale = min(COLUMN / shortest, MAX_TIME_WIDTH / table.total_time)
        scales[table.unit] = min(scale, scales.get(table.unit, scale))
    for title, table in tables.items():
        panel, panel_width, height = _panel(title, table, top, scales[table.unit])
        parts += panel
        top, width = top + height, max(width, panel_width)
    return Drawing(width=width + MARGIN, height=top + MARGIN - 8, marks=tuple(parts))


def draw_svg(tables: Tables) -> str:
    """Return an SVG with one panel for each table."""
    drawing = draw_marks(tables)
    width, height = f"{drawing.width:.0f}", f"{drawing.height:.0f}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
            *(_svg_box(mark) if isinstance(mark, Box) else _svg_text(mark) for mark in drawing.marks),
            "</svg>\n",
        ]
    )


def chrome_trace(tables: Tables) -> dict[str, Any]:
    """Return the tables as Chrome trace events, a process for each table and a thread for each device."""
    events: list[dict[str, Any]] = []
    for pid, (title, table) in enumerate(tables.items()):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": title}})
        for device in range(table.work.num_devices):
            name = {"name": f"device {device}"}
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": device, "args": name})
        events += [_event(cell, pid, MICROSECONDS[table.unit]) for cell in table.cells]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _event(cell: Cell, pid: int, scale: float) -> dict[str, Any]:
    action = cell.action
    return {
        "name": str(action),
        "cat": {Op.F: "forward", Op.B: "backward"}[action.op],
        "ph": "X",
        "ts": cell.start * scale,
        "dur": (cell.end - cell.start) * scale,
        "pid": pid,
        "tid": cell.device,
        "args": {"stage": str(action.node), "micro": action.micro},
    }


def _panel(title: str, table: Table, top: float, scale: float) -> tuple[list[Mark], float, float]:
    """Return the marks of one table below `top`, and its width and height."""
    work, origin = table.work, min(cell.start for cell in table.cells)
    left, first_row = MARGIN + HEAD, top + TITLE
    right, bottom = left + table.total_time * scale, first_row + work.num_devices * (ROW + GAP)
    parts: list[Mark] = [Text(x=MARGIN, y=top + 14, text=title, size=14)] if title else []
    parts += _key(right, top + 14, table, title)
    for device in range(work.num_devices):
        y = first_row + device * (ROW + GAP)
        parts.append(Text(x=MARGIN, y=y + ROW / 2 + 4, text=f"device {device}", fill=FAINT))
        parts.append(Box(x=left, y=y, width=right - left, fill=WASH, stroke=LINE))
    for cell in table.cells:
        x, y = left + (cell.start - origin) * scale, first_row + cell.device * (ROW + GAP)
        parts += _cell(
            cell, x, y, (cell.end - cell.start) * scale, label(cell.action, work), _shade(cell.action, table)
        )
    facts = summary(table)
    parts.append(Text(x=left, y=bottom + 13, text=facts, fill=FAINT))
    wide_enough = max(right, left + len(facts) * LETTER[11], MARGIN + len(title) * 8 + 200)
    return parts, wide_enough, TITLE + work.num_devices * (ROW + GAP) + AXIS


def _key(right: float, y: float, table: Table, title: str) -> list[Mark]:
    """Return the legend: right of the title, at the panel's right end where there is room."""
    ops = {Op.F: "forward", Op.B: "backward"} if table.work.training else {Op.F: "forward"}
    x = max(right - 88 * len(ops), MARGIN + len(title) * 8 + 16)
    parts: list[Mark] = []
    for i, (op, name) in enumerate(ops.items()):
        parts.append(Box(x=x + 88 * i, y=y - 10, width=12, height=12, radius=2, fill=_color(op, 1)))
        parts.append(Text(x=x + 88 * i + 17, y=y, text=name, fill=FAINT))
    return parts


def _cell(cell: Cell, x: float, y: float, width: float, name: str, shade: int) -> list[Mark]:
    tip = f"{cell.action}: {cell.start:.6g} to {cell.end:.6g}"
    box = Box(x=x, y=y, width=width, fill=_color(cell.action.op, shade), stroke=PAPER, tip=tip)
    size = next((size for size, letter in LETTER.items() if len(name) * letter < width), None)
    if size is None:
        return [box]
    return [box, Text(x=x + width / 2, y=y + ROW / 2 + 4, text=name, size=size, anchor="middle")]


def _shade(action: Action, table: Table) -> int:
    """Return the shade of an action: by its stage where a device has several, else by its micro batch."""
    work = table.work
    if len(work.device_of) == work.num_devices:
        return action.micro % NUM_SHADES
    mine = [node for node, device in work.device_of.items() if device == work.device_of[action.node]]
    return mine.index(action.node) % NUM_SHADES


def _color(op: Op, shade: int) -> str:
    lightness = 0.82 - 0.075 * shade
    red, green, blue = colorsys.hls_to_rgb(HUES[op], lightness, 0.72)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _svg_box(box: Box) -> str:
    edge = f' stroke="{box.stroke}"' if box.stroke else ""
    place = f'x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height}"'
    shape = f'<rect {place} rx="{box.radius}" fill="{box.fill}"{edge}'
    return f"{shape}><title>{escape(box.tip)}</title></rect>" if box.tip else f"{shape}/>"


def _svg_text(text: Text) -> str:
    weight = 600 if text.size > 11 else 400
    style = f'font-size="{text.size}" font-weight="{weight}" fill="{text.fill}" text-anchor="{text.anchor}"'
    return f'<text x="{text.x:.1f}" y="{text.y:.1f}" {style}>{escape(text.text)}</text>'


SCALE = 2  # of the PNG, for sharp text on high-resolution screens


def draw_png(tables: Tables) -> bytes:
    """Return a PNG with one panel for each table."""
    from PIL import Image, ImageDraw

    drawing = draw_marks(tables)
    image = Image.new("RGB", (round(drawing.width * SCALE), round(drawing.height * SCALE)), PAPER)
    pen = ImageDraw.Draw(image)
    for mark in drawing.marks:
        if isinstance(mark, Box):
            _draw_box(pen, mark)
        else:
            _draw_text(pen, mark)
    # A schedule has few colors, so a palette makes the file four times smaller.
    out = io.BytesIO()
    image.quantize(64).save(out, "PNG", optimize=True)
    return out.getvalue()


def _draw_box(pen: Any, box: Box) -> None:
    corners = [value * SCALE for value in (box.x, box.y, box.x + box.width, box.y + box.height)]
    pen.rounded_rectangle(corners, radius=box.radius * SCALE, fill=box.fill, outline=box.stroke)


def _draw_text(pen: Any, text: Text) -> None:
    from PIL import ImageFont

    font = ImageFont.load_default(text.size * SCALE)
    anchor = {"start": "ls", "middle": "ms"}[text.anchor]
    pen.text((text.x * SCALE, text.y * SCALE), text.text, fill=text.fill, font=font, anchor=anchor)


def _text(tables: Tables) -> str:
    return "\n\n".join(draw_timeline(table, title) for title, table in tables.items()) + "\n"


FORMATS: Mapping[str, Callable[[Tables], str | bytes]] = {
    ".svg": draw_svg,
    ".png": draw_png,
    ".json": lambda tables: json.dumps(chrome_trace(tables)) + "\n",  # for chrome://tracing or ui.perfetto.dev
    ".txt": _text,
}


def check_diagram_file(path: Path) -> None:
    """Raise ConfigError unless the file's suffix is that of a known format."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(
            f"{path} has no suffix of a diagram format.",
            rule=f"Schedules are written as {', '.join(FORMATS)} (a Chrome trace is .json).",
            remedy=f"Use a name such as {path.stem or 'schedule'}.svg.",
        )


def write_diagram(path: Path, tables: Tables) -> None:
    """Write the tables to a file in the format of its suffix."""
    check_diagram_file(path)
    drawn = FORMATS[path.suffix.lower()](tables)
    write_atomic(path, drawn if isinstance(drawn, bytes) else drawn.encode())
