"""`headrace validate`: the accuracy of saved weights, a line for each set."""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.options import read_arguments, without_recipe
from headrace.cli.tables import print_fitted, terminal_width
from headrace.core.errors import ConfigError, nearest
from headrace.core.local_path import local_path, run_place
from headrace.core.units import format_percent
from headrace.rows.metrics import METRICS
from headrace.rows.row import NO_SCALE, Metric
from headrace.rows.tasks import TASKS

if TYPE_CHECKING:
    from headrace.run.validation import Validated


DESCRIPTION = (
    "Validate all checkpoints of a run, or one of them, on the run's validation images or on those in a folder. The "
    "options of the run apply; others may be given, such as --validation-micro-batch-size or --platform."
)
_HEADING = "     step    epoch  weights    top-1     top-5      loss  balanced   images  seconds"
_SPARE = len("   images  seconds")  # the last columns, for which a terminal of 80 columns has no room
_WHOLE = len(_HEADING) + len("  best so far")


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parsed = read_arguments(without_recipe(argv), "headrace validate", _add_arguments, DESCRIPTION)
    args = parsed.args
    if args.last and args.best:
        raise ConfigError("Both --last and --best are given.", remedy="Leave one of them out.")
    if bool(args.path) == bool(parsed.options.get("weights")):
        given = "Both a run and --weights are given" if args.path else "No run and no weights are named"
        raise ConfigError(f"{given}.", remedy="Name a run or a checkpoint, or give --weights NAME.")
    options = _with_folder(args.folder, parsed.options)
    from headrace.data.sets.held_out import HELD_OUT
    from headrace.job import current_group, join_job
    from headrace.run.validation import ALL, BEST, LAST, validate

    which = LAST if args.last else BEST if args.best else ALL
    with join_job(distributed=bool(parsed.options.get("distributed"))):
        if args.images and not current_group().is_alone:
            raise ConfigError("--images is given to several processes.", remedy="Run it in one process.")
        found = validate(args.path, options, which=which, report_dir=args.report_dir)
        if current_group().is_first:
            best = _show(found, as_json=args.json)
            if best is not None and "dataset_path" in options and HELD_OUT in best.images:
                # Whoever names a folder here often means all of it.
                count = best.reports[_better(best)]["num_samples"]
                note = f"note: {count:,} images of {best.images}; headrace validate RUN_DIR FOLDER takes a whole folder"
                print_fitted(note, sys.stderr)
            if args.images and best is not None:
                _show_images(best, options, as_json=args.json)
            elif best is not None and not args.json:
                _show_classes(best)
        else:
            list(found)  # process 0 prints the results
    return 0


