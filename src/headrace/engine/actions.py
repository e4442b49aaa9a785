"""Walk through the actions of one step: what each takes, and where its results go.

The walk knows the graph of stages and nothing of arrays: `Programs` run the passes and move values between devices. It
dispatches in the order it is given and waits for nothing, so the devices overlap as far as that order lets them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.plan.schedule import Action, Node, Op, Work

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

    def hop(self, value: Any, node: Node, /) -> Any:
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
            self._inputs.setdefault((later, micro), {})[node] = self.programs.hop(output, later)
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
            self._gradients.setdefault((before, micro), {})[node] = self.programs.hop(gradient, before)
        return result
