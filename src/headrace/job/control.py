"""Join the other processes of a job, exchange control messages, compare what all must agree on, and leave it.

Small values go through the key-value store of JAX's coordination service, which waits for no device and exists before
any device is touched; arrays go through XLA's collectives. Every process must make the same calls in the same order.
"""

import atexit
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.core.errors import ConfigError, HeadraceError, ProcessLost
from headrace.core.files import parse_json
from headrace.core.jax_private import CoordinationClient, coordination_client, devices_are_started
from headrace.core.tree import PyTree
from headrace.job.detect_launcher import LAUNCHER_PID, Member, ProcessInfo, detect_process_info
from headrace.job.liveness import GRACE_SECONDS, LivenessMonitor, ProgressWatch, ending_message
from headrace.job.local_processes import process_gpus, visible_gpus
from headrace.job.rendezvous import rendezvous
from headrace.job.unread_launchers import refuse_unread_launcher

T = TypeVar("T")

_ROOT = "headrace/run"
# Milliseconds of one wait, after which the wait is repeated. There is no overall limit: the liveness monitor ends this
# process if the one that it waits for dies.
_WAIT_MS = 60_000
# Arrays are broadcast in pieces of this size, because a collective holds several copies on the device: sending 292 MiB
# at once took 2.9 GiB, in pieces 0.65 GiB.
PIECE_BYTES = 2**24
# Broadcast values that stay in the store. No process is that far behind, since training calls need all of them.
_KEPT_BROADCASTS = 256


