"""Read the known datasets: the embedded digits, CIFAR, idx files of MNIST, and where their files are."""

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import DataError
from headrace.core.files import is_directory
from headrace.core.rng import bits, name_id
from headrace.core.unpickle import PickleKind, RefusedPickle, read_pickle, shorten
from headrace.data.sets.catalog import DIGITS, Layout, SetRow
from headrace.data.sets.file_problem import FileProblem, Part, empty_part, join_parts, label_problem
from headrace.data.sets.get import PublishedSet, datasets_directory

# The embedded digits: 1,797 handwritten digits of 8 x 8 values from 0 to 16, enlarged to 32 x 32 grey images.
#
# For source and licence see files/NOTICE.txt. Enlarging and splitting use whole numbers only, so every machine has the
# same images and the same split, whatever the run's seed.


_FILE = "digits.npz"
_SHA256 = "56691635b5c95f315ed55907c4fe83309809b3b822ee0b8d68e84bba3ffd4ca3"
_FACTOR = 4


def read_digits() -> dict[str, Part]:
    """Return the two splits, with a finding if the shipped file has changed."""
    file = resources.files("headrace.data").joinpath("files", _FILE)
    path = Path(str(file))
    try:
        data = file.read_bytes()
    except OSError as error:
        return _damaged(path, f"cannot be read: {error.strerror}")
    # Accuracies of the demo and of the tests belong to these very images.
    if hashlib.sha256(data).hexdigest() != _SHA256:
        return _damaged(path, "not the file that belongs to this version; install Headrace again")
    images, labels, held_out = _unpack(data)
    return {
        "train": Part(images=images[~held_out], labels=labels[~held_out]),
        "validation": Part(images=images[held_out], labels=labels[held_out]),
    }


