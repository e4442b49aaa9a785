"""What differs between runs, in their options and in their results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config.spellings import PARTS
from headrace.core.errors import CheckpointError
from headrace.report.run_summary import UNREADABLE, RunSummary, different_options, read_summary
from headrace.rows.metrics import TOP1
from headrace.rows.row import Metric
from headrace.telemetry.records import ValidationRecord

_NAMES = ("run_name", "log_dir", "resume")  # where a run lies explains nothing


def read_compared(paths: Sequence[Path]) -> list[RunSummary]:
    """Return the summaries of runs; one that cannot be read is an error."""
    runs = [read_summary(path) for path in paths]
    for run in runs:
        if run.state == UNREADABLE:
            raise CheckpointError(
                f"{run.path} cannot be read: {run.problem}.", remedy="`headrace runs` lists runs that can be read."
            )
    return runs


def compare_options(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """Return the options in which runs differ, apart from their names, with the value of each run."""
    found = {name: values for name, values in different_options(runs).items() if name not in _NAMES}
    # What a mapping states of its parts is shown beside it: one row says it.
    said = {
        f"{row.mapping}.{key}": found[row.name]
        for row in PARTS
        if row.name in found
        for key in _keys(found, row.mapping)
    }
    return {name: values for name, values in found.items() if said.get(name) != values}


def _keys(found: Mapping[str, list[Any]], mapping: str) -> list[str]:
    return [name.removeprefix(f"{mapping}.") for name in found if name.startswith(f"{mapping}.")]


def compare_results(runs: Sequence[RunSummary]) -> dict[str, list[str]]:
    """Return a row for each kind of result; a trial has no accuracy worth comparing."""

    def accuracy(record: ValidationRecord) -> str:
        row = headlines[0]
        return row.text(record.metric(row.name)) + ("" if record.weights == "raw" else f" ({record.weights})")

    headlines = [run.headline for run in runs] or [TOP1]

    def of_best(run: RunSummary) -> str:
        best = run.best
        if best is None or run.is_trial:
            return "trial" if run.is_trial else "-"
        by = "" if run.monitor == headlines[0] else f", of the best {run.monitor.title}"
        return f"{accuracy(best)} at epoch {best.epoch:.4g}{by}"

    def of_last(run: RunSummary) -> str:
        if run.best is None or run.is_trial:
            return "-"
        # Raw and averaged weights are validated at the same step: those that were the best are compared.
        last = [record for record in run.validations if record.weights == run.best.weights][-1]
        return f"{accuracy(last)}, loss {last.loss:.4f}"

    def of_classes(run: RunSummary, row: Metric) -> str:
        return "-" if run.best is None or run.is_trial else row.text(run.best.metric(row.name))

    shown = dict.fromkeys(row for run in runs if run.start for row in run.start.metrics_beside)
    useless = [run.problem_word for run in runs]
    return {
        "state": [run.state for run in runs],
        **({"model": [word or "-" for word in useless]} if any(useless) else {}),
        f"best {headlines[0].title}": [of_best(run) for run in runs],
        **{row.title: [of_classes(run, row) for run in runs] for row in shown},
        "validation images": [f"{run.best.num_samples:,}" if run.best else "-" for run in runs],
        "dataset": [run.data_text for run in runs],
        "last validation": [of_last(run) for run in runs],
        "training loss": [f"{run.last_train.loss:.4f}" if run.last_train else "-" for run in runs],
        "epochs": [f"{run.epoch:.4g}" for run in runs],
        "time to train": [run.time_text for run in runs],
        "images per second": [f"{run.images_per_second:,.0f}" if run.images_per_second else "-" for run in runs],
        "parameters": [f"{(run.start and run.start.num_parameters) or 0:,}" for run in runs],
        "device": [run.start.device or run.start.platform if run.start else "-" for run in runs],
        "version": [run.start.version if run.start else "-" for run in runs],
    }
