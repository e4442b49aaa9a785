"""The devices of a run: the platform, virtual CPU devices, the compilation cache, the mesh."""

import hashlib
import platform as machine
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace.config.schema import Run
from headrace.core.errors import RunStopped
from headrace.core.files import cache_directory
from headrace.core.jax_private import devices_are_started

REPLICA = "replica"  # the one mesh axis of a run without pipeline stages
Device = Any  # jax.Device, which type checkers take for a variable


def start_devices(platform: str, num_devices: int, num_processes: int = 1) -> list[Device]:
    """Return the first `num_devices` devices, equally many of each process; CPU devices that are missing are virtual.

    Must be the first use of JAX's devices in this process: afterwards the number of CPU devices is fixed.
    """
    num_local = num_devices // num_processes
    if platform != "auto" and not devices_are_started():
        jax.config.update("jax_platforms", platform)
    # Also where the platform turns out to be a GPU: once the backends have started and this is known, the number of
    # CPU devices can no longer be changed.
    if num_local > max(1, jax.config.jax_num_cpu_devices):  # pyright: ignore[reportAttributeAccessIssue]
        with suppress(RuntimeError):  # the backend already runs (library use, tests): checked below
            jax.config.update("jax_num_cpu_devices", num_local)
    try:
        everything = jax.devices() if num_processes > 1 else jax.local_devices()
        # The rows of a mesh are replicas: sorted like this, the first ones belong to process 0, which a process relies
        # on when it reads only the samples of its own replicas.
        devices = sorted(everything, key=lambda device: (device.process_index, device.id))
    except (RuntimeError, AssertionError) as error:  # JAX asserts that a platform's plugin is there
        reason = f": {str(error).splitlines()[0]}" if str(error) else "."
        raise RunStopped(
            f"No device of platform {platform} can be used{reason}",
            rule="A platform needs its devices, their driver, and the JAX built for it.",
            remedy="Install that platform's JAX (for NVIDIA: pip install 'headrace[cuda]') or use --platform cpu.",
        ) from error
    _check_platform(platform, devices[0].platform)
    of_process = [sum(device.process_index == process for device in devices) for process in range(num_processes)]
    if num_processes > 1 and min(of_process) < num_local:
        raise _too_few(of_process, num_local, devices[0].platform)
    if len(devices) >= num_devices:
        return take(devices, num_devices)
    kind = devices[0].platform
    if kind == "cpu":
        remedy = (
            "JAX was started before Headrace could request more: set jax_num_cpu_devices first, or unset XLA_FLAGS."
        )
    else:
        remedy = "Lower --num-replicas and raise --gradient-accumulation-count by the same factor."
    raise RunStopped(f"{num_devices} devices are needed, but there are {len(devices)} ({kind}).", remedy=remedy)


def _check_platform(asked: str, found: str) -> None:
    """Refuse an accelerator that is not there: JAX ignores a choice made after it has opened its devices."""
    # A CPU is replaced by what is there: a model of a run on a CPU may be used in a process that has opened GPUs.
    if asked not in ("auto", "cpu", found) and not (found == "gpu" and asked in ("cuda", "rocm")):
        raise RunStopped(
            f"Platform {asked} was requested, but JAX already uses {found} in this process.",
            rule="JAX opens its devices once, at their first use.",
            remedy=f"Start a new process, or set JAX_PLATFORMS={asked} before anything uses JAX.",
        )


def take(devices: list[Device], count: int) -> list[Device]:
    """Return the first `count` of sorted devices, equally many of each process, which owns whole replicas."""
    processes = sorted({device.process_index for device in devices})
    each = count // len(processes)
    return [d for process in processes for d in [d for d in devices if d.process_index == process][:each]]


def _too_few(of_process: list[int], needed: int, kind: str) -> RunStopped:
    """Return the error that names the process with the fewest devices."""
    process, found = min(enumerate(of_process), key=lambda pair: pair[1])
    return RunStopped(
        f"{needed} devices are needed in every process, but process {process} has {found} ({kind}).",
        rule="A process owns whole replicas, with all devices of their pipelines.",
        remedy="Start fewer processes with more devices each, or lower --num-replicas or the number of stages.",
    )


def show_devices(first: int | None, num_devices: int) -> None:
    """Make only `num_devices` GPUs, from the number `first` on, visible to JAX; with None all of them are.

    Like `start_devices`, it must come before any other use of JAX's devices.
    """
    if first is not None:
        numbers = range(first, first + num_devices)
        for platform in ("cuda", "rocm"):
            jax.config.update(f"jax_{platform}_visible_devices", ",".join(map(str, numbers)))


