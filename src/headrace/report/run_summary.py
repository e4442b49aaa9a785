"""What is known of a run from its directory, read quickly and without JAX; damaged and foreign files are no error."""

import fcntl
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config.schema import all_options
from headrace.config.spellings import shown
from headrace.core.directory_lock import LOCK_FILE
from headrace.core.json_text import parse_json
from headrace.core.units import format_duration, format_list
from headrace.rows.metrics import TOP1
from headrace.rows.row import Metric
from headrace.rows.tasks import CLASSIFICATION, TASKS
from headrace.telemetry.records import (
    METRICS_FILE,
    RunEnd,
    RunStart,
    TrainRecord,
    ValidationRecord,
    best_validation,
    monitor_of,
    parse_record,
)

CONFIG_FILE = "config.json"
UNREADABLE, NOT_STARTED, RUNNING, KILLED = "unreadable", "not started", "running", "killed"
_UNNAMED = (
    "folder",
    "tfrecord",
    "array_record",
    "tar",
    "packed",
    "csv",
    "npz",
    "parquet",
)  # kinds of files, not datasets
_DEPTH = 3  # of directories below the one that is listed
_MOST_ENTRIES = 20_000  # of directories looked into
_MOST_BYTES = 64 << 20  # of a JSON file
_LONGEST_LINE = 1 << 22  # of records: a validation of 1,000 classes has 40 kB
# The lines of these kinds are read; of the many others only the last training record matters.
# By their beginning: a record's kind is always the first entry of its line.
_READ = tuple(f'{{"kind": "{kind.kind}"'.encode() for kind in (RunStart, ValidationRecord, RunEnd))
_TRAIN = f'{{"kind": "{TrainRecord.kind}"'.encode()


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run: its options as saved, its first and last records, and its best validation.

    `state` is how it ended (finished, stopped, interrupted, failed, compiled), or running, killed (no end was
    recorded), not started, unreadable (`problem` says why).
    """

    path: Path
    state: str
    problem: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    start: RunStart | None = None
    end: RunEnd | None = None
    last_train: TrainRecord | None = None
    validations: tuple[ValidationRecord, ...] = ()
    energy_joules: float | None = None  # of all its processes that have ended, where GPUs count it
    modified: float = 0.0  # when its records were last written, in seconds since 1970

    @property
    def best(self) -> ValidationRecord | None:
        """The validation that is best by the metric that the run monitored."""
        return best_validation(self.validations, self.monitor)

    @property
    def monitor(self) -> Metric:
        """The metric that the run compared its validations by."""
        return monitor_of([self.start] if self.start else [])

    @property
    def problem_word(self) -> str:
        """Why the result is useless in one word, diverged or constant; nothing otherwise."""
        return self.end.model_verdict.partition(":")[0] if self.end else ""

    @property
    def state_text(self) -> str:
        """The state, and the word for a useless result, for a table."""
        return ", ".join(word for word in (self.state, self.problem_word) if word)

    @property
    def accuracy_bound(self) -> float | None:
        """What the best top-1 is at least, at 97.5 %: the lower end of Wilson's interval. None of a trial.

        Runs are sorted by it: 2 of 2 images say less than 1,900 of 2,000.
        """
        best = None if self.is_trial else self.best
        if best is None or best.top1 is None or not math.isfinite(best.top1):
            return None
        return wilson_interval(best.top1, best.num_samples)[0]

    @property
    def headline(self) -> Metric:
        """The metric that tells how good the network is: top-1, of other tasks what is monitored."""
        return self.start.headline if self.start else TOP1

    @property
    def score(self) -> float | None:
        """That metric of the best validation; None of a trial."""
        return None if self.best is None or self.is_trial else self.best.metric(self.headline.name)

    @property
    def score_text(self) -> str:
        """The same for a table of runs, with its name where it is no top-1."""
        row = self.headline
        return row.text(self.score) if row == TOP1 or self.score is None else f"{row.title} {row.text(self.score)}"

    @property
    def dataset(self) -> str:
        """Name what it trained on: a dataset that has no name but its kind is named by its directory or file."""
        kind, place = self.start.dataset if self.start else "", self.options.get("dataset_path")
        return Path(place).name or kind if kind in _UNNAMED and isinstance(place, str) else kind

    @property
    def data_text(self) -> str:
        """The dataset with its numbers of images and classes, as far as they were recorded."""
        start = self.start
        if start is None:
            return "-"
        if start.num_train is None or start.num_validation is None or start.num_classes is None:
            return self.dataset  # of an earlier version
        images = f"{start.num_train:,} + {start.num_validation:,} images"
        row = TASKS.get(start.task, CLASSIFICATION)
        return (
            f"{self.dataset}: {images}, {start.num_classes:,} {row.output if start.num_classes == 1 else row.outputs}"
        )

    @property
    def is_trial(self) -> bool:
        """Whether the run was cut short by dry_run_steps, and validated on a few images."""
        return bool(self.options.get("dry_run_steps"))

    @property
    def epoch(self) -> float:
        """How far the run has come."""
        records = (self.end, self.last_train, *self.validations[-1:])
        return max((record.epoch for record in records if record is not None), default=0.0)

    @property
    def seconds(self) -> float | None:
        """The time to train so far, those of earlier processes included."""
        if self.end is not None:
            return self.end.time_to_train
        return self.last_train.elapsed_seconds if self.last_train else None

    @property
    def time_text(self) -> str:
        """The time to train, for a table."""
        return "-" if self.seconds is None else format_duration(self.seconds)

    @property
    def written(self) -> str:
        """When its records were last written, for a table."""
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.modified)) if self.modified else "-"

    @property
    def device_hours(self) -> float | None:
        """What the run has cost so far: the hours of training of each of its devices."""
        devices = self.start.num_devices or self.start.num_replicas if self.start else 0
        return None if self.seconds is None else self.seconds * devices / 3600

    @property
    def cost_text(self) -> str:
        """What the run has cost so far, for a table: hours of devices and, where it was measured, energy."""
        hours = self.device_hours
        if hours is None:
            return "-"
        text = format_duration(3600 * hours) if hours < 1 else f"{hours:,.1f} h"
        return text + (f", {self.energy_joules / 3.6e6:.3g} kWh" if self.energy_joules else "")

    @property
    def images_per_second(self) -> float | None:
        """The rate of the whole run or, while it trains, of its last record."""
        last = self.end or self.last_train
        return last.images_per_second if last else None

    @property
    def checkpoints(self) -> Path:
        """The directory of its checkpoints."""
        chosen = self.options.get("checkpoint_dir")
        return Path(chosen) if isinstance(chosen, str) else self.path / "checkpoints"


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share that was measured on so many images."""
    if not count:
        return 0.0, 1.0
    z = 1.96
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, (middle - spread) / (1 + z * z / count)), min(1.0, (middle + spread) / (1 + z * z / count))


