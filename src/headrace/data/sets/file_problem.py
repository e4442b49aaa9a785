"""Readers of files collect problems and return what they could read; the caller decides whether to raise."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.core.errors import DataError
from headrace.core.units import format_list

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
        row = self._found.setdefault(reason, [0, example])
        row[0] = int(row[0]) + 1

    def rows(self) -> tuple[Skipped, ...]:
        """Return what was counted, most frequent first."""
        rows = (Skipped(reason=why, count=int(count), example=str(name)) for why, (count, name) in self._found.items())
        return tuple(sorted(rows, key=lambda row: -row.count))


@dataclass(frozen=True, kw_only=True)
class SplitPart:
    """What could be read of one file or one split."""

    images: np.ndarray  # uint8 [n, H, W, C]
    labels: np.ndarray  # int32 [n]; a label out of range stays as it is in the file
    findings: tuple[FileProblem, ...] = ()


def empty_part(image_hwc: tuple[int, int, int], *findings: FileProblem) -> SplitPart:
    """Return a part with no samples, for files that could not be read."""
    return SplitPart(images=np.zeros((0, *image_hwc), np.uint8), labels=np.zeros((0,), np.int32), findings=findings)


def join_parts(parts: Sequence[SplitPart]) -> SplitPart:
    return SplitPart(
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
    at = [offsets[0] + int(record) * offsets[1] for record in bad] if offsets else []
    named = [f"record {record:,} has {int(labels[record])}" for record in bad]
    if at:
        named = [f"{text} at byte {offset:,}" for text, offset in zip(named, at, strict=True)]
    problem = f"{len(bad):,} {what}(s) not in 0..{num_classes - 1}: {format_list(named, _NAMED)}"
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
