"""Join the other processes of a job, before anything touches a device; and leave it, in order or in trouble."""

import atexit
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache

import jax

from headrace.core.errors import ConfigError, HeadraceError, ProcessLost
from headrace.job.detect_launcher import LOOPBACK, find_place, split_address
from headrace.job.liveness import GRACE, LivenessMonitor, describe
from headrace.job.local_processes import gpu_share, visible_gpus
from headrace.job.process_info import COORDINATOR, PARENT, Place
from headrace.job.rendezvous import rendezvous

SHUTDOWN_SECONDS = 5  # for JAX's own last barrier: the watch has seen to it that all processes come to it together
NEWS_SECONDS = 3.0  # after a failed collective the news of who died comes within milliseconds


def join_job(*, distributed: bool = False) -> Place | None:
    """Find this process's place in the environment and join the others; None where there are none."""
    place = find_place(os.environ, distributed=distributed)
    return None if place is None else join(place)


def join(place: Place) -> Place:
    """Meet the other processes; return the place, with what only JAX could know. A second time nothing happens."""
    if not place.is_alone and not jax.distributed.is_initialized():
        # XLA's own CPU collectives know one process only. On other platforms nobody reads this.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        with suppress(AttributeError):  # where JAX has it
            jax.config.update("jax_enable_preemption_service", False)  # signals are ours
        if place.num_processes:
            _meet(place)
        else:
            jax.distributed.initialize(initialization_timeout=int(place.join_seconds))
    if not place.num_processes:
        place = replace(place, process=jax.process_index(), num_processes=jax.process_count())
    _job().place = place
    return place


@contextmanager
def joined(*, distributed: bool = False) -> Iterator[Place | None]:
    """Be part of the job while the block runs: an error in here ends all processes, and theirs end this one."""
    place = join_job(distributed=distributed)
    watch = current_monitor()
    if watch is None:
        yield place
        return
    try:
        with naming_the_lost():
            yield place
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        watch.fail(_in_a_line(error))
        watch.tell()  # the error itself is printed, by whoever catches it
        # JAX would wait for the others at exit, and then abort.
        code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        atexit.register(_leave_at_once, code)
        raise


@contextmanager
def naming_the_lost() -> Iterator[None]:
    """Turn the error of a collective whose other end is gone into one that says which process that was."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        watch, of_xla = current_monitor(), isinstance(error, jax.errors.JaxRuntimeError)
        lost = watch.wait_for_loss(NEWS_SECONDS if of_xla else NEWS_SECONDS / 10) if watch else None
        if watch is None or lost is None:
            raise
        if watch.me.process:
            time.sleep(GRACE)  # only process 0 has something to write: the watch ends the others right now
        raise ProcessLost(
            f"{describe(watch.me, lost)}.",
            rule="A step needs all processes.",
            remedy="Nothing before the last checkpoint is lost: headrace resume RUN_DIR, with any number of processes.",
        ) from error


def current_monitor() -> LivenessMonitor | None:
    """Return the watch of the job that this process has joined."""
    return _job().watch


def refuse_narrow(devices_per_replica: int) -> None:
    """Refuse a plan whose replicas need more devices than the launcher was told that they have."""
    place = _job().place
    if place is None or place.devices_per_replica is None or devices_per_replica <= place.devices_per_replica:
        return
    raise ConfigError(
        f"A replica of this plan needs {devices_per_replica} devices, and the launcher gives it "
        f"{place.devices_per_replica}.",
        rule="--ipus-per-replica is the number of devices of a replica: one for each stage of a pipeline.",
        remedy=f"Launch with --ipus-per-replica {devices_per_replica}, or cut the network into fewer stages.",
    )


@dataclass
class _Job:
    place: Place | None = None
    watch: LivenessMonitor | None = None


@cache
def _job() -> _Job:
    """Return what this process has joined: one job in its life, as it is with JAX's own state."""
    return _Job()


def _meet(place: Place) -> None:
    """Call the roll, start the watch, then JAX."""
    roll = rendezvous(place)
    parent = os.getppid() if os.environ.get(PARENT) == str(os.getppid()) else None  # else a script stands between
    watch = _job().watch = LivenessMonitor(roll, place.silence_seconds, parent)
    host, port = split_address(roll.jax_address, COORDINATOR)
    local = host == LOOPBACK
    try:
        jax.distributed.initialize(
            coordinator_address=roll.jax_address,
            num_processes=place.num_processes,
            process_id=place.process,
            local_device_ids=gpu_share(place, os.environ, len(visible_gpus(os.environ))),
            cluster_detection_method="deactivate",
            initialization_timeout=int(max(place.join_seconds, 10)),
            # JAX ends a process by an abort of its own. It is the second line: the watch must have spoken before.
            heartbeat_timeout_seconds=int(3 * place.silence_seconds) + 10,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            coordinator_bind_address=f"{host}:{port}" if local else None,
        )
    except Exception as error:
        watch.fail(_in_a_line(error))
        raise
    atexit.register(watch.farewell)  # after JAX's own, so that it runs before it


def _in_a_line(error: BaseException) -> str:
    text = error.problem if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:300].removesuffix(".") if text else type(error).__name__


def _leave_at_once(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
