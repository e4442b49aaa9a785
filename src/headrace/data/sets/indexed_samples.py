"""Samples stored in a few large files, located by an index.

The index of a set is made on first use and kept in the user's cache directory, under a name made of the files' names,
sizes and times; a changed file gets a new index.
"""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headrace.core.errors import DataError
from headrace.core.files import cache_directory, entries_of
from headrace.core.units import format_list
from headrace.data.decoding.batch_decoder import NO_CHECKSUM, RECORD_CHECKSUM, FileExtents
from headrace.data.decoding.image import BadImage
from headrace.data.decoding.limits import refuse_large_file
from headrace.data.sets.kept_columns import read_columns, write_columns
from headrace.data.sets.mirror import mirror_of
from headrace.data.sets.npz_file import stored_array
from headrace.data.sets.samples import Content

# Part of an index's name: with another number, indices of earlier versions are not read.
_VERSION = 4


@dataclass(frozen=True, kw_only=True)
class ImageParts:
    """For each stored sample, which of its bytes are the image, and which boxes belong to its objects."""

    skip: np.ndarray  # int64, from the sample's first byte
    size: np.ndarray  # int64
    first_object: np.ndarray  # int32, numbers of rows of `objects`
    end_object: np.ndarray  # int32
    objects: np.ndarray  # float32 [m, 4]: top, left, bottom, right, from 0 to 1

    def take(self, chosen: np.ndarray) -> "ImageParts":
        """Return the parts of a subset of the samples."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in _PART_COLUMNS[:4]})

    def objects_of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the boxes of these samples one after the other, and where each sample's end."""
        first, end = self.first_object[samples], self.end_object[samples]
        rows = [self.objects[start:stop] for start, stop in zip(first.tolist(), end.tolist(), strict=True)]
        return np.concatenate([self.objects[:0], *rows]), np.cumsum(end - first, dtype=np.int32)


_PART_COLUMNS = ("skip", "size", "first_object", "end_object", "objects")


@dataclass(frozen=True, kw_only=True)
class Index:
    """Where the samples of a split are stored (file number, first byte, length), and their labels, from 0."""

    file: np.ndarray  # int32
    offset: np.ndarray  # int64
    length: np.ndarray  # int64
    labels: np.ndarray  # int32
    class_names: tuple[str, ...] = ()
    parts: ImageParts | None = None  # None: what is stored is the image

    def take(self, chosen: np.ndarray) -> "Index":
        """Return the index of a subset of the samples."""
        columns = {name: getattr(self, name)[chosen] for name in ("file", "offset", "length", "labels")}
        return replace(self, **columns, parts=self.parts and self.parts.take(chosen))


class StoredSamples:
    """The samples of an index. `open_content(bytes, sample)` turns stored bytes into an image.

    `crcs` are the CRC-32 of each sample, where known; `footer` bytes after a sample are a TFRecord's checksum.
    """

    def __init__(
        self,
        files: Sequence[Path],
        index: Index,
        open_content: Callable[[bytes, int], Content],
        footer: int = 0,
        crcs: np.ndarray | None = None,
    ) -> None:
        self._files, self._index, self._open, self._footer = tuple(map(str, files)), index, open_content, footer
        self._crcs, self.labels = crcs, index.labels
        self._mirror = mirror_of(files[0]) if files else None
        if self._mirror is not None:  # files of a store
            self._numbers = np.array([self._mirror.number(file) for file in files], np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, sample: int) -> str:
        """Return the file and the byte."""
        return f"{self._files[self._index.file[sample]]}, byte {int(self._index.offset[sample]):,}"

    def extents(self, samples: np.ndarray) -> FileExtents:
        """Return where these images are stored."""
        index, files, count = self._index, [os.fsencode(file) for file in self._files], len(samples)
        none = RECORD_CHECKSUM if self._footer else NO_CHECKSUM
        crcs = np.full(count, none, np.int64) if self._crcs is None else self._crcs[samples].astype(np.int64)
        places = FileExtents(
            paths=[files[number] for number in index.file[samples].tolist()],
            offsets=index.offset[samples],
            lengths=index.length[samples] + self._footer,
            crcs=crcs,
            skips=np.zeros(count, np.int64),
            sizes=np.full(count, -1, np.int64),
        )
        if self._mirror is not None:
            there = self._mirror.fetch(self._numbers[index.file[samples]], places.offsets, places.lengths)
            for place in np.flatnonzero(~there).tolist():
                places.paths[place] = b""  # too much to keep: read by `content`
        if index.parts is None:
            return places
        objects, ends = index.parts.objects_of(samples)
        skips, sizes = index.parts.skip[samples], index.parts.size[samples]
        return places._replace(skips=skips, sizes=sizes, objects=objects, object_ends=ends)

    def ahead(self, samples: np.ndarray) -> None:
        """Begin to fetch samples that will be wanted soon, where they are in a store."""
        if self._mirror is not None:
            index = self._index
            numbers, lengths = self._numbers[index.file[samples]], index.length[samples] + self._footer
            self._mirror.ahead(numbers, index.offset[samples], lengths)

    def content(self, sample: int) -> Content:
        """Return the stored image and the boxes of the objects in it, where known."""
        length = int(self._index.length[sample]) + self._footer
        refuse_large_file(length)
        if self._mirror is not None:
            number = int(self._numbers[self._index.file[sample]])
            return self._open(self._mirror.read(number, int(self._index.offset[sample]), length), sample)
        try:
            # Opened each time: a thousand shards would use up the descriptors of a process, and opening costs
            # microseconds.
            handle = os.open(self._files[self._index.file[sample]], os.O_RDONLY)
            try:
                data = os.pread(handle, length, int(self._index.offset[sample]))  # releases the interpreter lock
            finally:
                os.close(handle)
        except OSError as error:
            raise BadImage(f"cannot be read: {error.strerror or error}") from None
        if len(data) != length:
            raise BadImage(f"the file ends inside: {len(data):,} of {length:,} bytes")
        return self._open(data, sample)


