"""`headrace runs [DIR]`: the runs in a directory with their results."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.table import Column, table_lines, terminal_width
from headrace.config.arguments import Parser
from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.report.run_summary import RunSummary

DESCRIPTION = (
    "List the runs in a directory, a few levels deep: best validation accuracy, epochs done and planned, time to "
    "train, rate, when it was last written, and how it ended. Nothing in them is changed."
)


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace runs", description=DESCRIPTION)
    parser.add_argument("place", metavar="DIR", nargs="?", type=Path, default=Path("runs"), help="where to look [runs]")
    parser.add_argument(
        "--sort", choices=tuple(_SORTS), default="date", help="newest, most accurate or fastest first [date]"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each run")
    args = parser.parse_args(argv)
    from headrace.report.run_summary import find_runs, read_summary

    if not args.place.is_dir():
        problem = f"{args.place} is not a directory." if args.place.exists() else f"There is no directory {args.place}."
        raise ConfigError(problem, remedy="Runs are made by headrace train, in ./runs unless --log-dir is given.")
    runs = sorted((read_summary(path) for path in find_runs(args.place)), key=_SORTS[args.sort])
    if args.json:
        for run in runs:
            print(json.dumps(_facts(run)))
    elif not runs:
        print(f"no runs in {args.place}")
    else:
        print("\n".join(table_lines(_columns(runs, args.place), terminal_width())))
        for run in runs:
            if run.problem:
                print(f"{_name(run, args.place)}: {run.problem}")
    return 0


def _accuracy_key(run: "RunSummary") -> float:
    return -run.best.top1 if run.best and not run.is_trial else math.inf


_SORTS: dict[str, Callable[["RunSummary"], float]] = {
    "date": lambda run: -run.modified,
    "accuracy": _accuracy_key,
    "time": lambda run: math.inf if run.seconds is None else run.seconds,
}


def _columns(runs: list["RunSummary"], place: Path) -> list[Column]:
    from headrace.core.units import format_duration

    def top1(run: "RunSummary") -> str:
        return "trial" if run.is_trial else f"{100 * run.best.top1:.2f} %" if run.best else "-"

    def rate(run: "RunSummary") -> str:
        return f"{run.end.images_per_second:,.0f}" if run.end and run.end.images_per_second else "-"

    def written(run: "RunSummary") -> str:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(run.modified)) if run.modified else "-"

    times = [format_duration(run.seconds) if run.seconds is not None else "-" for run in runs]
    return [
        Column(title="run", cells=[_name(run, place) for run in runs]),
        Column(title="top-1", cells=[top1(run) for run in runs], right=True),
        Column(title="epochs", cells=[_epochs(run) for run in runs], right=True, spare=1),
        Column(title="time", cells=times, right=True),
        Column(title="img/s", cells=[rate(run) for run in runs], right=True, spare=2),
        Column(title="written", cells=[written(run) for run in runs], spare=3),
        Column(title="state", cells=[run.state for run in runs]),
    ]


def _epochs(run: "RunSummary") -> str:
    planned = f"/{run.start.num_epochs}" if run.start else ""
    return f"{run.epoch:.4g}{planned}" if run.start else "-"


def _name(run: "RunSummary", place: Path) -> str:
    name = str(run.path.relative_to(place)) if run.path != place else str(run.path)
    return name.encode(errors="replace").decode()  # a name that is not UTF-8 cannot be printed


def _facts(run: "RunSummary") -> dict[str, object]:
    """Return what --json prints of a run."""
    best, end, start = run.best, run.end, run.start
    return {
        "run": str(run.path).encode(errors="replace").decode(),
        "state": run.state,
        "problem": run.problem,
        "model": start.model if start else None,
        "dataset": start.dataset if start else None,
        "epoch": run.epoch,
        "num_epochs": start.num_epochs if start else None,
        "best_top1": best.top1 if best else None,
        "best_epoch": best.epoch if best else None,
        "best_weights": best.weights if best else None,
        "best_checkpoint": end.best_checkpoint if end else None,
        "is_trial": run.is_trial,
        "time_to_train": run.seconds,
        "images_per_second": end.images_per_second if end else None,
        "modified": run.modified,
    }
