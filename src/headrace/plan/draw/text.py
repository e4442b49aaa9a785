"""A schedule as text for the terminal. The SVG and the Chrome trace show the same cells."""

import math
from collections.abc import Sequence

from headrace.plan.device_mapping import mapping_text
from headrace.plan.schedule import Action, Op, Work
from headrace.plan.timeline import Cell, Timetable

MAX_WIDTH = 100
_CUT = " ... "
MAX_COLUMNS = 500


def draw_timeline(table: Timetable, title: str = "", max_width: int = MAX_WIDTH) -> str:
    """Return the table as one row per device over time, with a legend; the middle of a long one is omitted."""
    lines = rows(table.cells, table.work, max_width)
    return "\n".join([*([title] if title else []), *lines, _legend(table.work), f"{summary(table)}."])


def summary(table: Timetable) -> str:
    """Return a sentence with the time, the idle fraction and the peaks of a table."""
    text = f"{table.total_time:,.4g} {table.unit}, idle {table.bubble:.1%}"
    if not table.work.training:
        return text
    return f"{text}, stored at most by stage: {' '.join(map(str, table.peak_by_stage()))} micro batches"


def label(action: Action, work: Work) -> str:
    """Return the label of an action: without the stage where each device has only one."""
    return str(action) if len(work.device_of) > work.num_devices else f"{action.op}{action.micro}"


def rows(cells: Sequence[Cell], work: Work, max_width: int) -> list[str]:
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
        example += f", {Op.W}0 its gradients of weights" if work.training and work.splits else ""
        return f"{example}, . idle. {stages or 'Stage s is on dev s.'}"
    node = work.stages[-1][0]
    example = f"{node}{Op.F}0 stage {node} forward on micro batch 0"
    example += f", {node}{Op.B}0 backward" if work.training else ""
    example += f", {node}{Op.W}0 its gradients of weights" if work.is_split(node) else ""
    return f"{example}, . idle. {_stage_devices(work)}"


def _stage_devices(work: Work) -> str:
    return f"Devices of the stages: {mapping_text(work.device_mapping)}."
