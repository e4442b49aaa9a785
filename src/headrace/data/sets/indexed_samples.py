"""Samples stored in a few large files, located by an index: what all have in common, packed files, tar shards."""

import hashlib
import io
import json
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import DataError
from headrace.core.files import cache_directory, entries_of, parse_json, write_atomic
from headrace.core.units import format_list
from headrace.data.decoding.image import EXTENSIONS, BadImage, decode, decode_factor, encode_jpeg, read_header
from headrace.data.decoding.jpeg import NO_CHECKSUM, RECORD_CHECKSUM, FileExtents
from headrace.data.decoding.limits import refuse_large_file
from headrace.data.sets.catalog import numbered_classes
from headrace.data.sets.npz_file import stored_array
from headrace.data.sets.samples import Content, Samples

# The index of a set is made on first use and kept in the user's cache directory, under a name made of the files' names,
# sizes and times; a changed file gets a new index.


# Part of an index's name: with another number, indices of earlier versions are not read.
_VERSION = 3


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
        if index.parts is None:
            return places
        objects, ends = index.parts.objects_of(samples)
        skips, sizes = index.parts.skip[samples], index.parts.size[samples]
        return places._replace(skips=skips, sizes=sizes, objects=objects, object_ends=ends)

    def content(self, sample: int) -> Content:
        """Return the stored image and the boxes of the objects in it, where known."""
        length = int(self._index.length[sample]) + self._footer
        refuse_large_file(length)
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
        path = cache_directory() / "indices" / f"{kind}-{_fingerprint(kind, files, class_names)}.npz"
    except OSError as error:  # such as a link to a file that is not there
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}.", remedy="Fetch or build it again."
        ) from None
    try:
        names = ("file_number", "offset", "length", "labels", "class_names", *_PART_COLUMNS)
        arrays = read_npz(path.read_bytes(), names)
        names = parse_json(arrays.pop("class_names").tobytes())
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError("class names that are no list of names")
        arrays["file"] = arrays.pop("file_number")
        columns = {name: arrays.pop(name) for name in _PART_COLUMNS}
        # The index comes from a cache that others may write to: whatever it says stays inside the files.
        check_rows(arrays, [file.stat().st_size for file in files], len(names))
        parts = ImageParts(**columns) if len(columns["skip"]) else None
        if parts is not None:
            _check_parts(parts, arrays["length"])
        return Index(**arrays, class_names=tuple(names), parts=parts)
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or a damaged one: built again
        index = make()
    buffer = io.BytesIO()
    columns: dict[str, Any] = {}
    for name in _PART_COLUMNS:
        columns[name] = np.empty(0) if index.parts is None else getattr(index.parts, name)
    np.savez(
        buffer,
        file_number=index.file,  # not `file`, which is the name of savez's own parameter
        offset=index.offset,
        length=index.length,
        labels=index.labels,
        class_names=np.frombuffer(json.dumps(index.class_names).encode(), np.uint8),
        **columns,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, buffer.getvalue())
    except OSError:  # no writable cache directory: the next run builds it again
        pass
    return index


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
    file, offset, length, labels = (columns[name] for name in ("file", "offset", "length", "labels"))
    if not count:
        return
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


def make_index(rows: Sequence[tuple[int, int, int, int]], class_names: Sequence[str]) -> Index:
    """Return the index of rows (file, offset, length, label)."""
    columns = np.array(rows, np.int64).reshape(len(rows), 4).T
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


# Packed files: all images of a set in one file, resized once so that later epochs and runs read them quickly.
#
#     magic | images, one after the other | index (npz) | place, length and CRC-32 of the index | magic
#
# Images are JPEGs resized to a chosen shorter side (smaller ones stay as they are), with a restart marker after each
# row of blocks, so that a crop decodes only the rows it needs. Each has a CRC-32, checked whenever it is read. The file
# is read with `pread`, which releases the interpreter lock; a memory map would hold the lock while waiting for the
# disk.


