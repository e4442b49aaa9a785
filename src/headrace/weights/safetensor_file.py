"""The bytes of a safetensors file as arrays, and back, with whatever travels along in its header."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

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
