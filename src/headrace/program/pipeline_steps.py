"""The steps of a `pipeline()`: the nodes of its functions, the loss, what leaves, and the updates, as one plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from headrace.core.tree import PyTree
from headrace.engine.accumulation import Accumulation, accumulator_dtype, widened
from headrace.engine.devices import REPLICA, replicated
from headrace.engine.multiprocess_arrays import local_part
from headrace.engine.pipeline.nodes import (
    INPUTS,
    PRODUCTS,
    NodePrograms,
    NodeSpec,
    NodeValues,
    add_passes,
    expand,
    floats,
    is_float,
    make_node,
    squeeze,
    sums_of,
)
from headrace.engine.pipeline.step_plan import (
    ALL,
    EACH,
    HAND_ON,
    MOVE,
    NOTHING,
    STEP_NUMBER,
    HostCall,
    Key,
    LaunchPlan,
    Program,
    StepBuilder,
    on_mesh,
)
from headrace.engine.placement import placed_shardings, to_device
from headrace.plan.schedule import Node
from headrace.program.outfeed import Outfeed
from headrace.program.pipeline_request import as_row
from headrace.program.pipeline_spec import PipelineSpec, TracedNode, update_groups
from headrace.program.structure import Structure

LATEST: Key = "latest"  # what is ready when a step is nearly done


@dataclass(frozen=True)
class Updates:
    """Which weights are updated together, and the shapes of their optimizer's state."""

    groups: tuple[tuple[int, ...], ...]  # numbers of weights
    states: tuple[Any, ...]  # shapes, one for each group


def pipeline_node(traced: TracedNode, spec: PipelineSpec, node: Node) -> NodeSpec:
    """Return a function of the pipeline as a node of the executor."""
    request, work = spec.request, spec.work
    training = spec.ending is not None

    def apply(
        params: PyTree, _: Any, state: PyTree, inputs: tuple[PyTree, ...], __: Any
    ) -> tuple[Any, tuple[PyTree, PyTree]]:
        leaves = [leaf[0] for outputs in inputs for leaf in outputs]
        args, kwargs = jax.tree.unflatten(traced.inputs.treedef, leaves)
        outputs, state = traced.function.call(params, state, args, kwargs)
        return [jnp.asarray(leaf)[None] for leaf in jax.tree.leaves(outputs)], (state, ())

    accumulation = Accumulation(
        count=work.num_micros, reduction=request.reduction_method.upper(), dtype=request.gradient_accumulation_dtype
    )
    is_first, is_last = node.stage == 0, node.stage == work.num_stages - 1
    return NodeSpec(
        mesh=traced.mesh,
        apply=apply,
        name=f"stage_{node}",
        num_inputs=1 + (request.infeed is not None) if is_first else len(work.stages[node.stage - 1]),
        num_gradients=1 if is_last else len(work.stages[node.stage + 1]),
        is_first=is_first,
        accumulation=accumulation if training else None,
        keeps=INPUTS if request.recomputation else PRODUCTS,
    )


@dataclass(frozen=True)
class PipelineSteps:
    """The nodes, and the plan of a step that is made from them."""

    spec: PipelineSpec
    nodes: dict[Node, NodePrograms]
    updates: Updates
    plan: LaunchPlan


def make_steps(spec: PipelineSpec) -> PipelineSteps:
    nodes = {
        node: make_node(pipeline_node(traced, spec, node), spec.table.work.is_split(node))
        for node, traced in spec.nodes.items()
    }
    updates = _make_updates(spec)
    builder = _Builder(spec, nodes, updates)
    return PipelineSteps(spec, nodes, updates, builder.build())


def _make_updates(spec: PipelineSpec) -> Updates:
    groups = update_groups(spec)
    shapes = [
        jax.eval_shape(lambda group=group: init_optimizer(spec, {key: spec.params[key] for key in group}))
        for group in groups
    ]
    return Updates(tuple(groups), tuple(shapes))


