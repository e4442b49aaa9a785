"""What the name of a stored program is made of."""

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import jaxlib
import ml_dtypes
import numpy as np

from headrace.core.process import num_processors, process_began
from headrace.engine.devices import Device, machine_id
from headrace.ops.native_kernels import load_kernels
from headrace.ops.tracing import on_cpu

# Packages that no traced code is in (docs/explanation/architecture.md).
_NEVER_TRACED = ("checkpoint", "cli", "job", "program", "report", "telemetry", "weights")
# Settings of JAX for caches and messages. All others count, whatever they mean.
_NOT_COMPILED = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_explain", "jax_debug_log")
_NOT_COMPILED += ("jax_cuda_visible_devices", "jax_rocm_visible_devices")  # another GPU of the same kind
# Variables that XLA and the libraries below it read.
_VARIABLES = ("XLA_", "TF_", "LIBTPU_", "CUDA_", "CUDNN_", "CUBLAS", "NVIDIA_", "NCCL_", "ROCM_", "HIP_", "MIOPEN_")
_WHICH_DEVICES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# Whose functions stand in this package's modules without anybody having replaced anything.
_KNOWN = {"functools", "headrace", "jax", "jaxlib", "ml_dtypes", "numpy", "optax"}
_KNOWN |= {*sys.stdlib_module_names, "PIL", "rich", "safetensors", "yaml"}
_began = process_began()


def leaf_description(leaf: Any) -> tuple[Any, ...]:
    """Return what a program depends on of an argument: an array, or its shape."""
    where, is_committed = getattr(leaf, "sharding", None), getattr(leaf, "committed", True)
    return tuple(leaf.shape), np.dtype(leaf.dtype), bool(getattr(leaf, "weak_type", False)), where, is_committed


@cache
def source_digest(root: Path = Path(__file__).parents[1]) -> str:
    """Return a digest of this package's source; "" where what was imported may be another one than that on disk."""
    found = hashlib.sha256()
    files = [path for path in sorted(root.rglob("*.py")) if path.relative_to(root).parts[0] not in _NEVER_TRACED]
    # Contents, not times and sizes, which a checkout or a copy may leave as they were: 1.6 MB in 16 ms.
    for path in files:
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    is_older = max((path.stat().st_mtime for path in files), default=_began) < _began
    return found.hexdigest() if is_older else ""


def is_patched() -> bool:
    """Say whether somebody has replaced functions of this package, or methods of its classes, by their own."""
    # A copy is taken at once; while pairs are made of it one by one, another thread may import.
    for name, module in sys.modules.copy().items():
        package, _, rest = name.partition(".")
        if package == "headrace" and rest.partition(".")[0] not in _NEVER_TRACED:
            values = list(vars(module).values())
            values += [part for each in values if isinstance(each, type) for part in list(vars(each).values())]
            if any(isinstance(each, FunctionType) and _root(each) not in _KNOWN for each in values):
                return True
    return False


def _root(function: FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def surroundings(devices: Sequence[Device]) -> tuple[object, ...]:
    """Return, as texts and numbers, all that tracing and compiling depend on beside a program and its options."""
    client = devices[0].client
    of_devices = [(d.id, d.platform, d.device_kind, str(getattr(d, "compute_capability", ""))) for d in devices]
    settings = [f"{name}={value}" for name, value in jax.config.values.items() if not name.startswith(_NOT_COMPILED)]
    variables = [f"{name}={os.environ[name]}" for name in os.environ if name.startswith(_VARIABLES)]
    return (
        _versions(client.platform),
        (client.platform, client.platform_version, jax.default_backend(), str(jax.sharding.get_abstract_mesh())),
        tuple(of_devices),
        tuple(sorted(settings)),
        tuple(sorted(each for each in variables if not each.startswith(_WHICH_DEVICES))),
        # XLA divides a program for CPUs among as many threads; the kernels are in programs by the names of their calls.
        (machine_id(), num_processors(), str(load_kernels()[0])) if on_cpu() else (),
    )


@cache
def _versions(platform_name: str) -> tuple[str, ...]:
    versions = [sys.version, *(f"{each.__name__} {each.__version__}" for each in (jax, jaxlib, np, ml_dtypes))]
    versions += _metadata("optax", "optax-")
    if platform_name != "cpu":  # JAX's plugin and the libraries that come with it
        versions += _metadata("jax", "jax", "nvidia")
        with suppress(OSError):
            versions.append(Path("/proc/driver/nvidia/version").read_text())
    return tuple(versions)


def _metadata(module: str, *beginnings: str) -> list[str]:
    """Return the names of the metadata beside a package, which have versions: importing optax takes 40 ms."""
    found = importlib.util.find_spec(module)
    place = Path(found.origin).parents[1] if found and found.origin else None
    names = place.glob("*.dist-info") if place else ()
    if versions := sorted(each.name for each in names if each.name.startswith(beginnings)):
        return versions
    return [f"{module} {importlib.import_module(module).__version__}"]  # a mere checkout has none
