"""Machines that are not here: their names, and XLA's devices for them, which compile programs and run none."""

import functools
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any

import jax

from headrace.core.errors import ConfigError, did_you_mean
from headrace.core.jax_private import add_compiler
from headrace.core.target import Target

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What XLA's compiler asks of a GPU."""

    name: str
    capability: str  # NVIDIA's compute capability, or AMD's architecture
    cores: int  # streaming multiprocessors, compute units
    memory_bytes: int
    bandwidth: int  # bytes a second
    l2_bytes: int
    clock_ghz: float
    shared_per_core: int
    registers: int = 65536
    threads_per_warp: int = 32
    per_host: int = 8

    @property
    def is_amd(self) -> bool:
        """Whether ROCm compiles for it, and not CUDA."""
        return self.capability.startswith("gfx")


@dataclass(frozen=True, kw_only=True)
class Tpu:
    """A generation of TPUs."""

    name: str
    memory_bytes: int  # of a device
    topologies: Mapping[int, str]  # chips along each axis, by the number that their name has
    chips_per_host: Mapping[int, str] = field(default_factory=dict)  # where it is not 2x2x1
    config: str = "default"  # of a chip: megacore makes one device of its two cores


_PLANE = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBE = {  # named by two cores a chip
    8: "2x2x1",
    16: "2x2x2",
    32: "2x2x4",
    64: "2x4x4",
    128: "4x4x4",
    256: "4x4x8",
    512: "4x8x8",
    1024: "8x8x8",
}
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
    "mi300": Gpu(
        name="AMD Instinct MI300X",
        capability="gfx942",
        cores=304,
        memory_bytes=192 * _GIB,
        bandwidth=5_300_000_000_000,
        l2_bytes=4 << 20,
        clock_ghz=2.1,
        shared_per_core=64 << 10,
        registers=131072,
        threads_per_warp=64,
    ),
}
TPUS = {
    "v4": Tpu(name="TPU v4", memory_bytes=32 * _GIB, topologies=_CUBE, config="megacore"),
    "v5e": Tpu(name="TPU v5 lite", memory_bytes=16 * _GIB, topologies=_PLANE, chips_per_host=_SMALL),
    "v5p": Tpu(name="TPU v5", memory_bytes=95 * _GIB, topologies=_CUBE),
    "v6e": Tpu(name="TPU v6 lite", memory_bytes=32 * _GIB, topologies=_PLANE, chips_per_host=_SMALL),
}
_RULE = (
    "GPUs are {}, with their number in one machine: h200x8, and machines in front: 2xh200x8; TPUs {}, as their slices "
    "are called: v5e-8, and slices in front: 2xv5e-16."
)
# What XLA compiles with; it is found by JAX where it is installed.
_PACKAGES = {
    "cuda": ("jax-cuda13-pjrt", "aot-cuda"),
    "rocm": ("jax-rocm7-pjrt", "aot-rocm"),
    "tpu": ("libtpu", "aot-tpu"),
}


def read_target(text: str) -> Target:
    """Return the machines that a text such as h200x8, 2xh200x8 or v5e-8 names; refuse what is not known."""
    found = re.fullmatch(r"(?:(\d+)x)?([a-z0-9]+?)(?:(x|-)(\d+))?", text.lower())
    several, kind, mark, size = found.groups() if found else (None, text.lower(), None, None)
    machines, count = int(several or 1), int(size or 1)
    rule = _RULE.format(", ".join(GPUS), ", ".join(TPUS))
    if (gpu := GPUS.get(kind)) is not None and mark != "-":
        if not 1 <= count <= gpu.per_host or not machines:
            full = count and count % gpu.per_host == 0
            raise ConfigError(
                f"target is {text}.",
                rule=f"A machine has 1 to {gpu.per_host} GPUs; the number of machines is written in front.",
                remedy=f"{count // gpu.per_host}x{kind}x{gpu.per_host}" if full else "",
            )
        return Target(
            platform="gpu",
            capability=gpu.capability,
            name=gpu.name,
            kind=kind,
            memory_bytes=gpu.memory_bytes,
            count=machines * count,
            machines=machines,
        )
    if (tpu := TPUS.get(kind)) is not None and mark == "-":
        if count not in tpu.topologies or not machines:
            sizes = ", ".join(f"{kind}-{number}" for number in tpu.topologies)
            raise ConfigError(f"target is {text}.", rule=f"The slices of {kind} are {sizes}.")
        chips = _product(tpu.topologies[count])
        return Target(
            platform="tpu",
            name=tpu.name,
            kind=kind,
            memory_bytes=tpu.memory_bytes,
            count=machines * chips,
            machines=machines * chips // _product(_host_of(tpu, count)),
            slices=machines,
        )
    raise ConfigError(f"target is {text}.", rule=rule, remedy=did_you_mean(kind, [*GPUS, *TPUS]))