def init_optimizer(spec: PipelineSpec, params: dict[int, PyTree]) -> PyTree:
    """Return the optimizer's state at the start for these weights; of 16-bit weights it is that of float32 ones."""
    assert spec.ending is not None
    return spec.ending.blank_optimizer().init(widened(jax.tree.map(jnp.asarray, params)))


class _Builder:
    """Adds the launches of a step to a plan."""

    def __init__(self, spec: PipelineSpec, nodes: dict[Node, NodePrograms], updates: Updates) -> None:
        self.spec, self.nodes, self.updates = spec, nodes, updates
        self.lane_of = spec.work.device_of
        mesh_of = {self.lane_of[node]: traced.mesh for node, traced in spec.nodes.items()}
        self.builder = StepBuilder([mesh_of[lane] for lane in sorted(mesh_of)])
        self.last = spec.work.stages[-1]
        self.end_lane = self.lane_of[self.last[0]]  # of the loss, and of what leaves
        self.end_mesh = spec.nodes[self.last[0]].mesh
        self.loss = None if spec.ending is None else self._loss_program(spec.ending.loss_and_arguments)

    def build(self) -> LaunchPlan:
        spec, builder = self.spec, self.builder
        for key in spec.params:
            builder.keep(self._lane_of_weights(key), ("params", key))
        for number, group in enumerate(self.updates.groups):
            builder.keep(self._lane_of_weights(group[0]), ("optimizer", number))
        for node in spec.work.stages[0]:
            self._start(node)
        for node, function in spec.functions.items():
            if function.has_state:
                builder.keep(self.lane_of[node], ("others", node))
            if self._counts:
                builder.keep(self.lane_of[node], *(("number", node, micro) for micro in range(spec.work.num_micros)))
        states = add_passes(
            builder, spec.table, self.nodes, {node: self._values(node) for node in self.nodes}, self._end
        )
        for number, group in enumerate(self.updates.groups):
            self._update(number, group)
        for node, function in spec.functions.items():
            if function.has_state:
                settle = on_mesh(spec.nodes[node].mesh, _settle, (EACH,), (EACH,))
                builder.add(self.lane_of[node], settle, [states[node]], [("others", node)])
        return builder.build()

    @property
    def _counts(self) -> bool:
        accumulation = self.nodes[self.last[0]].spec.accumulation
        return accumulation is not None and accumulation.counts

    def _start(self, node: Node) -> None:
        """Let a first node wait for the host, and for its elements where there is an infeed."""
        # Launching waits for no device: without `go`, which Pipeline._feed holds back, a lane without an infeed would
        # launch all steps of a run at once.
        lane = self.lane_of[node]
        self.builder.keep(lane, ("constants", node))
        self.builder.feed(lane, ("go", node))
        self.builder.add(lane, HostCall(lambda _: ()), [("go", node)])
        if self.spec.request.infeed is not None:
            for micro in range(self.spec.work.num_micros):
                self.builder.feed(lane, ("element", node, micro))

    def _values(self, node: Node) -> NodeValues:
        function = self.spec.functions[node]
        inputs: Callable[[int], tuple[Key, ...]] | None = None
        if node.stage == 0 and self.spec.request.infeed is None:
            inputs = lambda micro: (("constants", node),)  # noqa: E731
        elif node.stage == 0:
            inputs = lambda micro: (("constants", node), ("element", node, micro))  # noqa: E731
        return NodeValues(
            params=("params", function.weights),
            state=("others", node) if function.has_state else NOTHING,
            inputs=inputs,
            number=(lambda micro: ("number", node, micro)) if self._counts else (lambda micro: NOTHING),
        )

    def _end(self, micro: int) -> tuple[Key, ...]:
        """Compute the loss of a micro batch and its gradients, and let its results leave."""
        outputs = [("outputs", node, micro) for node in self.last]
        gradients = tuple(("gradients of the loss", node, micro) for node in self.last)
        if self.loss is not None:
            writes = (("loss", micro), ("arguments", micro), *gradients)
            self.builder.add(self.end_lane, self.loss, outputs, writes)
        is_last = micro == self.spec.work.num_micros - 1
        if is_last:
            done = ("loss", micro) if self.loss is not None else outputs[0]
            self.builder.add(self.end_lane, HAND_ON, [done], [LATEST])
            self.builder.to_host(LATEST)
        outfeed = self.spec.request.outfeed
        if outfeed is not None:
            values = [("loss", micro)] if self.spec.request.outfeed_loss else outputs
            self._leave(outfeed, micro, values)
        return gradients if self.loss is not None else ()

    def _leave(self, outfeed: Outfeed, micro: int, reads: Sequence[Key]) -> None:
        spec, num_micros = self.spec, self.spec.work.num_micros
        chosen = self._chosen
        if not spec.request.accumulate_outfeed:

            def leave(step: int, *values: PyTree) -> tuple[()]:
                outfeed.add_one(step * num_micros + micro, local_part(chosen(values)))
                return ()

            self.builder.add(self.end_lane, HostCall(leave), [STEP_NUMBER, *reads])
            return
        is_first, dtype = micro == 0, spec.request.accumulate_outfeed_dtype

        def add(totals: PyTree, *values: PyTree) -> tuple[PyTree]:
            found = [jnp.asarray(leaf, accumulator_dtype(dtype, leaf)) for leaf in chosen(values)]
            return (found if is_first else jax.tree.map(jnp.add, totals, found),)

        # Two programs: that of the first micro batch begins the sums, the other one adds to them.
        if micro < 2:
            self._gather = on_mesh(self.end_mesh, add, (EACH,) * (1 + len(reads)), (EACH,))
        totals: Key = NOTHING if is_first else "leaving"
        self.builder.add(self.end_lane, self._gather, [totals, *reads], ["leaving"])
        if micro == num_micros - 1:

            def leave_once(step: int, totals: PyTree) -> tuple[()]:
                outfeed.add_one(step, local_part(totals))
                return ()

            self.builder.add(self.end_lane, HostCall(leave_once), [STEP_NUMBER, "leaving"])

    def _chosen(self, values: tuple[PyTree, ...]) -> list[PyTree]:
        """Return the leaves of what leaves, of the last nodes' outputs or of the loss."""
        request = self.spec.request
        if request.outfeed_loss:
            return [values[0]]
        outputs = [
            value
            for node, leaves in zip(self.last, values, strict=True)
            for value in jax.tree.unflatten(self.spec.nodes[node].outputs.treedef, leaves)
        ]
        mask = request.outfeed_mask or [False] * len(outputs)
        return jax.tree.leaves(as_row([value for value, out in zip(outputs, mask, strict=True) if not out]))

    def _update(self, number: int, group: tuple[int, ...]) -> None:
        """Reduce the gradients where the weights are, and update them together where the first of the group is."""
        builder, lane, spec = self.builder, self._lane_of_weights(group[0]), self.spec
        for key in group:
            sums = [sums_of(node) for node in spec.nodes_of(key)]
            reduce = on_mesh(self._mesh_of_weights(key), _reduce, (EACH,) * len(sums), (ALL,))
            builder.add(self._lane_of_weights(key), reduce, sums, [("gradient", key)])
            if self._lane_of_weights(key) != lane:
                # Weights are there from the start of a call: only what a launch has made is sent to another lane.
                builder.add(self._lane_of_weights(key), MOVE, [("params", key)], [("moved", key)])
        away = {key for key in group if self._lane_of_weights(key) != lane}
        params = [("moved" if key in away else "params", key) for key in group]
        gradients = [("gradient", key) for key in group]
        arguments = ("arguments", spec.work.num_micros - 1)
        builder.add(
            lane,
            self._update_program(number, group),
            [("optimizer", number), arguments, *params, *gradients],
            [("optimizer", number), *(("updated" if key in away else "params", key) for key in group)],
        )
        for key in away:
            builder.add(self._lane_of_weights(key), MOVE, [("updated", key)], [("params", key)])

    def _update_program(self, number: int, group: tuple[int, ...]) -> Program:
        """Return `update(optimizer's state, arguments, *params, *gradients) -> (optimizer's state, *params)`."""
        ending, mesh, placement = self.spec.ending, self._mesh_of_weights(group[0]), self.spec.placement
        assert ending is not None
        shapes = self.updates.states[number]

        def update(state: PyTree, arguments: PyTree, *rest: object) -> tuple[PyTree, ...]:
            params, gradients = (
                dict(zip(group, part, strict=True)) for part in (rest[: len(group)], rest[len(group) :])
            )
            changes, after = ending.optimizer(*squeeze(arguments)).update(gradients, state, widened(params))
            # The types that it began with: the next step's program takes what this one returns.
            after = jax.tree.map(lambda new, like: new.astype(like.dtype), after, shapes)
            updated: Any = optax.apply_updates(params, changes)
            return after, *(updated[key] for key in group)

        # Mapped over the replicas, so that an optimizer may speak of their axis; but where its state is cut over them,
        # XLA has to find out what each computes and sends.
        many = (ALL,) * len(group)
        mapped = update
        if not placement.sharded:
            mapped = jax.shard_map(
                update, mesh=mesh, in_specs=(ALL, EACH, *many, *many), out_specs=(ALL, *many), check_vma=False
            )
        where = placed_shardings(shapes, mesh, placement)
        jitted = jax.jit(
            lambda state, *rest: mapped(to_device(state, mesh, placement), *rest),
            out_shardings=(where, *(replicated(mesh),) * len(group)),
        )
        return Program(jitted=jitted, mesh=mesh, outs=(where, *many))

    def _loss_program(self, finish: Callable[..., tuple[PyTree, PyTree]]) -> Program:
        """Return `loss(*outputs of the last nodes) -> (loss, arguments, *gradients of each)`."""
        structures = [self.spec.nodes[node].outputs for node in self.last]

        def loss(*lists: list[PyTree]) -> tuple[PyTree, ...]:
            lists = squeeze(lists)
            given = tuple(floats(leaves) for leaves in lists)
            function = lambda *floating: finish(*_merged(structures, lists, floating))  # noqa: E731
            gradient = jax.value_and_grad(function, argnums=tuple(range(len(lists))), has_aux=True)
            (value, arguments), gradients = gradient(*given)
            return expand((value, arguments, *gradients))

        return on_mesh(self.end_mesh, loss, (EACH,) * len(self.last), (EACH,) * (2 + len(self.last)))

    def _lane_of_weights(self, key: int) -> int:
        return self.lane_of[self.spec.nodes_of(key)[0]]

    def _mesh_of_weights(self, key: int) -> Mesh:
        return self.spec.nodes[self.spec.nodes_of(key)[0]].mesh


def _merged(structures: list[Structure], lists: PyTree, floating: tuple[list[PyTree], ...]) -> list[PyTree]:
    """Return the values of the last nodes, those that have gradients from `floating`."""
    values: list[Any] = []
    for structure, leaves, mine in zip(structures, lists, floating, strict=True):
        left = iter(mine)
        values += jax.tree.unflatten(structure.treedef, [next(left) if is_float(leaf) else leaf for leaf in leaves])
    return values


def _reduce(*sums: PyTree) -> tuple[PyTree]:
    """Return the gradient of weights: the sum over the nodes that share them, the mean over replicas."""
    totals = widened(squeeze(sums))
    return (lax.pmean(jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *totals), REPLICA),)


def _settle(state: PyTree) -> tuple[PyTree]:
    """Make the states of all replicas equal: the mean of numbers, the first replica's of all else."""

    def one(leaf: object) -> PyTree:
        return lax.pmean(leaf, REPLICA) if is_float(leaf) else lax.all_gather(leaf, REPLICA)[0]

    return (expand(jax.tree.map(one, squeeze(state))),)
