"""Pictures of schedules by the suffix of a file: a row for each format."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.files import write_atomic
from headrace.plan.picture import draw_text
from headrace.plan.picture_files import chrome_trace, draw_svg
from headrace.plan.picture_png import draw_png
from headrace.plan.table import Table

Tables = Mapping[str, Table]


def _text(tables: Tables) -> str:
    return "\n\n".join(draw_text(table, title) for title, table in tables.items()) + "\n"


FORMATS: Mapping[str, Callable[[Tables], str | bytes]] = {
    ".svg": draw_svg,
    ".png": draw_png,
    ".json": lambda tables: json.dumps(chrome_trace(tables)) + "\n",  # for chrome://tracing or ui.perfetto.dev
    ".txt": _text,
}


def check_picture_file(path: Path) -> None:
    """Refuse a file whose suffix names no format."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(
            f"{path} has no suffix of a picture.",
            rule=f"Schedules are drawn as {', '.join(FORMATS)} (a Chrome trace is .json).",
            remedy=f"Name it {path.stem or 'schedule'}.svg, for instance.",
        )


def write_picture(path: Path, tables: Tables) -> None:
    """Draw the tables into a file, as its suffix says."""
    check_picture_file(path)
    drawn = FORMATS[path.suffix.lower()](tables)
    write_atomic(path, drawn if isinstance(drawn, bytes) else drawn.encode())
