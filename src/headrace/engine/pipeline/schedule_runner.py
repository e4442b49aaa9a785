"""Walk through the actions of one step: what each takes, and where its results go.

The walk knows the graph of stages and nothing of arrays: `Programs` run the passes and move values between devices. It
dispatches in the order it is given and waits for nothing, so the devices overlap as far as that order lets them.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

import jax

from headrace.plan.schedule import Action, Node, Op, Work, needs
from headrace.plan.table import Cell, Table

Observer = Callable[[Action, Any], None]  # (action, its result, still in flight)


class Programs(Protocol):
    """What runs the passes of the nodes. Inputs and outputs are whatever the nodes agree on."""

    def forward(self, node: Node, micro: int, inputs: tuple[Any, ...], /) -> tuple[Any, Any]:
        """Return (output, what the backward pass needs); `inputs` are the outputs of all nodes of the stage before."""
        ...

    def backward(
        self, node: Node, micro: int, inputs: tuple[Any, ...], saved: Any, gradients: tuple[Any, ...], /
    ) -> Any:
        """Return the gradients of the inputs, one for each node of the stage before.

        `gradients` are those of this node's output, one from each node of the stage after; none at the last stage.
        """
        ...

    def transfer(self, value: Any, node: Node, /) -> Any:
        """Put a value on the devices of a node."""
        ...


@dataclass(kw_only=True)
class Walk:
    """One step under way; `peaks` counts what is really held between the passes."""

    work: Work
    programs: Programs
    observe: Observer | None = None
    peaks: dict[Node, int] = field(default_factory=dict)  # most micro batches that each node held at once
    outputs: dict[tuple[Node, int], Any] = field(default_factory=dict)  # of the last stage
    _inputs: dict[tuple[Node, int], dict[Node, Any]] = field(default_factory=dict)
    _saved: dict[Node, dict[int, Any]] = field(default_factory=dict)
    _gradients: dict[tuple[Node, int], dict[Node, Any]] = field(default_factory=dict)

    def run(self, actions: Iterable[Action]) -> "Walk":
        """Dispatch the actions in their order."""
        for action in actions:
            result = self._forward(action) if action.op is Op.F else self._backward(action)
            if self.observe is not None:
                self.observe(action, result)
        return self

    def _neighbours(self, stage: int) -> tuple[Node, ...]:
        return self.work.stages[stage] if 0 <= stage < self.work.num_stages else ()

    def _arrived(self, action: Action, *, keep: bool) -> tuple[Any, ...]:
        here = (action.node, action.micro)
        arrived = self._inputs.get(here, {}) if keep else self._inputs.pop(here, {})
        return tuple(arrived[node] for node in self._neighbours(action.stage - 1))

    def _forward(self, action: Action) -> Any:
        node, micro = action.node, action.micro
        inputs = self._arrived(action, keep=self.work.training)
        output, saved = self.programs.forward(node, micro, inputs)
        if self.work.training:
            held = self._saved.setdefault(node, {})
            held[micro] = saved
            self.peaks[node] = max(self.peaks.get(node, 0), len(held))
        after = self._neighbours(action.stage + 1)
        for later in after:
            self._inputs.setdefault((later, micro), {})[node] = self.programs.transfer(output, later)
        if not after:
            self.outputs[node, micro] = output
        return output

    def _backward(self, action: Action) -> Any:
        node, micro = action.node, action.micro
        gradients = self._gradients.pop((node, micro), {})
        ordered = tuple(gradients[later] for later in self._neighbours(action.stage + 1))
        inputs, saved = self._arrived(action, keep=False), self._saved[node].pop(micro)
        result = self.programs.backward(node, micro, inputs, saved, ordered)
        for before, gradient in zip(self._neighbours(action.stage - 1), result, strict=False):
            self._gradients.setdefault((before, micro), {})[node] = self.programs.transfer(gradient, before)
        return result


# Measure when the actions of a step really ran, without holding up their dispatch.


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
