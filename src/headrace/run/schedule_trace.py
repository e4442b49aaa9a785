"""`--trace-schedule`: one step's schedule as it really runs, drawn beside the planned one."""

from pathlib import Path
from typing import Any

from headrace.core.units import format_duration
from headrace.engine.dispatch import Dispatcher
from headrace.engine.state import State
from headrace.plan.picture_formats import FORMATS, write_picture
from headrace.plan.pipeline import PipelinePlan
from headrace.plan.table import Table


def trace_schedule(
    dispatcher: Dispatcher, pipeline: PipelinePlan, source: tuple[State, Any, Any], directory: Path | None
) -> list[str]:
    """Trace the first step of a block on a copy of the state; draw it; return what it shows, in sentences.

    `source` is (state, resident set, block). Where `directory` is None another process draws, with its own times.
    """
    measured = dispatcher.trace(*source)
    if directory is None:
        return []
    tables = {"planned, with the stages' times from shapes or measured blocks": pipeline.expected_table()}
    tables["measured"] = measured
    for suffix in FORMATS:
        write_picture(directory / f"schedule{suffix}", tables)
    return [
        f"schedule: the passes of a step took {format_duration(measured.total_time)}, devices idle "
        f"{measured.bubble:.1%} (planned {pipeline.expected_bubble:.1%}); see {directory / 'schedule.svg'}",
        f"stages' shares of the time: {_shares(measured)} (planned "
        + " ".join(f"{stage.time_share:.0%}" for stage in pipeline.stages)
        + ")",
    ]


def _shares(table: Table) -> str:
    times = dict.fromkeys(range(table.work.num_stages), 0.0)
    for cell in table.cells:
        times[cell.action.stage] += cell.end - cell.start
    total = sum(times.values()) or 1.0
    return " ".join(f"{time / total:.0%}" for time in times.values())
