"""The devices that a run will find.

`visible_devices` opens none: opening GPUs takes their memory, and opening CPU devices fixes their number. What drivers
write into files is read; where JAX has opened its devices already, it is asked. `describe_machine` opens them.
"""

import functools
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import jax

from headrace.config.schema import Run
from headrace.core.errors import RunStopped
from headrace.core.jax_private import devices_are_started
from headrace.core.session import session
from headrace.engine.devices import Device, start_devices, warm_up
from headrace.ops.tracing import given_target

FIRST_BFLOAT16 = (8, 0)  # NVIDIA's compute capability from which on bfloat16 is in hardware
ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class Visible:
    """Devices of one platform (cpu, gpu, tpu): how many, the memory of the smallest, whether they have bfloat16."""

    platform: str
    count: int
    memory_bytes: int | None = None  # None: not known
    bfloat16: bool = False
    name: str = ""  # of the first, as its driver or JAX writes it; empty: not known


def visible_devices(platform: str, root: Path = ROOT, *, details: bool = True) -> Visible:
    """Return the devices that a run on this platform (auto, cpu, cuda, rocm, tpu) will find.

    Under `made_for`, those of the target.
    Without details, which NVIDIA's driver takes a while to say, memory and number formats are not known.
    """
    if (made := given_target()) is not None and made.name:
        return Visible(
            platform=made.platform,
            count=made.count,
            memory_bytes=made.memory_bytes,
            bfloat16=has_bfloat16(made.capability),
            name=made.name,
        )
    # Asking JAX would start its backends; only where they run already does it cost nothing. Not where they start in
    # a thread: it would be waited for, and what a run chooses for itself must not depend on who is first.
    if devices_are_started() and not session().starts_early.is_set():
        return _started(jax.local_devices())
    asked = platform if platform != "auto" else jax.config.jax_platforms or ""  # pyright: ignore[reportAttributeAccessIssue]
    name = asked.split(",")[0]
    names = {"": tuple(_FINDERS), "gpu": ("cuda", "rocm"), "cpu": ()}.get(name, (name,))
    found = (_FINDERS[each](root, details) for each in names if each in _FINDERS)
    if (first := next(filter(None, found), None)) is not None:
        return first
    if name in ("", "cpu", "gpu", "cuda"):
        return _cpu()
    return Visible(platform=name, count=1, bfloat16=True)  # it was named, but its devices cannot be counted from here


def start_early(run: Run) -> threading.Thread | None:
    """Start the GPU that a run will find, in a thread, while the caller imports the rest; None where there is none.

    Taking a GPU's memory takes two seconds, and importing takes one after JAX is there. Only for a process that is no
    part of a job, and surely trains. Whatever goes wrong is said by the run, when it starts its devices itself.
    """
    # A run on chosen devices, or on CPU devices, has settings to make first, which follow from its plan.
    if run.first_device is not None or devices_are_started():
        return None
    seen = visible_devices(run.platform, details=False)
    if seen.platform != "gpu":
        return None
    if seen.count > 1:  # should JAX not get along with the GPUs and take the CPU, it has as many devices
        jax.config.update("jax_num_cpu_devices", seen.count)

    def start() -> None:
        with suppress(RunStopped, RuntimeError):
            warm_up(start_devices(run.platform, 1))

    session().starts_early.set()
    thread = threading.Thread(target=start, name="start-early")
    thread.start()
    return thread


def count_replicas(asked: int, devices_each: int, num_processes: int = 1) -> int:
    """Return the number of replicas; for 0 as many as the devices of all processes make, at least one in each."""
    if asked:
        return asked
    return max(1, visible_devices("auto", details=False).count // devices_each) * num_processes


def _started(devices: list[Device]) -> Visible:
    if devices[0].platform == "cpu":
        return Visible(platform="cpu", count=len(devices), memory_bytes=host_memory())
    return Visible(
        platform=devices[0].platform,
        count=len(devices),
        memory_bytes=min((device_memory_bytes(device) or 0 for device in devices), default=0) or None,
        bfloat16=has_bfloat16(capability_of(devices[0])),
        name=devices[0].device_kind,
    )


def device_memory_bytes(device: Device) -> int | None:
    """Return how many bytes this process may use on the device, or None where it is not known (the CPU)."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats.get("bytes_limit") if stats else None


def capability_of(device: Device) -> str:
    return str(getattr(device, "compute_capability", "") or "")  # NVIDIA's alone have one


def has_bfloat16(capability: str) -> bool:
    """Say whether an accelerator has bfloat16, by NVIDIA's compute capability; what has none is taken to have it."""
    version = version_of(capability)
    return version is None or version >= FIRST_BFLOAT16


def version_of(capability: str) -> tuple[int, ...] | None:
    """Return NVIDIA's compute capability `9.0` as numbers; None for others, such as AMD's `gfx90a`."""
    parts = capability.split(".")
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdigit() for part in parts) else None


