"""Tables on the console: as wide as they need in a pipe; on a terminal, columns are left out until the table fits."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: its heading, its cells, how they are aligned, and whether it may be left out (the highest first)."""

    title: str
    cells: Sequence[str]
    right: bool = False
    spare: int = 0  # 0: never left out

    @property
    def width(self) -> int:
        return max(len(text) for text in (self.title, *self.cells))


def terminal_width() -> int | None:
    """Return the width of the terminal, None where the output is not one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table_lines(columns: Sequence[Column], width: int | None = None) -> list[str]:
    """Return the lines of a table with its headings; columns without a single cell are left out."""
    kept = [column for column in columns if any(column.cells)]
    while width and _wide(kept) > width and any(column.spare for column in kept):
        spare = max(kept, key=lambda column: column.spare)
        kept = [column for column in kept if column is not spare]
    rows = zip(*([column.title, *column.cells] for column in kept), strict=True)
    aligned = (
        (f"{cell:{'>' if c.right else '<'}{c.width}}" for c, cell in zip(kept, row, strict=True)) for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in aligned]


def _wide(columns: Sequence[Column]) -> int:
    return sum(column.width + 2 for column in columns) - 2
