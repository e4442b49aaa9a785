"""Exact evaluation through the stages of a pipeline: weights stay on the devices of their stages, batches pass by."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from headrace.core.tree import PyTree
from headrace.engine.apply_blocks import weights_of
from headrace.engine.call_loop import BATCHES, put_on
from headrace.engine.devices import REPLICA, replica_mesh, replicated
from headrace.engine.forward import EvalSpec, Sums
from headrace.engine.multiprocess_arrays import place, shapes_of, transfer
from headrace.engine.pipeline.nodes import NodePrograms, NodeSpec, NodeValues, add_passes, counts_of, make_node
from headrace.engine.pipeline.step_plan import (
    ALL,
    EACH,
    HAND_ON,
    CompiledSteps,
    HostCall,
    Key,
    LaunchPlan,
    LoweredSteps,
    Program,
    StepBuilder,
    Values,
    on_mesh,
)
from headrace.plan.schedule import Node, Work
from headrace.plan.simulation import make_table

IN_FLIGHT = 2  # batches under way for each stage: enough to keep all busy, and no more that wait in memory


def _wait(count: jax.Array) -> tuple[()]:
    jax.block_until_ready(count)
    return ()


_WAIT = HostCall(_wait)


@dataclass(frozen=True, kw_only=True)
class StagedEvaluation:
    """One node for each stage; the last one also adds up the sums."""

    names: tuple[tuple[str, ...], ...]  # of the blocks of each stage
    meshes: tuple[Mesh, ...]
    device_mapping: tuple[int, ...]
    nodes: dict[Node, NodePrograms]
    empty: Callable[[], Sums]
    total: Program
    _plans: dict[int, LaunchPlan] = field(default_factory=dict)  # by the number of batches
    _numbers: dict[tuple[Node, int], jax.Array] = field(default_factory=dict)  # small numbers on the devices

    def put(self, tree: PyTree, kind: str) -> PyTree:
        """Put batches or a resident set on the devices of the first stage and, without images, of the last."""
        labels = {key: value for key, value in tree.items() if key != "images"}
        return put_on(self.meshes[0], tree, kind), put_on(self.meshes[-1], labels, kind)

    def place(self, weights: tuple[PyTree, PyTree]) -> tuple[PyTree, ...]:
        """Put (params, stats) on the devices of their stages."""
        return tuple(
            transfer(weights_of(names, weights), replicated(mesh))
            for names, mesh in zip(self.names, self.meshes, strict=True)
        )

    def compile(self, placed: tuple[PyTree, ...], resident: PyTree, block: PyTree) -> "StagedEvaluation":
        """Compile the programs of all stages for weights and batches like these."""
        self._compiled(self._start(placed, resident, block), block)
        return self

    def lower(self, weights: tuple[PyTree, PyTree], resident: PyTree, block: PyTree) -> tuple[LaunchPlan, LoweredSteps]:
        """Make XLA's input of all programs from Python, for devices that need not be here."""
        parts = tuple(
            place(shapes_of(weights_of(names, weights)), replicated(mesh))
            for names, mesh in zip(self.names, self.meshes, strict=True)
        )
        start, number = self._given(parts, resident, block), np.zeros((), np.int32)
        for key in self._numbered(block):
            start[key] = place(shapes_of(number), replicated(self.meshes[key[1].stage]))
        last = Node(len(self.nodes) - 1)
        start[counts_of(last)] = place(jax.eval_shape(self.empty), NamedSharding(self.meshes[-1], EACH))
        plan = self._plan(_num_batches(block))
        return plan, plan.lower(start)

    def prepare(self, placed: tuple[PyTree, ...], _resident: PyTree, _block: PyTree) -> tuple[PyTree, ...]:
        """Return the weights as they are: stages compute all that follows from them in each call."""
        return placed

    def __call__(self, weights: tuple[PyTree, ...], resident: PyTree, block: PyTree) -> Sums:
        """Return the sums over the block's batches."""
        start = self._start(weights, resident, block)
        return self._compiled(start, block)(start, 1)["total"]

    def _start(self, weights: tuple[PyTree, ...], resident: PyTree, block: PyTree) -> Values:
        start = self._given(weights, resident, block)
        start |= {key: self._number(key[1], key[2]) for key in self._numbered(block)}
        start[counts_of(Node(len(self.nodes) - 1))] = self.empty()
        return start

    def _given(self, weights: tuple[PyTree, ...], resident: PyTree, block: PyTree) -> Values:
        start: Values = {("params", Node(number)): part for number, part in enumerate(weights)}
        for node, side in ((Node(0), 0), (Node(len(self.nodes) - 1), 1)):
            start["resident", node] = resident[side] if resident else None
            start["block", node] = block[side]
        return start | {"total": ()}

    def _numbered(self, block: PyTree) -> list[tuple[str, Node, int]]:
        """Return the names of the numbers of batches that the first and the last stage read."""
        nodes = dict.fromkeys((Node(0), Node(len(self.nodes) - 1)))
        return [("number", node, number) for node in nodes for number in range(_num_batches(block))]

    def _compiled(self, start: Values, block: PyTree) -> CompiledSteps:
        num_batches = _num_batches(block)
        if num_batches not in self._plans:
            self._plans[num_batches] = self._plan(num_batches)
        return self._plans[num_batches].compile(start)

    def _plan(self, num_batches: int) -> LaunchPlan:
        # Any schedule would do: without backward passes the order on each device is the same in all of them.
        table = make_table("Interleaved", Work(self.device_mapping, num_batches, training=False))
        device_of, last = table.work.device_of, Node(len(self.nodes) - 1)
        mesh_of = {device_of[node]: self.meshes[node.stage] for node in self.nodes}
        builder = StepBuilder([mesh_of[device] for device in sorted(mesh_of)])
        for node in self.nodes:
            builder.keep(device_of[node], ("params", node))
        for node in dict.fromkeys((Node(0), last)):
            numbers = [("number", node, number) for number in range(num_batches)]
            builder.keep(device_of[node], ("resident", node), ("block", node), *numbers)
        builder.keep(device_of[last], counts_of(last), "total")

        def end(number: int) -> tuple[Key, ...]:
            builder.add(device_of[last], HAND_ON, [("outputs", last, number)], [("ended", number)])
            # The first stage waits for the end of an earlier batch: launching does not wait for devices, and without a
            # limit the activations of all batches would be in memory at once.
            earlier = number - (IN_FLIGHT - 1) * len(self.nodes)
            if earlier >= 0:
                builder.add(device_of[Node(0)], _WAIT, [("ended", earlier)])
            return ()

        add_passes(builder, table, self.nodes, {node: self._values(node) for node in self.nodes}, end)
        builder.add(device_of[last], self.total, [counts_of(last)], ["total"])
        return builder.build()

    def _values(self, node: Node) -> NodeValues:
        fetches = node.stage in (0, len(self.nodes) - 1)
        return NodeValues(
            params=("params", node),
            source=(lambda number: (("resident", node), ("block", node), ("number", node, number)))
            if fetches
            else (lambda number: ()),
            inputs=(lambda number: ()) if node.stage == 0 else None,
        )

    def _number(self, node: Node, number: int) -> jax.Array:
        if (node, number) not in self._numbers:
            self._numbers[node, number] = place(np.int32(number), replicated(self.meshes[node.stage]))
        return self._numbers[node, number]