MAGIC, END = b"headrace pack 1\n", b"end of pack\n"
_TRAILER = struct.Struct("<QQI")
SUFFIX = ".hrp"
_COLUMNS = ("offset", "length", "labels", "crc")


@dataclass(frozen=True, kw_only=True)
class Pack:
    """An opened packed file."""

    class_names: tuple[str, ...]
    train: StoredSamples
    validation: StoredSamples
    shorter_side: int
    quality: int

    @property
    def split_by(self) -> str:
        """Return how it was made."""
        return f"packed at a shorter side of {self.shorter_side}, quality {self.quality}"


def is_pack(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_pack(path: Path) -> Pack:
    """Open a packed file; one that is cut short or damaged is a DataError."""
    try:
        arrays, facts = _read_index(path)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, struct.error) as error:
        raise DataError(
            f"{path} is not a complete packed file: {error}.", remedy="Make it again with `headrace data pack`."
        ) from None
    count = facts["num_train"]

    def part(rows: slice) -> StoredSamples:
        crcs = arrays["crc"][rows]
        index = Index(
            file=np.zeros(len(crcs), np.int32),
            offset=arrays["offset"][rows],
            length=arrays["length"][rows],
            labels=arrays["labels"][rows],
        )

        def checked(data: bytes, sample: int) -> Content:
            if zlib.crc32(data) != crcs[sample]:
                raise BadImage("the checksum is wrong")
            return Content(data)

        return StoredSamples([path], index, checked, crcs=crcs)

    return Pack(
        class_names=tuple(facts["class_names"]),
        train=part(slice(0, count)),
        validation=part(slice(count, None)),
        shorter_side=facts["shorter_side"],
        quality=facts["quality"],
    )


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """The result of packing."""

    path: Path
    num_samples: int
    num_bytes: int
    before_bytes: int
    bad: tuple[str, ...]


def write_pack(
    path: Path,
    class_names: Iterable[str],
    splits: tuple[Samples, Samples],
    form: tuple[int, int],
    num_threads: int,
) -> PackReport:
    """Pack both splits; `form` is (shorter side, quality). Bad images are left out and listed in the report."""
    shorter_side, quality = form
    jobs = [(split, sample) for split, samples in enumerate(splits) for sample in range(len(samples))]
    rows: list[tuple[int, int, int, int, int]] = []
    bad: list[str] = []
    before = 0
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")

    def work(job: tuple[int, int]) -> tuple[bytes | None, int, str]:
        samples, sample = splits[job[0]], job[1]
        try:
            content = samples.content(sample)
            return repack(content.image, shorter_side, quality), content.num_bytes, ""
        except BadImage as error:
            return None, 0, f"{samples.name(sample)}: {error}"

    try:
        with temporary.open("wb") as file, ThreadPoolExecutor(num_threads) as pool:
            file.write(MAGIC)
            for start in range(0, len(jobs), 1024):  # limits how many encoded images wait in memory to be written
                some = jobs[start : start + 1024]
                for (split, sample), (data, size, problem) in zip(some, pool.map(work, some), strict=True):
                    if data is None:
                        bad.append(problem)
                        continue
                    rows.append((split, file.tell(), len(data), int(splits[split].labels[sample]), zlib.crc32(data)))
                    file.write(data)
                    before += size
            _write_index(
                file, rows, {"class_names": list(class_names), "shorter_side": shorter_side, "quality": quality}
            )
        # Only now under its name: an interrupted pack never looks like a complete one.
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return PackReport(
        path=path, num_samples=len(rows), num_bytes=path.stat().st_size, before_bytes=before, bad=tuple(bad)
    )


