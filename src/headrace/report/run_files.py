"""The JSON files of a run's directory, for reports: a file that is missing or damaged is no error."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.files import parse_json
from headrace.report.run_summary import CONFIG_FILE, RunSummary, read_summary

PLAN_FILE, MACHINE_FILE, IMAGES_FILE, SCHEDULE_FILE = "plan.json", "machine.json", "images.json", "schedule.json"
PROFILE_FILE = "profile/profile.json"
_MOST_BYTES = 64 << 20


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


def read_files(path: Path) -> RunFiles:
    """Return what the files of a run hold."""
    summary = read_summary(path)
    report, step, weights = _validation_report(summary)
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
    )


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds, {} where there is none."""
    try:
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return {}
        found = parse_json(file.read_bytes(), _MOST_BYTES)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _validation_report(run: RunSummary) -> tuple[Mapping[str, Any], int, str]:
    """Return (report, step, weights) of the best validation, or of the newest one whose report is there."""
    newest_first = sorted(run.validations, key=lambda record: record.step, reverse=True)
    for record in ([run.best] if run.best else []) + newest_first:
        reports = read_mapping(run.path / "reports" / f"step_{record.step:08d}.json")
        report = reports.get(record.weights)
        if isinstance(report, dict):
            return report, record.step, record.weights
    return {}, 0, ""
