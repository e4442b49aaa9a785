"""The JSON files of a run directory: one that is missing or damaged is no error."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.report.run_summary import CONFIG_FILE, RunSummary, best_other, read_json, read_summary
from headrace.rows.metrics import METRICS
from headrace.telemetry.console import best_text
from headrace.telemetry.model_verdict import never_recognized
from headrace.telemetry.validation_report import report_file

PLAN_FILE, MACHINE_FILE, IMAGES_FILE, SCHEDULE_FILE = "plan.json", "machine.json", "images.json", "schedule.json"
PROFILE_FILE = "profile/profile.json"
_MOST_BESIDE = 100  # runs that are read for one sentence


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What the files of a run hold, {} for those that cannot be read, and the validation report of its best result."""

    summary: RunSummary
    config: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    profile: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    report_step: int = 0
    report_weights: str = ""
    rival: RunSummary | None = None  # the best other run on the same dataset


def read_files(path: Path, others: Iterable[RunSummary] | None = None) -> RunFiles:
    """Return what the files of a run hold; `others` are runs to compare it with, by default those beside it."""
    summary = read_summary(path)
    report, step, weights = _newest_report(summary)
    return RunFiles(
        summary=summary,
        config=read_mapping(path / CONFIG_FILE),
        plan=read_mapping(path / PLAN_FILE),
        machine=read_mapping(path / MACHINE_FILE),
        images=read_mapping(path / IMAGES_FILE),
        schedule=read_mapping(path / SCHEDULE_FILE),
        profile=read_mapping(path / PROFILE_FILE),
        report=report,
        report_step=step,
        report_weights=weights,
        rival=best_other(summary, _beside(path) if others is None else others),
    )


def _beside(path: Path) -> Iterator[RunSummary]:
    """Yield the runs in the same directory, the newest if there are many."""
    try:
        beside = [place for place in path.absolute().parent.iterdir() if (place / CONFIG_FILE).is_file()]
        newest = sorted(beside, key=lambda place: -(place / CONFIG_FILE).stat().st_mtime)
    except OSError:  # deleted meanwhile
        return
    yield from (read_summary(place) for place in newest[:_MOST_BESIDE])


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds, {} where there is none."""
    try:
        found = read_json(file) if file.is_file() else None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def best_report(run: RunSummary) -> Mapping[str, Any]:
    """Return the report of a run's best validation, {} where there is none."""
    best = run.best
    found = read_mapping(report_file(run.path, best.step)).get(best.weights) if best else None
    return found if isinstance(found, dict) else {}


def accuracy_lines(run: RunSummary) -> list[str]:
    """Return the result of a run's best validation in words, with the classes that it never recognized."""
    best = run.best
    if best is None:
        return []
    if run.is_trial:
        count = f"{best.num_samples:,} image{'s' * (best.num_samples != 1)}"
        return [f"not shown: a trial (--dry-run-steps), validated on {count} only"]
    where = f"at epoch {best.epoch:.4g} ({best.num_samples:,} images{best.weights_text})"
    values = {name: best.metric(name) for name in (run.start.metrics if run.start else METRICS)}
    lines = [f"{best_text(values, run.start)} {where}"]
    missed = never_recognized(best_report(run))
    return [*lines, f"never recognized: {missed}"] if missed else lines


def _newest_report(run: RunSummary) -> tuple[Mapping[str, Any], int, str]:
    """Return (report, step, weights) of the best validation, or of the newest one whose report is there."""
    newest_first = sorted(run.validations, key=lambda record: record.step, reverse=True)
    for record in ([run.best] if run.best else []) + newest_first:
        reports = read_mapping(report_file(run.path, record.step))
        report = reports.get(record.weights)
        if isinstance(report, dict):
            return report, record.step, record.weights
    return {}, 0, ""
