"""`headrace compare`: what differs between runs, in their options and in their results."""

import re
import string
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.cli.tables import Column, print_fitted, shorten, table_lines, terminal_width
from headrace.config.command_line import Parser
from headrace.core.errors import ConfigError
from headrace.core.local_path import run_place
from headrace.core.stored_copy import here

_COMPARE = "Print the options in which runs differ, and their results side by side. Nothing in them is changed."
# Characters of a value on a terminal: the most of any, and what all have room for before runs are put below others.
_WIDEST, _NARROWEST = 32, 10


def compare(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="headrace compare", description=_COMPARE)
    parser.add_argument("paths", metavar="RUN_DIR", nargs="+", type=run_place, help="two or more runs")
    args = parser.parse_intermixed_args(argv)
    if not 2 <= len(args.paths) <= len(string.ascii_uppercase):
        raise ConfigError(
            f"The number of runs is {len(args.paths)}.",
            rule="Two to twenty-six can be compared.",
            remedy="headrace compare A B",
        )
    from headrace.report.comparison import compare_options, compare_results, read_compared
    from headrace.report.run_summary import describe_data_apart

    runs = read_compared([here(path) for path in args.paths])
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
