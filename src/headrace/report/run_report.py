"""The report of a run, or of several side by side, as one HTML file that needs nothing else."""

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.core.files import write_atomic
from headrace.report.comparison import compare_options, compare_results
from headrace.report.curves import Curves, draw_compared, draw_panels
from headrace.report.markup import Html, element, page, rows_table, section
from headrace.report.run_files import RunFiles, read_files
from headrace.report.run_summary import RunSummary, describe_data_apart
from headrace.report.sections import run_sections, run_title
from headrace.rows.values import format_value

REPORT_FILE, COMPARISON_FILE = "report.html", "comparison.html"
Table = tuple[str, tuple[str, ...], Sequence[tuple[object, ...]]]  # title, heading, rows
_WORST = 5  # classes and mistakes in a text


def write_run_report(path: Path, file: Path | None = None) -> Path:
    """Write the report of the run at `path`, into its directory unless another file is given; return the file."""
    file = file or path / REPORT_FILE
    curves = Curves(path)
    curves.read_more()
    write_atomic(file, run_page(read_files(path), curves, {}).encode())
    return file


def run_page(files: RunFiles, curves: Curves, live: Mapping[str, object], *above: Html) -> str:
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


def write_evaluation(file: Path, images: Mapping[str, Any], report: Mapping[str, Any], place: str) -> None:
    """Write the page of one checkpoint on labelled images: its report, probabilities and notable images.

    `place` says which images they are.
    """
    files = RunFiles(
        summary=RunSummary(path=Path(images["checkpoint"]), state="finished"),
        images=images,
        report=report,
        report_step=images["step"],
        report_weights=images["weights"],
    )
    parts = run_sections(files)
    heading = [element("h1", images["checkpoint"]), element("div", place, class_="faint")]
    body = [*heading, *(parts[name] for name in ("validation", "scores", "images"))]
    write_atomic(file, page(f"{images['checkpoint']}: evaluation", body, {"panels": []}).encode())


def evaluation_lines(images: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    """Return the worst classes and the most confident mistakes as lines of text."""
    if "task" in report:
        return _output_lines(images, report)
    rated = sorted((row for row in report["classes"] if row["recall"] is not None), key=lambda row: row["recall"])
    worst = [f"{row['name']} {100 * row['recall']:.1f} %" for row in rated[:_WORST] if row["recall"] < 1]
    lines = [f"worst classes (recall): {', '.join(worst)}"] if worst else []
    confused = [f"{pair['true']} as {pair['predicted']} {pair['count']:,} times" for pair in report["most_confused"]]
    lines += [f"most confused: {', '.join(confused[:_WORST])}"] if confused else []
    mistakes = images.get("mistakes", ())[:_WORST]
    lines += ["most confident mistakes:"] if mistakes else []
    for row in mistakes:
        text = f"{row['predicted']} {100 * row['probability']:.1f} %, is {row['true']}"
        lines.append(f"  {row['file']}: {text} ({100 * row['true_probability']:.1f} %)")
    return lines


def _output_lines(images: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    """Return the worst labels or the error of each target, and the images that are the furthest from right."""
    rated = [row for row in report["classes"] if row["average_precision"] is not None]
    rated = sorted(rated, key=lambda row: row["average_precision"])[:_WORST]
    worst = [f"{row['name']} {100 * row['average_precision']:.1f} %" for row in rated]
    lines = [f"worst labels (average precision): {', '.join(worst)}"] if worst else []
    for row in report.get("targets", ())[:_WORST]:
        errors = {"MAE": row["mae"], "RMSE": row["rmse"], "R2": row["r2"]}
        numbers = [f"{title} {value:.4g}" for title, value in errors.items() if value is not None]
        lines.append(f"{row['name']}: {', '.join(numbers)}")
    mistakes = images.get("mistakes", ())[:_WORST]
    lines += ["furthest from right:"] if mistakes else []
    return lines + [f"  {row['file']}: {row['text']}, is {row['truth']}" for row in mistakes]


def write_comparison(runs: Sequence[RunSummary], file: Path, tables: Sequence[Table] = ()) -> None:
    """Write a page that compares runs; `tables` come first."""
    curves = [Curves(run.path) for run in runs]
    for each in curves:
        each.read_more()
    above = [
        section(f"table{place}", title, rows_table(rows, heading))
        for place, (title, heading, rows) in enumerate(tables)
    ]
    write_atomic(file, comparison_page(runs, curves, {}, *above).encode())


def comparison_page(
    runs: Sequence[RunSummary], curves: Sequence[Curves], live: Mapping[str, object], *above: Html
) -> str:
    """Return the page that compares runs: their curves together, options that differ, results."""
    names = run_names(runs)
    options = [(name, *map(_text, values)) for name, values in compare_options(runs).items()]
    different = rows_table(options, ("option", *names)) if options else element("p", "No option differs.")
    body = [
        *above,
        element("h1", f"{len(runs)} runs compared"),
        *([element("div", class_="problem", id="connection")] if live else []),
        results_section(runs),
        section("curves", "Curves", element("div", class_="charts", id="charts")),
        section("options", "Options that differ", different),
        section("paths", "Runs", rows_table([(name, run.path) for name, run in zip(names, runs, strict=True)])),
    ]
    data = {"panels": draw_compared(dict(zip(names, curves, strict=True))), **live}
    return page(f"{len(runs)} runs compared", body, data)


def results_section(runs: Sequence[RunSummary]) -> Html:
    """Return the table of results; a live page replaces it while the runs train."""
    results = [(name, *values) for name, values in compare_results(runs).items()]
    names = run_names(runs)
    apart = describe_data_apart(runs, names)
    warning = [element("p", f"{apart[0].upper()}{apart[1:]}.", class_="problem")] if apart else []
    return section("results", "Results", *warning, rows_table(results, ("", *names)))


def run_names(runs: Sequence[RunSummary]) -> list[str]:
    """Return short, different names: those of the directories, with a letter where they are not unique."""
    names = [run.path.resolve().name.encode(errors="replace").decode() for run in runs]
    if len(set(names)) == len(names):
        return names
    return [f"{letter} {name}" for letter, name in zip(string.ascii_uppercase, names, strict=False)]


def _text(value: object) -> str:
    return value if isinstance(value, str) else format_value(tuple(value) if isinstance(value, list) else value)
