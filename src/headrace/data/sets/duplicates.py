"""Identical images in one dataset: in both splits (validation then measures memory), or in two classes."""

import hashlib
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from headrace.core.units import format_list
from headrace.data.sets.samples import FileSamples, Samples

DIGEST = np.dtype("S16")  # of an image's bytes; zero for one that could not be read
_QUICK_FILES = 50_000  # the search at the start of a run is left out for sets with more files: it needs their sizes
_ENDS = 4096  # bytes read of each end of a file before whole files are compared
_NAMED_PAIRS = 3
_APART = {1: "are in more than one class", 2: "have more than one label"}  # by the dims of all labels


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
    label: int | tuple[float, ...]
    path: str
    size: int
    inode: tuple[int, int]  # with its device: the same for links to one file


def _files(split: int, samples: Samples) -> Iterator[_File]:
    for sample, given in enumerate(samples.labels.tolist()):
        label = tuple(given) if isinstance(given, list) else given
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
        labels = [splits[split].labels[sample].tolist() for split, sample in group]
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
        wrong.append(f"{len(confused):,} image(s) {_APART[splits[0].labels.ndim]}: {_pairs(confused)}")
    return wrong, [f"{repeated:,} image(s) repeat another one of their class and split"] if repeated else []


def _pairs(pairs: list[tuple[str, str]]) -> str:
    return format_list((f"{first} = {second}" for first, second in pairs), _NAMED_PAIRS)
