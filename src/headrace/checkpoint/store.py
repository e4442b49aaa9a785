"""Checkpoints on the disk: one directory each, with the tensors (safetensors) and a manifest (JSON). No pickle.

A checkpoint is written under a hidden name, synced, and renamed: a directory called `step_00000781` is whole or, if
the disk lied, recognised as damaged by `verify`. One process writes into a directory at a time (see lock.py); any
number may read.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from headrace.checkpoint import manifest as manifests
from headrace.checkpoint.manifest import MANIFEST_FILE, TENSOR_FILE
from headrace.core.errors import CheckpointError
from headrace.core.files import sync_directory, write_synced

Arrays = dict[str, np.ndarray]

# safetensors.numpy.load knows no bfloat16, so the table is ours.
_DTYPES: dict[str, np.dtype] = {
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
_STEP_NAME = re.compile(r"(?:\.old-)?step_(\d+)")
_REMEDIES = {
    errno.ENOSPC: "Free some space, or point --checkpoint-dir at another disk.",
    errno.EDQUOT: "Free some of your quota, or point --checkpoint-dir at another disk.",
    errno.EFBIG: "Raise the file size limit (ulimit -f), or point --checkpoint-dir at another disk.",
}


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after `step` weight updates."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name, or None for any other name."""
    match = _STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def save(directory: Path | str, name: str, arrays: Mapping[str, Any], manifest: Mapping[str, Any]) -> Path:
    """Write one checkpoint so that it is whole or absent, and return its path; one of the same name is replaced.

    `manifest` needs at least `step`. Left-overs of processes that were killed while saving are removed.
    """
    if "step" not in manifest:
        raise ValueError("a checkpoint's manifest needs 'step'")
    host = {key: _host_array(key, value) for key, value in arrays.items()}
    data = safetensors.numpy.save(host)
    text = manifests.to_bytes(manifests.build(manifest, host, data))
    path = Path(directory) / name
    temporary = path.with_name(f".tmp-{name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        temporary.mkdir()
        write_synced(temporary / TENSOR_FILE, data)
        write_synced(temporary / MANIFEST_FILE, text)
        sync_directory(temporary)
        _put_in_place(temporary, path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def load(path: Path | str) -> tuple[Arrays, dict[str, Any]]:
    """Read and check one checkpoint; return its tensors and its manifest."""
    arrays, manifest, problems = _examine(Path(path))
    if problems or manifest is None:
        raise CheckpointError(
            f"The checkpoint {path} cannot be used: {'; '.join(problems)}.",
            remedy="Take another checkpoint of the run; `headrace resume` passes over damaged ones by itself.",
        )
    return arrays, manifest


def verify(path: Path | str) -> list[str]:
    """Return what is wrong with a checkpoint, every byte of it read; an empty list means that it is good."""
    return _examine(Path(path))[2]


def list_checkpoints(directory: Path | str) -> list[Path]:
    """Return the checkpoints in a directory, oldest step first; they are not verified."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if step_of(path) is not None and path.is_dir()]
    names = {path.name for path in found}
    # `.old-x` counts only if a crash came between the two renames of a replacement (see _put_in_place).
    found = [path for path in found if path.name.removeprefix(".old-") not in names - {path.name}]
    return sorted(found, key=lambda path: (step_of(path) or 0, path.name))


def newest_good(directory: Path | str) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest checkpoint that is good, and those newer ones that were passed over, each with its problem."""
    damaged = []
    for path in reversed(list_checkpoints(directory)):
        problems = verify(path)
        if not problems:
            return path, damaged
        damaged.append((path, "; ".join(problems)))
    return None, damaged


def write_error(path: Path, error: OSError) -> CheckpointError:
    """Say for people why a file of the run could not be written."""
    remedy = _REMEDIES.get(error.errno or 0, "Check that the directory exists, is a directory and may be written to.")
    return CheckpointError(f"Cannot write {path}: {error.strerror or error}.", remedy=remedy)


def _host_array(name: str, value: Any) -> np.ndarray:
    """Return the tensor as a contiguous array (safetensors would write the raw memory of a strided one)."""
    array = np.asarray(value, order="C")
    if array.dtype not in _DTYPES.values():
        raise CheckpointError(f"Tensor {name} has type {array.dtype}, which a checkpoint cannot hold.")
    return array


def _put_in_place(temporary: Path, path: Path) -> None:
    """Give the finished directory its name. A non-empty directory cannot be renamed over, so an old one steps aside."""
    old = path.with_name(f".old-{path.name}")
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    sync_directory(path.parent)
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)


def _sweep(directory: Path) -> None:
    """Remove what killed processes left behind."""
    for path in directory.iterdir():
        replaced = path.name.startswith(".old-") and path.with_name(path.name.removeprefix(".old-")).exists()
        if replaced or path.name.startswith(".tmp-"):
            shutil.rmtree(path, ignore_errors=True)


def _examine(path: Path) -> tuple[Arrays, dict[str, Any] | None, list[str]]:
    """Read everything; return (tensors, manifest, problems)."""
    if not path.is_dir():
        return {}, None, ["it is not a directory" if path.exists() else "it does not exist"]
    text, problem = _read(path / MANIFEST_FILE)
    if problem:
        return {}, None, [problem]
    manifest, problem = manifests.parse(text)
    if manifest is None:
        return {}, None, [problem]
    data, problem = _read(path / TENSOR_FILE)
    problem = problem or _wrong_bytes(data, manifest["tensor_file"])
    if problem:
        return {}, manifest, [problem]
    try:
        arrays = {name: _array(entry) for name, entry in safetensors.deserialize(data)}
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        return {}, manifest, [f"{TENSOR_FILE} cannot be decoded ({error})"]
    return arrays, manifest, list(_wrong_tensors(arrays, manifest["tensors"]))


def _read(path: Path) -> tuple[bytes, str]:
    try:
        return path.read_bytes(), ""
    except FileNotFoundError:
        return b"", f"{path.name} is missing"
    except OSError as error:
        return b"", f"{path.name} cannot be read ({error.strerror})"


def _array(entry: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(entry["data"], dtype=_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _wrong_bytes(data: bytes, expected: Mapping[str, Any]) -> str:
    if len(data) != expected["bytes"]:
        word = "truncated" if len(data) < expected["bytes"] else "too long"
        return f"{TENSOR_FILE} is {word}: {len(data):,} bytes, the manifest says {expected['bytes']:,}"
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        return f"{TENSOR_FILE} is damaged: its sha256 is not the one in the manifest"
    return ""


def _wrong_tensors(arrays: Arrays, expected: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(expected.keys() - arrays.keys()):
        yield f"tensor {name} is missing"
    for name in sorted(arrays.keys() - expected.keys()):
        yield f"tensor {name} is not in the manifest"
    for name in sorted(arrays.keys() & expected.keys()):
        found, said = arrays[name], expected[name]
        if list(found.shape) != said["shape"] or found.dtype.name != said["dtype"]:
            yield f"tensor {name} is {found.dtype.name}{list(found.shape)}, not {said['dtype']}{said['shape']}"