def warm_collectives(meshes: Iterable[Mesh], batch_norm_group_size: int = 1) -> None:
    """All-reduce over the replicas of each mesh, and over the groups of replicas that share batch norm statistics.

    Collectives connect the processes at their first use and give up if one is late: gloo waits 30 seconds, whatever is
    set, and one process may well compile for longer than that after another. Later collectives have no such limit.
    """
    size = batch_norm_group_size
    for mesh in dict.fromkeys(meshes):
        (replica,) = mesh.axis_names
        sharding = NamedSharding(mesh, P(replica))
        ones = jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.ones(1, np.float32))
        groups = [list(range(i, i + size)) for i in range(0, mesh.size, size)] if size > 1 else None

        def count(one: jax.Array, groups: list[list[int]] | None = groups, replica: str = replica) -> jax.Array:
            # Groups are exchanged apart: XLA makes another communicator for each set of devices, and each has its own
            # first use.
            total = lax.psum(one, replica)
            return total if groups is None else lax.psum(total, replica, axis_index_groups=groups)

        mapped = jax.shard_map(count, mesh=mesh, in_specs=P(replica), out_specs=P(replica), check_vma=False)
        jax.block_until_ready(jax.jit(mapped)(ones))


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Discard what libraries print to standard output inside the block: gloo reports every connection."""
    sys.stdout.flush()
    # The descriptor itself is redirected, because C++ does not write through sys.stdout.
    saved, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(null)


class ProcessGroup(Member):
    """This process among those of its job."""

    def __init__(self, process: int = 0, num_processes: int = 1, client: CoordinationClient | None = None) -> None:
        self.process, self.num_processes, self._client = process, num_processes, client
        self._calls = itertools.count()
        self._has_requested_stop = False

    def broadcast(self, value: object = None) -> Any:
        """Return process 0's value (anything JSON can hold) in every process."""
        if self.is_alone:
            return value
        number = next(self._calls)
        if self.is_first:
            self._store.key_value_set(f"{_ROOT}/broadcast/{number}", json.dumps(value))
            # The store is memory of process 0, and a run broadcasts before every call: without this it would grow for
            # days.
            if number >= _KEPT_BROADCASTS:
                self._store.key_value_delete(f"{_ROOT}/broadcast/{number - _KEPT_BROADCASTS}")
            return value
        return parse_json(self._wait(f"{_ROOT}/broadcast/{number}"))

    def all_gather(self, value: object) -> list[Any]:
        """Return every process's value (anything JSON can hold), ordered by process, in every process."""
        if self.is_alone:
            return [value]
        key = f"{_ROOT}/gather/{next(self._calls)}"
        self._store.key_value_set(f"{key}/{self.process}", json.dumps(value))
        return [parse_json(self._wait(f"{key}/{process}")) for process in range(self.num_processes)]

    def on_first_process(self, work: Callable[[], T]) -> T | None:
        """Call `work` in process 0 and return its result there, None elsewhere.

        If it raises, the liveness monitor ends the other processes.
        """
        return work() if self.is_first else None

    def broadcast_arrays(self, tree: PyTree) -> PyTree:
        """Return process 0's host arrays in every process, bit for bit; their shapes must already be equal."""
        if self.is_alone:
            return tree
        # Copies, contiguous: what is received is written into them, byte by byte.
        leaves, structure = jax.tree.flatten(jax.tree.map(lambda leaf: np.array(leaf, order="C"), tree))
        for piece in _pieces([leaf.reshape(-1).view(np.uint8) for leaf in leaves]):
            # As bytes: a broadcast is a sum with zeros elsewhere, and of floats it would turn -0.0 into 0.0 and change
            # the bits of NaN.
            received = multihost_utils.broadcast_one_to_all(np.concatenate(piece))
            ends = itertools.accumulate(part.size for part in piece)
            for part, end in zip(piece, ends, strict=True):
                part[:] = received[end - part.size : end]  # the parts are views of the leaves
        return jax.tree.unflatten(structure, leaves)

    def connect_devices(self, meshes: Sequence[Mesh], batch_norm_group_size: int = 1) -> None:
        """Wait for all processes, then connect the devices of each mesh (see `warm_collectives`)."""
        if self.is_alone:
            return
        self.all_gather(None)  # a barrier: gloo gives up on a process that is 30 s late
        with quiet_stdout():
            self.broadcast_arrays(np.zeros(1, np.uint8))
            warm_collectives(meshes, batch_norm_group_size)

    def agree_to_stop(self, requested: str | None) -> str | None:
        """Return why the job is to stop now, or None: the same in every process.

        `requested` is the signal that this process has received, if any.
        """
        if self.is_alone:
            return requested
        if requested and not self.is_first and not self._has_requested_stop:
            # Once: a key of the store can be set only once, and a process may be sent several signals.
            self._store.key_value_set(f"{_ROOT}/stop/{self.process}", f"{requested} at process {self.process}")
            self._has_requested_stop = True
        if self.is_first and not requested:
            # Does not wait, unlike getting a key that is not there yet.
            others = self._store.key_value_dir_get(f"{_ROOT}/stop/")
            requested = others[0][1] if others else None
        # Process 0 alone decides: a signal that arrives between two processes' questions would stop one of them only.
        return self.broadcast(requested)

    @property
    def _store(self) -> CoordinationClient:
        assert self._client is not None, "a group of several processes has a client"
        return self._client

    def _wait(self, key: str) -> str:
        while True:
            try:
                return self._store.blocking_key_value_get(key, _WAIT_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


def _pieces(rows: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Cut the concatenation of byte arrays into pieces of equal size (the last may be smaller); yield views of each."""
    starts = [0, *itertools.accumulate(row.size for row in rows)]
    for begin in range(0, starts[-1], PIECE_BYTES):
        end = begin + PIECE_BYTES
        parts = [row[max(begin - start, 0) : max(end - start, 0)] for row, start in zip(rows, starts[:-1], strict=True)]
        yield [part for part in parts if part.size]


def current_group() -> ProcessGroup:
    """Return the group that this process has joined; a process that joined none is alone, so far."""
    return ProcessGroup() if coordination_client() is None else _joined_group()


@cache
def _joined_group() -> ProcessGroup:
    """Return the one group of this process: it counts its messages."""
    found = coordination_client()
    assert found is not None, "asked for only after joining"
    return ProcessGroup(*found)


# Compare values that must be equal in all processes of a job, before training starts.


_MAX_REPORTED = 6


def check_consistency(group: ProcessGroup, facts: Mapping[str, object]) -> None:
    """Raise ConfigError in every process, naming what differs, unless all processes pass equal named values.

    Values that JSON does not know are compared by their text. Each process sends a digest first; the values themselves
    are exchanged only to report a difference.
    """
    if group.is_alone:
        return
    # Sorted, so that equal facts give equal digests whatever order they were collected in.
    text = json.dumps(facts, sort_keys=True, default=str)
    if len(set(group.all_gather(hashlib.sha256(text.encode()).hexdigest()))) > 1:
        _report(group.all_gather(json.loads(text)))


def _report(by_process: Sequence[Mapping[str, Any]]) -> None:
    names = differing_names(by_process)
    listed = [f"{name}: {', '.join(_values(name, by_process))}" for name in names[:_MAX_REPORTED]]
    more = f"; and {len(names) - _MAX_REPORTED} more" if len(names) > _MAX_REPORTED else ""
    raise ConfigError(
        f"The processes differ in {'; '.join(listed)}{more}.",
        rule="Every process of a job runs the same command on the same data, with the same versions.",
        remedy="Start all of them with the same options; configuration files and data must be the same on all hosts.",
    )


def differing_names(by_process: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values are not equal in all processes; a missing name differs from any value."""
    # A dict keeps the order, options before what follows from them; a set would not.
    names = dict.fromkeys(name for facts in by_process for name in facts)
    missing = object()
    first = by_process[0]
    return [name for name in names if any(f.get(name, missing) != first.get(name, missing) for f in by_process)]


def _values(name: str, by_process: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{facts.get(name)} (process {number})" for number, facts in enumerate(by_process)][:_MAX_REPORTED]


# Join the other processes of a job, before any device is touched; and leave it, in order or after an error.


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


def _connect(info: ProcessInfo) -> None:
    """Rendezvous, start the liveness monitor, then initialize JAX."""
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