def repack(data: bytes | np.ndarray, shorter_side: int, quality: int) -> bytes:
    """Return an image as a JPEG whose shorter side is at most this, turned upright."""
    from PIL import Image

    if isinstance(data, np.ndarray):
        pixels = data[:, :, :3]  # a JPEG has no alpha channel, and training drops it too
    else:
        header = read_header(data)
        shrink = min(1.0, shorter_side / min(header.height, header.width))
        wanted = max(1, round(header.height * shrink)), max(1, round(header.width * shrink))
        pixels = decode(data, header, 3, decode_factor(header, (header.height, header.width), wanted))
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    # Again, from the decoded size: decoding at a fraction has done part of the shrinking.
    shrink = min(1.0, shorter_side / min(image.size))
    if shrink < 1:
        size = max(1, round(image.width * shrink)), max(1, round(image.height * shrink))
        image = image.resize(size, Image.Resampling.BILINEAR)
    # A marker after each row of blocks: crops then skip the rows above them.
    return encode_jpeg(image, quality, rows_between_markers=1)


def _write_index(file: io.BufferedWriter, rows: list[tuple[int, int, int, int, int]], facts: dict) -> None:
    columns = np.array(rows, np.int64).reshape(len(rows), 5).T
    facts = facts | {"num_train": int((columns[0] == 0).sum())}
    buffer = io.BytesIO()
    np.savez(
        buffer,
        offset=columns[1],
        length=columns[2],
        labels=columns[3].astype(np.int32),
        crc=columns[4].astype(np.uint32),
        facts=np.frombuffer(json.dumps(facts).encode(), np.uint8),
    )
    index = buffer.getvalue()
    place = file.tell()
    file.write(index + _TRAILER.pack(place, len(index), zlib.crc32(index)) + END)
    file.flush()
    # Before the rename, which may otherwise reach the disk earlier than the data.
    os.fsync(file.fileno())


def _read_index(path: Path) -> tuple[dict[str, np.ndarray], dict]:
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin like one")
        tail = _TRAILER.size + len(END)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - tail))
        trailer = file.read(tail)
        if trailer[-len(END) :] != END:
            raise ValueError("its end is missing")
        place, length, crc = _TRAILER.unpack(trailer[: _TRAILER.size])
        if place > size or length > size - place:
            raise ValueError("the place of its index is beyond its end")
        file.seek(place)
        index = file.read(length)
    if len(index) != length or zlib.crc32(index) != crc:
        raise ValueError("the checksum of its index is wrong")
    arrays = read_npz(index, (*_COLUMNS, "facts"))
    facts = parse_json(arrays.pop("facts").tobytes())
    _check_facts(facts, len(arrays["crc"]))
    check_rows(arrays | {"file": np.zeros(len(arrays["crc"]), np.int32)}, [size], len(facts["class_names"]))
    return arrays, facts


def _check_facts(facts: dict, count: int) -> None:
    numbers = [facts[name] for name in ("num_train", "shorter_side", "quality")]
    if not all(type(number) is int for number in numbers) or not 0 <= numbers[0] <= count:
        raise ValueError("its numbers are impossible")
    if not isinstance(facts["class_names"], list) or not all(isinstance(name, str) for name in facts["class_names"]):
        raise ValueError("its class names are not a list of names")
    if not facts["class_names"]:
        raise ValueError("it names no classes")


# Tar shards in WebDataset's layout: `KEY.jpg` beside `KEY.cls` (a label in digits) or `KEY.json` (with a `label`).


_VALIDATION = ("val", "test")
_LABELS = (".cls", ".json")
_MAX_LABEL_BYTES = 1 << 20  # a label is a few bytes; whatever else has such a name is not read
# A header that counts for all files is gone through for each: one of a megabyte took 12 ms of each.
_MAX_HEADER_BYTES = 1 << 16


def plain_content(data: bytes, sample: int) -> Content:
    """Return the content of a sample whose stored bytes are the image itself."""
    return Content(data)


def has_tar_shards(path: Path) -> bool:
    """Say whether a folder has tar files."""
    return path.is_dir() and any(entry.suffix == ".tar" for entry in path.iterdir())