def indexed(kind: str, files: Sequence[Path], class_names: Sequence[str], make: Callable[[], Index]) -> Index:
    """Return the index of these files: from the cache, or built and, if possible, cached.

    `class_names` are those that a file beside them gives its classes.
    """
    try:
        path = cache_directory() / "indices" / f"{kind}-{_fingerprint(kind, files, class_names)}.columns"
    except OSError as error:  # such as a link to a file that is not there
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}.", remedy="Fetch or build it again."
        ) from None
    try:
        return _kept(path, files)
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or a damaged one: built again
        index = make()
    columns = {name: getattr(index, name) for name in _COLUMNS}
    if index.parts is not None:
        columns |= {name: getattr(index.parts, name) for name in _PART_COLUMNS}
    try:
        write_columns(path, columns, {"class_names": index.class_names})
        # As the next run will read it: from the disk, in no memory of its own.
        return _kept(path, files)
    except (OSError, ValueError):  # no writable cache directory: the next run builds it again
        return index


_COLUMNS = ("file", "offset", "length", "labels")


def _kept(path: Path, files: Sequence[Path]) -> Index:
    columns, facts = read_columns(path)
    names = facts["class_names"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("class names that are no list of names")
    arrays = {name: columns[name] for name in _COLUMNS}
    # The index comes from a cache that others may write to: whatever it says stays inside the files.
    check_rows(arrays, [file.stat().st_size for file in files], len(names))
    parts = ImageParts(**{name: columns[name] for name in _PART_COLUMNS}) if "skip" in columns else None
    if parts is not None:
        _check_parts(parts, arrays["length"])
    return Index(**arrays, class_names=tuple(names), parts=parts)


def read_names(file: Path) -> tuple[str, ...]:
    """Return the class names in a text file, one per line; () if there is no such file."""
    try:
        return tuple(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else ()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} cannot be read: {error}.", rule="Class names are UTF-8 text.", remedy="Save it as UTF-8."
        ) from None


