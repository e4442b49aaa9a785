"""Safetensors files as arrays and back, with a note that Headrace writes into the header."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from headrace.core.json_text import parse_json

# safetensors.numpy.load knows no bfloat16, so the table is ours.
DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_MAX_HEADER_BYTES = 64 << 20  # what is not a safetensors file may announce exabytes
_NOTE = "headrace"  # the name of our entry in the header's metadata


def read_tensors(data: bytes) -> dict[str, np.ndarray]:
    """Return the tensors by name; whatever is wrong is a ValueError. Memory: twice the file's size."""
    try:
        entries = safetensors.deserialize(data)
    except (safetensors.SafetensorError, ValueError, OverflowError) as error:
        raise ValueError(f"not a whole safetensors file: {error}") from error
    return {name: _array(name, entry) for name, entry in entries}


def _array(name: str, entry: dict[str, Any]) -> np.ndarray:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"tensor {name[:120]} has the type {entry['dtype']}, which is not one of {', '.join(DTYPES)}")
    try:
        return np.frombuffer(entry["data"], dtype).reshape(entry["shape"])
    except (ValueError, OverflowError) as error:  # sizes beyond NumPy's, beside a 0
        raise ValueError(f"tensor {name[:120]} has a shape that cannot be: {error}") from error


def read_note(path: Path) -> dict[str, Any]:
    """Return the note that Headrace wrote into a file, {} if others wrote it; whatever is wrong is a ValueError."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER_BYTES:
            raise ValueError("not a safetensors file")
        return _note(file.read(size))


def _note(header: bytes) -> dict[str, Any]:
    entries = parse_json(header)
    texts = entries.get("__metadata__") if isinstance(entries, dict) else None
    written = texts.get(_NOTE, "{}") if isinstance(texts, dict) else "{}"
    note = parse_json(written) if isinstance(written, str) else None
    if not isinstance(note, dict):
        raise ValueError(f"its note {_NOTE!r} is not a mapping")
    return note


def read_safetensors(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return (tensors, the note that Headrace wrote along); whatever is wrong is a ValueError."""
    arrays = read_tensors(data)
    return arrays, _note(data[8 : 8 + int.from_bytes(data[:8], "little")])


def write_safetensors(arrays: dict[str, np.ndarray], note: dict[str, Any]) -> bytes:
    """Return the file's bytes. Other readers look for `format`."""
    return b"".join(safetensors_parts(arrays, {"format": "pt", _NOTE: json.dumps(note)}))


# As the safetensors library lays tensors out: those of the largest types first, so that each begins at a multiple of
# its size; of one type by name.
_ORDER = ("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "I8", "U8", "BOOL")
_CODES = {DTYPES[code]: (place, code) for place, code in enumerate(_ORDER)}
_PART_BYTES = 1 << 20  # what reads a part again, to hash it, finds it in the processor's cache


def safetensors_parts(
    arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: its header, then the arrays' own memory; nothing is copied.

    Types must be those of DTYPES. An array whose elements do not lie in order is copied when its turn comes.
    """
    names = sorted(arrays, key=lambda name: (_CODES[arrays[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        array, begin = arrays[name], end
        end += array.nbytes
        code = _CODES[array.dtype][1]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        # As plain bytes: Python's buffers know no bfloat16.
        memory = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
        for begin in range(0, len(memory), _PART_BYTES):
            yield memory[begin : begin + _PART_BYTES].data
