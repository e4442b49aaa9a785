"""Machines that are not here: their names, and XLA's devices for them, which compile programs and run none."""

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headrace.core.errors import ConfigError, did_you_mean
from headrace.core.target import Target

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What XLA's compiler asks of an NVIDIA GPU."""

    name: str
    capability: str
    cores: int  # streaming multiprocessors
    memory_bytes: int
    bandwidth: int  # bytes a second
    l2_bytes: int
    clock_ghz: float
    shared_per_core: int
    per_host: int = 8


@dataclass(frozen=True, kw_only=True)
class Tpu:
    """A generation of TPUs."""

    name: str
    memory_bytes: int
    topologies: Mapping[int, str]  # chips along each axis, by the number that their name has
    chips_per_host: Mapping[int, str] = field(default_factory=dict)  # where it is not 2x2x1


_PLANE = {1: "1x1", 4: "2x2", 8: "2x4"}
_CUBE = {8: "2x2x1"}  # named by two cores a chip
_SMALL = {1: "1x1x1", 8: "2x4x1"}
GPUS = {
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability="8.0",
        cores=108,
        memory_bytes=80 * _GIB,
        bandwidth=2_039_000_000_000,
        l2_bytes=40 << 20,
        clock_ghz=1.41,
        shared_per_core=164 << 10,
    ),
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        capability="9.0",
        cores=132,
        memory_bytes=80 * _GIB,
        bandwidth=3_350_000_000_000,
        l2_bytes=50 << 20,
        clock_ghz=1.98,
        shared_per_core=228 << 10,
    ),
    "h200": Gpu(
        name="NVIDIA H200",
        capability="9.0",
        cores=132,
        memory_bytes=141 * _GIB,
        bandwidth=4_800_000_000_000,
        l2_bytes=50 << 20,
        clock_ghz=1.98,
        shared_per_core=228 << 10,
    ),
}
TPUS = {
    "v5e": Tpu(name="TPU v5 lite", memory_bytes=16 * _GIB, topologies=_PLANE, chips_per_host=_SMALL),
    "v5p": Tpu(name="TPU v5", memory_bytes=95 * _GIB, topologies=_CUBE),
    "v6e": Tpu(name="TPU v6 lite", memory_bytes=32 * _GIB, topologies=_PLANE, chips_per_host=_SMALL),
}
_RULE = "GPUs are {}, with their number: h200x8 (in one machine); TPUs {}, as their slices are called: v5e-8."
# What XLA compiles with; it is found by JAX where it is installed.
_PACKAGES = {"gpu": ("jax-cuda13-pjrt", "aot-cuda"), "tpu": ("libtpu", "aot-tpu")}


def read_target(text: str) -> Target:
    """Return the machines that a text such as h200x8 or v5e-8 names; refuse what is not known."""
    found = re.fullmatch(r"([a-z0-9]+?)(?:x|-)(\d+)", text.lower())
    kind, count = (found.group(1), int(found.group(2))) if found else (text.lower(), 1)
    rule = _RULE.format(", ".join(GPUS), ", ".join(TPUS))
    if (gpu := GPUS.get(kind)) is not None and "-" not in text:
        if not 1 <= count <= gpu.per_host:
            raise ConfigError(f"target is {text}.", rule=f"It is one machine, with 1 to {gpu.per_host} GPUs.")
        return Target(
            platform="gpu",
            capability=gpu.capability,
            name=gpu.name,
            memory_bytes=gpu.memory_bytes,
            count=count,
        )
    if (tpu := TPUS.get(kind)) is not None and "-" in text:
        if count not in tpu.topologies:
            sizes = ", ".join(f"{kind}-{number}" for number in tpu.topologies)
            raise ConfigError(f"target is {text}.", rule=f"The slices of {kind} in one machine are {sizes}.")
        chips = _chips(tpu.topologies[count])
        return Target(platform="tpu", name=tpu.name, memory_bytes=tpu.memory_bytes, count=chips)
    raise ConfigError(f"target is {text}.", rule=rule, remedy=did_you_mean(kind, [*GPUS, *TPUS]))


def _chips(topology: str) -> int:
    return math.prod(map(int, topology.split("x")))


def compiler_of(target: Target) -> str:
    """Return the package that compiles for a target, with its version; refuse a target whose package is missing."""
    package, extra = _PACKAGES[target.platform]
    with suppress(PackageNotFoundError):
        return f"{package} {version(package)}"
    raise ConfigError(
        f"Programs for {target.name} are compiled with {package}, which is not installed.",
        rule="The compiler comes without the device: no driver is needed.",
        remedy=f"pip install 'headrace[{extra}]', in an environment of its own if this one trains.",
    )


def devices_of(target: Target) -> list[Any]:
    """Return XLA's devices for machines that are not here."""
    compiler_of(target)
    from jax.experimental import topologies

    if target.platform == "tpu":
        # Else libtpu asks a cloud's server for the machine that this is, for minutes.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing runs: several may compile at once
        row = next(row for row in TPUS.values() if row.name == target.name)
        kind = next(kind for kind in TPUS if TPUS[kind] is row)
        size, shape = next((n, each) for n, each in row.topologies.items() if _chips(each) == target.count)
        bounds = [int(each) for each in row.chips_per_host.get(size, "2x2x1").split("x")]
        topology = topologies.get_topology_desc(f"{kind}:{shape}", platform="tpu", chips_per_host_bounds=bounds)
        return list(topology.devices)
    row = next(row for row in GPUS.values() if row.name == target.name)
    shape = f"1x{target.count}x1"  # each GPU is seen as a process of its own
    described = topologies.get_topology_desc(row.name, platform="cuda", topology=shape, target_config=_description(row))
    return list(described.devices)


def _description(gpu: Gpu) -> str:
    """Return a GPU as XLA's compiler reads it: a GpuTargetConfigProto as text."""
    major, minor = gpu.capability.split(".")
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": gpu.shared_per_core,
        "shared_memory_per_block_optin": gpu.shared_per_core - 1024,
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": 128,
        "block_dim_limit_x": (1 << 31) - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "memory_bandwidth": gpu.bandwidth,
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": gpu.memory_bytes,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "device_address_bits": 64,
        "name": f'"{gpu.name}"',
        "device_vendor": '"NVIDIA Corporation"',
        "platform_version": f'"Compute Capability {gpu.capability}"',
        "driver_version": '"13.0.0"',
        "runtime_version": '"13.0.0"',
        "compile_time_toolkit_version": '"13.0.0"',
        "dnn_version": '"9.10.0"',
    }
    fields = " ".join(f"{name}: {value}" for name, value in info.items())
    return (
        f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} '
        f'device_description_str: "{gpu.name}"'
    )
