"""The report of a run, or of several side by side, as one HTML file that needs nothing else."""

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config.values import shown
from headrace.core.files import write_atomic
from headrace.report.comparison import compare_options, compare_results
from headrace.report.curves import Curves, draw_compared, draw_panels
from headrace.report.markup import Html, element, page, rows_table, section
from headrace.report.run_files import RunFiles, read_files
from headrace.report.run_summary import RunSummary
from headrace.report.sections import run_sections, run_title

REPORT_FILE = "report.html"


def write_run_report(path: Path, file: Path | None = None) -> Path:
    """Write the report of the run at `path`, into its directory unless another file is given; return the file."""
    file = file or path / REPORT_FILE
    curves = Curves(path)
    curves.read_more()
    write_atomic(file, run_page(read_files(path), curves, {}).encode())
    return file


def run_page(files: RunFiles, curves: Curves, live: Mapping[str, Any], *above: Html) -> str:
    """Return the page of a run; `live` has where its script asks for updates."""
    run = files.summary
    facts = [str(run.path), f"{curves.num_damaged} damaged lines in its records" if curves.num_damaged else ""]
    heading = [
        element("h1", run_title(files)),
        element("div", " · ".join(fact for fact in facts if fact), class_="faint"),
        *([element("div", class_="problem", id="connection")] if live else []),
    ]
    data = {"panels": draw_panels(curves), "version": str(curves.version), **live}
    return page(f"{run.path.name}: {run_title(files)}", [*above, *heading, *run_sections(files).values()], data)


def write_comparison(runs: Sequence[RunSummary], file: Path) -> None:
    """Write a page that compares runs."""
    curves = [Curves(run.path) for run in runs]
    for each in curves:
        each.read_more()
    write_atomic(file, comparison_page(runs, curves, {}).encode())


def comparison_page(runs: Sequence[RunSummary], curves: Sequence[Curves], live: Mapping[str, Any], *above: Html) -> str:
    """Return the page that compares runs: their curves together, options that differ, results."""
    names = run_names(runs)
    options = [(name, *map(_text, values)) for name, values in compare_options(runs).items()]
    different = rows_table(options, ("option", *names)) if options else element("p", "No option differs.")
    results = [(name, *values) for name, values in compare_results(runs).items()]
    body = [
        *above,
        element("h1", f"{len(runs)} runs compared"),
        section("results", "Results", rows_table(results, ("", *names))),
        section("curves", "Curves", element("div", class_="charts", id="charts")),
        section("options", "Options that differ", different),
        section("paths", "Runs", rows_table([(name, run.path) for name, run in zip(names, runs, strict=True)])),
    ]
    data = {"panels": draw_compared(dict(zip(names, curves, strict=True))), **live}
    return page(f"{len(runs)} runs compared", body, data)


def run_names(runs: Sequence[RunSummary]) -> list[str]:
    """Return short, different names: those of the directories, with a letter where they are not unique."""
    names = [run.path.resolve().name.encode(errors="replace").decode() for run in runs]
    if len(set(names)) == len(names):
        return names
    return [f"{letter} {name}" for letter, name in zip(string.ascii_uppercase, names, strict=False)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else shown(tuple(value) if isinstance(value, list) else value)
