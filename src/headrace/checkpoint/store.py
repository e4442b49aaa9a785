"""Checkpoints on the disk: one directory each, with the tensors (safetensors) and a manifest (JSON). No pickle.

A checkpoint is written under a hidden name, synced, and renamed: a directory called `step_00000781` is complete or,
if the disk failed, recognized as damaged by `verify`. One process writes into a directory at a time
(`core.files.lock_directory`); any number may read.

The caller passes what it knows (step, epoch, seed, config, origins, plan, class_names ...); the store adds
the format version, the table of tensors, size and checksum of the tensor file, library versions, the time, and a
checksum of the manifest itself.
"""

import errno
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import CheckpointError
from headrace.core.files import sync_directory, write_parts_synced, write_synced
from headrace.core.json_text import parse_json
from headrace.core.tensor_file import DTYPES, read_tensors, safetensors_parts
from headrace.core.units import format_list

FORMAT = "headrace-checkpoint"
FORMAT_VERSION = 1
TENSOR_FILE = "state.safetensors"
MANIFEST_FILE = "manifest.json"
_LIBRARIES = ("headrace", "jax", "jaxlib", "numpy", "optax", "safetensors")


def build_manifest(
    given: Mapping[str, object], arrays: Mapping[str, np.ndarray], num_bytes: int, sha256: str
) -> dict[str, Any]:
    """Return the manifest for a tensor file with these tensors, this size and this sum."""
    body = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **given,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": library_versions(),
        "tensor_file": {"name": TENSOR_FILE, "bytes": num_bytes, "sha256": sha256},
        "tensors": {name: {"dtype": a.dtype.name, "shape": list(a.shape)} for name, a in sorted(arrays.items())},
    }
    # Through text and back, so that the checksum is that of what a reader will find. NaN is not JSON: others could not
    # read it.
    body = json.loads(json.dumps(body, default=_plain, allow_nan=False))
    return {**body, "manifest_sha256": checksum(body)}


