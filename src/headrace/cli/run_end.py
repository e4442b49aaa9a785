"""The table at the end of a run: accuracy, best checkpoint, where the time went, what limited it, what to do next."""

import shlex
import textwrap
from typing import TYPE_CHECKING

from headrace.cli.table import terminal_width
from headrace.core.units import format_duration

if TYPE_CHECKING:
    from headrace.report.run_summary import RunSummary
    from headrace.run.trained_model import RunResult

_COLUMN = 12
_KINDS = {"wait": "waiting for input", "wait_validation": "waiting for validation images"}  # others are plain words


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
        rows.append(("time", _time(run.end.seconds, run.end.wall_seconds)))
        rows.append(("verdict", run.end.verdict))
    for name, file in (("report", run.path / "report.html"), ("plot", run.path / "curve.svg")):
        if file.is_file():
            rows.append((name, shlex.quote(str(file))))
    rows.append(("directory", shlex.quote(str(run.path))))
    rows += [("next" if not place else "", command) for place, command in enumerate(_next(result, run))]
    width = terminal_width()
    return [line for name, text in rows if text for line in _wrapped(name, text, width)]


def _wrapped(name: str, text: str, width: int | None) -> list[str]:
    """Return a row, broken to the terminal's width; paths and commands stay whole, to be copied."""
    indent = " " * _COLUMN
    if width and name not in ("checkpoint", "plot", "directory") and not text.startswith("headrace "):
        lines = textwrap.wrap(text, max(30, width - _COLUMN), break_on_hyphens=False, break_long_words=False)
    else:
        lines = [text]
    return [f"{name:{_COLUMN}}{lines[0]}", *(indent + line for line in lines[1:])]


def _accuracy(run: "RunSummary") -> list[tuple[str, str]]:
    best = run.best
    if best is None:
        return []
    if run.is_trial:
        count = f"{best.num_samples:,} image{'s' * (best.num_samples != 1)}"
        return [("accuracy", f"not shown: a trial (--dry-run-steps), validated on {count} only")]
    weights = "" if best.weights == "raw" else f", {best.weights} weights"
    text = f"{100 * best.top1:.2f} % top-1, the best, at epoch {best.epoch:.4g} ({best.num_samples:,} images{weights})"
    last = {record.weights: record for record in run.validations}  # the last one of each kind
    final = max(last.values(), key=lambda record: record.step)
    rows = [("accuracy", text)]
    if final.step != best.step:
        ended = ", ".join(f"{100 * record.top1:.2f} % ({weights})" for weights, record in last.items())
        rows.append(("", f"{ended} at the end"))
    if run.end is not None and run.end.time_to_target is not None:
        rows.append(("target", f"reached after {format_duration(run.end.time_to_target)}"))
    return rows


def _time(seconds: dict[str, float], wall: float | None) -> str:
    if wall is None:
        return ""
    largest = sorted(((spent, kind) for kind, spent in seconds.items() if spent >= 0.005 * wall), reverse=True)
    parts = ", ".join(f"{_KINDS.get(kind, kind)} {format_duration(spent)}" for spent, kind in largest)
    return f"{format_duration(wall)}: {parts}"


def _next(result: "RunResult", run: "RunSummary") -> list[str]:
    """Return the commands that one would type next."""
    path = shlex.quote(str(run.path))
    if result.outcome == "interrupted":
        return [f"headrace resume {path}"] if result.can_resume else []
    if run.is_trial or result.outcome == "compiled" or not any(run.checkpoints.glob("*")):
        return []
    more = [f"headrace resume {path}"] if result.outcome == "stopped" else []
    return [f"headrace predict {path} IMAGES", f"headrace export {path} --format onnx", *more]
