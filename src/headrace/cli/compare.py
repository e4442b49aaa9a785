"""`headrace compare A B ...`: what differs between runs, in their options and in their results."""

import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.table import Column, table_lines
from headrace.config.arguments import Parser
from headrace.core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from headrace.run.run_summary import RunSummary

DESCRIPTION = "Print the options in which runs differ, and their results side by side. Nothing in them is changed."
_NAMES = ("run_name",)  # differ in any case, and say nothing
_WIDEST = 32  # characters of a value


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace compare", description=DESCRIPTION)
    parser.add_argument("paths", metavar="RUN_DIR", nargs="+", type=Path, help="two or more runs")
    args = parser.parse_args(argv)
    if not 2 <= len(args.paths) <= len(string.ascii_uppercase):
        raise ConfigError(
            f"The number of runs is {len(args.paths)}.",
            rule="Two to twenty-six can be compared.",
            remedy="headrace compare A B",
        )
    from headrace.run.run_summary import UNREADABLE, different_options, read_summary

    runs = [read_summary(path) for path in args.paths]
    for run in runs:
        if run.state == UNREADABLE:
            raise CheckpointError(
                f"{run.path} cannot be compared: {run.problem}.", remedy="`headrace runs` lists runs that can be read."
            )
    letters = string.ascii_uppercase[: len(runs)]
    for letter, run in zip(letters, runs, strict=True):
        print(f"{letter}  {run.path}" + (f"  ({run.problem})" if run.problem else ""))
    different = different_options(runs)
    rows = {name: values for name, values in different.items() if name not in _NAMES}
    print("\n" + ("options that differ:" if rows else "no option differs"))
    _print(letters, rows)
    print("\nresults:")
    _print(letters, _results(runs))
    return 0


def _print(letters: str, rows: dict[str, list[Any]]) -> None:
    if not rows:
        return
    columns = [Column(title="", cells=list(rows))]
    for number, letter in enumerate(letters):
        columns.append(Column(title=letter, cells=[_cell(values[number]) for values in rows.values()]))
    print("\n".join("  " + line for line in table_lines(columns)))


def _cell(value: Any) -> str:
    from headrace.config.values import shown

    text = value if isinstance(value, str) else shown(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST // 2 - 2]}...{text[-(_WIDEST // 2 - 1) :]}"


def _results(runs: list["RunSummary"]) -> dict[str, list[str]]:
    """Return a row for each kind of result; a trial has no accuracy worth comparing."""
    from headrace.core.units import format_duration

    def of_best(run: "RunSummary") -> str:
        best = run.best
        if best is None or run.is_trial:
            return "trial" if run.is_trial else "-"
        return f"{100 * best.top1:.2f} % at epoch {best.epoch:.4g}"

    def of_last(run: "RunSummary") -> str:
        last = run.validations[-1] if run.validations and not run.is_trial else None
        return f"{100 * last.top1:.2f} %, loss {last.loss:.4f}" if last else "-"

    def of_end(run: "RunSummary", name: str, shape: Any) -> str:
        value = getattr(run.end, name) if run.end else None
        return shape(value) if value else "-"

    return {
        "state": [run.state for run in runs],
        "best top-1": [of_best(run) for run in runs],
        "last validation": [of_last(run) for run in runs],
        "training loss": [f"{run.last_train.loss:.4f}" if run.last_train else "-" for run in runs],
        "epochs": [f"{run.epoch:.4g}" for run in runs],
        "time to train": [format_duration(run.seconds) if run.seconds is not None else "-" for run in runs],
        "images per second": [of_end(run, "images_per_second", lambda rate: f"{rate:,.0f}") for run in runs],
        "parameters": [f"{(run.start and run.start.num_parameters) or 0:,}" for run in runs],
        "device": [run.start.device or run.start.platform if run.start else "-" for run in runs],
        "version": [run.start.version if run.start else "-" for run in runs],
    }
