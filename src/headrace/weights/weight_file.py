"""Read a file of weights, whatever made it: torch (.pth, .pt), safetensors, Keras (.h5). The content decides."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from headrace.core.errors import CheckpointError
from headrace.weights.torch_file import is_torch_legacy, is_torch_zip, read_torch_file

_HDF5_HEAD = b"\x89HDF\r\n\x1a\n"
_WRAPPERS = ("module.", "_orig_mod.")  # what torch's parallel and compiled modules put before every name


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """Tensors under the names of whoever wrote them, and where they came from."""

    source: str
    arrays: dict[str, np.ndarray]
    metadata: dict[str, Any] = field(default_factory=dict)


def read_file(path: Path, ema: bool = False) -> Foreign:
    """Return the tensors of a file; floating-point ones as float32. With `ema` the averaged weights in it."""
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise CheckpointError(
            f"The weights {path} cannot be read: {error.strerror}.", remedy="Give a file, a checkpoint or a run."
        ) from error
    metadata: dict[str, Any] = {}
    if is_torch_zip(head) or is_torch_legacy(head):
        arrays = read_torch_file(path, ema)
    elif head == b"" or ema:
        problem = "is empty" if head == b"" else "holds one set of weights: there is no average in it"
        raise CheckpointError(f"The file of weights {path} {problem}.", remedy="Give another file.")
    elif head.startswith(_HDF5_HEAD):
        from headrace.weights.keras_file import read_keras_file

        arrays = read_keras_file(path)
    else:
        arrays, metadata = _read_safetensors(path)
    return Foreign(source=str(path), arrays=_unwrapped(_as_float32(arrays)), metadata=metadata)


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:

    try:
        return read_safetensors(path.read_bytes())
    except (safetensors.SafetensorError, KeyError, ValueError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} is no file of weights that Headrace knows, or it is cut off ({error}).",
            rule="Known are torch's .pth and .pt, .safetensors, Keras' .h5, and Headrace's checkpoints and runs.",
        ) from error


def _as_float32(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return 16- and 64-bit floating-point numbers as float32; whole numbers stay."""
    floating = ("float16", "bfloat16", "float64")
    return {name: a.astype(np.float32) if a.dtype.name in floating else a for name, a in arrays.items()}


def _unwrapped(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Take off a prefix that all names have; a counter beside them may do without."""
    for prefix in _WRAPPERS * 2:
        inside = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
        if inside and all(name.startswith(prefix) or a.ndim == 0 for name, a in arrays.items()):
            arrays = inside
    return arrays


# The bytes of a safetensors file as arrays, and back, with whatever travels along in its header.


# safetensors.numpy.load knows no bfloat16, so the table is ours.
_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
}
_ALONG = "headrace"  # the one text of the header that is ours


def read_safetensors(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return (tensors, what Headrace wrote along); a damaged file raises SafetensorError, KeyError or ValueError."""
    arrays = {
        name: np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in safetensors.deserialize(data)
    }
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    return arrays, json.loads(header.get(_ALONG, "{}"))


def write_safetensors(arrays: dict[str, np.ndarray], along: dict[str, Any]) -> bytes:
    """Return the file's bytes. `format` is what other readers look for."""
    host = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    return safetensors.numpy.save(host, {"format": "pt", _ALONG: json.dumps(along)})
