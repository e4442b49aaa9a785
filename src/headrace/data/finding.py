"""What is wrong with a file, and what could be read of it. Readers collect; whoever asked decides whether to raise."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.core.errors import DataError

_NAMED = 20  # offsets written out in one finding; the count is always exact


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong: the file, the byte at which it shows, the problem in words."""

    path: Path
    problem: str
    offset: int | None = None

    def __str__(self) -> str:
        place = f"{self.path}, byte {self.offset:,}" if self.offset is not None else str(self.path)
        return f"{place}: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a reader got out of one file or one split."""

    images: np.ndarray  # uint8 [n, H, W, C]
    labels: np.ndarray  # int32 [n]; a label out of range stays as it is in the file
    findings: tuple[Finding, ...] = ()


def empty_part(image_hwc: tuple[int, int, int], *findings: Finding) -> Part:
    """Return a part of which nothing could be read."""
    return Part(images=np.zeros((0, *image_hwc), np.uint8), labels=np.zeros((0,), np.int32), findings=findings)


def join_parts(parts: Sequence[Part]) -> Part:
    """Return the parts one after the other."""
    return Part(
        images=np.concatenate([part.images for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        findings=tuple(finding for part in parts for finding in part.findings),
    )


def label_finding(
    path: Path, labels: np.ndarray, num_classes: int, offsets: tuple[int, int] | None, what: str = "label"
) -> list[Finding]:
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
    return [Finding(path=path, offset=at[0] if at else None, problem=problem)]


def raise_findings(name: str, findings: Sequence[Finding]) -> None:
    """Raise the first finding as a DataError, saying how many there are."""
    if not findings:
        return
    more = f" ({len(findings) - 1} more problem(s).)" if len(findings) > 1 else ""
    raise DataError(
        f"The data set {name} is damaged. {findings[0]}.{more}",
        remedy=f"`headrace data verify --dataset {name}` lists every problem; fetch the damaged files again.",
    )
