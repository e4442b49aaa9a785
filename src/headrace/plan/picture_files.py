"""Placed schedules as files: an SVG for documents, a Chrome trace for chrome://tracing or ui.perfetto.dev.

Both take tables by title, so that schedules, or what was planned and what was measured, can stand side by side.
"""

import colorsys
from collections.abc import Mapping
from html import escape
from typing import Any

from headrace.plan.picture import label, summary
from headrace.plan.schedule import Action, Op
from headrace.plan.table import Cell, Table

# Sizes in pixels.
MARGIN, HEAD, ROW, GAP, TITLE, AXIS = 16, 52, 26, 4, 30, 30
MAX_TIME_WIDTH, COLUMN = 1100, 34
LETTER = {11: 7.0, 9: 5.8}  # font size -> about the width of a character: a name is written where it fits

HUES = {Op.F: 0.59, Op.B: 0.08}  # blue and orange, which colour-blind readers also tell apart
NUM_SHADES = 4
MICROSECONDS = {"ticks": 1e3, "seconds": 1e6}  # a tick is shown as a millisecond
INK, FAINT, LINE = "#24292f", "#6e7781", "#d0d7de"


def draw_svg(tables: Mapping[str, Table]) -> str:
    """Return an SVG with one panel for each table; tables in the same unit have the same scale."""
    parts, top, width = [], MARGIN, 0.0
    scales: dict[str, float] = {}
    for table in tables.values():
        shortest = min(cell.end - cell.start for cell in table.cells)
        scale = min(COLUMN / shortest, MAX_TIME_WIDTH / table.total_time)
        scales[table.unit] = min(scale, scales.get(table.unit, scale))
    for title, table in tables.items():
        panel, panel_width, height = _panel(title, table, top, scales[table.unit])
        parts += panel
        top, width = top + height, max(width, panel_width)
    width, top = width + MARGIN, top + MARGIN - 8
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{top:.0f}" '
            f'viewBox="0 0 {width:.0f} {top:.0f}" font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{width:.0f}" height="{top:.0f}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def chrome_trace(tables: Mapping[str, Table]) -> dict[str, Any]:
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


def _panel(title: str, table: Table, top: float, scale: float) -> tuple[list[str], float, float]:
    """Return the marks of one table below `top`, and its width and height."""
    work, origin = table.work, min(cell.start for cell in table.cells)
    left, first_row = MARGIN + HEAD, top + TITLE
    right, bottom = left + table.total_time * scale, first_row + work.num_devices * (ROW + GAP)
    parts = [_text(MARGIN, top + 14, title, size=14)] if title else []
    parts += _key(right, top + 14, table, title)
    for device in range(work.num_devices):
        y = first_row + device * (ROW + GAP)
        parts.append(_text(MARGIN, y + ROW / 2 + 4, f"device {device}", fill=FAINT))
        parts.append(_box(left, y, right - left, "#f6f8fa", stroke=LINE))
    for cell in table.cells:
        x, y = left + (cell.start - origin) * scale, first_row + cell.device * (ROW + GAP)
        parts += _cell(
            cell, x, y, (cell.end - cell.start) * scale, label(cell.action, work), _shade(cell.action, table)
        )
    facts = summary(table)
    parts.append(_text(left, bottom + 13, facts, fill=FAINT))
    wide_enough = max(right, left + len(facts) * LETTER[11], MARGIN + len(title) * 8 + 200)
    return parts, wide_enough, TITLE + work.num_devices * (ROW + GAP) + AXIS


def _key(right: float, y: float, table: Table, title: str) -> list[str]:
    """Return the legend: right of the title, at the panel's right end where there is room."""
    ops = {Op.F: "forward", Op.B: "backward"} if table.work.training else {Op.F: "forward"}
    x = max(right - 88 * len(ops), MARGIN + len(title) * 8 + 16)
    parts = []
    for i, (op, name) in enumerate(ops.items()):
        parts.append(
            f'<rect x="{x + 88 * i:.1f}" y="{y - 10:.1f}" width="12" height="12" rx="2" fill="{_colour(op, 1)}"/>'
        )
        parts.append(_text(x + 88 * i + 17, y, name, fill=FAINT))
    return parts


def _cell(cell: Cell, x: float, y: float, width: float, name: str, shade: int) -> list[str]:
    start, end = f"{cell.start:.6g}", f"{cell.end:.6g}"
    tip = f"<title>{escape(str(cell.action))}: {start} to {end}</title>"
    box = _box(x, y, width, _colour(cell.action.op, shade), stroke="#ffffff", inside=tip)
    size = next((size for size, letter in LETTER.items() if len(name) * letter < width), None)
    return [box] if size is None else [box, _text(x + width / 2, y + ROW / 2 + 4, name, size=size, anchor="middle")]


def _shade(action: Action, table: Table) -> int:
    """Return the shade of an action: by its stage where a device has several, else by its micro batch."""
    work = table.work
    if len(work.device_of) == work.num_devices:
        return action.micro % NUM_SHADES
    mine = [node for node, device in work.device_of.items() if device == work.device_of[action.node]]
    return mine.index(action.node) % NUM_SHADES


def _colour(op: Op, shade: int) -> str:
    lightness = 0.82 - 0.075 * shade
    red, green, blue = colorsys.hls_to_rgb(HUES[op], lightness, 0.72)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _box(x: float, y: float, width: float, fill: str, *, stroke: str, inside: str = "") -> str:
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW}" rx="3" fill="{fill}" stroke="{stroke}"'
    return f"{shape}>{inside}</rect>" if inside else f"{shape}/>"


def _text(x: float, y: float, words: str, *, size: int = 11, fill: str = INK, anchor: str = "start") -> str:
    weight = 600 if size > 11 else 400
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
