"""One step of a pipeline under way: its nodes' programs, dispatched as the walk over the schedule's actions asks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from headrace.plan.schedule import Node
from headrace.program.gradients import accumulator_dtype
from headrace.program.node_programs import EACH, NodePrograms, make_loss, on_mesh
from headrace.program.outfeed import Outfeed
from headrace.program.pipeline_request import as_row
from headrace.program.pipeline_spec import PipelineSpec


@dataclass(frozen=True)
class Programs:
    """All programs of a pipeline but the updates."""

    spec: PipelineSpec
    nodes: dict[Node, NodePrograms]
    loss: Any  # None in inference
    gather: Any  # (sums so far, a micro batch's values) -> sums; None unless the outfeed is accumulated

    @property
    def last_mesh(self) -> Mesh:
        """The devices of the loss."""
        return self.nodes[self.spec.last[0]].spec.mesh


def make_programs(spec: PipelineSpec, nodes: dict[Node, NodePrograms]) -> Programs:
    """Return the programs of a pipeline, from those of its nodes."""
    mesh = nodes[spec.last[0]].spec.mesh
    outputs = tuple(nodes[node].spec.outputs for node in spec.last)
    loss = None if spec.ending is None else make_loss(mesh, outputs, spec.ending.loss_and_arguments)
    dtype = spec.request.accumulate_outfeed_dtype

    def add(totals: Any, values: Any) -> Any:
        values = [jnp.asarray(leaf, accumulator_dtype(dtype, leaf)) for leaf in values]
        return values if totals is None else jax.tree.map(jnp.add, totals, values)

    gather = on_mesh(mesh, add, (EACH, EACH), EACH) if spec.request.accumulate_outfeed else None
    return Programs(spec, nodes, loss, gather)


@dataclass(kw_only=True)
class Step:
    """What a step holds while it runs; the walk calls forward, backward and transfer."""

    programs: Programs
    params: dict[int, Any]  # by the number of the weights
    states: dict[Node, Any]
    first_leaves: dict[Node, list[Any]]  # the run's constants on the devices of the first nodes
    elements: Sequence[Any]  # of the infeed, for each micro batch those of all replicas
    first_row: int  # of the outfeed
    sums: dict[Node, Any] = field(default_factory=dict)
    arguments: Any = ()
    latest: Any = None  # something that is ready when the step is nearly done
    _outputs: dict[int, dict[Node, Any]] = field(default_factory=dict)
    _loss_gradients: dict[int, dict[Node, Any]] = field(default_factory=dict)
    _totals: Any = None
    _num_gathered: int = 0

    def start(self) -> "Step":
        """Make empty sums for the gradients."""
        if self.programs.loss is not None:
            self.sums = {node: programs.fresh(self._params(node)) for node, programs in self.programs.nodes.items()}
        return self

    def forward(self, node: Node, micro: int, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        """Run a node forward; the last stage's outputs leave, and in training become a loss."""
        leaves = [leaf for outputs in inputs for leaf in outputs] if node.stage else self._first_leaves(node, micro)
        state = self.states[node]
        outputs, kept, self.states[node] = self.programs.nodes[node].forward(self._params(node), state, leaves)
        if node in self.programs.spec.last:
            self._outputs.setdefault(micro, {})[node] = outputs
            if len(self._outputs[micro]) == len(self.programs.spec.last):
                self._end(micro, self._outputs.pop(micro))
        return outputs, (state, leaves, kept)

    def backward(self, node: Node, micro: int, inputs: tuple[Any, ...], saved: Any, gradients: tuple[Any, ...]) -> Any:
        """Run a node backward; return the gradients of the outputs of the nodes before."""
        state, leaves, kept = saved
        if node in self.programs.spec.last:
            gradients = (self._loss_gradients[micro].pop(node),)
        result, self.sums[node] = self.programs.nodes[node].backward(
            self._params(node), state, leaves, kept, gradients, self.sums[node], np.int32(micro)
        )
        return result

    def transfer(self, value: Any, node: Node) -> Any:
        """Put a value on the devices of a node."""
        return put(value, self.programs.nodes[node].spec.mesh)

    def _params(self, node: Node) -> Any:
        return self.params[self.programs.spec.functions[node].weights]

    def _first_leaves(self, node: Node, micro: int) -> list[Any]:
        """Return the run's constants, then this micro batch's element of every replica, stacked."""
        if not self.elements:
            return self.first_leaves[node]
        replicas = self.programs.spec.request.replicas
        mine = self.elements[micro * replicas : (micro + 1) * replicas]
        stacked = jax.tree.leaves(jax.tree.map(lambda *arrays: np.stack(arrays), *mine))
        return [*self.first_leaves[node], *put(stacked, self.programs.nodes[node].spec.mesh)]

    def _end(self, micro: int, outputs: dict[Node, Any]) -> None:
        """Compute the loss of a micro batch and its gradients, and let its results leave."""
        spec, loss = self.programs.spec, None
        if self.programs.loss is not None:
            lists = tuple(put(outputs[node], self.programs.last_mesh) for node in spec.last)
            loss, gradients, self.arguments = self.programs.loss(lists)
            self._loss_gradients[micro] = {
                node: self.transfer(mine, node) for node, mine in zip(spec.last, gradients, strict=True)
            }
        self.latest = loss if loss is not None else [outputs[node] for node in spec.last]
        if spec.request.outfeed is not None:
            self._leave(spec.request.outfeed, micro, self._values(outputs, loss))

    def _values(self, outputs: dict[Node, Any], loss: Any) -> list[Any]:
        """Return the leaves of what leaves."""
        spec, request = self.programs.spec, self.programs.spec.request
        if request.outfeed_loss:
            return [loss]
        values = [
            value
            for node in spec.last
            for value in jax.tree.unflatten(self.programs.nodes[node].spec.outputs.treedef, outputs[node])
        ]
        mask = request.outfeed_mask or [False] * len(values)
        return jax.tree.leaves(as_row([value for value, left_out in zip(values, mask, strict=True) if not left_out]))

    def _leave(self, outfeed: Outfeed, micro: int, leaves: list[Any]) -> None:
        if self.programs.gather is None:
            outfeed.add_one(self.first_row + micro, leaves)
            return
        self._totals = self.programs.gather(self._totals, put(leaves, self.programs.last_mesh))
        self._num_gathered += 1
        if self._num_gathered == self.programs.spec.work.num_micros:
            outfeed.add_one(self.first_row, self._totals)


def put(value: Any, mesh: Mesh) -> Any:
    """Put arrays [replicas, ...] on the devices of a mesh; what is there already is not touched."""
    there = _each(mesh)
    # device_put itself takes some 50 microseconds to find out that it has nothing to do.
    if all(getattr(leaf, "sharding", None) == there for leaf in jax.tree.leaves(value)):
        return value
    return jax.device_put(value, there)


@lru_cache(maxsize=64)
def _each(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, EACH)