def data_groups(runs: Sequence[RunSummary]) -> list[int]:
    """Return a number for each run, equal for runs that have the same dataset as far as records tell.

    Accuracies on different datasets cannot be compared. A run of an earlier version, which recorded no digest of its
    labels, is told apart by name, place and number of validation images.
    """
    digests = all(run.start is None or run.start.dataset_digest for run in runs)
    keys: dict[object, int] = {}
    return [keys.setdefault(_data_key(run, digests=digests), len(keys)) for run in runs]


def _data_key(run: RunSummary, *, digests: bool) -> object:
    if run.start is None:
        return None
    if digests:
        return run.dataset, run.start.dataset_digest
    images = run.validations[-1].num_samples if run.validations else run.start.num_validation
    return run.dataset, run.options.get("dataset_path"), images


def best_other(run: RunSummary, others: Iterable[RunSummary]) -> RunSummary | None:
    """Return the run with the best top-1 on the same dataset, this one and trials aside; None where there is none."""
    if run.start is None or not run.start.dataset_digest:
        return None
    key = _data_key(run, digests=True)
    found = [
        other
        for other in others
        if other.path.resolve() != run.path.resolve()
        and other.start is not None
        and other.accuracy_bound is not None
        and _data_key(other, digests=True) == key
    ]
    return max(found, key=lambda other: other.accuracy_bound or 0.0, default=None)


def describe_data_apart(runs: Sequence[RunSummary], names: Sequence[str]) -> str:
    """Say which runs were trained on different datasets; nothing where all have the same."""
    groups = data_groups(runs)
    if len(set(groups)) < 2:
        return ""
    parts = []
    for group in dict.fromkeys(groups):
        members = [name for name, of in zip(names, groups, strict=True) if of == group]
        parts.append(f"{format_list(members, 5)} ({runs[groups.index(group)].data_text})")
    return f"different datasets, whose accuracies cannot be compared: {'; '.join(parts)}"


def find_runs(place: Path) -> Iterator[Path]:
    """Yield the run directories in a directory, a few levels deep, by name; the directory itself if it is a run."""
    waiting, looked = [(place, 0)], 0
    while waiting and looked < _MOST_ENTRIES:
        directory, depth = waiting.pop(0)
        looked += 1
        if (directory / CONFIG_FILE).is_file():
            if not _is_foreign(directory):
                yield directory
            continue
        if depth < _DEPTH:
            waiting += [(inner, depth + 1) for inner in _directories(directory)]