def tar_shards(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the shards of training and validation: those with val or test in their name are the latter."""
    files = sorted(file for file in path.glob("*.tar") if file.is_file())
    validation = [file for file in files if any(name in file.stem.lower() for name in _VALIDATION)]
    return [file for file in files if file not in validation], validation


def tar_index(files: Sequence[Path]) -> Index:
    """Return the index of these shards; classes are named by a file `classes.txt` beside them, or numbered."""
    names = read_names(files[0].parent / "classes.txt")
    return indexed("tar", files, names, lambda: _make_index(files, names))


def _make_index(files: Sequence[Path], class_names: tuple[str, ...]) -> Index:
    rows = []
    for number, path in enumerate(files):
        try:
            rows += _rows_of(path, number)
        except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError) as error:
            # tarfile calls itself for each header that describes another one.
            problem = "one file has hundreds of headers" if isinstance(error, RecursionError) else error
            raise DataError(
                f"{path} is not a complete tar file: {problem}.", remedy="Fetch or make it again."
            ) from None
    if not rows:
        raise DataError(f"{files[0].parent} has no images in its tar files.", rule="A sample is KEY.jpg and KEY.cls.")
    count = max(row[3] for row in rows) + 1
    if class_names and count > len(class_names):
        raise DataError(f"A label is {count - 1}, but there are {len(class_names)} class names.")
    return make_index(rows, class_names or numbered_classes(count))


class _TarBytes(io.FileIO):
    """A tar file that is read in small pieces: tarfile would read a name or header of any length that is named."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size or -1:,} bytes at byte {self.tell():,}")
        return super().read(size) or b""


def _rows_of(path: Path, number: int) -> list[tuple[int, int, int, int]]:
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    # Uncompressed only: images inside a compressed archive could not be read by their offset.
    with _TarBytes(path) as stored, tarfile.open(fileobj=stored, mode="r:") as archive:
        size = path.stat().st_size
        # Not `for member in archive`, which keeps all of them: each has a copy of the headers for all that follow.
        while (member := archive.next()) is not None:
            archive.members.clear()  # pyright: ignore[reportAttributeAccessIssue]; its types lack it
            folder, _, base = member.name.rpartition("/")
            # At the first dot, as WebDataset has it: KEY.seg.png belongs to KEY.
            key, dot, suffix = base.partition(".")
            key = f"{folder}/{key}"
            if not member.isfile() or not dot:
                continue
            # tarfile does not notice that the last file is cut off.
            if member.offset_data + member.size > size:
                raise tarfile.ReadError(f"it ends inside {member.name}")
            if f".{suffix.lower()}" in EXTENSIONS:
                images[key] = (member.offset_data, member.size)
            elif f".{suffix.lower()}" in _LABELS and member.size <= _MAX_LABEL_BYTES:
                file = archive.extractfile(member)
                assert file is not None
                data = b"".join(iter(lambda file=file: file.read(_MAX_HEADER_BYTES), b""))
                labels[key] = _label(path, member.name, data)
    lost = [key.lstrip("/") for key in images if key not in labels]
    if lost:
        raise DataError(
            f"{path}: {len(lost):,} image(s) without a label, such as {lost[0]}.",
            rule="Beside KEY.jpg there is KEY.cls with the label in digits, or KEY.json with a `label`.",
        )
    return [(number, *place, labels[key]) for key, place in images.items()]


def _label(path: Path, name: str, data: bytes) -> int:
    try:
        label = parse_json(data)["label"] if name.endswith(".json") else int(data.decode())
        if isinstance(label, str):
            label = int(label)
        if type(label) is not int:  # int() would accept 1.9 and make it 1
            raise TypeError(label)
    except (ValueError, KeyError, TypeError):
        raise DataError(
            f"{path}: {name} holds no label, but {data[:40]!r}.", rule="A label is a whole number."
        ) from None
    if not 0 <= label < 1_000_000:
        raise DataError(f"{path}: the label in {name} is {label}, out of range.", rule="Labels start from 0.")
    return label
