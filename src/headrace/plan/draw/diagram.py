"""Schedule diagrams as files: SVG, PNG, text, and a Chrome trace for chrome://tracing or ui.perfetto.dev.

A diagram is first a list of marks (boxes and texts), which SVG and PNG then render. All formats take several tables
by title, to compare schedules, or the planned times with the measured ones.
"""

import colorsys
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.files import write_atomic
from headrace.plan.draw.text import draw_timeline, label, summary
from headrace.plan.schedule import Action, Op
from headrace.plan.timeline import Cell, Timetable

# Sizes in pixels.
MARGIN, HEAD, ROW, GAP, TITLE, AXIS = 16, 52, 26, 4, 30, 30
MAX_TIME_WIDTH, COLUMN = 1100, 34
LETTER = {11: 7.0, 9: 5.8}  # font size -> approximate character width: labels are drawn only where they fit

HUES = {Op.F: 0.59, Op.B: 0.08, Op.W: 0.45}  # blue, orange and green, which color-blind readers can tell apart
NAMES = {Op.F: "forward", Op.B: "backward", Op.W: "weights"}
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
Tables = Mapping[str, Timetable]  # by title


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
        "cat": NAMES[action.op],
        "ph": "X",
        "ts": cell.start * scale,
        "dur": (cell.end - cell.start) * scale,
        "pid": pid,
        "tid": cell.device,
        "args": {"stage": str(action.node), "micro": action.micro},
    }


def _panel(title: str, table: Timetable, top: float, scale: float) -> tuple[list[Mark], float, float]:
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


def _key(right: float, y: float, table: Timetable, title: str) -> list[Mark]:
    """Return the legend: right of the title, at the panel's right end where there is room."""
    there = {cell.action.op for cell in table.cells}
    ops = {op: name for op, name in NAMES.items() if op in there}
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


def _shade(action: Action, table: Timetable) -> int:
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
