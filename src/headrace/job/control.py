"""Control messages between the processes of a job: what process 0 decides, and what all must agree on.

Small values go through the key-value store of JAX's coordination service, which waits for no device and exists before
any device is touched; arrays go through XLA's collectives. Every process must make the same calls in the same order.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from headrace.core.jax_private import CoordinationClient, coordination_client
from headrace.job.warm_collectives import quiet_stdout, warm_collectives

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


class ProcessGroup:
    """This process among those of its job."""

    def __init__(self, process: int = 0, num_processes: int = 1, client: CoordinationClient | None = None) -> None:
        self.process, self.num_processes, self._client = process, num_processes, client
        self._calls = itertools.count()
        self._has_requested_stop = False

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes logs, records and checkpoints."""
        return self.process == 0

    @property
    def is_alone(self) -> bool:
        """Whether the job has no other process."""
        return self.num_processes == 1

    def broadcast(self, value: Any = None) -> Any:
        """Return process 0's value (anything JSON can hold) in every process."""
        if self.is_alone:
            return value
        number = next(self._calls)
        if self.is_first:
            self._store.key_value_set(f"{_ROOT}/broadcast/{number}", json.dumps(value))
            if number >= _KEPT_BROADCASTS:
                self._store.key_value_delete(f"{_ROOT}/broadcast/{number - _KEPT_BROADCASTS}")
            return value
        return json.loads(self._wait(f"{_ROOT}/broadcast/{number}"))

    def all_gather(self, value: Any) -> list[Any]:
        """Return every process's value (anything JSON can hold), ordered by process, in every process."""
        if self.is_alone:
            return [value]
        key = f"{_ROOT}/gather/{next(self._calls)}"
        self._store.key_value_set(f"{key}/{self.process}", json.dumps(value))
        return [json.loads(self._wait(f"{key}/{process}")) for process in range(self.num_processes)]

    def on_first_process(self, work: Callable[[], T]) -> T | None:
        """Call `work` in process 0 and return its result there, None elsewhere.

        If it raises, the liveness monitor ends the other processes.
        """
        return work() if self.is_first else None

    def broadcast_arrays(self, tree: Any) -> Any:
        """Return process 0's host arrays in every process, bit for bit; their shapes must already be equal."""
        if self.is_alone:
            return tree
        leaves, structure = jax.tree.flatten(jax.tree.map(lambda leaf: np.array(leaf, order="C"), tree))
        for piece in _pieces([leaf.reshape(-1).view(np.uint8) for leaf in leaves]):
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
            self._store.key_value_set(f"{_ROOT}/stop/{self.process}", f"{requested} at process {self.process}")
            self._has_requested_stop = True
        if self.is_first and not requested:
            others = self._store.key_value_dir_get(f"{_ROOT}/stop/")
            requested = others[0][1] if others else None
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


@cache
def current_group() -> ProcessGroup:
    """Return the group that this process has joined; a process that joined none is alone."""
    found = coordination_client()
    return ProcessGroup() if found is None else ProcessGroup(*found)
