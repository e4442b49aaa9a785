"""The processes of a job as one: what process 0 decides the others follow, and what must be equal is compared.

Words go through the store of JAX's coordination service, which waits for no device and is there before any is touched;
arrays go through XLA's collectives. Every process must come to the same questions in the same order.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from headrace.job.warm_collectives import connect_devices, quiet_output

_ROOT = "headrace/run"
_PATIENCE = 60_000  # milliseconds; then it is waited again: the watch ends a process that waits for a dead one
# Of a state, sent at once: devices hold it several times. 292 MiB took 2.9 GiB in one piece, in such ones 0.65.
PIECE_BYTES = 2**24
_KEPT = 256  # answers of process 0 that stay in the store; nobody is that far behind, since calls need everybody


class Group:
    """This process among those of its job."""

    def __init__(self, process: int = 0, num_processes: int = 1, client: Any = None) -> None:
        self.process, self.num_processes, self._client = process, num_processes, client
        self._questions = itertools.count()
        self._has_asked = False

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes logs, records and checkpoints."""
        return self.process == 0

    @property
    def is_alone(self) -> bool:
        """Whether the job has no other process."""
        return self.num_processes == 1

    def share(self, value: Any = None) -> Any:
        """Return process 0's value (of JSON's kinds) in every process."""
        if self.is_alone:
            return value
        number = next(self._questions)
        if self.is_first:
            self._client.key_value_set(f"{_ROOT}/said/{number}", json.dumps(value))
            if number >= _KEPT:
                self._client.key_value_delete(f"{_ROOT}/said/{number - _KEPT}")
            return value
        return json.loads(self._wait(f"{_ROOT}/said/{number}"))

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value (of JSON's kinds), in their order, in every process."""
        if self.is_alone:
            return [value]
        place = f"{_ROOT}/gathered/{next(self._questions)}"
        self._client.key_value_set(f"{place}/{self.process}", json.dumps(value))
        return [json.loads(self._wait(f"{place}/{process}")) for process in range(self.num_processes)]

    def first(self, work: Callable[[], Any]) -> Any:
        """Let process 0 do some work; return what it gives there, None elsewhere. If it fails, the watch ends all."""
        return work() if self.is_first else None

    def same(self, tree: Any) -> Any:
        """Return process 0's host arrays in every process, bit by bit; the shapes must be equal already."""
        if self.is_alone:
            return tree
        leaves, build = jax.tree.flatten(jax.tree.map(lambda leaf: np.array(leaf, order="C"), tree))
        for piece in _pieces([leaf.reshape(-1).view(np.uint8) for leaf in leaves]):
            received = multihost_utils.broadcast_one_to_all(np.concatenate(piece))
            ends = itertools.accumulate(part.size for part in piece)
            for part, end in zip(piece, ends, strict=True):
                part[:] = received[end - part.size : end]
        return jax.tree.unflatten(build, leaves)

    def meet(self, meshes: Sequence[Mesh], group_size: int = 1) -> None:
        """Wait for all processes, and connect those of their devices that will exchange something."""
        if self.is_alone:
            return
        self.gather(None)
        with quiet_output():
            self.same(np.zeros(1, np.uint8))
            connect_devices(meshes, group_size)

    def stop_asked(self, asked: str | None) -> str | None:
        """Return why the job is to stop now, the same in every process, or None; `asked` is what this one was told."""
        if self.is_alone:
            return asked
        if asked and not self.is_first and not self._has_asked:
            self._client.key_value_set(f"{_ROOT}/asked/{self.process}", f"{asked} at process {self.process}")
            self._has_asked = True
        if self.is_first and not asked:
            others = self._client.key_value_dir_get(f"{_ROOT}/asked/")
            asked = others[0][1] if others else None
        return self.share(asked)

    def _wait(self, key: str) -> str:
        while True:
            try:
                return self._client.blocking_key_value_get(key, _PATIENCE)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise


def _pieces(rows: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Cut rows of bytes, one behind the other, into pieces of one size but the last; yield the parts of each."""
    starts = [0, *itertools.accumulate(row.size for row in rows)]
    for begin in range(0, starts[-1], PIECE_BYTES):
        end = begin + PIECE_BYTES
        parts = [row[max(begin - start, 0) : max(end - start, 0)] for row, start in zip(rows, starts[:-1], strict=True)]
        yield [part for part in parts if part.size]


@cache
def current_group() -> Group:
    """Return the group that this process has joined; one that never joined any is alone."""
    if not jax.distributed.is_initialized():
        return Group()
    from jax._src.distributed import global_state  # the store has no public door; multihost_utils takes this one too

    return Group(global_state.process_id, global_state.num_processes, global_state.client)
