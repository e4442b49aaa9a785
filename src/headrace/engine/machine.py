"""What a machine offers: its devices with memory and number formats, its host, and the versions installed."""

import importlib.metadata
import os
import platform
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import jax

from headrace.core import __version__
from headrace.core.process import num_processors
from headrace.engine.devices import Device
from headrace.engine.visible import capability_of, device_memory_bytes, has_bfloat16, host_memory, version_of
from headrace.native.library import describe_kernels
from headrace.rows.exports import EXPORTS
from headrace.rows.trackers import TRACKERS

_PACKAGES = (
    *("jax", "jaxlib", "numpy", "optax"),
    *(name for row in EXPORTS.values() for name in row.needs),
    *(row.package for row in TRACKERS.values()),
    *("onnxruntime-gpu", "mlflow-skinny"),  # other distributions of these modules
)
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
    kernels: str = ""  # for convolutions on the CPU; or why there are none
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def describe_machine() -> Machine:
    """Return what this machine offers. JAX opens its devices."""
    found = [device for device in jax.devices() if device.process_index == jax.process_index()]
    kinds: dict[tuple[str, str], list[Device]] = {}
    for device in found:
        kinds.setdefault((device.platform, device.device_kind), []).append(device)
    versions = {"headrace": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        # By its distribution and not by its module: `onnxruntime` may have come as onnxruntime-gpu.
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return Machine(
        devices=tuple(_kind(name, kind, devices) for (name, kind), devices in kinds.items()),
        default_platform=found[0].platform,
        processors=num_processors(),
        memory_bytes=host_memory(),
        host=_processor_name(),
        kernels=describe_kernels(),
        versions=versions,
        notes=tuple(_notes(found[0].platform)),
    )


def _kind(name: str, kind: str, devices: list[Device]) -> DeviceKind:
    capability = capability_of(devices[0])
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
    if version_of(capability) is None:
        return ""
    return (
        "in hardware"
        if has_bfloat16(capability)
        else "emulated: use --precision 16.32 --half-type float16 --loss-scaling dynamic"
    )


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