def _product(sizes: str) -> int:
    return math.prod(map(int, sizes.split("x")))


def _host_of(tpu: Tpu, size: int) -> str:
    """Return the chips of one machine in a slice of this size."""
    return tpu.chips_per_host.get(size, "2x2x1")


def compiler_of(target: Target) -> str:
    """Return the package that compiles for a target, with its version; refuse a target whose package is missing."""
    package, extra = _PACKAGES[_backend(target)]
    with suppress(PackageNotFoundError):
        return f"{package} {version(package)}"
    raise ConfigError(
        f"Programs for {target.name} are compiled with {package}, which is not installed.",
        rule="The compiler comes without the device: no driver is needed.",
        remedy=f"pip install 'headrace[{extra}]', in an environment of its own if this one trains.",
    )


def _backend(target: Target) -> str:
    """Return JAX's name of the plugin that compiles for a target."""
    return "tpu" if target.platform == "tpu" else "rocm" if GPUS[target.kind].is_amd else "cuda"


def devices_of(target: Target) -> list[Any]:
    """Return XLA's devices for machines that are not here, in the order in which a run takes them."""
    compiler_of(target)
    from jax.experimental import topologies

    backend = _backend(target)
    if backend == "tpu":
        # Else libtpu asks a cloud's server for the machine that this is, for minutes.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")  # it complains that this machine is none of a cloud's
        os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing runs: several may compile at once
        tpu, chips = TPUS[target.kind], target.count // target.slices
        size, shape = next((n, each) for n, each in tpu.topologies.items() if _product(each) == chips)
        topology = topologies.get_topology_desc(
            f"{target.kind}:{shape}",
            platform="tpu",
            chips_per_host_bounds=[int(each) for each in _host_of(tpu, size).split("x")],
            **({"chip_config_name": tpu.config} if tpu.config != "default" else {}),
            **({"num_slices": target.slices} if target.slices > 1 else {}),
        )
    else:
        if backend == "rocm":
            _open_rocm()
        # Each machine has fast links of its own only: XLA's slices x hosts x GPUs.
        shape = f"{target.machines}x1x{target.count // target.machines}"
        text = _description(GPUS[target.kind])
        topology = topologies.get_topology_desc(target.name, platform=backend, topology=shape, target_config=text)
    return sorted(topology.devices, key=lambda device: (device.process_index, device.id))


@functools.cache
def _open_rocm() -> None:
    """Load AMD's compiler, which does not announce itself to JAX on a machine without such a GPU."""
    library = next((each for each in files("jax-rocm7-pjrt") or () if each.name == "xla_rocm_plugin.so"), None)
    try:
        add_compiler("rocm", Path(str(library.locate())) if library else Path("xla_rocm_plugin.so"))
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(
            f"AMD's compiler cannot be loaded: {str(error).splitlines()[0]}",
            rule="It is linked with the libraries of ROCm 7, which pip does not bring; no GPU is needed.",
            remedy="Install ROCm 7, or name its libraries in LD_LIBRARY_PATH.",
        ) from error


def _description(gpu: Gpu) -> str:
    """Return a GPU as XLA's compiler reads it: a GpuTargetConfigProto as text."""
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": gpu.threads_per_warp,
        "shared_memory_per_block": 64 << 10 if gpu.is_amd else 48 << 10,
        "shared_memory_per_core": gpu.shared_per_core,
        "shared_memory_per_block_optin": gpu.shared_per_core - (0 if gpu.is_amd else 1024),
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": 128,
        "block_dim_limit_x": (1 << 31) - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 1024 if gpu.is_amd else 64,
        "memory_bandwidth": gpu.bandwidth,
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": gpu.memory_bytes,
        "registers_per_core_limit": gpu.registers,
        "registers_per_block_limit": gpu.registers,
        "device_address_bits": 64,
        "name": f'"{gpu.name}"',
    }
    info |= _AMD if gpu.is_amd else _NVIDIA | {"platform_version": f'"Compute Capability {gpu.capability}"'}
    fields = " ".join(f"{name}: {value}" for name, value in info.items())
    if gpu.is_amd:
        capability = f'rocm_compute_capability {{ gcn_arch_name: "{gpu.capability}:sramecc+:xnack-" }}'
        about = 'platform_name: "ROCM" dnn_version_info {}'
    else:
        major, minor = gpu.capability.split(".")
        capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
        about = 'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 }'
    return f'gpu_device_info {{ {fields} {capability} }} {about} device_description_str: "{gpu.name}"'


_AMD = {"device_vendor": '"Advanced Micro Devices, Inc"'}
_NVIDIA = {
    "device_vendor": '"NVIDIA Corporation"',
    "driver_version": '"13.0.0"',
    "runtime_version": '"13.0.0"',
    "compile_time_toolkit_version": '"13.0.0"',
    "dnn_version": '"9.10.0"',
}