@lru_cache(maxsize=1)  # for the next run of the process; what is selected from these arrays are copies
def _unpack(data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return images, labels, and which samples are held out."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        values, labels = arrays["images"], arrays["labels"].astype(np.int32)
    return enlarge(values), labels, validation_mask(labels)


def enlarge(values: np.ndarray) -> np.ndarray:
    """Return [n, 8, 8] values of 0..16 as [n, 32, 32, 1] bytes: bilinear, pixel centres aligned, edges repeated."""
    # Whole numbers up to 1,024 are exact as floats, whose products are ten times as fast.
    weights = _weights(values.shape[1]).astype(np.float32)
    sums = (weights @ values.astype(np.float32) @ weights.T).astype(np.int32)  # 64 times the value between 0 and 16
    return ((sums * 255 + 512) // 1024).astype(np.uint8)[..., None]


def validation_mask(labels: np.ndarray) -> np.ndarray:
    """Return which samples are held out: the wanted number of each class, drawn by sample number."""
    draw = bits(name_id("digits/validation"), np.arange(len(labels), dtype=np.uint32))
    held_out = np.zeros(len(labels), bool)
    for label, count in enumerate(DIGITS.validation_counts):
        members = np.flatnonzero(labels == label)
        held_out[members[np.argsort(draw[members], kind="stable")[:count]]] = True
    return held_out


def _weights(size: int) -> np.ndarray:
    """Return the bilinear weights [4 * size, size] in eighths."""
    weights = np.zeros((size * _FACTOR, size), np.int64)
    for out in range(size * _FACTOR):
        low, part = divmod(2 * out + 1 - _FACTOR, 2 * _FACTOR)  # position (out + 1/2) / 4 - 1/2, in eighths
        weights[out, max(low, 0)] += 2 * _FACTOR - part
        weights[out, min(low + 1, size - 1)] += part
    return weights


def _damaged(path: Path, problem: str) -> dict[str, Part]:
    part = empty_part(DIGITS.image_hwc, FileProblem(path=path, problem=problem))
    return {"train": part, "validation": empty_part(DIGITS.image_hwc)}


# Read CIFAR-10 and CIFAR-100: binary records and Python batches. An image is stored as 3 planes of 32 x 32 bytes.


def read_binary(path: Path, row: SetRow, num_records: int) -> Part:
    """Read records of [coarse label] label, pixels; the label used is the last one before the pixels."""
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        return _unreadable(path, row, error)
    num_labels = 2 if row.coarse_classes else 1
    size = num_labels + _num_pixels(row)
    whole = min(len(data) // size, num_records)
    findings = []
    # What is whole is still read: the report then lists other problems of the file, too.
    if len(data) != num_records * size:
        findings.append(
            FileProblem(
                path=path,
                offset=min(len(data), num_records * size),
                problem=f"the file has {len(data):,} bytes, but {num_records:,} records of {size:,} bytes are "
                f"{num_records * size:,}; {_end(len(data), size, num_records)}",
            )
        )
    records = data[: whole * size].reshape(whole, size)
    labels = records[:, num_labels - 1].astype(np.int32)
    if row.coarse_classes:
        findings += label_problem(path, records[:, 0].astype(np.int32), row.coarse_classes, (0, size), "coarse label")
    findings += label_problem(path, labels, row.num_classes, (num_labels - 1, size))
    return Part(images=_to_hwc(records[:, num_labels:], row), labels=labels, findings=tuple(findings))


def read_python(path: Path, row: SetRow, num_records: int) -> Part:
    """Read a pickled dict with `data` and `labels` (CIFAR-100: `fine_labels`)."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        return _unreadable(path, row, error)
    try:
        batch = read_batch_pickle(raw)
    except ValueError as error:
        return empty_part(
            row.image_hwc, FileProblem(path=path, offset=len(raw), problem=f"refused or damaged: {error}")
        )
    key = "fine_labels" if row.coarse_classes else "labels"
    problem = _batch_problem(batch, key, row)
    if problem:
        return empty_part(row.image_hwc, FileProblem(path=path, problem=problem))
    pixels, labels = batch["data"], np.array(batch[key], np.int64).astype(np.int32)
    findings = []
    if not len(pixels) == len(labels) == num_records:
        findings.append(
            FileProblem(
                path=path, problem=f"{len(pixels):,} images and {len(labels):,} labels, not {num_records:,} of each"
            )
        )
    whole = min(len(pixels), len(labels), num_records)
    findings += label_problem(path, labels, row.num_classes, None)
    return Part(images=_to_hwc(pixels[:whole], row), labels=labels[:whole], findings=tuple(findings))


def read_class_names(path: Path, num_classes: int) -> tuple[str, ...] | None:
    """Return the class names shipped with a dataset (text lines or a pickled list), or None if they are not usable."""
    try:
        if path.suffix == ".txt":
            names: Any = path.read_text(encoding="utf-8").split()
        else:
            meta = read_batch_pickle(path.read_bytes())
            found = meta.get("fine_label_names", meta.get("label_names"))
            names = [name.decode() if isinstance(name, bytes) else str(name) for name in found]
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return tuple(names) if len(names) == num_classes else None


def _batch_problem(batch: object, key: str, row: SetRow) -> str:
    """Return what is wrong with the structure of a Python batch, '' if nothing is."""
    if not isinstance(batch, dict) or "data" not in batch or key not in batch:
        return f"not a batch: a dict with `data` and `{key}` is expected"
    pixels, labels = batch["data"], batch[key]
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _num_pixels(row):
        return f"`data` is not an array of images by {_num_pixels(row):,} bytes"
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**31 for label in labels):
        return f"`{key}` is not a list of whole numbers"
    return ""


@dataclass(slots=True)
class _PickledDtype:
    code: str


@dataclass(slots=True)
class _PickledArray:
    """A uint8 array whose state comes later in the pickle."""

    array: np.ndarray | None = None


def _pickled_dtype(code: object, *_flags: object) -> _PickledDtype:
    return _PickledDtype(code.decode("latin1") if isinstance(code, bytes) else str(code)[:20])


def _set_array(target: _PickledArray, state: object) -> None:
    """Take an array's state: (version, shape, dtype, is Fortran order, bytes)."""
    if not isinstance(state, tuple) or len(state) != 5:
        raise RefusedPickle("an array without its five values")
    _, shape, dtype, fortran, data = state
    if (
        not isinstance(dtype, _PickledDtype)
        or dtype.code not in ("u1", "|u1")
        or not isinstance(data, bytes | bytearray)
    ):
        raise RefusedPickle("an array that does not hold bytes (uint8)")
    if not isinstance(shape, tuple) or len(shape) > 8 or not all(type(size) is int and size >= 0 for size in shape):
        raise RefusedPickle(f"an array of shape {shorten(shape)}")
    target.array = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


def _array_from_buffer(data: object, dtype: object, shape: object, order: object = "C") -> _PickledArray:
    """Replace the function through which protocol 5 passes an array."""
    array = _PickledArray()
    _set_array(array, (1, shape, dtype, order == "F", data))
    return array


def _latin1(text: object, encoding: object = "latin1") -> bytes:
    """Replace `_codecs.encode`, with which Python 3 writes bytes in protocol 2."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise RefusedPickle("an encoding other than latin1")
    return text.encode("latin1")


# NumPy 2.0 renamed the module, so both names occur in files.
_BATCH = PickleKind(
    content="datasets",
    names={
        **{(f"numpy.{core}.multiarray", "_reconstruct"): lambda *_: _PickledArray() for core in ("core", "_core")},
        **{(f"numpy.{core}.numeric", "_frombuffer"): _array_from_buffer for core in ("core", "_core")},
        ("numpy", "ndarray"): "numpy.ndarray",
        ("numpy", "dtype"): _pickled_dtype,
        ("_codecs", "encode"): _latin1,
    },
    objects=(_PickledArray,),
    # A dtype's state is its byte order and alignment: one-byte numbers have none.
    build={_PickledArray: _set_array, _PickledDtype: lambda dtype, state: None},
)


def read_batch_pickle(data: bytes) -> Any:
    """Return a batch's dict, lists, texts, numbers and uint8 arrays. Whatever is wrong is a ValueError."""
    batch, _ = read_pickle(data, _BATCH)
    if not isinstance(batch, dict):
        raise RefusedPickle(f"a {type(batch).__name__} instead of a dict")
    return {key: value.array if isinstance(value, _PickledArray) else value for key, value in batch.items()}


def _unreadable(path: Path, row: SetRow, error: OSError) -> Part:
    return empty_part(row.image_hwc, FileProblem(path=path, problem=f"cannot be read: {error.strerror}"))


def _num_pixels(row: SetRow) -> int:
    return int(np.prod(row.image_hwc))


def _to_hwc(pixels: np.ndarray, row: SetRow) -> np.ndarray:
    """Turn planes into pixels, a channel at a time: twice as fast as one transposed copy."""
    channels = row.image_hwc[2]
    images = np.empty((len(pixels), *row.image_hwc), np.uint8)
    for channel, plane in enumerate(np.split(pixels, channels, axis=1)):
        images[..., channel] = plane.reshape(images.shape[:-1])
    return images


def _end(num_bytes: int, size: int, num_records: int) -> str:
    whole, rest = divmod(num_bytes, size)
    if num_bytes > num_records * size:
        return f"{num_bytes - num_records * size:,} bytes too many"
    return f"it ends {rest:,} bytes into record {whole:,}" if rest else f"it ends after record {whole - 1:,}"


# Read idx files (MNIST and similar datasets), plain or compressed: a magic number, the sizes, then one byte per value.
#
# Offsets in messages count bytes of the uncompressed file.


_UINT8 = 8  # the type byte of idx
_CHUNK = 1 << 20


def read_pair(images_path: Path | None, labels_path: Path | None, row: SetRow, num_samples: int) -> Part:
    """Read the file of images and the file of labels of one split; a path that is None counts as empty."""
    height, width, channels = row.image_hwc
    assert channels == 1, "idx files hold grey images"
    pixels, found = _read(images_path, (num_samples, height, width))
    labels, found_labels = _read(labels_path, (num_samples,))
    findings = found + found_labels
    if labels_path is not None:
        findings += label_problem(labels_path, labels, row.num_classes, (8, 1))
    if images_path is None or labels_path is None:
        return empty_part(row.image_hwc, *findings)
    whole = min(len(pixels), len(labels))
    return Part(
        images=pixels[:whole].reshape(whole, *row.image_hwc),
        labels=labels[:whole].astype(np.int32),
        findings=tuple(findings),
    )


def _read(path: Path | None, shape: tuple[int, ...]) -> tuple[np.ndarray, list[FileProblem]]:
    """Return the complete items in the file, and what is wrong with it."""
    nothing = np.zeros((0, *shape[1:]), np.uint8)
    if path is None:
        return nothing, []
    header = 4 + 4 * len(shape)
    data, findings = _bytes_of(path, header + int(np.prod(shape, dtype=np.int64)))
    if len(data) < header:
        problems = findings or [
            FileProblem(path=path, offset=len(data), problem=f"ends inside the header of {header} bytes")
        ]
        return nothing, problems
    problem = _magic_problem(data[:4], len(shape))
    if problem:
        return nothing, [*findings, FileProblem(path=path, offset=0, problem=problem)]
    sizes = tuple(int(size) for size in np.frombuffer(data[4:header], ">u4"))
    if sizes[1:] != shape[1:]:
        problem = f"images of {' x '.join(map(str, sizes[1:]))}, not {' x '.join(map(str, shape[1:]))}"
        return nothing, [*findings, FileProblem(path=path, offset=8, problem=problem)]
    if sizes[0] != shape[0]:
        findings.append(
            FileProblem(path=path, offset=4, problem=f"the header says {sizes[0]:,} items, not {shape[0]:,}")
        )
    item = int(np.prod(shape[1:], dtype=np.int64))
    expected = header + sizes[0] * item
    if len(data) != expected and not findings:
        problem = f"{len(data):,} bytes, but {sizes[0]:,} items and the header are {expected:,}"
        findings.append(FileProblem(path=path, offset=min(len(data), expected), problem=problem))
    whole = min((len(data) - header) // item, sizes[0], shape[0])
    return np.frombuffer(data, np.uint8, whole * item, header).reshape(whole, *shape[1:]), findings


def _magic_problem(magic: bytes, num_dims: int) -> str:
    wanted = bytes((0, 0, _UINT8, num_dims))
    if magic == wanted:
        return ""
    hint = "; this is gzip data, its name should end in .gz" if magic[:2] == b"\x1f\x8b" else ""
    return f"the magic number is 0x{magic.hex()}, not 0x{wanted.hex()}{hint}"


def _bytes_of(path: Path, expected: int) -> tuple[bytes, list[FileProblem]]:
    """Return the (uncompressed) bytes as far as they can be read, and not much more than are expected.

    The limit is there because a compressed file of a megabyte can expand to a gigabyte.
    """
    parts: list[bytes] = []
    most = expected + _CHUNK
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            while most > 0 and (part := file.read(_CHUNK)):
                parts.append(part)
                most -= len(part)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        problem = f"the gzip data is damaged ({error})"
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    else:
        return b"".join(parts), []
    data = b"".join(parts)
    return data, [FileProblem(path=path, offset=len(data), problem=problem)]


# Locate the files of a known dataset (the directories searched, the layout found there) and read its splits.


ENVIRONMENT = ("DATASETS_DIR", "DATA_DIR")
SYSTEM_DIRECTORY = Path("/usr/share/datasets")  # where Debian's dataset packages put their files
MAX_DEPTH = 3  # levels of sub-directories searched
MAX_DIRECTORIES = 5000  # a mistyped path such as / must not be walked for minutes


@dataclass(frozen=True, kw_only=True)
class Found:
    """A dataset's directory, its layout, and the file of each wanted name (None: missing)."""

    directory: Path
    layout: Layout
    train_files: tuple[Path | None, ...]
    validation_files: tuple[Path | None, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names of the missing files."""
        wanted = self.layout.train_files + self.layout.validation_files
        there = self.train_files + self.validation_files
        return tuple(name for name, path in zip(wanted, there, strict=True) if path is None)


def search_roots(dataset_path: str) -> tuple[Path, ...]:
    """Return the directories to search: the given one or, by default, also those of the environment and the system."""
    given = Path(dataset_path).expanduser()
    named = [Path(os.environ[name]).expanduser() for name in ENVIRONMENT if os.environ.get(name)]
    # A path that was given is meant: finding the set somewhere else instead would hide a typing error.
    if dataset_path != "." and given not in named:
        return (given,)
    return tuple(dict.fromkeys([given, *named, datasets_directory(), SYSTEM_DIRECTORY]))


def locate_set(row: SetRow, dataset_path: str) -> Found:
    """Return the first place that holds files of the set; none is a DataError that lists the directories searched."""
    roots = search_roots(dataset_path)
    for root in roots:
        for directory in _candidates(root, [name for layout in row.layouts for name in layout.directories]):
            for layout in row.layouts:
                found = _files_in(directory, layout)
                # Any file of the layout: an incomplete set is reported with what it lacks, not as missing.
                if len(found.missing) < len(layout.train_files + layout.validation_files):
                    return found
    raise _not_found(row, roots)


def locate_folder(published: PublishedSet, dataset_path: str) -> Path:
    """Return the folder of a published set of class folders: one of its name, or the one that was given."""
    roots = search_roots(dataset_path)
    for root in roots:
        for directory in _candidates(root, [published.folder]):
            is_meant = directory.name == published.folder or (directory == root and dataset_path != ".")
            if is_meant and (directory / "train").is_dir():
                return directory
    raise DataError(
        f"The dataset {published.name} was not found.",
        rule=f"Searched {', '.join(map(_describe, roots))} for {published.folder} (up to {MAX_DEPTH} levels down).",
        remedy=f"Download it with `headrace data get {published.name}`, or add --download.",
    )


def variants(layout: Layout, name: str) -> tuple[str, ...]:
    """Return the names under which a file is known: idx files also with a dot and compressed."""
    if layout.kind != "idx":
        return (name,)
    dotted = name.replace("-idx", ".idx")
    return (name, dotted, f"{name}.gz", f"{dotted}.gz")


def _files_in(directory: Path, layout: Layout) -> Found:
    def path_of(name: str) -> Path | None:
        paths = (directory / variant for variant in variants(layout, name))
        return next((path for path in paths if path.is_file()), None)

    return Found(
        directory=directory,
        layout=layout,
        train_files=tuple(path_of(name) for name in layout.train_files),
        validation_files=tuple(path_of(name) for name in layout.validation_files),
    )


def _candidates(root: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield the root, then its sub-directories of these names, nearest first."""
    if not root.is_dir():
        return
    yield root
    wanted = {name.lower() for name in names}
    for directory in _sub_directories(root):
        tail = directory.relative_to(root).as_posix().lower()
        if any(tail == name or tail.endswith(f"/{name}") for name in wanted):
            yield directory


def _sub_directories(root: Path) -> Iterator[Path]:
    """Yield visible sub-directories level by level, in order of name, within the limits."""
    level, seen = [root], 0
    for _ in range(MAX_DEPTH):
        below: list[Path] = []
        for directory in level:
            try:
                with os.scandir(directory) as entries:
                    names = sorted(
                        each.name for each in entries if not each.name.startswith(".") and is_directory(each)
                    )
            except OSError:  # a directory we may not read is not where the user keeps the set
                continue
            below += [directory / name for name in names]
            seen += len(names)
            # Counted by names that were listed, not by directories entered: one may have a million.
            if seen > MAX_DIRECTORIES:
                break
        yield from below
        level = below if seen <= MAX_DIRECTORIES else []


def _not_found(row: SetRow, roots: tuple[Path, ...]) -> DataError:
    files = "; or ".join(
        ", ".join(layout.train_files + layout.validation_files) + (" (plain or .gz)" if layout.kind == "idx" else "")
        for layout in row.layouts
    )
    names = ", ".join(dict.fromkeys(name for layout in row.layouts for name in layout.directories))
    places = ", ".join(_describe(root) for root in roots)
    return DataError(
        f"The dataset {row.name} was not found. Searched for {files}.",
        rule=f"Searched {places}, and in sub-directories named {names} (up to {MAX_DEPTH} levels down).",
        remedy=f"Download it with `headrace data get {row.name}`, or add --download. By hand: {row.how_to_get} Then "
        "name the directory with --dataset-path or $DATASETS_DIR.",
    )


def _describe(root: Path) -> str:
    absolute = root.absolute()
    if root.is_dir():
        return str(absolute)
    return f"{absolute} ({'a file: unpack it first' if root.is_file() else 'does not exist'})"


SPLITS = ("train", "validation")
_CIFAR_READERS = {"cifar-binary": read_binary, "cifar-python": read_python}


def read_split(found: Found, row: SetRow, split: str) -> Part:
    """Return the split's images and labels and everything that is wrong with its files."""
    train = split == "train"
    files = found.train_files if train else found.validation_files
    wanted = found.layout.train_files if train else found.layout.validation_files
    num_samples = row.num_train if train else row.num_validation
    absent = tuple(
        FileProblem(path=found.directory / name, problem="the file is missing")
        for name, path in zip(wanted, files, strict=True)
        if path is None
    )
    part = _read_files(files, found.layout.kind, row, num_samples)
    return Part(images=part.images, labels=part.labels, findings=absent + part.findings)


def class_names(found: Found, row: SetRow) -> tuple[str, ...]:
    """Return the class names stored beside the data, or else the known ones."""
    if found.layout.names_file is None:
        return row.class_names
    return read_class_names(found.directory / found.layout.names_file, row.num_classes) or row.class_names


def _read_files(files: tuple[Path | None, ...], kind: str, row: SetRow, num_samples: int) -> Part:
    if kind == "idx":
        images, labels = files
        return read_pair(images, labels, row, num_samples)
    per_file, rest = divmod(num_samples, len(files))
    assert rest == 0, "CIFAR's files are of equal length"
    parts = [_CIFAR_READERS[kind](path, row, per_file) for path in files if path is not None]
    return join_parts([empty_part(row.image_hwc), *parts])
