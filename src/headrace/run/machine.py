"""What a machine offers: its devices with memory and number formats, its host, and the versions installed."""

import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from headrace.core import __version__
from headrace.engine.visible import FIRST_BFLOAT16, device_memory_bytes, host_memory

_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "onnx", "onnxruntime", "tensorboardX", "wandb")
_CPU_BF16 = ("avx512_bf16", "amx_bf16", "bf16")  # names in /proc/cpuinfo, the last on ARM


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """The devices of one kind: how many, the memory of each that JAX may use, and what is known of bfloat16."""

    platform: str
    name: str
    count: int
    memory_bytes: int | None = None
    capability: str = ""
    bfloat16: str = ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine, as far as a run is concerned."""

    devices: tuple[DeviceKind, ...]
    default_platform: str
    processors: int
    memory_bytes: int | None
    host: str
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def describe_machine() -> Machine:
    """Return what this machine offers. JAX opens its devices."""
    found = [device for device in jax.devices() if device.process_index == jax.process_index()]
    kinds: dict[tuple[str, str], list[Any]] = {}
    for device in found:
        kinds.setdefault((device.platform, device.device_kind), []).append(device)
    versions = {"headrace": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is not None:
            versions[package] = importlib.metadata.version(package)
    return Machine(
        devices=tuple(_kind(name, kind, devices) for (name, kind), devices in kinds.items()),
        default_platform=found[0].platform,
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=host_memory(),
        host=_processor_name(),
        versions=versions,
        notes=tuple(_notes(found[0].platform)),
    )


def _kind(name: str, kind: str, devices: list[Any]) -> DeviceKind:
    capability = str(getattr(devices[0], "compute_capability", "") or "")
    return DeviceKind(
        platform=name,
        name=kind,
        count=len(devices),
        memory_bytes=device_memory_bytes(devices[0]),
        capability=capability,
        bfloat16=_bfloat16(name, capability),
    )


def _bfloat16(name: str, capability: str) -> str:
    if name == "cpu":
        return "in hardware" if set(_CPU_BF16) & set(_processor_flags()) else "emulated"
    if name == "tpu":
        return "in hardware"
    parts = capability.split(".")
    if len(parts) == 2 and all(part.isdigit() for part in parts):
        return "in hardware" if tuple(map(int, parts)) >= FIRST_BFLOAT16 else "emulated: use --half-type float16"
    return ""


def _notes(default: str) -> list[str]:
    """Return what keeps an accelerator from being used."""
    notes = []
    if default == "cpu" and Path("/proc/driver/nvidia/version").exists():
        if os.environ.get("JAX_PLATFORMS", "") in ("", "cuda"):
            notes.append("An NVIDIA driver is here, but JAX uses the CPU: pip install 'headrace[cuda]'.")
        else:
            notes.append(f"An NVIDIA driver is here, but JAX_PLATFORMS is {os.environ['JAX_PLATFORMS']}.")
    return notes


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _processor_flags() -> list[str]:
    return next((line.partition(":")[2].split() for line in _cpuinfo() if line.startswith(("flags", "Features"))), [])


def _processor_name() -> str:
    named = (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
