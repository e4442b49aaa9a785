"""The schedule of a pipelined run in its report: planned, from plan.json, and measured, where it was traced."""

from collections.abc import Mapping
from typing import Any

from headrace.plan.draw.diagram import FAINT, INK, LINE, MICROSECONDS, PAPER, WASH, draw_svg
from headrace.plan.schedule import Action, Work
from headrace.plan.simulation import by_shares, make_table
from headrace.plan.timeline import Cell, Timetable
from headrace.report.markup import Html, element, section
from headrace.report.run_files import RunFiles

_MOST_CELLS = 20_000


def draw_schedule(files: RunFiles) -> Html:
    """Return the section with the diagram of one step; nothing for a run without a pipeline."""
    pipeline = files.plan.get("pipeline")
    if not pipeline or files.plan.get("one_program") or len(pipeline["stages"]) < 2:
        return Html("")
    work = Work(_mapping(pipeline["device_mapping"]), pipeline["num_micros"])
    if 2 * work.num_micros * len(work.device_of) > _MOST_CELLS:
        return Html("")
    shares = [stage["time_share"] for stage in pipeline["stages"]]
    planned = make_table(pipeline["schedule"], work, by_shares(shares))
    tables = {"planned, from the stages' shares of the time": planned}
    if measured := _measured(files.schedule, work):
        tables["measured"] = measured
    idle = ", ".join(f"{name.partition(',')[0]} {table.bubble:.1%}" for name, table in tables.items())
    facts = f"{pipeline['schedule']}, {work.num_stages} stages on {work.num_devices} devices, {work.num_micros} micro "
    facts += f"batches per step. Devices idle: {idle}."
    note = (
        "A row is a device; F2 is the forward pass of micro batch 2, B2 its backward pass. Point at one for its times."
    )
    return section(
        "schedule",
        "Schedule of one step",
        element("p", facts),
        element("div", Html(_themed(draw_svg(tables))), class_="schedule"),
        element("p", note, class_="note"),
    )


def _mapping(value: object) -> Any:
    return tuple(_mapping(item) for item in value) if isinstance(value, list) else value


def _measured(trace: Mapping[str, Any], work: Work) -> Timetable | None:
    """Return the table of a Chrome trace that `--trace-schedule` wrote: the events of its last process."""
    events = [event for event in trace.get("traceEvents", []) if event.get("ph") == "X"]
    if not events:
        return None
    last = max(event["pid"] for event in events)
    scale = MICROSECONDS["seconds"]
    cells = [
        Cell(event["ts"] / scale, (event["ts"] + event["dur"]) / scale, event["tid"], Action.parse(event["name"]))
        for event in events
        if event["pid"] == last
    ]
    # The first process of a trace is the plan: with it alone nothing was measured.
    if last == 0 or len(cells) > _MOST_CELLS or not {action for *_, action in cells} <= set(work.actions()):
        return None
    return Timetable(cells=tuple(sorted(cells, key=lambda cell: (cell.start, cell.device))), work=work, unit="seconds")


def _themed(svg: str) -> str:
    """Let the colors of a diagram follow the page's; labels stay dark on their light boxes."""
    return "\n".join(map(_themed_line, svg.splitlines()))


def _themed_line(line: str) -> str:
    if 'text-anchor="middle"' in line:  # a label within a box
        return line
    for color, name in ((INK, "ink"), (FAINT, "faint"), (LINE, "line"), (WASH, "wash"), (PAPER, "card")):
        line = line.replace(f'"{color}"', f'"var(--{name})"')
    return line
