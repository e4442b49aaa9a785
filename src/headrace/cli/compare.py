"""`headrace compare A B ...`: what differs between runs, in their options and in their results."""

import string
from pathlib import Path
from typing import Any

from headrace.cli.table import Column, table_lines
from headrace.config.arguments import Parser
from headrace.core.errors import ConfigError

DESCRIPTION = "Print the options in which runs differ, and their results side by side. Nothing in them is changed."
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
    from headrace.report.comparison import compare_options, compare_results, read_compared

    runs = read_compared(args.paths)
    letters = string.ascii_uppercase[: len(runs)]
    for letter, run in zip(letters, runs, strict=True):
        print(f"{letter}  {run.path}" + (f"  ({run.problem})" if run.problem else ""))
    rows = compare_options(runs)
    print("\n" + ("options that differ:" if rows else "no option differs"))
    _print(letters, rows)
    print("\nresults:")
    _print(letters, compare_results(runs))
    return 0


def _print(letters: str, rows: dict[str, list[Any]]) -> None:
    if not rows:
        return
    columns = [Column(title="", cells=list(rows))]
    for number, letter in enumerate(letters):
        columns.append(Column(title=letter, cells=[_cell(values[number]) for values in rows.values()]))
    print("\n".join("  " + line for line in table_lines(columns)))


def _cell(value: Any) -> str:
    from headrace.config.values import format_value

    text = value if isinstance(value, str) else format_value(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST // 2 - 2]}...{text[-(_WIDEST // 2 - 1) :]}"
