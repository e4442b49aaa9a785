"""Records of a run as frozen values. A line of metrics.jsonl is one record; all other files derive from it.

A record survives the round trip through JSON exactly. Accuracies are fractions (0..1), times are seconds. JSON has no
numbers that are not finite: they are written as the strings "NaN", "Infinity" and "-Infinity" (which Python's `float`
and `pandas.to_numeric` read), so that null always means "no value".
"""

import json
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

from headrace.core.errors import CheckpointError
from headrace.core.json_text import parse_json
from headrace.core.units import format_duration
from headrace.rows.metrics import METRICS, OF_CLASSES, TOP1, UNEVEN
from headrace.rows.row import Metric
from headrace.rows.tasks import CLASSIFICATION

METRICS_FILE = "metrics.jsonl"
TRAINING_FILE = "training.csv"
VALIDATION_FILE = "validation.csv"
LOG_FILE = "log.txt"
REPORTS = "reports"  # a directory


@dataclass(frozen=True, kw_only=True)
class Record:
    """Base of all records: `kind` names the type, `step` counts the weight updates done so far in the run."""

    kind: ClassVar[str]
    step: int

    def __post_init__(self) -> None:
        """Turn NumPy and JAX scalars into plain numbers, so that records of equal numbers are equal."""
        for name, kind in _field_kinds(type(self)).items():
            object.__setattr__(self, name, _plain(getattr(self, name), kind))

    def to_dict(self) -> dict[str, Any]:
        """Return {"kind": ..., field: value}, still with floats that may not be finite."""
        values = {"kind": self.kind} | {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if name not in ("metrics", "asked_metrics") or value}

    def to_json(self) -> str:
        """Return the record as one line of JSON, without the line's end."""
        return json.dumps(_spell_non_finite(self.to_dict()), allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the record of these values; fields that a newer Headrace may have added are ignored."""
        given = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        missing = [f.name for f in fields(cls) if f.name not in given and _is_required(f)]
        if missing:
            raise ValueError(f"a record of kind {cls.kind!r} lacks {', '.join(missing)}")
        return cls(**given)


@dataclass(frozen=True, kw_only=True)
class RunStart(Record):
    """A process starts or resumes a run; `step` is 0 or the step restored."""

    kind: ClassVar[str] = "run_start"
    time: str  # ISO 8601, UTC
    model: str
    dataset: str
    num_epochs: int
    total_steps: int
    updates_per_epoch: int
    global_batch_size: int
    version: str = ""
    platform: str = ""
    device: str = ""
    num_replicas: int = 1
    num_devices: int | None = None  # of all processes; unknown of earlier versions
    num_parameters: int | None = None
    seed: int = 0
    target_accuracy: float | None = None
    monitor: str = "top1"  # the metric by which validations are compared
    # The dataset, to tell whether runs have the same: images, classes, and a digest of labels and names of classes.
    num_train: int | None = None
    num_validation: int | None = None
    num_classes: int | None = None
    dataset_digest: str = ""
    class_ratio: float | None = None  # training images of the largest class by those of the smallest
    seconds_left: float | None = None  # of a time budget; the number of steps is not known then
    task: str = CLASSIFICATION.name
    # Those that code asked for, and those of another task than classification: name, title, unit and better of each.
    asked_metrics: tuple[dict[str, str], ...] = ()

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """All metrics of the run by name, ours and those that code gave."""
        return metrics_of(self.asked_metrics)

    @property
    def of_epochs(self) -> str:
        """The planned number of epochs as it follows the number done; nothing where it is not known."""
        return f"/{self.num_epochs}" if self.seconds_left is None else ""

    @property
    def monitored(self) -> Metric:
        """The metric by which validations are compared."""
        return self.metrics.get(self.monitor, TOP1)

    @property
    def headline(self) -> Metric:
        """The metric that tells how good a network is: top-1, of other tasks what is monitored."""
        return TOP1 if self.task == CLASSIFICATION.name else self.monitored

    @property
    def metrics_beside(self) -> tuple[Metric, ...]:
        """Those shown beside top-1: of classes where these are uneven, the one monitored, and what code asked for."""
        uneven = (self.class_ratio or 1.0) >= UNEVEN
        asked = {each.get("name") for each in self.asked_metrics} | {self.monitor}
        rows = (row for row in self.metrics.values() if not row.has_field)
        shown = [row for row in rows if row.name in asked or (uneven and row in OF_CLASSES)]
        if self.task == CLASSIFICATION.name:
            return tuple(shown)
        return tuple(sorted(shown, key=lambda row: row != self.monitored))  # what is monitored first


@dataclass(frozen=True, kw_only=True)
class TrainRecord(Record):
    """Means over the steps since the last record; rates exclude the first call and are None if there was no other."""

    kind: ClassVar[str] = "train"
    epoch: float
    loss: float
    accuracy: float | None = None  # of classes
    top5: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # those that code gave
    learning_rate: float
    grad_norm: float | None = None
    images_per_second: float | None = None
    step_seconds: float | None = None
    loss_scale: float | None = None
    skipped_steps: int = 0
    infeed_wait_seconds: float = 0.0
    elapsed_seconds: float


@dataclass(frozen=True, kw_only=True)
class CurvePoint(Record):
    """Means over the few steps since the last point, for curves: some hundreds in a run, however long its calls are.

    The learning rate is that of the last step, the images per second those of its call, as on the progress line.
    """

    kind: ClassVar[str] = "point"
    epoch: float
    loss: float
    accuracy: float | None = None  # of classes
    learning_rate: float
    images_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class ValidationRecord(Record):
    """The whole validation set, with the raw weights or their moving average (`weights`: raw | ema)."""

    kind: ClassVar[str] = "validation"
    epoch: float
    weights: str = "raw"
    loss: float
    top1: float | None = None  # of classes
    top5: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # those of classes, and those that code gave
    num_samples: int
    seconds: float
    images_per_second: float | None = None
    checkpoint: str | None = None
    elapsed_seconds: float | None = None

    @property
    def weights_text(self) -> str:
        """What follows a number to say that it is not that of the raw weights."""
        return "" if self.weights == "raw" else f", {self.weights} weights"

    def metric(self, name: str) -> float | None:
        """Return the value of a metric, None where there is none: records of earlier versions have fewer."""
        return getattr(self, name) if name in METRICS and METRICS[name].has_field else self.metrics.get(name)


def validation_rank(record: ValidationRecord, monitor: Metric) -> tuple[float, float, int, bool] | None:
    """Return what validations are compared by, more is better; None without a number, which is never the best.

    The metric; of equal ones the lower loss, then the earlier, then raw weights.
    """
    value = record.metric(monitor.name)
    if value is None or not math.isfinite(value):
        return None
    loss = -record.loss if math.isfinite(record.loss) else -math.inf
    return monitor.merit(value), loss, -record.step, record.weights == "raw"


def report_rank(report: Mapping[str, Any], monitor: Metric) -> tuple[float, float] | None:
    """Return what validation reports are compared by, as `validation_rank`; None without a number."""
    value, loss = {**report.get("metrics", {}), **report}.get(monitor.name), report.get("loss")
    if value is None or not math.isfinite(value):
        return None
    return monitor.merit(value), -loss if loss is not None and math.isfinite(loss) else -math.inf


def best_validation(records: Iterable[Record], monitor: Metric = TOP1) -> ValidationRecord | None:
    """Return the best validation of raw or averaged weights."""
    ranked = [
        (rank, record)
        for record in records
        if isinstance(record, ValidationRecord) and record.weights in ("raw", "ema")
        if (rank := validation_rank(record, monitor)) is not None
    ]
    return max(ranked, key=lambda each: each[0])[1] if ranked else None


def monitor_of(records: Iterable[Record]) -> Metric:
    """Return the metric by which a run compares its validations."""
    starts = [record for record in records if isinstance(record, RunStart)]
    return starts[-1].monitored if starts else TOP1


def headline_of(records: Iterable[Record]) -> Metric:
    """Return the metric that tells how good a run's network is."""
    starts = [record for record in records if isinstance(record, RunStart)]
    return starts[-1].headline if starts else TOP1


def metrics_of(asked: Iterable[Mapping[str, str]]) -> dict[str, Metric]:
    """Return all metrics of a run by name: ours, and those that records say code asked for."""
    given = {
        each["name"]: Metric(
            name=each["name"],
            title=each.get("title", ""),
            unit=each.get("unit", ""),
            better="less" if each.get("better") == "less" else "more",
        )
        for each in asked
        if "name" in each
    }
    return {**METRICS, **{name: row for name, row in given.items() if name not in METRICS}}


def asked_metrics(rows: Iterable[Metric]) -> tuple[dict[str, str], ...]:
    """Return metrics that code asked for, as records keep them."""
    return tuple({"name": row.name, "title": row.title, "unit": row.unit, "better": row.better} for row in rows)


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord(Record):
    """A checkpoint has been written to disk."""

    kind: ClassVar[str] = "checkpoint"
    epoch: float
    name: str
    num_bytes: int
    seconds: float
    blocked_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Note(Record):
    """A message for people; `level` is info or warning."""

    kind: ClassVar[str] = "note"
    step: int = 0
    level: str = "info"
    text: str


@dataclass(frozen=True, kw_only=True)
class RunEnd(Record):
    """A process ends: `outcome` is finished, stopped, interrupted, compiled or failed.

    `reason` says why a callback, early stopping or a target accuracy stopped it. The times to train and to the target
    are those of the whole run. `seconds` splits `wall_seconds`, the time of this process, by kind
    (`metric_totals.KINDS`). Records without `wall_seconds` are older: their kinds overlap. `start` splits the time up
    to the first call. `memory` is the most that was in use: `device_peak_bytes`, or `process_peak_bytes` where devices
    do not count it. `saving` counts the checkpoints `written` and `passed_over`, the `write_seconds` of the thread, and
    of these the `waited_seconds` in which nothing trained. `energy_joules` is what its GPUs used, where they count it.
    """

    kind: ClassVar[str] = "run_end"
    time: str
    outcome: str
    reason: str = ""
    epoch: float
    time_to_train: float
    time_to_target: float | None = None
    epoch_at_target: float | None = None
    images_per_second: float | None = None
    best_top1: float | None = None  # of the best validation
    best: dict[str, float] = field(default_factory=dict)  # all metrics of the best validation
    best_checkpoint: str | None = None
    skipped_steps: int = 0
    wall_seconds: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    start: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    saving: dict[str, float] = field(default_factory=dict)
    energy_joules: float | None = None
    verdict: str = ""
    model_verdict: str = ""  # why the result is useless: a loss that diverged, one answer for all images

    @property
    def saving_text(self) -> str:
        """Return a sentence on the checkpoints of the process, empty if none was handed over."""
        written, passed = (int(self.saving.get(name, 0)) for name in ("written", "passed_over"))
        if not written + passed:
            return ""
        took, waited = (format_duration(self.saving[name]) for name in ("write_seconds", "waited_seconds"))
        over = f", {passed:,} passed over" if passed else ""
        checkpoints = f"{written:,} checkpoint{'s' * (written != 1)}"
        return f"{checkpoints} written in {took}{over}; training waited {waited} for it"


KINDS: Mapping[str, type[Record]] = {
    kind.kind: kind for kind in (RunStart, TrainRecord, CurvePoint, ValidationRecord, CheckpointRecord, Note, RunEnd)
}


_MAX_LINE_BYTES = 16 << 20


def parse_record(line: str | bytes) -> Record:
    """Return the record of one JSON line; ValueError says what is wrong with it."""
    values = parse_json(line, _MAX_LINE_BYTES)
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"not a record: {str(values)[:60]}")
    try:
        return KINDS[kind].from_dict(values)
    except TypeError as error:
        raise ValueError(str(error)) from error


