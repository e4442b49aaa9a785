"""Problems with data files: damaged files, and single bad samples met during a run.

Readers collect problems and return what they could read; the caller decides whether to raise."""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.core.errors import DataError
from headrace.core.files import parse_json

_NAMED = 20  # offsets written out in one finding; the count is always exact


@dataclass(frozen=True, kw_only=True)
class FileProblem:
    """One problem: the file, the byte where it was found, and a description."""

    path: Path
    problem: str
    offset: int | None = None

    def __str__(self) -> str:
        place = f"{self.path}, byte {self.offset:,}" if self.offset is not None else str(self.path)
        return f"{place}: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Files that are not read, all for the same reason."""

    reason: str
    count: int
    example: str

    def __str__(self) -> str:
        files = "1 file is" if self.count == 1 else f"{self.count:,} files are"
        return f"{files} skipped ({self.reason}): {self.example}{', ...' if self.count > 1 else ''}"


class SkippedFiles:
    """Counts skipped files by reason."""

    def __init__(self) -> None:
        self._found: dict[str, list[str | int]] = {}

    def add(self, reason: str, example: str) -> None:
        """Count one."""
        row = self._found.setdefault(reason, [0, example])
        row[0] = int(row[0]) + 1

    def rows(self) -> tuple[Skipped, ...]:
        """Return what was counted, most frequent first."""
        rows = (Skipped(reason=why, count=int(count), example=str(name)) for why, (count, name) in self._found.items())
        return tuple(sorted(rows, key=lambda row: -row.count))


@dataclass(frozen=True, kw_only=True)
class Part:
    """What could be read of one file or one split."""

    images: np.ndarray  # uint8 [n, H, W, C]
    labels: np.ndarray  # int32 [n]; a label out of range stays as it is in the file
    findings: tuple[FileProblem, ...] = ()


def empty_part(image_hwc: tuple[int, int, int], *findings: FileProblem) -> Part:
    """Return a part with no samples, for files that could not be read."""
    return Part(images=np.zeros((0, *image_hwc), np.uint8), labels=np.zeros((0,), np.int32), findings=findings)


def join_parts(parts: Sequence[Part]) -> Part:
    """Concatenate the parts."""
    return Part(
        images=np.concatenate([part.images for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        findings=tuple(finding for part in parts for finding in part.findings),
    )


def label_problem(
    path: Path, labels: np.ndarray, num_classes: int, offsets: tuple[int, int] | None, what: str = "label"
) -> list[FileProblem]:
    """Return a finding that names every label out of range; `offsets` is (first, stride) of the label bytes."""
    bad = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if not len(bad):
        return []
    at = [offsets[0] + int(record) * offsets[1] for record in bad[:_NAMED]] if offsets else []
    named = [f"record {record:,} has {int(labels[record])}" for record in bad[:_NAMED]]
    if at:
        named = [f"{text} at byte {offset:,}" for text, offset in zip(named, at, strict=True)]
    more = f" and {len(bad) - _NAMED:,} more" if len(bad) > _NAMED else ""
    problem = f"{len(bad):,} {what}(s) not in 0..{num_classes - 1}: {', '.join(named)}{more}"
    return [FileProblem(path=path, offset=at[0] if at else None, problem=problem)]


def raise_problems(name: str, findings: Sequence[FileProblem]) -> None:
    """Raise the first finding as a DataError, saying how many there are."""
    if not findings:
        return
    more = f" ({len(findings) - 1} more problem(s).)" if len(findings) > 1 else ""
    raise DataError(
        f"The dataset {name} is damaged. {findings[0]}.{more}",
        remedy=f"`headrace data verify --dataset {name}` lists every problem; fetch the damaged files again.",
    )


# Bad samples: reported once each, listed in a file; too many of them stop the run


FILE = "bad_samples.jsonl"


class BadSamples:
    """The bad samples that a process has met in both splits of its dataset."""

    def __init__(self, name: str, num_samples: int, max_share: float) -> None:
        self._name, self._limit, self._share = name, int(max_share * num_samples), max_share
        self._lock = threading.Lock()
        self._found: dict[tuple[str, int], dict[str, str | int]] = {}
        self._path: Path | None = None
        self._listed: set[tuple[str | int, str | int]] = set()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def rows(self) -> list[dict[str, str | int]]:
        """Return split, sample, name and problem of each, in the order in which they were met."""
        return list(self._found.values())

    def write_to(self, path: Path) -> None:
        """List them in this file from now on, those met so far included; nothing is written while there are none."""
        with self._lock:
            self._path = path
            lines = path.read_text().splitlines() if path.exists() else []  # of the run before it was resumed
            # A resumed run appends to the list, and must not list the same image twice.
            rows = [parse_json(line) for line in lines]
            self._listed = {(row["split"], row["sample"]) for row in rows}
            for row in self._found.values():
                self._append(row)

    def add(self, split: str, sample: int, name: str, problem: str) -> None:
        """Count a sample the first time it is met; one too many is a DataError."""
        with self._lock:
            # Every epoch meets it again.
            if (split, sample) in self._found:
                return
            row = {"split": split, "sample": sample, "name": name, "problem": problem}
            self._found[split, sample] = row
            self._append(row)
            count = len(self._found)
        if count > self._limit:
            where = f" They are listed in {self._path}." if self._path else ""
            raise DataError(
                f"{count:,} bad sample(s) in {self._name}, the last one {name}: {problem}.{where}",
                rule=f"At most {self._limit:,} may be bad: --max-bad-samples {self._share:g} of the samples.",
                remedy="`headrace data verify` names all of them; fix or delete them, or raise --max-bad-samples.",
            )

    def describe(self) -> str:
        """Return a sentence on them, empty while there are none."""
        if not self._found:
            return ""
        first = next(iter(self._found.values()))
        where = f", listed in {self._path.name}" if self._path else ""
        return (
            f"{len(self._found):,} bad sample(s) were replaced by the next of their class{where}; "
            f"the first: {first['name']}: {first['problem']}"
        )

    def _append(self, row: dict[str, str | int]) -> None:
        if self._path is not None and (row["split"], row["sample"]) not in self._listed:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
