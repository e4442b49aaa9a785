"""The records of a run for the trackers that its options ask for.

A failure of a tracker (no login, no network, a full disk) is reported once and never stops the run.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.config.schema import Logging
from headrace.core.errors import ConfigError
from headrace.core.json_text import parse_json
from headrace.engine.histograms import Histogram
from headrace.rows.trackers import TRACKERS, TrackerRow
from headrace.telemetry.line_file import Sink
from headrace.telemetry.records import (
    CheckpointRecord,
    CurvePoint,
    Record,
    RunEnd,
    TrainRecord,
    ValidationRecord,
    number_fields,
)
from headrace.telemetry.sinks import Notify
from headrace.telemetry.trackers.confusion import draw_confusion
from headrace.telemetry.trackers.tracker import RunDescription, Tracker
from headrace.telemetry.validation_report import report_file

_MOST_BYTES = 64 << 20  # of a validation report
_MOST_CLASSES = 360  # in a confusion matrix
# Those that the points of curves have: a record's mean over an epoch is no point of the same curve.
_OF_POINTS = tuple(f"train/{name}" for name in number_fields(CurvePoint))


class TrackerSink(Sink):
    """Sends the numbers of records to a tracker, opened at the first one; a failure ends the tracker, not the run."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], notify: Notify, run_dir: Path) -> None:
        self._name, self._open, self._notify, self._run_dir = name, open_tracker, notify, run_dir
        self._tracker: Tracker | None = None
        self._failed = False

    def write(self, record: Record) -> None:
        """Send the record."""
        self._guarded(lambda tracker: self._send(tracker, record))

    def points(self, points: Sequence[CurvePoint]) -> None:
        """Send the points of the curves."""
        rows = [(point.step, _numbers(point, "train")) for point in points]
        self._guarded(lambda tracker: tracker.scalars(*rows))

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Send the histograms of a step, but for blocks without a single finite number."""
        filled = {name: each for name, each in found.items() if each["counts"].any()}
        if filled:
            self._guarded(lambda tracker: tracker.histograms(step, filled))

    def close(self) -> None:
        """Finish; a second call does nothing."""
        if self._tracker is not None:
            self._guarded(lambda tracker: tracker.close())
        # Closed for good: a record that comes later would open another run there.
        self._tracker, self._failed = None, True

    def _guarded(self, use: Callable[[Tracker], None]) -> None:
        if self._failed:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # from third-party libraries
                self._tracker = self._tracker or self._open()
                use(self._tracker)
        except Exception as error:  # whatever fails in a tracker
            self._failed = True
            self._notify(
                f"{self._name} failed ({type(error).__name__}: {error}); the run continues without it", "warning"
            )

    def _send(self, tracker: Tracker, record: Record) -> None:
        if isinstance(record, TrainRecord):
            numbers = _numbers(record, "train")
            tracker.scalars((record.step, {name: numbers[name] for name in numbers if name not in _OF_POINTS}))
        elif isinstance(record, ValidationRecord):
            group = f"validation/{record.weights}"
            tracker.scalars((record.step, _numbers(record, group)))
            file = report_file(self._run_dir, record.step)  # written before the record
            report = parse_json(file.read_bytes(), _MOST_BYTES).get(record.weights) if file.is_file() else None
            if report and len(report["classes"]) <= _MOST_CLASSES:
                tracker.image(record.step, f"{group}/confusion_matrix", draw_confusion(report))
        elif isinstance(record, CheckpointRecord):
            tracker.scalars((record.step, _numbers(record, "checkpoint")))
        elif isinstance(record, RunEnd):
            ended = {f"seconds/{name}": value for name, value in record.seconds.items()}
            ended |= {f"best/{name}": value for name, value in record.best.items()}
            ended |= {"outcome": record.outcome, "verdict": record.verdict, "model_verdict": record.model_verdict}
            tracker.summary(ended | _numbers(record, "run"))


def _numbers(record: Record, group: str) -> dict[str, float]:
    """Return the numbers of a record as `group/field`; except the step."""
    values = record.to_dict()
    values |= values.pop("metrics", {})
    return {
        f"{group}/{name}": float(value)
        for name, value in values.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def refuse_missing(logging: Logging) -> None:
    """Raise ConfigError if a requested tracker is not installed, before anything starts."""
    for row in asked_for(logging):
        if importlib.util.find_spec(row.package) is None:
            raise ConfigError(
                f"--{row.option} is given, but the package {row.package} is not installed.",
                remedy=f"pip install 'headrace[{row.option}]', or remove --{row.option}.",
            )


def make_trackers(logging: Logging, about: RunDescription, notify: Notify) -> list[TrackerSink]:
    """Return the sinks of the trackers that are asked for; `notify` hears of their troubles."""

    def opener(row: TrackerRow) -> Callable[[], Tracker]:
        return lambda: importlib.import_module(row.module).open_tracker(about, logging, notify)

    return [TrackerSink(row.option, opener(row), notify, about.directory) for row in asked_for(logging)]


def asked_for(logging: Logging) -> list[TrackerRow]:
    """Return the trackers that the options ask for."""
    return [row for row in TRACKERS.values() if getattr(logging, row.option)]