def _with_folder(folder: Path | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the folder to validate on, which is the short form of one of them."""
    if folder is None:
        return dict(options)
    if other := options.get("validation_path"):
        raise ConfigError(
            f"Both the folder {folder} and --validation-path {other} are given.", remedy="Leave one of them out."
        )
    if not folder.expanduser().is_dir():
        there = folder.parent.iterdir() if folder.parent.is_dir() else ()
        guess = nearest(folder.name, (entry.name for entry in there if entry.is_dir()))
        raise ConfigError(
            f"{folder} is a file." if folder.is_file() else f"There is no folder {folder}.",
            rule="A run is validated on a folder with a folder of images for each class.",
            remedy=f"Did you mean {folder.parent / guess}?" if guess else "Check the path.",
        )
    return {**options, "validation_path": str(folder)}


def _show(found: Iterable["Validated"], *, as_json: bool) -> "Validated | None":
    """Print the results as they come; return that of the best accuracy, the first of several."""
    table, place, best = ResultTable(), None, None
    for result in found:
        print(*result.remarks, sep="\n", end="\n" if result.remarks else "", file=sys.stderr)
        if not result.problem and (best is None or _rank(result) > _rank(best)):
            best = result
        if result.problem:
            print(f"warning: skipped: {result.problem}", file=sys.stderr)
        if as_json:
            _print_json(result)
        else:
            table.show(result)
        place = result.report_file.parent if result.report_file else place
    if not as_json:
        table.close()
        if place:
            print(f"reports (confusion matrix, classes): {place}")
    return best


def _show_classes(result: "Validated") -> None:
    from headrace.report.run_report import evaluation_lines
    from headrace.telemetry.model_verdict import model_verdict, never_recognized

    report = result.reports[_better(result)]
    for line in evaluation_lines({}, report):
        print(line)
    if missed := never_recognized(report):
        print_fitted(f"never recognized: {missed}")
    if verdict := model_verdict(None, report):
        print_fitted(f"verdict: {verdict}")


def _better(result: "Validated") -> str:
    """Return the better set of weights; of equal ones the first."""
    return max(result.reports, key=lambda weights: _rank_of(result, weights))


def _rank(result: "Validated") -> tuple[float, ...]:
    return _rank_of(result, _better(result))


def _rank_of(result: "Validated", weights: str) -> tuple[float, ...]:
    from headrace.telemetry.records import report_rank

    return report_rank(result.reports[weights], result.monitor) or ()  # () is less than any other


def _show_images(result: "Validated", options: Mapping[str, object], *, as_json: bool) -> None:
    """Predict every image again, with the better weights; print the worst mistakes and write the page."""
    from headrace.report.run_report import evaluation_lines, write_evaluation
    from headrace.run.image_results import evaluate_validation

    found = evaluate_validation(result.checkpoint, options, _better(result))
    lines = evaluation_lines(found.images, found.report)
    if result.report_file is not None:
        page = result.report_file.with_suffix(".html")
        write_evaluation(page, found.images, found.report, f"{found.images['num_images']:,} validation images")
        lines.append(f"page: {page}")
    # With --json, standard output has nothing but lines of JSON.
    print(*lines, sep="\n", file=sys.stderr if as_json else sys.stdout)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        nargs="?",
        metavar="RUN_DIR|CHECKPOINT",
        type=run_place,
        help="a run or checkpoint, here or in a store",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="FOLDER",
        type=local_path,
        help="other images, a folder for each class [the run's validation images]",
    )
    parser.add_argument("--last", action="store_true", help="only the newest good checkpoint of the run")
    parser.add_argument("--best", action="store_true", help="only the best one, by its accuracy during training")
    parser.add_argument(
        "--images", action="store_true", help="print the worst classes and mistakes of the best one, and write a page"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each checkpoint")
    parser.add_argument(
        "--report-dir",
        type=local_path,
        metavar="DIR",
        help="where the full reports are written, one file for each checkpoint [RUN_DIR/reports/validate]",
    )


class ResultTable:
    """Prints rows as they come, marks each that is the best so far, and names the best one at the end."""

    def __init__(self) -> None:
        self._num_rows, self._best_row = 0, ""
        self._best: tuple[float, ...] = ()

    def show(self, result: "Validated") -> None:
        """Print the rows of one checkpoint."""
        for weights, report in result.reports.items():
            if not self._num_rows:
                print(_fitted(_heading(report)))
            self._num_rows += 1
            rank, row = _rank_of(result, weights), result.monitor
            is_best = rank > self._best
            if is_best:
                self._best = rank
                value = {**report.get("metrics", {}), **report}[row.name]
                self._best_row = f"{result.checkpoint.name} ({weights}), {row.title} {row.text(value)}"
            print(_fitted(_row(result, weights, report)) + ("  best so far" if is_best else ""), flush=True)

    def close(self) -> None:
        """Print which row was the best, if there were several."""
        if self._num_rows > 1 and self._best_row:
            print(f"best: {self._best_row}")


def _fitted(row: str) -> str:
    return row[:-_SPARE] if (terminal_width() or _WHOLE) < _WHOLE else row


def _heading(report: dict[str, Any]) -> str:
    if "task" not in report:
        return _HEADING
    metrics = "".join(f"{row.title:>{_width(row)}}" for row in _shown(report))
    return f"     step    epoch  weights{metrics}      loss   images  seconds"


def _shown(report: dict[str, Any]) -> list[Metric]:
    return [row for row in TASKS[report["task"]].metrics(NO_SCALE) if not row.has_field]


def _width(row: Metric) -> int:
    return max(10, len(row.title) + 2)


def _row(result: "Validated", weights: str, report: dict[str, Any]) -> str:
    if "task" in report:
        metrics = "".join(f"{row.text(report['metrics'].get(row.name)):>{_width(row)}}" for row in _shown(report))
        start = f"{result.step:9d}{result.epoch:9.2f}{weights:>9}{metrics}{report['loss']:10.4f}"
        return f"{start}{report['num_samples']:9,d}{result.seconds[weights]:9.3f}"
    return (
        f"{result.step:9d}{result.epoch:9.2f}{weights:>9}{format_percent(report['top1']):>9}{format_percent(report['top5']):>10}"
        f"{report['loss']:10.4f}{format_percent(report['balanced_accuracy']):>10}{report['num_samples']:9,d}"
        f"{result.seconds[weights]:9.3f}"
    )


def _print_json(result: "Validated") -> None:
    from headrace.telemetry.validation_report import finite_or_null

    line: dict[str, Any] = {"checkpoint": str(result.checkpoint), "step": result.step}
    if result.problem:
        print(json.dumps(line | {"problem": result.problem}), flush=True)
        return
    line |= {"epoch": result.epoch, "report": str(result.report_file) if result.report_file else None}
    for weights, report in result.reports.items():
        names = ("loss",) if "task" in report else METRICS
        numbers = {key: report[key] for key in (*names, "num_samples")}
        numbers |= report.get("metrics", {}) if "task" in report else {}
        line[weights] = numbers | {"seconds": round(result.seconds[weights], 6)}
    print(json.dumps(finite_or_null(line)), flush=True)  # the loss of weights that diverged is NaN