def parse_records(lines: bytes, where: str) -> list[Record]:
    """Return the records of a metrics.jsonl; a tail that a crash truncated or garbled is dropped.

    A crash cannot damage a line that good records follow: then CheckpointError names the line.
    """
    whole = lines[: lines.rfind(b"\n") + 1].split(b"\n")[:-1]
    records: list[Record] = []
    bad: tuple[int, str] | None = None
    for number, line in enumerate(whole, start=1):
        try:
            record = parse_record(line)
        except ValueError as error:
            bad = bad or (number, str(error))
            continue
        if bad:
            raise CheckpointError(
                f"{where}, line {bad[0]} is damaged: {bad[1]}.",
                rule="Every line holds one record.",
                remedy="Fix or delete that line.",
            )
        records.append(record)
    return records


@cache
def _field_kinds(record: type[Record]) -> dict[str, str]:
    """Return {field: "int" | "float" | "str" | "dict" | "tuple"}, followed by ? if None is allowed."""
    hints = typing.get_type_hints(record)
    kinds = {}
    for f in fields(record):
        options = typing.get_args(hints[f.name]) if type(None) in typing.get_args(hints[f.name]) else (hints[f.name],)
        base = typing.get_origin(options[0]) or options[0]
        kinds[f.name] = base.__name__ + ("?" if len(options) > 1 else "")
    return kinds


