"""Read CIFAR-10 and CIFAR-100: binary records and Python batches. An image is stored as 3 planes of 32 x 32 bytes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.unpickle import PickleKind, RefusedPickle, read_pickle, shorten
from headrace.data.sets.catalog import SetRow
from headrace.data.sets.file_problem import FileProblem, SplitPart, empty_part, label_problem


def read_binary(path: Path, row: SetRow, num_records: int) -> SplitPart:
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
    return SplitPart(images=_to_hwc(records[:, num_labels:], row), labels=labels, findings=tuple(findings))


def read_python(path: Path, row: SetRow, num_records: int) -> SplitPart:
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
    return SplitPart(images=_to_hwc(pixels[:whole], row), labels=labels[:whole], findings=tuple(findings))


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


def _unreadable(path: Path, row: SetRow, error: OSError) -> SplitPart:
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
