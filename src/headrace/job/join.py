"""Join the other processes of a job, before any device is touched; and leave it, in order or after an error."""

import atexit
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache

import jax

from headrace.core.errors import ConfigError, HeadraceError, ProcessLost
from headrace.core.jax_private import devices_are_started
from headrace.job.detect_launcher import detect_process_info, refuse_unread_launcher
from headrace.job.liveness import GRACE_SECONDS, LivenessMonitor, ProgressWatch, ending_message
from headrace.job.local_processes import process_gpus, visible_gpus
from headrace.job.process_info import ProcessInfo
from headrace.job.rendezvous import rendezvous
from headrace.job.variables import LAUNCHER_PID

# For JAX's own last barrier. It can be short: the liveness monitor makes all processes reach it together.
SHUTDOWN_SECONDS = 5
# After a failed collective, the monitor usually reports within milliseconds which process died.
REPORT_SECONDS = 3.0


def join(info: ProcessInfo) -> ProcessInfo:
    """Join the job; return the info, completed by what only JAX could know. A second call does nothing."""
    if not info.is_alone and not jax.distributed.is_initialized():
        if devices_are_started():
            raise ConfigError(
                f"{info.detected_by} says that this is process {info.process} of {info.num_processes}, but this "
                "process has started its devices alone.",
                rule="A process joins its job before anything uses JAX.",
                remedy="Begin the program with `with headrace.join_job():`.",
            )
        # XLA's built-in CPU collectives support a single process only. Other platforms ignore this setting.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        with suppress(AttributeError):  # not every version of JAX has it
            jax.config.update("jax_enable_preemption_service", False)  # Headrace handles signals itself
        if info.num_processes:
            _connect(info)
        else:
            # On Cloud TPU only JAX knows the other hosts, so that it also connects them; there is no rendezvous to
            # watch then.
            jax.distributed.initialize(initialization_timeout=int(info.join_seconds))
    if not info.num_processes:
        info = replace(info, process=jax.process_index(), num_processes=jax.process_count())
    _job().info = info
    return info


@contextmanager
def join_job(*, distributed: bool = False) -> Iterator[ProcessInfo | None]:
    """Be part of the job that the environment describes while the block runs; yield None if there is no such job.

    An error inside the block ends all processes of the job, and an error in another process ends this one.
    """
    info = detect_process_info(os.environ, distributed=distributed)
    if info is None and not jax.distributed.is_initialized():
        refuse_unread_launcher(os.environ)
    info = None if info is None else join(info)
    monitor = current_monitor()
    if monitor is None:
        yield info
        return
    try:
        with report_lost_process():
            yield info
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        monitor.fail(_first_line(error))
        monitor.claim_last_message()  # whoever catches the error prints it
        # Without this, JAX would wait for the others at exit and then abort.
        code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        atexit.register(_exit_at_once, code)
        raise


@contextmanager
def report_lost_process() -> Iterator[None]:
    """Turn the error of a collective whose peer is gone into a ProcessLost that names the process."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        monitor, from_xla = current_monitor(), isinstance(error, jax.errors.JaxRuntimeError)
        lost = monitor.wait_for_loss(REPORT_SECONDS if from_xla else REPORT_SECONDS / 10) if monitor else None
        if monitor is None or lost is None:
            raise
        if monitor.me.process:
            time.sleep(GRACE_SECONDS)  # only process 0 has a record to write: meanwhile the monitor ends this process
        raise ProcessLost(
            f"{ending_message(monitor.me, lost)}.",
            rule="A step needs all processes.",
            remedy="Nothing before the last checkpoint is lost: headrace resume RUN_DIR, with any number of processes.",
        ) from error


def current_monitor() -> LivenessMonitor | None:
    """Return the liveness monitor of the job that this process has joined."""
    return _job().monitor


def is_watched() -> bool:
    """Say whether Headrace monitors the processes of this job; else whoever connected JAX does, in its own way."""
    return current_monitor() is not None


def watch_progress() -> ProgressWatch:
    """Return the watch that ends this process if its run hangs, as the environment says."""
    return ProgressWatch(os.environ, current_monitor())


def check_devices_per_replica(devices_per_replica: int) -> None:
    """Raise ConfigError if the plan's replicas need more devices than the launcher assigned to each."""
    info = _job().info
    if info is None or info.devices_per_replica is None or devices_per_replica <= info.devices_per_replica:
        return
    raise ConfigError(
        f"A replica of this plan needs {devices_per_replica} devices, but the launcher assigns it "
        f"{info.devices_per_replica}.",
        rule="--devices-per-replica is the number of devices of a replica: one for each stage of a pipeline.",
        remedy=f"Launch with --devices-per-replica {devices_per_replica}, or use fewer pipeline stages.",
    )


