"""Measure when the actions of a step really ran, without holding up their dispatch."""

import threading
import time
from queue import SimpleQueue
from typing import Any

import jax

from headrace.plan.schedule import Action, Work, needs
from headrace.plan.table import Cell, Table


class Tracer:
    """Waits for the results of every device in a thread of its own, and notes the time at which each is there.

    An action ends when its result is there. It starts when it has been dispatched, what it needs has ended and its
    device is free: so the time in which values travel between devices counts as the action's.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._begin = time.perf_counter()
        self._dispatched: dict[Action, float] = {}
        self._ends: dict[Action, float] = {}
        self._queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(work.num_devices)]
        self._threads = [threading.Thread(target=self._wait, args=(queue,), daemon=True) for queue in self._queues]
        for thread in self._threads:
            thread.start()

    def observe(self, action: Action, result: Any) -> None:
        """Take note of an action that has just been dispatched."""
        self._dispatched[action] = time.perf_counter() - self._begin
        self._queues[self._work.device_of[action.node]].put((action, result))

    def table(self) -> Table:
        """Wait for all results; return the measured table, in seconds."""
        for queue, thread in zip(self._queues, self._threads, strict=True):
            queue.put(None)
            thread.join()
        free = dict.fromkeys(range(self._work.num_devices), 0.0)
        cells = []
        for action in self._dispatched:  # in the order of dispatch: what an action needs comes before it
            device, end = self._work.device_of[action.node], self._ends[action]
            ready = max((self._ends[need] for need in needs(action, self._work)), default=0.0)
            start = min(max(self._dispatched[action], ready, free[device]), end)
            free[device] = end
            cells.append(Cell(start, end, device, action))
        return Table(cells=tuple(sorted(cells)), work=self._work, unit="seconds")

    def _wait(self, queue: SimpleQueue[Any]) -> None:
        while (item := queue.get()) is not None:
            action, result = item
            jax.block_until_ready(result)
            self._ends[action] = time.perf_counter() - self._begin
