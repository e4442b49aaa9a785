"""The readers that are fuzzed: a good file of each kind, and the function that reads it."""

import io
import json
import pickle
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config.yaml_blocks import read_blocks
from headrace.core.errors import HeadraceError
from headrace.core.files import parse_json
from headrace.core.tensor_file import write_safetensors
from headrace.data.sets.cifar import read_batch_pickle
from headrace.data.sets.indexed_samples import check_rows, read_npz
from headrace.data.sets.tar_shards import _make_index
from headrace.telemetry.records import parse_record
from headrace.weights.torch_file import write_torch_file
from headrace.weights.weight_file import read_file

WEIGHTS = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3, np.int64)}
FILES = Path(__file__).parents[1] / "weights" / "files"


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One reader: its good files, how it reads a path, and the errors that are clear ones."""

    good: tuple[bytes, ...]
    read: Callable[[Path], Any]
    clear: tuple[type[BaseException], ...] = (HeadraceError,)
    weight: int = 1  # cases in proportion to it


def _npz() -> bytes:
    buffer = io.BytesIO()
    column = np.arange(3)
    np.savez(buffer, number=column, offset=column, length=column, labels=column)
    return buffer.getvalue()


def _read_index(path: Path) -> Any:
    columns = read_npz(path.read_bytes(), ("number", "offset", "length", "labels"))
    columns["file"] = columns.pop("number")
    check_rows(columns, [10, 10, 10], 3)
    return columns


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in (("a.jpg", b"x" * 20), ("a.cls", b"1"), ("b.jpg", b"y"), ("b.json", b'{"label": 0}')):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


_RECORD = {"kind": "note", "step": 1, "time": 1.0, "text": "ä", "level": "info"}
READERS: dict[str, Reader] = {
    "torch": Reader(
        good=(write_torch_file(WEIGHTS), *(file.read_bytes() for file in sorted(FILES.glob("*.pth")))),
        read=lambda path: read_file(path).arrays,
        weight=4,
    ),
    "safetensors": Reader(
        good=(write_safetensors(WEIGHTS, {"a": [1]}),), read=lambda path: read_file(path).arrays, weight=3
    ),
    "cifar": Reader(
        good=tuple(pickle.dumps({"data": np.zeros((2, 6), np.uint8), "labels": [1, 2]}, p) for p in (0, 2, 4, 5)),
        read=lambda path: read_batch_pickle(path.read_bytes()),
        clear=(ValueError,),
        weight=4,
    ),
    "json": Reader(
        good=(json.dumps(_RECORD).encode(),), read=lambda path: parse_json(path.read_bytes()), clear=(ValueError,)
    ),
    "record": Reader(
        good=(json.dumps(_RECORD).encode(),), read=lambda path: parse_record(path.read_bytes()), clear=(ValueError,)
    ),
    "yaml": Reader(good=(b"a: &a {seed: 1}\nb:\n  <<: *a\n  lr: [0.1, 2]\n  m: {x: {y: 1}}\n",), read=read_blocks),
    "index": Reader(good=(_npz(),), read=_read_index, clear=(ValueError,), weight=2),
    "tar": Reader(good=(_tar(),), read=lambda path: _make_index([path], ()), weight=2),
}
NUMBERS = tuple(struct.pack("<q", number) for number in (0, 1, -1, 2**31, 2**40, 2**62, -(2**63)))
