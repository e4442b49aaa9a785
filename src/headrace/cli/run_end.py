"""The table at the end of a run: accuracy, best checkpoint, where the time went, what limited it, what to do next."""

import shlex
import textwrap
from importlib.util import find_spec
from typing import TYPE_CHECKING

from headrace.cli.tables import terminal_width
from headrace.core.local_path import is_address
from headrace.core.units import format_duration

if TYPE_CHECKING:
    from headrace.report.run_summary import RunSummary
    from headrace.run.run_result import RunResult


_COLUMN = 12


def end_lines(result: "RunResult", run: "RunSummary") -> list[str]:
    """Return the table for a run that a process has just ended; `run` is what its records say."""
    rows: list[tuple[str, str]] = []
    if result.reason:
        rows.append((result.outcome, result.reason))
    rows += _accuracy(run)
    best = run.checkpoints / run.end.best_checkpoint if run.end and run.end.best_checkpoint else None
    if best is not None and best.is_dir():
        rows.append(("checkpoint", shlex.quote(str(best))))
    if run.end is not None:
        rows.append(("time", _time(run.end.seconds, run.end.wall_seconds, run.seconds)))
        if run.end.saving_text:
            rows.append(("saving", run.end.saving_text))
        verdicts = [verdict for verdict in (run.end.model_verdict, run.end.verdict) if verdict]
        rows += [("" if place else "verdict", verdict) for place, verdict in enumerate(verdicts)]
    for name, file in (("report", run.path / "report.html"), ("plot", run.path / "curve.svg")):
        if file.is_file():
            rows.append((name, shlex.quote(str(file))))
    rows.append(("directory", shlex.quote(str(run.path))))
    rows += [("next" if not place else "", command) for place, command in enumerate(_next(result, run))]
    from headrace.run.stored_run import run_path

    log_dir = str(run.options.get("log_dir"))
    if is_address(log_dir) and result.directory == run_path(log_dir, run.path.name):
        address = f"{log_dir.rstrip('/')}/{run.path.name}"
        rows = [(name, text.replace(str(run.path), address)) for name, text in rows]
        rows.append(("copy here", shlex.quote(str(run.path))))
    width = terminal_width()
    return [line for name, text in rows if text for line in _wrapped(name, text, width)]


def _wrapped(name: str, text: str, width: int | None) -> list[str]:
    """Return a row, broken to the terminal's width; paths and commands stay whole, to be copied."""
    indent = " " * _COLUMN
    if width and name not in ("checkpoint", "report", "plot", "directory") and not text.startswith("headrace "):
        lines = textwrap.wrap(text, max(30, width - _COLUMN), break_on_hyphens=False, break_long_words=False)
    else:
        lines = [text]
    return [f"{name:{_COLUMN}}{lines[0]}", *(indent + line for line in lines[1:])]


def _accuracy(run: "RunSummary") -> list[tuple[str, str]]:
    from headrace.report.run_files import accuracy_lines

    rows = [("" if place else "accuracy", line) for place, line in enumerate(accuracy_lines(run))]
    best = run.best
    if best is None or run.is_trial:
        return rows
    last = {record.weights: record for record in run.validations}  # the last one of each kind
    final = max(last.values(), key=lambda record: record.step)
    if final.step != best.step:
        row = run.monitor
        ended = ", ".join(f"{row.text(record.metric(row.name))} ({weights})" for weights, record in last.items())
        rows.insert(1, ("", f"{'' if row.name == 'top1' else f'{row.title} '}{ended} at the end"))
    if run.end is not None and run.end.time_to_target is not None:
        rows.append(("target", f"reached after {format_duration(run.end.time_to_target)}"))
    return rows


def _time(seconds: dict[str, float], wall: float | None, trained: float | None) -> str:
    """Say where the wall time of the last process went; of a resumed run, `trained` has the earlier ones' time, too."""
    from headrace.telemetry.clock import KIND_NAMES

    if wall is None:
        return ""
    largest = sorted(((spent, kind) for kind, spent in seconds.items() if spent >= 0.005 * wall), reverse=True)
    parts = ", ".join(f"{KIND_NAMES.get(kind, kind)} {format_duration(spent)}" for spent, kind in largest)
    which = " of this process" if trained is not None and trained > wall else ""
    return f"{format_duration(wall)}{which}: {parts}"


def _next(result: "RunResult", run: "RunSummary") -> list[str]:
    """Return the commands that one would type next."""
    path = shlex.quote(str(run.path))
    if result.outcome == "interrupted":
        return [f"headrace resume {path}"] if result.can_resume else []
    if run.is_trial or result.outcome == "compiled" or not any(run.checkpoints.glob("*")):
        return []
    more = [f"headrace resume {path}"] if result.outcome == "stopped" else []
    missing = "" if find_spec("onnx") else "  # needs: pip install 'headrace[onnx]'"
    return [f"headrace predict {path} IMAGES", f"headrace export {path} --format onnx{missing}", *more]
