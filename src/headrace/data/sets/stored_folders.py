"""Class folders in a store: listed once, with an index that is kept, in arrays that are read from the disk.

A million names as Python's texts take 100 MB, and as arrays of a file no memory but what is looked at.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np

from headrace.core.errors import DataError
from headrace.core.files import cache_directory
from headrace.core.store import Store
from headrace.core.units import format_list
from headrace.data.decoding.batch_decoder import FileExtents
from headrace.data.decoding.image import FORMATS_TEXT, BadImage, readable_extensions
from headrace.data.decoding.limits import refuse_large_file
from headrace.data.sets.held_out import hold_out, never_validated
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.kept_columns import read_columns, write_columns
from headrace.data.sets.mirror import Listed, Mirror
from headrace.data.sets.samples import Content

TRAIN_NAMES, VALIDATION_NAMES = ("train", "training"), ("val", "validation", "valid", "test")
_LISTERS = 16  # folders that are listed at the same time
_COLUMNS = ("names", "ends", "sizes", "labels")


class Names(Sequence[str]):
    """Texts as one array of bytes, and where each ends."""

    def __init__(self, text: np.ndarray, ends: np.ndarray) -> None:
        self._text, self._ends = text, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        number = range(len(self))[place]
        first = int(self._ends[number - 1]) if number else 0
        return self._text[first : int(self._ends[number])].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), 1 << 16):
            ends = self._ends[first : first + (1 << 16)].tolist()
            start = begin = int(self._ends[first - 1]) if first else 0
            text = self._text[start : ends[-1]].tobytes()
            for end in ends:
                yield text[begin - start : end - start].decode()
                begin = end


@dataclass(frozen=True, kw_only=True)
class FolderIndex:
    """The images of class folders, in order: first those for training, then those for validation."""

    names: Names
    sizes: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    num_train: int  # -1: the folders are not divided
    splits: tuple[str, ...]  # the folders of the two splits, where there are such
    num_skipped: int
    listed_at: str
    file: Path


def read_index(store: Store, folders: Sequence[str]) -> FolderIndex:
    """Return the index of a place with these folders: the one that was kept, or a new one."""
    key = hashlib.sha256(json.dumps([1, store.address, *folders]).encode()).hexdigest()[:24]
    file = cache_directory() / "indices" / f"folders-{key}.columns"
    try:
        return _kept(file)
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or a damaged one
        _make(store, folders, file)
    return _kept(file)


def _kept(file: Path) -> FolderIndex:
    columns, facts = read_columns(file)
    count, ends = len(columns["ends"]), columns["ends"]
    if not count or int(ends[-1]) != len(columns["names"]) or (np.diff(ends) <= 0).any():
        raise ValueError("its names are damaged")
    if any(len(columns[name]) != count for name in _COLUMNS[1:]):
        raise ValueError("its columns have several lengths")
    if columns["labels"].min() < 0 or columns["labels"].max() >= len(facts["class_names"]):
        raise ValueError("its labels are damaged")
    return FolderIndex(
        names=Names(columns["names"], ends),
        sizes=columns["sizes"],
        labels=columns["labels"],
        class_names=tuple(map(str, facts["class_names"])),
        num_train=int(facts["num_train"]),
        splits=tuple(map(str, facts["splits"])),
        num_skipped=int(facts["num_skipped"]),
        listed_at=str(facts["listed_at"]),
        file=file,
    )


def _make(store: Store, folders: Sequence[str], file: Path) -> None:
    """List all folders, and write what is there; the names stay bytes, one class after the other."""
    train = next((name for name in TRAIN_NAMES if name in folders), None)
    held = next((name for name in VALIDATION_NAMES if name in folders), None)
    if train is None:
        held = held if list(folders) == [held] else None
    tops = [name for name in (train, held) if name is not None] or [""]
    classes: tuple[str, ...] = ()
    parts: list[tuple[bytes, np.ndarray, np.ndarray, np.ndarray]] = []
    counts, num_skipped = [], 0
    for top in tops:
        within = store.listing(top)[0] if top else list(folders)
        within = [name for name in within if not name.startswith(".")]
        start = f"{top}/" if top else ""
        with ThreadPoolExecutor(_LISTERS, thread_name_prefix="list") as pool:
            found = list(pool.map(lambda name, start=start: _list_class(store, f"{start}{name}"), within))
        with_images = [name for name, part in zip(within, found, strict=True) if len(part.sizes)]
        num_skipped += sum(part.num_skipped for part in found)
        classes = classes or tuple(with_images)
        if strange := sorted(set(with_images) - set(classes)):
            raise DataError(
                f"{store.address}/{top} has {len(strange)} class folder(s) that training has not: "
                f"{format_list(strange, 5)}.",
                rule=f"Validation can only ask for classes that were trained: {format_list(classes, 5)}.",
            )
        counts.append(sum(len(part.sizes) for part in found))
        number = {name: label for label, name in enumerate(classes)}
        for name, part in zip(within, found, strict=True):
            if len(part.sizes):
                labels = np.full(len(part.sizes), number[name], np.int32)
                parts.append((part.text, part.lengths, part.sizes, labels))
    if len(classes) < 2:
        raise DataError(
            f"{store.address} has {'one class folder' if classes else 'no class folders'} with images.",
            rule=f"A class is a folder, its name the class's, with image files in it: {FORMATS_TEXT}.",
            remedy="Give the address of the folder that holds the class folders, or of shards.",
        )
    facts = {
        "class_names": classes,
        "num_train": -1 if tops == [""] else counts[0] if train else 0,
        "splits": [] if tops == [""] else tops,
        "num_skipped": num_skipped,
        "listed_at": time.strftime("%Y-%m-%d %H:%M", time.localtime()),
    }
    columns = {
        "names": np.frombuffer(b"".join(part[0] for part in parts), np.uint8),
        "ends": np.cumsum(np.concatenate([part[1] for part in parts]), dtype=np.int64),
        "sizes": np.concatenate([part[2] for part in parts]),
        "labels": np.concatenate([part[3] for part in parts]),
    }
    try:
        write_columns(file, columns, facts)
    except OSError as error:
        raise DataError(
            f"The index of {store.address} cannot be written to {file}: {error.strerror}.",
            remedy="Free some space, or name another cache directory: XDG_CACHE_HOME.",
        ) from None


@dataclass(frozen=True)
class _Part:
    text: bytes
    lengths: np.ndarray
    sizes: np.ndarray
    num_skipped: int


def _list_class(store: Store, folder: str) -> _Part:
    """List the images of a class, also in the folders below it, in the order of their names."""
    readable = readable_extensions()
    waiting, rows, num_skipped = [folder], [], 0
    while waiting:
        here = waiting.pop()
        folders, files = store.listing(here)
        waiting += [f"{here}/{name}" for name in folders if not name.startswith(".")]
        for entry in files:
            if entry.size and entry.name.lower().endswith(readable) and not entry.name.startswith("."):
                rows.append((f"{here}/{entry.name}".encode(), entry.size))
            else:
                num_skipped += 1
    rows.sort()
    return _Part(
        b"".join(name for name, _ in rows),
        np.array([len(name) for name, _ in rows], np.int64),
        np.array([size for _, size in rows], np.int64),
        num_skipped,
    )


def listed_images(index: FolderIndex) -> Listed:
    """Return the files of an index, as a mirror takes them."""
    return Listed(names=index.names, sizes=index.sizes, digest=index.file.name)


class ObjectSamples:
    """Images that are each a file in a store."""

    def __init__(self, mirror: Mirror, numbers: np.ndarray, labels: np.ndarray) -> None:
        self._mirror, self._numbers, self.labels = mirror, numbers, np.asarray(labels, np.int32)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, sample: int) -> str:
        """Return the address."""
        return f"{self._mirror.store.address}/{self._mirror.files.names[int(self._numbers[sample])]}"

    def content(self, sample: int) -> Content:
        """Return the file's bytes."""
        number = int(self._numbers[sample])
        size = self._mirror.size(number)
        refuse_large_file(size)
        data = self._mirror.read(number, 0, size)
        if len(data) != size:
            raise BadImage(f"{len(data):,} of {size:,} bytes are there")
        return Content(data)

    def extents(self, samples: np.ndarray) -> FileExtents:
        """Return where these images are, those that the disk may keep."""
        numbers = np.asarray(self._numbers[samples])
        sizes = np.asarray(self._mirror.files.sizes[numbers])
        there = self._mirror.fetch(numbers, numbers * 0, sizes)
        none, zero = np.full(len(samples), -1, np.int64), np.zeros(len(samples), np.int64)
        paths = [
            os.fsencode(self._mirror.path(number)) if here else b""
            for number, here in zip(numbers.tolist(), there.tolist(), strict=True)
        ]
        return FileExtents(paths, zero, lengths=none, crcs=none, skips=zero, sizes=none)

    def ahead(self, samples: np.ndarray) -> None:
        """Begin to fetch samples that will be wanted soon."""
        numbers = np.asarray(self._numbers[samples])
        self._mirror.ahead(numbers, numbers * 0, np.asarray(self._mirror.files.sizes[numbers]))