def make_staged_evaluation(
    spec: EvalSpec, ranges: Sequence[tuple[int, int]], devices: np.ndarray, mapping: Sequence[int]
) -> StagedEvaluation:
    """Return the evaluation over stages of these blocks, on a grid of devices [replica, device of the replica]."""
    meshes = tuple(replica_mesh(list(devices[:, device])) for device in mapping)
    zeros = spec.sum_shapes()

    def empty() -> Sums:
        return jax.tree.map(lambda a: jnp.zeros((spec.num_replicas, *a.shape), a.dtype), zeros)

    def total(sums: Sums) -> tuple[Sums]:
        # Sums stay apart by replica until the end: one exchange for a block, none while batches are passing.
        return (lax.psum(jax.tree.map(lambda a: a[0], sums), REPLICA),)

    return StagedEvaluation(
        names=tuple(spec.network.block_names[i:j] for i, j in ranges),
        meshes=meshes,
        device_mapping=tuple(mapping),
        nodes={
            Node(number): make_node(_evaluation_node(spec, blocks, mesh))
            for number, (blocks, mesh) in enumerate(zip(ranges, meshes, strict=True))
        },
        empty=jax.jit(empty, out_shardings=NamedSharding(meshes[-1], EACH)),
        total=on_mesh(
            meshes[-1], total, (EACH,), (ALL,), name="evaluate_total", compiler_options=spec.compiler_options
        ),
    )


def _evaluation_node(spec: EvalSpec, blocks: tuple[int, int], mesh: Mesh) -> NodeSpec:
    """Return a stage as a node; the last one counts, and puts out how many samples it has counted."""
    ctx = spec.context()
    is_first, is_last = blocks[0] == 0, blocks[1] == len(spec.network.blocks)

    def fetch(*source: PyTree) -> PyTree:
        if not source:
            return ()
        resident, block, number = source
        return resident, {key: lax.dynamic_index_in_dim(value, number, 0, False) for key, value in block.items()}

    def apply(
        weights: PyTree, _: Any, state: PyTree, inputs: tuple[PyTree, ...], fetched: PyTree
    ) -> tuple[Any, tuple[PyTree, PyTree]]:
        x = spec.fetch(*fetched)[0] if is_first else inputs[0]
        y = spec.network.apply_range(*blocks, weights[0], weights[1], x, ctx)[0]
        if not is_last:
            return y, (state, ())
        resident, batch = fetched
        sums = spec.reducer.keep(y, spec.fetch.labels(resident, batch), batch["mask"])
        # The output is something small that is there when the batch is done, for the first stage to wait for.
        return sums["count"][None], (state, sums)

    return NodeSpec(
        mesh=mesh,
        apply=apply,
        name=f"evaluate_{blocks[0]}_{blocks[1]}",
        num_inputs=0 if is_first else 1,
        source_specs=(ALL, BATCHES, ALL) if is_first or is_last else (),
        fetch=fetch,
        count=(lambda total, new: jax.tree.map(jnp.add, total, new)) if is_last else lambda counts, _: counts,
        compiler_options=spec.compiler_options,
    )


def _num_batches(block: PyTree) -> int:
    return jax.tree.leaves(block[0])[0].shape[0]