@dataclass(frozen=True)
class NumberField:
    """A field of a record that is a number: its default, None without one; and whether it counts something."""

    default: float | None
    is_whole: bool


@cache
def number_fields(record: type[Record]) -> Mapping[str, NumberField]:
    """Return the fields of a kind of record that are numbers, by name."""
    kinds = _field_kinds(record)
    return {
        f.name: NumberField(None if f.default is MISSING else f.default, kinds[f.name] == "int")
        for f in fields(record)
        if kinds[f.name].removesuffix("?") in ("int", "float")
    }


def _plain(value: Any, kind: str) -> Any:
    """Return a value as the plain Python type of its field; TypeError if it cannot be converted exactly."""
    if value is None:
        if kind.endswith("?"):
            return None
        raise TypeError("null where a value is needed")
    base = kind.removesuffix("?")
    if base == "dict":
        return {str(key): float(item) for key, item in dict(value).items()}
    if base == "tuple":
        return tuple({str(key): str(item) for key, item in dict(each).items()} for each in value)
    if base == "str" and not isinstance(value, str):
        raise TypeError(f"expected text, not {value!r}")
    if base == "int" and (isinstance(value, str) or int(value) != value):
        raise TypeError(f"expected a whole number, not {value!r}")
    return {"int": int, "float": float, "str": str}[base](value)


def _is_required(f: Field[Any]) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _spell_non_finite(value: object) -> Any:
    """Replace numbers that are not finite by their names."""
    if isinstance(value, dict):
        return {key: _spell_non_finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def read_records(run_dir: Path | str) -> list[Record]:
    """Return all records of a run, oldest first; none when nothing was recorded yet."""
    path = Path(run_dir) / METRICS_FILE
    try:
        return parse_records(path.read_bytes(), str(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error