def devices_of_this_process(num_visible: int) -> int:
    """Return how many of the devices that a process of this host sees are this one's."""
    info = _job().info
    own = process_gpus(info, os.environ, num_visible) if info else None
    return num_visible if own is None else len(own)


@dataclass
class _Job:
    info: ProcessInfo | None = None
    monitor: LivenessMonitor | None = None


@cache
def _job() -> _Job:
    """Return the job that this process has joined: at most one in its life, like JAX's own distributed state."""
    return _Job()


def refuse_missing_tls(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if certificates are given that this JAX does not use: whoever gives them trusts them."""
    names = [name for name in ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE") if environ.get(name)]
    if names and not hasattr(jax.config, names[0].lower()):
        raise ConfigError(
            f"{names[0]} is set, but JAX {jax.__version__} connects processes without certificates.",
            rule="JAX has mutual TLS for its coordination service from 0.12 on.",
            remedy="Install a newer JAX, or unset the variable.",
        )


def _connect(info: ProcessInfo) -> None:
    """Rendezvous, start the liveness monitor, then initialize JAX."""
    refuse_missing_tls(os.environ)
    connections = rendezvous(info)
    monitor = _job().monitor = LivenessMonitor(connections, info.silence_seconds, _launcher_to_watch())
    try:
        jax.distributed.initialize(
            coordinator_address=connections.jax_address,
            num_processes=info.num_processes,
            process_id=info.process,
            local_device_ids=process_gpus(info, os.environ, len(visible_gpus(os.environ))),
            # JAX would otherwise look for Slurm or MPI itself and overrule what was found here.
            cluster_detection_method="deactivate",
            initialization_timeout=int(max(info.join_seconds, 10)),
            # JAX's own heartbeat aborts the process without naming anyone. It is the fallback, so it must be slower
            # than the liveness monitor.
            heartbeat_timeout_seconds=int(3 * info.silence_seconds) + 10,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            coordinator_bind_address=connections.jax_bind,
        )
    except Exception as error:
        monitor.fail(_first_line(error))
        raise
    atexit.register(_leave_together, monitor)  # registered after JAX's own handler, so it runs before that


def _leave_together(monitor: LivenessMonitor) -> None:
    """Wait for the others at exit. Ctrl-C ends this process at once: its work is done, and JAX would abort."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        monitor.wait_until_all_done()
    except KeyboardInterrupt:
        monitor.fail("it was interrupted while it waited for the others")
        _exit_at_once(130)


def _launcher_to_watch() -> int | None:
    """Return the launcher's pid if this process is its child: its child it remains until the launcher ends.

    Where a script stands between the two, its end says nothing: then the launcher is not watched. But a child that was
    adopted by init, because its launcher was killed before the job had joined, learns so from the watch at once.
    """
    parent, named = os.getppid(), os.environ.get(LAUNCHER_PID, "")
    if not named.isdecimal() or (named != str(parent) and not (parent == 1 and _has_ended(int(named)))):
        return None
    return int(named)


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's
        pass
    return False


def _first_line(error: BaseException) -> str:
    text = error.problem if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:300].removesuffix(".") if text else type(error).__name__


def _exit_at_once(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