def manifest_bytes(manifest: Mapping[str, object]) -> bytes:
    """Return the text of manifest.json."""
    return (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()


def checksum(manifest: Mapping[str, object]) -> str:
    """Return the sha256 of a manifest's content, whatever its layout as text."""
    body = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parse_manifest(text: bytes) -> tuple[dict[str, Any] | None, str]:
    """Return (manifest, "") or (None, what is wrong with it)."""
    try:
        manifest = parse_json(text)
    except ValueError as error:
        return None, f"{MANIFEST_FILE} is damaged: it is not JSON ({error})"
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return None, f"{MANIFEST_FILE} is damaged or not a Headrace manifest: 'format' is not {FORMAT!r}"
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        return None, f"{MANIFEST_FILE} is of format version {version}; this Headrace reads version {FORMAT_VERSION}"
    # Before anything in it is believed: sizes and names are used to read the other file.
    if manifest.get("manifest_sha256") != checksum(manifest):
        return None, f"{MANIFEST_FILE} is damaged: its content does not match its own checksum"
    file, tensors = manifest.get("tensor_file"), manifest.get("tensors")
    if not isinstance(file, dict) or type(file.get("bytes")) is not int or not isinstance(file.get("sha256"), str):
        return None, f"{MANIFEST_FILE} is wrong: 'tensor_file' does not give bytes and sha256"
    if not isinstance(tensors, dict) or not all(isinstance(entry, dict) for entry in tensors.values()):
        return None, f"{MANIFEST_FILE} is wrong: 'tensors' is not a table"
    return manifest, ""


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that made the state."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _LIBRARIES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _plain(value: object) -> Any:
    """Turn a NumPy number or array into JSON values."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a manifest holds plain values only, not {type(value).__name__}")


Arrays = dict[str, np.ndarray]

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


def save(
    directory: Path | str,
    name: str,
    arrays: Mapping[str, object],
    manifest: Mapping[str, object],
    *,
    make_directory: bool = True,
) -> Path:
    """Write one checkpoint atomically and return its path; one of the same name is replaced.

    `manifest` needs at least `step`. What processes killed while saving left behind is removed. A directory that is not
    there is made, unless `make_directory` is false: then something has taken it away, which is an error.
    """
    if "step" not in manifest:
        raise ValueError("a checkpoint's manifest needs 'step'")
    host = {key: _host_array(key, value) for key, value in arrays.items()}
    path = Path(directory) / name
    temporary = path.with_name(f".tmp-{name}-{os.getpid()}")
    try:
        # Only until the first checkpoint: a directory that disappears later was taken away, and making it again would
        # hide that.
        if make_directory and not path.parent.is_dir():
            # The first validation may list its score there at this moment (BestCheckpoints), in another thread.
            path.parent.mkdir(parents=True, exist_ok=True)
            sync_directory(path.parent.parent)  # or a power failure takes the first checkpoint with its directory
        remove_leftovers(path.parent)
        # Under a hidden name: who lists checkpoints at this moment must not find half of one.
        temporary.mkdir()
        num_bytes, sha256 = _write_tensors(temporary / TENSOR_FILE, host)
        text = manifest_bytes(build_manifest(manifest, host, num_bytes, sha256))
        write_synced(temporary / MANIFEST_FILE, text)
        # Everything is on the disk before the directory gets its name: what has the name is complete.
        sync_directory(temporary)
        _rename_into_place(temporary, path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def _write_tensors(path: Path, arrays: Arrays) -> tuple[int, str]:
    """Write a tensor file; return its size and its sum, which is that of the arrays, not of what the disk has."""
    num_bytes, digest = 0, hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        nonlocal num_bytes
        # Part by part: the whole file in memory took four copies of the state, and three times the processor's time.
        for part in safetensors_parts(arrays):
            num_bytes += len(part)
            digest.update(part)
            yield part

    write_parts_synced(path, hashed())
    return num_bytes, digest.hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A good checkpoint: every byte of it was read and checked."""

    path: Path
    arrays: Arrays
    manifest: dict[str, Any]


def read(path: Path | str) -> Checkpoint:
    """Read and check one checkpoint."""
    arrays, manifest, problems = _examine(Path(path))
    if problems or manifest is None:
        raise CheckpointError(
            f"The checkpoint {path} cannot be used: {'; '.join(problems)}.",
            remedy="Use another checkpoint of the run; `headrace resume` skips damaged ones.",
        )
    return Checkpoint(path=Path(path), arrays=arrays, manifest=manifest)


def load(path: Path | str) -> tuple[Arrays, dict[str, Any]]:
    """Read and check one checkpoint; return its tensors and its manifest."""
    found = read(path)
    return found.arrays, found.manifest


def verify(path: Path | str) -> list[str]:
    """Read every byte of a checkpoint; return its problems, an empty list if it is good."""
    return _examine(Path(path))[2]


def list_checkpoints(directory: Path | str) -> list[Path]:
    """Return the checkpoints in a directory, oldest step first; they are not verified."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if step_of(path) is not None and path.is_dir()]
    names = {path.name for path in found}
    # `.old-x` counts only if a crash came between the two renames of a replacement (see _rename_into_place).
    found = [path for path in found if path.name.removeprefix(".old-") not in names - {path.name}]
    return sorted(found, key=lambda path: (step_of(path) or 0, path.name))


def newest_good(directory: Path | str) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest good checkpoint, and the newer ones that were skipped, each with its problem."""
    found, damaged = read_newest(directory)
    return found and found.path, damaged


def read_newest(directory: Path | str) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """Read the newest good checkpoint; return it, and the newer ones that were skipped, each with its problem."""
    return read_first_good(reversed(list_checkpoints(directory)))


def read_first_good(paths: Iterable[Path]) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """Read checkpoints until one is good; return it, and those before it, each with its problem."""
    damaged = []
    for path in paths:
        arrays, manifest, problems = _examine(path)
        if manifest is not None and not problems:
            return Checkpoint(path=path, arrays=arrays, manifest=manifest), damaged
        damaged.append((path, "; ".join(problems)))
    return None, damaged


def write_error(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that could not be written."""
    remedy = _REMEDIES.get(error.errno or 0, "Check that the directory exists, is a directory and may be written to.")
    return CheckpointError(f"Cannot write {path}: {error.strerror or error}.", remedy=remedy)


def refuse_replacing(path: Path) -> None:
    """Refuse to overwrite something that is not a checkpoint."""
    if path.exists() and not (path / MANIFEST_FILE).is_file():
        raise CheckpointError(
            f"{path} exists and is not a checkpoint.",
            rule="A checkpoint is a directory with a manifest.json.",
            remedy="Choose another name.",
        )


def _host_array(name: str, value: object) -> np.ndarray:
    """Return the tensor as a contiguous array (safetensors would write the raw memory of a strided one)."""
    array = np.asarray(value, order="C")
    if array.dtype not in DTYPES.values():
        raise CheckpointError(f"Tensor {name} has type {array.dtype}, which a checkpoint cannot hold.")
    return array


def _rename_into_place(temporary: Path, path: Path) -> None:
    """Give the finished directory its name; an old one is renamed first, because rename cannot replace a directory."""
    old = path.with_name(f".old-{path.name}")
    if path.exists():
        # Between the two renames there is no checkpoint of this name for a moment; `list_checkpoints` then takes the
        # old one.
        path.rename(old)
    temporary.rename(path)
    sync_directory(path.parent)
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Remove what killed processes left behind of checkpoints."""
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
    manifest, problem = parse_manifest(text)
    if manifest is None:
        return {}, None, [problem]
    data, problem = _read(path / TENSOR_FILE)
    problem = problem or _wrong_bytes(data, manifest["tensor_file"])
    if problem:
        return {}, manifest, [problem]
    try:
        arrays = read_tensors(data)
    except ValueError as error:
        return {}, manifest, [f"{TENSOR_FILE} cannot be decoded ({error})"]
    return arrays, manifest, list(_wrong_tensors(arrays, manifest["tensors"]))


def _read(path: Path) -> tuple[bytes, str]:
    try:
        return path.read_bytes(), ""
    except FileNotFoundError:
        return b"", f"{path.name} is missing"
    except OSError as error:
        return b"", f"{path.name} cannot be read ({error.strerror})"


def _wrong_bytes(data: bytes, expected: Mapping[str, Any]) -> str:
    # The length first: it costs nothing and tells a truncated file from a damaged one.
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
        found, entry = arrays[name], expected[name]
        dtype, shape = entry.get("dtype"), entry.get("shape")
        if list(found.shape) != shape or found.dtype.name != dtype:
            yield f"tensor {name} is {found.dtype.name}{list(found.shape)}, not {dtype}{shape}"


def weight_tensors(arrays: Mapping[str, np.ndarray], weights: str = "raw") -> Arrays:
    """Return params and stats among a checkpoint's tensors: the raw ones, or those kept under a name such as ema."""
    start = "" if weights == "raw" else f"{weights}/"
    kinds = tuple(f"{start}{kind}/" for kind in ("params", "stats"))
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(kinds)}


_MAX_LISTED = 4  # names per kind of problem; a wrong model would otherwise fill the screen


def restore_tree(arrays: Mapping[str, np.ndarray], like: object, prefix: str = "") -> Any:
    """Return a tree with the structure of `like` whose leaves are the arrays of those names, exactly as loaded.

    Leaves of `like` need only a shape and a dtype (arrays, jax.ShapeDtypeStruct). With `prefix` "params" the tree is
    the part under `params/`, and other tensors are ignored; without it every tensor must be used. Names do not depend
    on the plan: any plan reads any checkpoint.
    """
    # Here, since reading a checkpoint's manifest should not load JAX.
    from headrace.core.tree import flatten_named, unflatten_named

    start = f"{prefix}/" if prefix else ""
    wanted = {start + name: leaf for name, leaf in flatten_named(like).items()}
    given = {name: array for name, array in arrays.items() if name.startswith(start)}
    problems = [
        _list("missing", [name for name in wanted if name not in given]),
        _list("unexpected", [name for name in given if name not in wanted]),
        _list(
            "of another shape or type", [_differs(name, given[name], wanted[name]) for name in wanted if name in given]
        ),
    ]
    if any(problems):
        raise CheckpointError(
            f"The checkpoint does not fit this model and optimizer. {' '.join(filter(None, problems))}",
            rule="Every tensor must exist under its name, with its shape and type.",
            remedy="Use the options that the checkpoint was made with; its manifest.json holds them.",
        )
    return unflatten_named(like, {name.removeprefix(start): given[name] for name in wanted})


def _differs(name: str, found: np.ndarray, leaf: Any) -> str:
    """Return '' if the array fits the leaf, else what differs."""
    shape, dtype = tuple(np.shape(leaf)), np.dtype(getattr(leaf, "dtype", type(leaf)))
    if found.shape == shape and found.dtype == dtype:
        return ""
    return f"{name} ({found.dtype.name}{list(found.shape)}, needed {dtype.name}{list(shape)})"


def _list(word: str, names: Sequence[str]) -> str:
    names = [name for name in names if name]
    if not names:
        return ""
    return f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'} {word}: {format_list(names, _MAX_LISTED)}."