def read_npz(data: bytes, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return arrays that `np.savez` wrote; any damage is a ValueError. Takes twice the file's size in memory."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = entries_of(archive)
            stored = all(info.compress_type == zipfile.ZIP_STORED for info in infos)
            # np.savez does not compress. A compressed array of a few bytes could unpack to any size.
            if not stored or sum(info.file_size for info in infos) > len(data):
                raise ValueError("its arrays are larger than the file")
            found = {info.filename.removesuffix(".npy"): stored_array(archive, info) for info in infos}
            beyond = [name for name in names if not found[name].fits]
            if beyond:
                raise ValueError(f"{beyond[0]} is {found[beyond[0]]}, which the file cannot hold")
            return {name: found[name].read(archive) for name in names}
    except Exception as error:  # zipfile and NumPy raise nearly anything for damaged files
        raise ValueError(f"its index is damaged ({type(error).__name__}: {error})") from error


def check_rows(columns: Mapping[str, np.ndarray], file_sizes: Sequence[int], num_classes: int) -> None:
    """Refuse, with a ValueError, an index whose samples are not inside their files or classes."""
    count = len(columns["file"]) if columns["file"].ndim else -1
    for name, column in columns.items():
        _refuse_other_columns(name, column, (count,))
    for first in range(0, count, _CHECKED):  # some at a time: what is made for all of them would take memory
        _check_some(
            {name: column[first : first + _CHECKED] for name, column in columns.items()}, file_sizes, num_classes
        )


_CHECKED = 1 << 20


def _check_some(columns: Mapping[str, np.ndarray], file_sizes: Sequence[int], num_classes: int) -> None:
    file, offset, length, labels = (columns[name] for name in ("file", "offset", "length", "labels"))
    if file.min() < 0 or file.max() >= len(file_sizes) or offset.min() < 0 or length.min() < 0:
        raise ValueError("its index names places that are in no file")
    sizes = np.array(file_sizes, np.int64)[file]
    if (offset > sizes).any() or (length > sizes - offset).any():
        raise ValueError("its index names places beyond the end of a file")
    if labels.min() < 0 or (num_classes and labels.max() >= num_classes):
        raise ValueError(f"its index has the label {labels.max()}, but there are {num_classes} classes from 0")


def _refuse_other_columns(name: str, column: np.ndarray, shape: tuple[int, ...]) -> None:
    if column.dtype.kind not in "iu" or column.shape != shape:
        raise ValueError(f"the column {name} of its index is {column.dtype}{list(column.shape)}")


def _check_parts(parts: ImageParts, lengths: np.ndarray) -> None:
    """Refuse, with a ValueError, images that are not inside their samples and objects that do not exist."""
    for name in _PART_COLUMNS[:4]:
        column = getattr(parts, name)
        _refuse_other_columns(name, column, lengths.shape)
        if column.min() < 0:
            raise ValueError(f"the column {name} of its index has negative numbers")
    if (parts.skip > lengths).any() or (parts.size > lengths - parts.skip).any():
        raise ValueError("its index names images beyond the end of their records")
    if parts.objects.dtype != np.float32 or parts.objects.ndim != 2 or parts.objects.shape[1] != 4:
        raise ValueError(f"the objects of its index are {parts.objects.dtype}{list(parts.objects.shape)}")
    if (parts.first_object > parts.end_object).any() or parts.end_object.max() > len(parts.objects):
        raise ValueError("its index names objects that it does not have")


def make_index(rows: Sequence[tuple[int, int, int, int]] | np.ndarray, class_names: Sequence[str]) -> Index:
    """Return the index of rows (file, offset, length, label)."""
    columns = np.asarray(rows, np.int64).reshape(len(rows), 4).T
    file, offset, length, labels = columns
    return Index(
        file=file.astype(np.int32),
        offset=offset,
        length=length,
        labels=labels.astype(np.int32),
        class_names=tuple(class_names),
    )


def empty_classes(index: Index) -> tuple[str, ...]:
    """Return a remark on the classes without samples, as in a part of ImageNet, if there are any."""
    counts = np.bincount(index.labels, minlength=len(index.class_names))
    empty = [index.class_names[label] for label in np.flatnonzero(counts == 0)]
    if not empty:
        return ()
    return (f"{len(empty):,} of {len(counts):,} classes have no training image: {format_list(empty, 3)}",)


def refuse_new_labels(path: Path, train: Index, validation: Index) -> None:
    """Refuse a set whose validation split has classes that training does not have."""
    most = int(validation.labels.max())
    if most >= len(train.class_names):
        raise DataError(
            f"{path}: validation has the class number {most}, training {len(train.class_names)} classes from 0.",
            rule="Validation can only ask for classes that were trained.",
        )


def _fingerprint(kind: str, files: Sequence[Path], class_names: Sequence[str]) -> str:
    # Not the content: reading all of a dataset to see that it has not changed would take as long as indexing it.
    # With the names, which are in the index: a file of names may be added to shards that were already used.
    facts = [(str(path.absolute()), stat.st_size, stat.st_mtime_ns) for path in files for stat in [path.stat()]]
    return hashlib.sha256(json.dumps([_VERSION, kind, facts, list(class_names)]).encode()).hexdigest()[:24]