def _cpu() -> Visible:
    count = max(1, jax.config.jax_num_cpu_devices)  # pyright: ignore[reportAttributeAccessIssue]
    return Visible(platform="cpu", count=count, memory_bytes=host_memory())


def _nvidia(root: Path, details: bool) -> Visible | None:
    # Without its plugin JAX does not see the GPU, and runs on the CPU.
    if not _has_package("jax_cuda12_plugin", "jax_cuda13_plugin"):
        return None
    present = len(list((root / "proc/driver/nvidia/gpus").glob("*"))) or len(list((root / "dev").glob("nvidia[0-9]*")))
    count = _chosen(present, "CUDA_VISIBLE_DEVICES")
    if not count:
        return None
    rows = [line.split(",") for line in _nvidia_smi()] if details else []
    memory = [int(row[0]) << 20 for row in rows if row[0].strip().isdigit()]
    return Visible(
        platform="gpu",
        count=count,
        memory_bytes=min(memory, default=None),
        bfloat16=all(has_bfloat16(row[1].strip()) for row in rows),
        name=rows[0][2].strip() if rows else "",
    )


@functools.cache
def _nvidia_smi() -> tuple[str, ...]:
    """Return "MiB, capability, name" of each GPU; nothing where the program is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=memory.total,compute_cap,name", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line for line in done.stdout.splitlines() if line.count(",") == 2)


def _amd(root: Path, _details: bool) -> Visible | None:
    if not _has_package("jax_rocm60_plugin", "jax_rocm7_plugin"):
        return None
    nodes = sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*"))
    # Processors are nodes, too; they have no SIMD units.
    gpus = [(node, facts) for node in nodes if (facts := _properties(node)).get("simd_count", 0) > 0]
    count = min(_chosen(len(gpus), name) for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))
    if not count:
        return None
    memory = [sum(_properties(bank).get("size_in_bytes", 0) for bank in node.glob("mem_banks/*")) for node, _ in gpus]
    versions = [facts.get("gfx_target_version", 0) for _, facts in gpus]  # gfx90a is 90010, gfx1100 is 110000
    return Visible(
        platform="gpu",
        count=count,
        memory_bytes=min(memory) or None,
        # CDNA from the MI100 (gfx908) on, and RDNA from 3 (gfx1100) on; the versions between have none.
        bfloat16=all(90008 <= version < 100000 or version >= 110000 for version in versions),
    )


def _properties(node: Path) -> Mapping[str, int]:
    """Return the numbers in a file of lines `name number`; none where it cannot be read."""
    try:
        words = [line.split() for line in (node / "properties").read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in words if len(row) == 2 and row[1].isdigit()}


def _tpu(root: Path, _details: bool) -> Visible | None:
    if not _has_package("libtpu"):
        return None
    present = len(list((root / "dev").glob("accel[0-9]*"))) or len(list((root / "dev/vfio").glob("[0-9]*")))
    count = _chosen(present, "TPU_VISIBLE_CHIPS")
    return Visible(platform="tpu", count=count, bfloat16=True) if count else None


_FINDERS: Mapping[str, Callable[[Path, bool], Visible | None]] = {"cuda": _nvidia, "rocm": _amd, "tpu": _tpu}


def _has_package(*names: str) -> bool:
    return any(find_spec(name) for name in names)


def _chosen(present: int, variable: str) -> int:
    """Return how many of the devices an environment variable leaves visible."""
    chosen = os.environ.get(variable)
    if chosen is None:
        return present
    return min(present, sum(word.strip() not in ("", "-1") for word in chosen.split(",")))


def host_memory() -> int | None:
    """Return the host's memory, or less where a container's limit is lower."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    try:
        # The kernel kills what exceeds a container's limit, however much memory the machine has. `max` means no limit.
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
