"""Problems with data: damaged files, single bad samples met during a run, identical images in both splits."""

import hashlib
import json
import os
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.core.errors import DataError
from headrace.core.files import parse_json
from headrace.core.units import format_list
from headrace.data.sets.samples import FileSamples, Samples

# Readers of files collect problems and return what they could read; the caller decides whether to raise.


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
class Part:
    """What could be read of one file or one split."""

    images: np.ndarray  # uint8 [n, H, W, C]
    labels: np.ndarray  # int32 [n]; a label out of range stays as it is in the file
    findings: tuple[FileProblem, ...] = ()


def empty_part(image_hwc: tuple[int, int, int], *findings: FileProblem) -> Part:
    """Return a part with no samples, for files that could not be read."""
    return Part(images=np.zeros((0, *image_hwc), np.uint8), labels=np.zeros((0,), np.int32), findings=findings)


def join_parts(parts: Sequence[Part]) -> Part:
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


# Bad samples: reported once each, listed in a file; too many of them stop the run


FILE = "bad_samples.jsonl"


class BadSamples:
    """The bad samples that a process has met in both splits of its dataset."""

    def __init__(self, name: str, num_samples: int, max_share: float) -> None:
        # One broken file of a few hundred is no reason to stop, unless none is allowed.
        self._limit = max(int(max_share * num_samples), 1 if max_share > 0 else 0)
        self._name, self._share = name, max_share
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
            text = path.read_text() if path.exists() else ""  # of the run before it was resumed
            # A resumed run appends to the list, and must not list the same image twice.
            for line in text.splitlines():
                with suppress(ValueError, KeyError, TypeError):  # a run that was killed may leave half a line
                    row = parse_json(line)
                    self._listed.add((row["split"], row["sample"]))
            if text and not text.endswith("\n"):
                path.write_text(f"{text}\n")
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
        """Describe them in a sentence, which is empty while there are none."""
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


# Identical images in one dataset: in both splits (validation then measures memory), or in two classes.


DIGEST = np.dtype("S16")  # of an image's bytes; zero for one that could not be read
_QUICK_FILES = 50_000  # the search at the start of a run is left out for sets with more files: it needs their sizes
_ENDS = 4096  # bytes read of each end of a file before whole files are compared
_NAMED_PAIRS = 3


def digest_of(image: bytes | np.ndarray) -> bytes:
    """Return 16 bytes that identify an image's stored bytes."""
    data = np.ascontiguousarray(image).tobytes() if isinstance(image, np.ndarray) else image
    return hashlib.blake2b(data, digest_size=15).digest() + b"\1"  # NumPy would drop a last byte that is zero


def describe_duplicates(splits: Sequence[Samples], digests: Sequence[np.ndarray]) -> tuple[list[str], list[str]]:
    """Return (what is wrong: images in both splits or in two classes; what is only remarkable), from all digests."""
    every = np.concatenate(list(digests))
    _, group, counts = np.unique(every, return_inverse=True, return_counts=True)
    # Images that could not be read have empty digests, which are no duplicates of each other.
    members = np.flatnonzero((counts[group] > 1) & (every != b""))
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    first_of_second = len(digests[0])
    for place in members.tolist():
        split = int(place >= first_of_second)
        groups[int(group[place])].append((split, place - split * first_of_second))
    return _sentences(splits, groups.values())


def quick_duplicates(splits: tuple[Samples, Samples]) -> list[str]:
    """Return what is wrong, comparing only files of equal size; nothing for sets that are too large or not files."""
    train, validation = splits
    if not isinstance(train, FileSamples) or not isinstance(validation, FileSamples):
        return []
    if len(train) + len(validation) > _QUICK_FILES:
        return []
    files = [file for split, samples in enumerate((train, validation)) for file in _files(split, samples)]
    # From cheap to expensive: after sizes and ends, hardly any file is left to be read whole.
    same = _divided([files], lambda file: file.size)
    for read in (_ends, _whole):
        # Links to one file are read once: a folder of links to a few images would else be read whole at every start.
        contents: dict[tuple[int, int], bytes] = {}
        same = _divided(same, lambda file, read=read, contents=contents: _cached(contents, file, read))
    return _sentences(splits, [[(file.split, file.sample) for file in group] for group in same])[0]


class _File(NamedTuple):
    split: int
    sample: int
    label: int
    path: str
    size: int
    inode: tuple[int, int]  # with its device: the same for links to one file


def _files(split: int, samples: Samples) -> Iterator[_File]:
    for sample, label in enumerate(samples.labels.tolist()):
        path = samples.name(sample)
        try:
            facts = os.stat(path)  # noqa: PTH116 (a Path for each of many files costs more than the call)
        except OSError:  # reported when it is read
            continue
        if stat.S_ISREG(facts.st_mode):  # opening a pipe would wait for somebody to write into it
            yield _File(split, sample, label, path, facts.st_size, (facts.st_dev, facts.st_ino))


def _divided(groups: Iterable[list[_File]], key: Callable[[_File], Hashable]) -> list[list[_File]]:
    """Divide groups by a property of their files, keeping those that spread over splits or classes."""
    parts: dict[Hashable, list[_File]] = defaultdict(list)
    for number, group in enumerate(groups):
        for file in group:
            with suppress(OSError):  # reported when it is read
                parts[number, key(file)].append(file)
    return [
        part
        for part in parts.values()
        if len({file.split for file in part}) > 1 or len({file.label for file in part}) > 1
    ]


def _cached(contents: dict[tuple[int, int], bytes], file: _File, read: Callable[[str], bytes]) -> bytes:
    if file.inode not in contents:
        contents[file.inode] = read(file.path)
    return contents[file.inode]


def _ends(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123
        first = file.read(_ENDS)
        file.seek(max(0, os.fstat(file.fileno()).st_size - _ENDS))
        return first + file.read(_ENDS)


def _whole(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123
        return hashlib.file_digest(file, "blake2b").digest()


def _sentences(splits: Sequence[Samples], groups: Iterable[Sequence[tuple[int, int]]]) -> tuple[list[str], list[str]]:
    leaked: list[tuple[str, str]] = []
    confused: list[tuple[str, str]] = []
    repeated = 0
    for group in groups:
        names = [splits[split].name(sample) for split, sample in group]
        labels = [int(splits[split].labels[sample]) for split, sample in group]
        held_out = [name for name, (split, _) in zip(names, group, strict=True) if split]
        other = next((n for n, label in zip(names, labels, strict=True) if label != labels[0]), None)
        if held_out and len(held_out) < len(group):
            leaked += [(name, names[0]) for name in held_out]
        if other is not None:
            confused.append((names[0], other))
        elif not held_out or len(held_out) == len(group):
            repeated += len(group) - 1
    wrong = []
    if leaked:
        wrong.append(
            f"{len(leaked):,} validation image(s) are also in training, so accuracy looks better than it is: "
            f"{_pairs(leaked)}"
        )
    if confused:
        wrong.append(f"{len(confused):,} image(s) are in more than one class: {_pairs(confused)}")
    return wrong, [f"{repeated:,} image(s) repeat another one of their class and split"] if repeated else []


def _pairs(pairs: list[tuple[str, str]]) -> str:
    return format_list((f"{first} = {second}" for first, second in pairs), _NAMED_PAIRS)
