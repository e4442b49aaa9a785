"""What differs between runs: options and results side by side, for the console and for reports."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.core.errors import CheckpointError
from headrace.core.units import format_duration
from headrace.report.run_summary import UNREADABLE, RunSummary, different_options, read_summary

_NAMES = ("run_name",)  # differ in any case, and say nothing


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
    return {name: values for name, values in different_options(runs).items() if name not in _NAMES}


def compare_results(runs: Sequence[RunSummary]) -> dict[str, list[str]]:
    """Return a row for each kind of result; a trial has no accuracy worth comparing."""

    def of_best(run: RunSummary) -> str:
        best = run.best
        if best is None or run.is_trial:
            return "trial" if run.is_trial else "-"
        return f"{100 * best.top1:.2f} % at epoch {best.epoch:.4g}"

    def of_last(run: RunSummary) -> str:
        last = run.validations[-1] if run.validations and not run.is_trial else None
        return f"{100 * last.top1:.2f} %, loss {last.loss:.4f}" if last else "-"

    def of_end(run: RunSummary, name: str, shape: Any) -> str:
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
