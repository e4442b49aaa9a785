"""Tables on the console."""

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TextIO


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: its heading, its cells of one or more lines, their alignment, and what a narrow terminal may lose."""

    title: str
    cells: Sequence[str]
    right: bool = False
    spare: int = 0  # 0: never left out; of others the highest first
    least: int = 0  # characters that cells may be cut to; 0: never cut

    @property
    def width(self) -> int:
        return max(len(line) for text in (self.title, *self.cells) for line in text.split("\n"))


def terminal_width(out: TextIO | None = None) -> int | None:
    """Return the width of the terminal that a stream (standard output) goes to, None where it goes to none."""
    stream = sys.stdout if out is None else out
    if not stream.isatty():
        return None
    try:  # not shutil.get_terminal_size(), which asks standard output alone: that of a message may be a file
        return int(os.environ.get("COLUMNS") or os.get_terminal_size(stream.fileno()).columns) or None
    except (OSError, ValueError):  # a terminal that does not say
        return None


def print_fitted(text: str, file: TextIO | None = None) -> None:
    """Print a text; on a terminal, lines that are too long for it are broken between words."""
    width = terminal_width(file)
    print("\n".join(break_line(line, width) for line in text.split("\n")) if width else text, file=file)


def break_line(line: str, width: int) -> str:
    """Break a line between words, so that it continues below the start of its last column."""
    if len(line) <= width or "|" in line:  # a diagram of a schedule cannot be broken
        return line
    columns = [found.end() for found in re.finditer(r"\S {2,}(?=\S)", line) if found.end() <= 0.6 * width]
    indent = columns[-1] if columns else len(line) - len(line.lstrip()) + 2
    room = {"subsequent_indent": " " * indent, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.wrap(line, width, **room))


def shorten(text: str, room: int) -> str:
    """Return a text of at most that many characters: of a longer one its beginning and its end."""
    if len(text) <= room:
        return text
    end = (room - 3) // 2
    return f"{text[: room - 3 - end]}...{text[len(text) - end :]}"


def table_lines(columns: Sequence[Column]) -> list[str]:
    """Return the lines of a table with its headings; columns without a single cell are left out."""
    kept = [column for column in columns if any(column.cells)]
    rows = zip(*([column.title, *column.cells] for column in kept), strict=True)
    lines = (line for row in rows for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""))
    aligned = (
        (f"{cell:{'>' if c.right else '<'}{c.width}}" for c, cell in zip(kept, line, strict=True)) for line in lines
    )
    return ["  ".join(cells).rstrip() for cells in aligned]


def fit_columns(columns: Sequence[Column], width: int | None) -> tuple[list[Column], list[str]]:
    """Return the columns that fit a terminal of that width, and in words what is missing. None: all of them."""
    kept, missing = list(columns), []
    while width and _wide(kept) > width and any(column.spare for column in kept):
        spare = max(kept, key=lambda column: column.spare)
        kept.remove(spare)
        missing.append(spare.title)
    over = _wide(kept) - width if width else 0
    for place, column in enumerate(kept):
        if over > 0 and column.least:
            room = max(column.width - over, column.least)
            kept[place] = replace(column, cells=[shorten(cell, room) for cell in column.cells])
            missing.append("whole names")
    return kept, missing


def _wide(columns: Sequence[Column]) -> int:
    return sum(column.width + 2 for column in columns) - 2
