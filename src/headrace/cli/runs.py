"""`headrace runs`, `compare`, `report` and `board`: runs as a list, side by side, as HTML and as a live page."""

import json
import math
import re
import secrets
import shlex
import string
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.options import (
    Column,
    add_platform_argument,
    check_output,
    fit_columns,
    print_fitted,
    shorten,
    table_lines,
    terminal_width,
    writing,
)
from headrace.config.schema import Parser
from headrace.core.errors import ConfigError
from headrace.core.local_path import local_path
from headrace.core.units import format_percent
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
    _add_place(parser)
    parser.add_argument(
        "--sort",
        choices=tuple(_SORTS),
        default="date",
        help="newest, most accurate (by the lower end of the accuracy's 95 %% interval) or fastest first [date]",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each run")
    args = parser.parse_intermixed_args(argv)
    from headrace.report.run_summary import data_groups, find_runs, read_summary

    _refuse_missing(args.place)
    runs = sorted((read_summary(path) for path in find_runs(args.place)), key=_SORTS[args.sort])
    if args.json:
        for run in runs:
            print(json.dumps(_facts(run)))
    elif not runs:
        print(f"no runs in {args.place}")
    else:
        columns, missing = fit_columns(_columns(runs, args.place), terminal_width())
        print("\n".join(table_lines(columns)))
        for run in runs:
            if run.problem:
                print_fitted(f"{_name(run, args.place)}: {run.problem}")
        if args.sort == "accuracy" and len(set(data_groups([run for run in runs if run.best]))) > 1:
            print_fitted("note: the runs have different datasets, whose accuracies cannot be compared")
        if missing:
            print_fitted(f"no room for {', '.join(missing)}; --json has everything")
    return 0


def _add_place(parser: Parser) -> None:
    parser.add_argument(
        "place", metavar="DIR", nargs="?", type=local_path, default=Path("runs"), help="where to look [runs]"
    )


def _refuse_missing(place: Path) -> None:
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
        return "trial" if run.is_trial else format_percent(run.best.top1) if run.best else "-"

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
    planned = f"/{run.start.num_epochs}" if run.start else ""
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


# headrace compare: what differs between runs, in their options and in their results.


_COMPARE = "Print the options in which runs differ, and their results side by side. Nothing in them is changed."
# Characters of a value on a terminal: the most of any, and what all have room for before runs are put below others.
_WIDEST, _NARROWEST = 32, 10


def compare(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace compare", description=_COMPARE)
    parser.add_argument("paths", metavar="RUN_DIR", nargs="+", type=local_path, help="two or more runs")
    args = parser.parse_intermixed_args(argv)
    if not 2 <= len(args.paths) <= len(string.ascii_uppercase):
        raise ConfigError(
            f"The number of runs is {len(args.paths)}.",
            rule="Two to twenty-six can be compared.",
            remedy="headrace compare A B",
        )
    from headrace.report.comparison import compare_options, compare_results, read_compared
    from headrace.report.run_summary import describe_data_apart

    runs = read_compared(args.paths)
    letters, width = string.ascii_uppercase[: len(runs)], terminal_width()
    for letter, run in zip(letters, runs, strict=True):
        path = shorten(str(run.path), width - 3) if width else str(run.path)
        print_fitted(f"{letter}  {path}" + (f"  ({run.problem})" if run.problem else ""))
    options = {name: [_text(value) for value in values] for name, values in compare_options(runs).items()}
    print("\n" + ("options that differ:" if options else "no option differs"))
    _print_table(letters, options, width)
    print("\nresults:")
    results = compare_results(runs)
    if apart := describe_data_apart(runs, letters):
        print_fitted(f"warning: {apart}")
    _print_table(letters, results, width)
    if width and any(len(text) > _WIDEST for values in (*options.values(), *results.values()) for text in values):
        print_fitted("values with ... were cut to fit the terminal; redirect the output to see them whole")
    return 0


def _print_table(letters: str, rows: Mapping[str, Sequence[str]], width: int | None) -> None:
    if not rows:
        return
    names, cells = Column(title="", cells=list(rows)), zip(*rows.values(), strict=True)
    columns = [Column(title=letter, cells=texts) for letter, texts in zip(letters, cells, strict=True)]
    tables = [[names, *columns]] if width is None else _narrow_tables(names, columns, width - 2)
    print("\n\n".join("\n".join(f"  {line}" for line in table_lines(table)) for table in tables))


def _narrow_tables(names: Column, columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Return the columns as tables of at most that width: cells are broken, and runs without room come below."""
    (names,) = _broken([names], 2 * width // 5)
    room = width - names.width
    count = max(1, room // (2 + _NARROWEST))
    cut = [replace(column, cells=[shorten(cell, _WIDEST) for cell in column.cells]) for column in columns]
    return [[names, *_broken(cut[first : first + count], room)] for first in range(0, len(cut), count)]


def _broken(columns: Sequence[Column], room: int) -> list[Column]:
    """Return columns of so many characters together, the spaces before them included."""
    widths: dict[str, int] = {}
    for place, column in enumerate(sorted(columns, key=lambda column: column.width)):
        # What a narrow column leaves of its share is the others'.
        widths[column.title] = max(1, min(column.width, room // (len(columns) - place) - 2))
        room -= widths[column.title] + 2
    return [
        replace(column, cells=["\n".join(_lines(cell, widths[column.title])) for cell in column.cells])
        for column in columns
    ]


def _lines(text: str, width: int) -> list[str]:
    """Break a text between words, or within the name of an option or a path."""
    lines = [""]
    for part in re.split(r"(?<=\s)|(?<=[_/])(?=\w)|(?<=\.)(?=[a-z])", text):
        if lines[-1] and len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [piece for line in lines for piece in textwrap.wrap(line, width)]


def _text(value: object) -> str:
    from headrace.rows.values import format_value

    return value if isinstance(value, str) else format_value(value)


# headrace report: the report of a run, or of several side by side.


_REPORT = (
    "Write the report of a run as one HTML file: curves, where the time went, confusion matrix, plan and schedule, "
    "options. Of several runs: curves together, options that differ, results. The file needs nothing else."
)


def report(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace report", description=_REPORT)
    parser.add_argument("paths", metavar="RUN_DIR", nargs="+", type=local_path, help="a run, or several to compare")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=local_path,
        help="file to write [RUN_DIR/report.html, or comparison.html]",
    )
    parser.add_argument(
        "--images",
        action="store_true",
        help="predict the validation images with the best weights first: mistakes, calibration, thresholds",
    )
    add_platform_argument(parser, "kind of device for --images [the run's]")
    args = parser.parse_intermixed_args(argv)
    if len(args.paths) > len(string.ascii_uppercase):
        raise ConfigError(f"The number of runs is {len(args.paths)}.", rule="At most twenty-six can be compared.")
    check_output(args.output, "-o")
    if args.platform and not args.images:
        raise ConfigError("--platform is given without --images.", rule="Only the prediction of images needs a device.")
    from headrace.report.comparison import read_compared
    from headrace.report.run_report import REPORT_FILE, write_comparison, write_run_report

    runs = read_compared(args.paths)
    if args.images:
        from headrace.report.run_files import read_mapping
        from headrace.run.image_results import write_image_results
        from headrace.telemetry.trackers import write_mistakes

        for run in runs:
            given = {"platform": args.platform} if args.platform else {}
            file = write_image_results(run.path, given)
            count = write_mistakes(run.path, read_mapping(file))
            more = f"; TensorBoard has {count} mistakes" if count else ""
            print(f"images: {shlex.quote(str(file))}{more}")
    file = args.output or (runs[0].path / REPORT_FILE if len(runs) == 1 else Path("comparison.html"))
    with writing(file, "-o"):
        if len(runs) == 1:
            write_run_report(runs[0].path, file)
        else:
            write_comparison(runs, file)
    print(f"written: {shlex.quote(str(file))}")
    return 0


# headrace board: a live page, on this machine.


_BOARD = (
    "Serve a page of the runs in a directory: a list to sort, filter and compare, and each run's report, updated while "
    "it trains. Nothing is changed. Only this machine can ask, unless --host is given; then a token is needed."
)


def board(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace board", description=_BOARD)
    _add_place(parser)
    parser.add_argument("--port", type=int, default=8800, help="port; 0 takes a free one [8800]")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on [127.0.0.1]")
    parser.add_argument(
        "--token", metavar="TEXT", help="token that every request must carry [generated if --host is given]"
    )
    args = parser.parse_intermixed_args(argv)
    _refuse_missing(args.place)
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"The port is {args.port}.", rule="Ports are 0 to 65535.")
    if args.token == "":
        raise ConfigError("The token is empty.", remedy="Leave --token out: one is generated where it is needed.")
    from headrace.report.board_server import LOCAL, Access, make_server

    is_local = args.host in LOCAL
    token = args.token or ("" if is_local else secrets.token_urlsafe(18))
    try:
        server = make_server(args.place, (args.host, args.port), Access(hosts=LOCAL if is_local else None, token=token))
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {args.host}, port {args.port}: {error.strerror}.", remedy="Try --port 0: any free port."
        ) from error
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"http://{host}:{server.server_address[1]}/{f'?token={token}' if token else ''}", flush=True)
    print("Press Ctrl-C to stop.", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