def _directories(place: Path) -> list[Path]:
    try:
        with os.scandir(place) as entries:
            inside = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [place / name for name in sorted(inside) if not name.startswith(".")]


def _is_foreign(directory: Path) -> bool:
    """Say whether a config.json belongs to another program: one that can be read, and is not of our form."""
    try:
        saved = read_json(directory / CONFIG_FILE)
    except (OSError, ValueError):
        return not any((directory / name).exists() for name in ("plan.json", METRICS_FILE))
    return not (isinstance(saved, dict) and isinstance(saved.get("values"), dict) and "origins" in saved)


def read_json(file: Path) -> Any:
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES:,} bytes")
    return parse_json(file.read_bytes(), _MOST_BYTES)


def read_summary(path: Path) -> RunSummary:
    """Return what is known of the run in a directory."""
    try:
        saved = read_json(path / CONFIG_FILE)
        if not isinstance(saved, dict) or not isinstance(saved.get("values"), dict):
            raise ValueError("it has no options")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return RunSummary(path=path, state=UNREADABLE, problem=f"{CONFIG_FILE}: {reason}")
    file, options = path / METRICS_FILE, shown(saved["values"])
    if not file.is_file():
        return RunSummary(path=path, state=_without_end(path, NOT_STARTED), options=options)
    try:
        lines, modified = _telling_lines(file), file.stat().st_mtime
    except OSError as error:
        problem = f"{METRICS_FILE}: {error.strerror}"
        return RunSummary(path=path, state=UNREADABLE, problem=problem, options=options)
    return _summarize(path, options, lines, modified)


def _telling_lines(file: Path) -> list[bytes]:
    """Return the lines that a summary is made of: all but those of training, of which the last one comes last.

    Read piece by piece: records of every step of a long run, or a file with a hole in it, are not taken into memory.
    """
    telling, last_train = [], b""
    with file.open("rb") as records:
        while line := records.readline(_LONGEST_LINE):
            if not line.endswith(b"\n"):
                if len(line) < _LONGEST_LINE:
                    break  # still being written, or was when the process was killed
                while line and not line.endswith(b"\n"):  # no record of ours is that long
                    line = records.readline(_LONGEST_LINE)
            elif line.startswith(_TRAIN):
                last_train = line
            elif line.startswith(_READ):
                telling.append(line)
    return [*telling, last_train] if last_train else telling


def _summarize(path: Path, options: Mapping[str, object], lines: list[bytes], modified: float) -> RunSummary:
    start: RunStart | None = None
    end: RunEnd | None = None
    last_train: TrainRecord | None = None
    validations, bad, joules = [], 0, None
    for line in lines:
        try:
            record = parse_record(line)
        except ValueError:
            bad += 1
            continue
        if isinstance(record, RunStart):
            start, end = record, None
        elif isinstance(record, RunEnd):
            end = record
            if record.energy_joules is not None:
                joules = (joules or 0.0) + record.energy_joules
        elif isinstance(record, ValidationRecord):
            validations.append(record)
        elif isinstance(record, TrainRecord):
            last_train = record
    return RunSummary(
        path=path,
        state=end.outcome if end else _without_end(path, KILLED if start else NOT_STARTED),
        problem=f"{METRICS_FILE}: {bad} damaged lines" if bad else "",
        options=options,
        start=start,
        end=end,
        last_train=last_train,
        validations=tuple(validations),
        modified=modified,
        energy_joules=joules,
    )


def _without_end(path: Path, otherwise: str) -> str:
    """Return `running` if a process holds the run's lock."""
    try:
        handle = os.open(path / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return otherwise
    try:
        # Shared: two that ask at the same moment must not take each other for the run.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return RUNNING
    except OSError:  # a file system without locks
        return otherwise
    finally:
        os.close(handle)
    return otherwise


def different_options(runs: Iterable[RunSummary]) -> dict[str, list[Any]]:
    """Return the options in which runs differ, mappings by key (`a.b`), with the value of each run; None if not set."""
    known = all_options()
    listed = [dict(run.options) for run in runs]
    for options in listed:  # an option that a run does not have is newer than the run, which had its default
        options |= {
            name: known[name].default for each in listed for name in each if name in known and name not in options
        }
    flat = [_flat(options) for options in listed]
    names = dict.fromkeys(name for each in flat for name in each)
    rows = {name: [each.get(name) for each in flat] for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}


def _flat(options: Mapping[str, object]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = list(value) if isinstance(value, tuple) else value  # a default, beside saved ones
    return found
