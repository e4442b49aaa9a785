"""Exchange control messages with the other processes of a job."""

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.core.jax_private import CoordinationClient, coordination_client
from headrace.core.json_text import parse_json
from headrace.core.tree import PyTree
from headrace.job.process_info import Member

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
        if not self.is_first:
            self._store.key_value_set(f"{key}/{self.process}", json.dumps(value))
            return self.broadcast()
        # By process 0, one request for each process: if all asked for all, 128 processes would send 16,384. (JAX's
        # barrier would be one more way to wait, and one that neither Ctrl-C nor a second try can end.)
        others = [f"{key}/{process}" for process in range(1, self.num_processes)]
        values = [value, *(parse_json(self._wait(each)) for each in others)]
        for each in others:
            self._store.key_value_delete(each)
        return self.broadcast(values)

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
