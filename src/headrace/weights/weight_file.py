"""Read a file of weights of torch (.pth, .pt), safetensors or Keras (.h5); its first bytes say which."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import CheckpointError
from headrace.core.tensor_file import read_safetensors
from headrace.weights.keras_file import read_keras_file
from headrace.weights.torch_file import is_torch_legacy, is_torch_zip, read_torch_file

_HDF5_HEAD = b"\x89HDF\r\n\x1a\n"


@dataclass(frozen=True, kw_only=True)
class ForeignWeights:
    """Tensors under the names of whoever wrote them, and where they came from."""

    source: str
    arrays: dict[str, np.ndarray]
    metadata: dict[str, Any] = field(default_factory=dict)


def read_file(path: Path, ema: bool = False) -> ForeignWeights:
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
        arrays = read_keras_file(path)
    else:
        arrays, metadata = _read_safetensors(path)
    return ForeignWeights(source=str(path), arrays=_as_float32(arrays), metadata=metadata)


def read_shapes(path: Path, ema: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's tensors by name; it is read again only if it has changed."""
    try:
        about = path.stat()
    except OSError as error:
        raise CheckpointError(f"The weights {path} cannot be read: {error.strerror}.") from error
    return _shapes(path.absolute(), (about.st_mtime_ns, about.st_size, about.st_ino), ema)


@lru_cache(maxsize=4)
def _shapes(path: Path, _stamp: tuple[int, ...], ema: bool) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in read_file(path, ema).arrays.items()}


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    try:
        return read_safetensors(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a file of weights that Headrace can read, or it is truncated ({error}).",
            rule="It reads torch's .pth and .pt, .safetensors, Keras' .h5, and Headrace's checkpoints and runs.",
            remedy="Download or save it again.",
        ) from error


def _as_float32(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return 16- and 64-bit floating-point numbers as float32; whole numbers stay."""
    floating = ("float16", "bfloat16", "float64")
    return {name: a.astype(np.float32) if a.dtype.name in floating else a for name, a in arrays.items()}
