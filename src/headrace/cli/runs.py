"""`headrace runs`: the runs of a directory as a list."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.tables import Column, fit_columns, print_fitted, table_lines, terminal_width
from headrace.config.command_line import Parser
from headrace.core.errors import ConfigError
from headrace.core.local_path import is_address, local_path, run_place
from headrace.rows.metrics import METRICS

if TYPE_CHECKING:
    from headrace.report.run_summary import RunSummary


_RUNS = (
    "List the runs in a directory, a few levels deep: best validation accuracy and on how many images, epochs done and "
    "planned, time to train, rate, dataset, when it was last written, and how it ended. Nothing in them is changed."
)


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace runs", description=_RUNS)
    parser.add_argument(
        "place",
        metavar="DIR",
        nargs="?",
        type=run_place,
        default="runs",
        help="where to look, here or in a store [runs]",
    )
    parser.add_argument(
        "--sort",
        choices=tuple(_SORTS),
        default="date",
        help="newest, most accurate (by the lower end of the accuracy's 95 %% interval) or fastest first [date]",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each run")
    args = parser.parse_intermixed_args(argv)
    from headrace.report.run_summary import data_groups, find_runs, read_summary

    place = _brought(args.place)
    refuse_missing(place)
    runs = sorted((read_summary(path) for path in find_runs(place)), key=_SORTS[args.sort])
    if args.json:
        for run in runs:
            print(json.dumps(_facts(run)))
    elif not runs:
        print(f"no runs in {args.place}")
    else:
        columns, missing = fit_columns(_columns(runs, place), terminal_width())
        print("\n".join(table_lines(columns)))
        for run in runs:
            if run.problem:
                print_fitted(f"{_name(run, place)}: {run.problem}")
        if args.sort == "accuracy" and len(set(data_groups([run for run in runs if run.best]))) > 1:
            print_fitted("note: the runs have different datasets, whose accuracies cannot be compared")
        if missing:
            print_fitted(f"no room for {', '.join(missing)}; --json has everything")
    return 0


def _brought(place: str) -> Path:
    """Return a path as it is; of runs in a store, a folder with their records."""
    if not is_address(place):
        return Path(place)
    from headrace.run.stored_run import bring_records

    return bring_records(place)


def add_place(parser: Parser) -> None:
    parser.add_argument(
        "place", metavar="DIR", nargs="?", type=local_path, default=Path("runs"), help="where to look [runs]"
    )


def refuse_missing(place: Path) -> None:
    if not place.is_dir():
        problem = f"{place} is not a directory." if place.exists() else f"There is no directory {place}."
        raise ConfigError(problem, remedy="Runs are made by headrace train, in ./runs unless --log-dir is given.")


_SORTS: dict[str, Callable[["RunSummary"], float]] = {
    "date": lambda run: -run.modified,
    "accuracy": lambda run: math.inf if run.accuracy_bound is None else -run.accuracy_bound,
    "time": lambda run: math.inf if run.seconds is None else run.seconds,
}


def _columns(runs: list["RunSummary"], place: Path) -> list[Column]:

    def top1(run: "RunSummary") -> str:
        return "trial" if run.is_trial else run.score_text

    def rate(run: "RunSummary") -> str:
        return f"{run.images_per_second:,.0f}" if run.images_per_second else "-"

    return [
        Column(title="run", cells=[_name(run, place) for run in runs], least=12),
        Column(title="top-1", cells=[top1(run) for run in runs], right=True),
        Column(title="images", cells=[f"{run.best.num_samples:,}" if run.best else "-" for run in runs], right=True),
        Column(title="epochs", cells=[_epochs(run) for run in runs], right=True, spare=2),
        Column(title="time", cells=[run.time_text for run in runs], right=True, spare=1),
        Column(title="img/s", cells=[rate(run) for run in runs], right=True, spare=3),
        Column(title="dataset", cells=[run.dataset or "-" for run in runs], spare=5),
        Column(title="written", cells=[run.written for run in runs], spare=4),
        Column(title="state", cells=[run.state_text for run in runs]),
    ]


def _epochs(run: "RunSummary") -> str:
    planned = run.start.of_epochs if run.start else ""
    return f"{round(run.epoch, 2):g}{planned}" if run.start else "-"


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
        "num_train": start.num_train if start else None,
        "num_validation": start.num_validation if start else None,
        "num_classes": start.num_classes if start else None,
        "dataset_digest": start.dataset_digest if start else None,
        "monitor": run.monitor.name,
        "task": start.task if start else None,
        "best_top1": best.top1 if best else None,
        "best_top1_at_least": run.accuracy_bound,
        "best_num_images": best.num_samples if best else None,
        **{
            f"best_{row.name}": best.metric(row.name) if best else None
            for row in (start.metrics if start else METRICS).values()
            if not row.has_field
        },
        "best_epoch": best.epoch if best else None,
        "best_weights": best.weights if best else None,
        "best_checkpoint": end.best_checkpoint if end else None,
        "model_verdict": end.model_verdict if end else "",
        "is_trial": run.is_trial,
        "time_to_train": run.seconds,
        "images_per_second": run.images_per_second,
        "modified": run.modified,
    }
