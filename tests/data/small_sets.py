"""Small datasets and writers for every layout, written byte by byte and without the readers' help."""

import gzip
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.sets import catalog
from headrace.data.sets.catalog import SetRow


@dataclass(frozen=True, kw_only=True)
class SmallSet:
    """The row of a small set and its true contents."""

    row: SetRow
    images: dict[str, np.ndarray]  # split -> uint8 [n, H, W, C]
    labels: dict[str, np.ndarray]


def make_small(name: str, num_train: int, num_validation: int) -> SmallSet:
    """Return a set like `name` with few random images whose labels go round the classes."""
    row = catalog.KNOWN_SETS[name]
    rng = np.random.default_rng(len(name))
    sizes = {"train": num_train, "validation": num_validation}
    images = {split: rng.integers(0, 256, (size, *row.image_hwc), np.uint8) for split, size in sizes.items()}
    labels = {split: np.arange(size, dtype=np.int32) % row.num_classes for split, size in sizes.items()}
    counts = {split: tuple(np.bincount(labels[split], minlength=row.num_classes).tolist()) for split in sizes}
    row = replace(
        row,
        num_train=num_train,
        num_validation=num_validation,
        train_counts=counts["train"],
        validation_counts=counts["validation"],
        check_mean=False,
    )
    return SmallSet(row=row, images=images, labels=labels)


def planes(images: np.ndarray) -> np.ndarray:
    """Return images as CIFAR stores them: red, green, blue plane, each row by row."""
    return np.stack([np.concatenate([image[:, :, c].ravel() for c in range(image.shape[2])]) for image in images])


def write_cifar_binary(small: SmallSet, directory: Path) -> None:
    """Write the binary layout record by record; CIFAR-100 gets the coarse label fine % 20."""
    directory.mkdir(parents=True, exist_ok=True)
    for split, files in _cifar_files(small, 0):
        for name, part in files:
            data = b""
            for label, pixels in zip(
                small.labels[split][part].tolist(), planes(small.images[split][part]), strict=True
            ):
                head = [label % 20, label] if small.row.coarse_classes else [label]
                data += bytes(head) + pixels.tobytes()
            (directory / name).write_bytes(data)


def write_cifar_python(small: SmallSet, directory: Path, dumps: Callable[[Any], bytes] | None = None) -> None:
    """Write the Python layout as Python 2 did (or with another `dumps`)."""
    directory.mkdir(parents=True, exist_ok=True)
    for split, files in _cifar_files(small, 1):
        for name, part in files:
            labels = small.labels[split][part].tolist()
            key = b"fine_labels" if small.row.coarse_classes else b"labels"
            batch: dict[Any, Any] = {
                b"batch_label": b"a batch",
                key: labels,
                b"data": planes(small.images[split][part]),
            }
            if small.row.coarse_classes:
                batch[b"coarse_labels"] = [label % 20 for label in labels]
            (directory / name).write_bytes((dumps or python2_dumps)(batch))


def _cifar_files(small: SmallSet, layout: int) -> list[tuple[str, list[tuple[str, slice]]]]:
    found = []
    for split in ("train", "validation"):
        names = getattr(small.row.layouts[layout], f"{split}_files")
        size = len(small.labels[split]) // len(names)
        found.append((split, [(name, slice(i * size, (i + 1) * size)) for i, name in enumerate(names)]))
    return found


def python2_dumps(value: Any) -> bytes:
    """Pickle with protocol 2 as Python 2 and its NumPy did: bytes as BINSTRING, the array module under its old name."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value: Any) -> bytes:
    if isinstance(value, bytes):
        return b"T" + struct.pack("<i", len(value)) + value
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(_python2, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_python2(key) + _python2(item) for key, item in value.items()) + b"u"
    assert isinstance(value, np.ndarray)
    assert value.dtype == np.uint8
    empty = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + _python2(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + _python2(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + _python2(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"(" + b"".join(_python2(size) for size in value.shape) + b"t"
    return empty + b"(K\x01" + shape + dtype + b"\x89" + _python2(value.tobytes()) + b"tb"


def python3_dumps(value: Any) -> bytes:
    """Pickle with protocol 2 from Python 3, which writes bytes through `_codecs.encode`."""
    return pickle.dumps(value, protocol=2)


def idx_bytes(array: np.ndarray) -> bytes:
    """Return an idx file: two zero bytes, type 8, number of dims, the sizes, the values."""
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(small: SmallSet, directory: Path, pattern: str = "{0}-{1}") -> None:
    """Write the four idx files; `pattern` joins the two halves of a name and may end in .gz."""
    directory.mkdir(parents=True, exist_ok=True)
    for split, prefix in (("train", "train"), ("validation", "t10k")):
        for kind, array in (
            ("images-idx3-ubyte", small.images[split][..., 0]),
            ("labels-idx1-ubyte", small.labels[split].astype(np.uint8)),
        ):
            name = f"{prefix}-" + pattern.format(*kind.split("-", 1))
            data = idx_bytes(array)
            (directory / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
