"""Outfeed: results that leave a device program while it runs, readable from another thread as they arrive.

`enqueue()` makes a value that the body of a loop returns after its loop variables; the loop sends it. Results are kept
by the number of their iteration, so that the order in which they arrive does not matter.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jax
import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.tree import PyTree
from headrace.program.structure import Structure, difference, one_of, whole_number


class OutfeedMode(StrEnum):
    """Which results an outfeed keeps."""

    ALL = "ALL"  # every one
    LAST = "LAST"  # the last one


@dataclass(frozen=True)
class Enqueue:
    """The operation that `outfeed.enqueue(values)` returns; it takes effect when the body of a loop returns it."""

    outfeed: "Outfeed"
    values: PyTree


# The operations made by a body that is being traced: one that it does not return would be lost in silence.
_MADE: ContextVar[list[Enqueue] | None] = ContextVar("made", default=None)


@contextmanager
def operations_made() -> Iterator[list[Enqueue]]:
    """Collect the operations that are made inside."""
    made: list[Enqueue] = []
    before = _MADE.set(made)
    try:
        yield made
    finally:
        _MADE.reset(before)


@dataclass(frozen=True)
class _Results:
    """Results of `count` iterations: leaves [replicas, at least count, ...], on a device or not.

    Those of one iteration may lack the dim: [replicas, ...].
    """

    leaves: Sequence[Any]
    count: int
    is_stacked: bool = True

    def is_ready(self) -> bool:
        return all(not hasattr(leaf, "is_ready") or leaf.is_ready() for leaf in self.leaves)

    def host(self) -> list[np.ndarray]:
        """Return leaves [count, replicas, ...]; waits for the device."""
        if not self.is_stacked:
            return [np.asarray(leaf)[None] for leaf in self.leaves]
        return [np.asarray(leaf)[:, : self.count].swapaxes(0, 1) for leaf in self.leaves]


class Outfeed:
    """Takes results out of a loop or a pipeline.

    In mode ALL `dequeue()` returns the results since the last time, stacked: [results, ...], or [results, replicas,
    ...] with more than one replica. In mode LAST it returns the last result alone. `buffer_depth` results leave the
    device together: 1 is prompt, more cost less.
    """

    def __init__(self, mode: OutfeedMode | str = OutfeedMode.ALL, *, buffer_depth: int = 1) -> None:
        self.mode = OutfeedMode(one_of(mode, "The mode of an outfeed", [str(mode) for mode in OutfeedMode]))
        self.buffer_depth = whole_number(buffer_depth, "buffer_depth", 1)
        self.started = threading.Event()  # set when a program that enqueues has been started
        self._change = threading.Condition()
        self._structure: Structure | None = None
        self._replicas = 1
        self._ready: deque[_Results] = deque()  # in order
        self._early: dict[int, _Results] = {}  # rows that arrived before earlier ones, by their first iteration
        self._parts: dict[int, dict[int, list[np.ndarray]]] = {}  # first iteration -> replica -> leaves
        self._expected = 0  # the iteration whose rows come next
        self._last: _Results | None = None
        self._owner: int | None = None  # the thread that runs the program
        self._running = False
        self._num_runs = self._num_read = 0  # runs that ended, and of those the ones that were read to their end

    def enqueue(self, values: PyTree) -> Enqueue:
        """Return the operation that puts a tree of arrays into this outfeed: return it from the body of a loop."""
        if not jax.tree.leaves(values):
            raise ConfigError("An outfeed was given nothing to enqueue.", remedy="Enqueue an array or a tree of them.")
        operation = Enqueue(self, values)
        if (made := _MADE.get()) is not None:
            made.append(operation)
        return operation

    def dequeue(self, wait_for_completion: bool = False) -> Any:
        """Return the results since the last dequeue, possibly none (ALL: arrays of 0 rows; LAST: None).

        On the thread that ran the program, and with `wait_for_completion`, wait for its end first.
        """
        if self._structure is None:
            raise ConfigError(
                "Nothing was ever enqueued in this outfeed.",
                rule="A program that enqueues must have been started before dequeue().",
                remedy="Return outfeed.enqueue(...) from the body of the loop; a thread waits with outfeed.started.",
            )
        # The thread that runs the program is back from it when it can ask: what it waits for is certain to come.
        wait = wait_for_completion or threading.get_ident() == self._owner
        with self._change:
            while wait and self._running and threading.get_ident() != self._owner:
                self._change.wait()
            taken = self._take(wait)
            if not self._running:
                self._num_read = self._num_runs
        if self.mode is OutfeedMode.LAST:
            return self._tree([leaf[-1] for leaf in taken[-1].host()], 0) if taken else None
        chunks = [rows.host() for rows in taken]
        empty = [np.zeros((0, self._replicas, *leaf.shape), leaf.dtype) for leaf in self._structure.leaves]
        return self._tree([np.concatenate(parts) for parts in zip(empty, *chunks, strict=True)], 1)

    def __iter__(self) -> Iterator[PyTree]:
        """Yield the results of one run as they arrive; waits for the run to start, and ends with it."""
        if self.mode is OutfeedMode.LAST:
            raise ConfigError("An outfeed of mode LAST cannot be iterated over.", remedy="Use Outfeed(mode='ALL').")
        run = self._num_read + 1
        while True:
            with self._change:
                while not self._ready and self._num_runs < run:
                    self._change.wait()
                if not self._ready:
                    self._num_read = max(self._num_read, run)
                    return
                rows = self._ready.popleft()
            leaves = rows.host()
            for number in range(rows.count):
                yield self._tree([leaf[number] for leaf in leaves], 0)

    def _take(self, wait: bool) -> list[_Results]:
        """Take the rows that are ready, or all if waiting is allowed. In mode LAST the last one stays."""
        if self.mode is OutfeedMode.LAST:
            return [self._last] if self._last is not None and (wait or self._last.is_ready()) else []
        taken = []
        while self._ready and (wait or self._ready[0].is_ready()):
            taken.append(self._ready.popleft())
        return taken

    def _tree(self, leaves: Sequence[np.ndarray], replica_dim: int) -> PyTree:
        assert self._structure is not None
        if self._replicas == 1:
            leaves = [leaf.squeeze(replica_dim) for leaf in leaves]
        return jax.tree.unflatten(self._structure.treedef, leaves)

    # Called by the programs that feed an outfeed

    def begin(self, structure: Structure, replicas: int) -> None:
        """Start a run that enqueues values of this structure."""
        with self._change:
            if self._running:
                raise ConfigError(
                    "An outfeed takes the results of one program at a time.",
                    remedy="Give each program a separate outfeed.",
                )
            held = self._structure if self._ready else None
            if held is not None and (held, self._replicas) != (structure, replicas):
                change = difference(held, structure) or f"comes from {replicas} replicas"
                raise ConfigError(
                    f"An outfeed still holds results of another program; what is enqueued now {change}.",
                    remedy="Dequeue first, or give each program a separate outfeed.",
                )
            self._structure, self._replicas, self._owner = structure, replicas, threading.get_ident()
            self._expected, self._running, self._last = 0, True, None
            self._early.clear()
            self._parts.clear()
            # Last: whoever waits for it may ask for results at once.
            self.started.set()

    def deliver(self, replica: Any, first: PyTree, *leaves: PyTree) -> None:
        """Take rows [count, ...] of one replica, called from inside the program."""
        # Copied, because the program may reuse the memory of these arrays after the callback.
        part = [np.array(leaf) for leaf in leaves]
        number = int(first)
        with self._change:
            parts = self._parts.setdefault(number, {})
            parts[int(replica)] = part
            if len(parts) < self._replicas:
                return
            del self._parts[number]
        together = [np.stack(group) for group in zip(*(parts[r] for r in range(self._replicas)), strict=True)]
        self.add(number, together, len(part[0]))

    def add(self, first: int, leaves: Sequence[object], count: int) -> None:
        """Take the rows of iterations `first` on: leaves [replicas, at least count, ...]."""
        if count:
            self._add(first, _Results(leaves, count))

    def add_one(self, number: int, leaves: Sequence[object]) -> None:
        """Take the results of one iteration: leaves [replicas, ...]."""
        self._add(number, _Results(leaves, 1, is_stacked=False))

    def _add(self, first: int, rows: _Results) -> None:
        with self._change:
            if self.mode is OutfeedMode.LAST:
                self._last = rows
            else:
                self._early[first] = rows
                # Rows of several launches and replicas may arrive in any order; readers get them by iteration.
                while self._expected in self._early:
                    rows = self._early.pop(self._expected)
                    self._ready.append(rows)
                    self._expected += rows.count
            self._change.notify_all()

    def finish(self) -> None:
        """End a run."""
        with self._change:
            self._running = False
            self._num_runs += 1
            self._change.notify_all()