def host_device() -> Device | None:
    """Return a CPU device, which compiles small programs fast and has a short queue; None if there is none to use."""
    if jax.process_count() > 1:
        return None  # processes start a platform together: one alone would wait for the others
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # the platforms that were chosen leave it out
        return None


def run_in_calling_thread() -> None:
    """Let a CPU run programs in the thread that calls them; for processes that only predict, with one device.

    No other thread is woken, which takes a tenth of a millisecond, 5 to 8 % of a small forward pass. Training
    needs calls that return at once. Like `start_devices`, it must come before any other use of JAX's devices; later it
    has no effect.
    """
    with suppress(AttributeError):  # should a version of JAX no longer know the option
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def start_run_devices(run: Run, num_devices: int, num_processes: int = 1) -> list[Device]:
    """Start the devices that a run's options ask for, with its compilation cache. JAX's must not be in use yet."""
    use_compilation_cache(run.compilation_cache_dir)
    show_devices(run.first_device, num_devices // num_processes)
    return start_devices(run.platform, num_devices, num_processes)


def warm_up(devices: list[Device]) -> None:
    """Put a number on each device: a GPU takes its memory when it is first used, and two seconds for it."""
    with suppress(jax.errors.JaxRuntimeError):  # no memory left, which the run says when it needs some
        jax.block_until_ready([jax.device_put(np.float32(0), device) for device in devices])


def replica_mesh(devices: list[Device]) -> Mesh:
    return Mesh(np.array(devices), (REPLICA,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a value that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def use_compilation_cache(directory: str | None) -> Path | None:
    """Cache compiled programs on disk: in `directory`, in the user's cache when None, nowhere when 'none'."""
    if directory == "none":
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    path = cache_directory() / "xla" / machine_id() if directory is None else Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if directory is None:
            # Programs that are executed: JAX makes their files as the umask says, so that nobody else may reach them.
            path.chmod(0o700)
    except OSError:
        return None  # a read-only home costs compile time, not the run
    jax.config.update("jax_compilation_cache_dir", str(path))
    # By default JAX keeps only programs that took over a second to compile; a run has dozens that take less.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


@cache
def machine_id() -> str:
    """Name the kind of CPU: programs compiled for one CPU may not run on another that shares the home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        features = ""
    return f"{machine.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


@dataclass
class CompileCounts:
    """How many programs were found in the cache, how many had to be compiled, and how many there were in all."""

    hits: int = 0
    misses: int = 0
    fallbacks: list[str] = field(default_factory=list)  # why programs were compiled again, with fewer options
    total: int = 0  # without those that the process still had

    def __str__(self) -> str:
        again = "".join(f"; {reason}" for reason in dict.fromkeys(self.fallbacks))
        if not self.hits + self.misses:
            return ("compilation cache off" if self.total else "kept from an earlier run") + again
        hits, misses = "s" * (self.hits != 1), "es" * (self.misses != 1)
        return f"compilation cache: {self.hits} hit{hits}, {self.misses} miss{misses}{again}"


# Of this thread, and of those that run in a copy of its context: several threads compile at the same time.
_COUNTING: ContextVar[CompileCounts | None] = ContextVar("counting", default=None)


@contextmanager
def count_compilations() -> Iterator[CompileCounts]:
    """Count the compilation cache's hits and misses while the block runs, and in a block around it as well."""
    counts, around = CompileCounts(), _COUNTING.get()

    def listen(event: str, **_: Any) -> None:
        # JAX calls every listener for every event of the process; this one counts only what its own context compiles.
        if _COUNTING.get() is counts:
            counts.hits += event == "/jax/compilation_cache/cache_hits"
            counts.misses += event == "/jax/compilation_cache/cache_misses"

    def listen_to_times(event: str, duration_secs: float, **_: Any) -> None:
        if _COUNTING.get() is counts:
            counts.total += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_listener(listen)
    jax.monitoring.register_event_duration_secs_listener(listen_to_times)
    token = _COUNTING.set(counts)
    try:
        yield counts
    finally:
        _COUNTING.reset(token)
        for name, found in vars(counts).items() if around else ():
            setattr(around, name, getattr(around, name) + found)
        jax.monitoring.unregister_event_listener(listen)
        jax.monitoring.unregister_event_duration_listener(listen_to_times)


def count_fallback(reason: str) -> None:
    """Count a program of this context that is compiled again, with fewer options."""
    if counts := _COUNTING.get():
        counts.fallbacks.append(reason)


def count_found() -> None:
    """Count a program of this context that was found compiled, without asking JAX."""
    if counts := _COUNTING.get():
        counts.hits += 1
        counts.total += 1
