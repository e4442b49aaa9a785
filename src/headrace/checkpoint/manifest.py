"""The manifest: the JSON beside the tensors that says what they are, and proves that they are still that.

The caller gives what it knows of the run (step, epoch, seed, config, origins, plan, class_names ...); the store adds
the format version, the table of tensors, size and checksum of the tensor file, library versions, the time, and a
checksum of the manifest itself.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import numpy as np

FORMAT = "headrace-checkpoint"
FORMAT_VERSION = 1
TENSOR_FILE = "state.safetensors"
MANIFEST_FILE = "manifest.json"
_LIBRARIES = ("headrace", "jax", "jaxlib", "numpy", "optax", "safetensors")


def build(given: Mapping[str, Any], arrays: Mapping[str, np.ndarray], data: bytes) -> dict[str, Any]:
    """Return the whole manifest for a tensor file whose bytes are `data`."""
    body = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **given,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": library_versions(),
        "tensor_file": {"name": TENSOR_FILE, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        "tensors": {name: {"dtype": a.dtype.name, "shape": list(a.shape)} for name, a in sorted(arrays.items())},
    }
    body = json.loads(json.dumps(body, default=_plain, allow_nan=False))
    return {**body, "manifest_sha256": checksum(body)}


def to_bytes(manifest: Mapping[str, Any]) -> bytes:
    """Return the text of manifest.json."""
    return (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()


def checksum(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of a manifest's content, whatever its layout as text."""
    body = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parse(text: bytes) -> tuple[dict[str, Any] | None, str]:
    """Return (manifest, "") or (None, what is wrong with it)."""
    try:
        manifest = json.loads(text)
    except ValueError as error:
        return None, f"{MANIFEST_FILE} is damaged: it is not JSON ({error})"
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return None, f"{MANIFEST_FILE} is damaged or not a Headrace manifest: 'format' is not {FORMAT!r}"
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        return None, f"{MANIFEST_FILE} is of format version {version}; this Headrace reads version {FORMAT_VERSION}"
    if manifest.get("manifest_sha256") != checksum(manifest):
        return None, f"{MANIFEST_FILE} is damaged: its content does not match its own checksum"
    return manifest, ""


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that made the state."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _LIBRARIES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _plain(value: Any) -> Any:
    """Turn a NumPy number or array into what JSON knows."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a manifest holds plain values only, not {type(value).__name__}")