def open_folders(mirror: Mirror, index: FolderIndex, fraction: float) -> ImageSet:
    """Return the class folders of a store as a set of images."""
    address, everything = mirror.store.address, np.arange(len(index.labels))
    remarks: tuple[str, ...] = ()
    if index.num_train in (-1, len(everything)):
        part = f"a folder {VALIDATION_NAMES[0]} beside a folder {TRAIN_NAMES[0]}"
        held_out = hold_out(index.names, np.asarray(index.labels), fraction, index.class_names, address, part)
        train, held, split_by, remarks = (
            np.flatnonzero(~held_out.mask),
            np.flatnonzero(held_out.mask),
            held_out.text,
            held_out.remarks,
        )
    else:
        train, held = everything[: index.num_train], everything[index.num_train :]
        split_by = " and ".join(index.splits) if index.num_train else f"{index.splits[0]} alone"
        remarks = never_validated(index.class_names, np.asarray(index.labels[index.num_train :]))
    skipped = (f"{index.num_skipped:,} files are no images, or empty",) if index.num_skipped else ()
    kept = f"listed on {index.listed_at}; to list it anew, delete {index.file}"
    return ImageSet(
        kind="folder",
        place=address,
        class_names=index.class_names,
        train=ObjectSamples(mirror, train, index.labels[train]),
        validation=ObjectSamples(mirror, held, index.labels[held]),
        split_by=f"{split_by}, {kept}",
        remarks=(*skipped, *remarks),
    )
