"""Training calls of a network that is cut into stages, each stage on devices of its own.

To a run it is the same as the device loop of one stage: `program(state, resident, block) -> (state, metrics)`. The
state stays cut from call to call: each stage's part of it is what its update donates and returns. Only a checkpoint, a
validation and the end of a run need it as a whole (`join`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from headrace.core.tree import PyTree, flatten_named, unflatten_named
from headrace.engine.call_loop import put_on
from headrace.engine.devices import replica_mesh, replicated
from headrace.engine.histograms import HISTOGRAMS, block_histograms
from headrace.engine.kept_programs import kept
from headrace.engine.multiprocess_arrays import in_turn, place, shapes_of
from headrace.engine.pipeline.nodes import NodePrograms, NodeValues, add_passes, counts_of, make_node, sums_of
from headrace.engine.pipeline.runner import Tracer
from headrace.engine.pipeline.step_plan import (
    EACH,
    NOTHING,
    CompiledSteps,
    Key,
    LaunchPlan,
    LoweredSteps,
    Program,
    StepBuilder,
    Values,
)
from headrace.engine.pipeline.training_stages import FIXED, StageSpec, make_reduce, make_update, part_of, training_node
from headrace.engine.placement import UPDATE_ONLY, make_copy, shardings
from headrace.engine.state import State
from headrace.engine.step import PER_STEP, Metrics
from headrace.plan.schedule import Node
from headrace.plan.timeline import Timetable

METRICS = ("learning_rate", "grad_norm", "loss_scale", "skipped", "bad")  # beside the sums
FLAGS = ("forward_finite", "gradient_finite")  # with fp_exceptions: one for each block
Parts = tuple[State, ...]  # the state, cut by stages; what all stages need is in every part
_count_values = jax.jit(block_histograms)


@dataclass(frozen=True, kw_only=True)
class StagePrograms:
    """All programs of a stage, and the shape of its part of the state."""

    like: State
    node: NodePrograms
    reduce: Program
    update: Program
    copy: Callable[[State], State]  # every process can read it whole


@dataclass(frozen=True, kw_only=True)
class Dispatcher:
    """The stages, their meshes and programs, and the schedule's table."""

    stages: tuple[StageSpec, ...]
    meshes: tuple[Mesh, ...]
    programs: tuple[StagePrograms, ...]
    table: Timetable

    def place(self, state: State) -> Parts:
        """Cut a state in host memory, and put each stage's part where the stage is."""
        flat = flatten_named(state)
        # From NumPy copies: device_put may alias an array that is already there, and the first donation would delete
        # the source. A copy for each stage: what all need is donated by each, and stages may share a device.
        return tuple(
            place(jax.tree.map(np.array, unflatten_named(own.like, flat)), shardings(own.like, mesh, stage.placement))
            for stage, own, mesh in zip(self.stages, self.programs, self.meshes, strict=True)
        )

    def join(self, parts: Parts) -> State:
        """Return the parts as one state, of the same arrays."""
        # Leaves that several parts have (the loss scale, the step and an optimizer's counts) are scalars which every
        # update advances in the same way, so that any of them is right.
        flat = {name: leaf for part in parts for name, leaf in flatten_named(part).items()}
        return unflatten_named(self._whole, flat)

    def put(self, tree: PyTree, kind: str) -> PyTree:
        """Put a block (`steps`) or a resident set where it is needed: images at the first stage, labels at the last."""
        parts = []
        for spec, mesh in zip(self.stages, self.meshes, strict=True):
            # Images are nearly all of a block's bytes: sent to every stage, they would take the room and the time of
            # all of them.
            left_out = () if spec.is_first else ("images",) if spec.is_last else ("images", "labels")
            part = put_on(mesh, {key: value for key, value in tree.items() if key not in left_out}, kind)
            if kind == "steps":
                # As a node takes it: what there is once a step, and what each micro batch has.
                of_step = {key: part.pop(key) for key in PER_STEP if key in part}
                part = {"of_step": of_step, "rest": part}
            parts.append(part)
        return tuple(parts)

    def copy_to_save(self, parts: Parts) -> State:
        """Copy the state so that this process can read it whole, stage by stage."""
        copies = [programs.copy(part) for programs, part in zip(self.programs, parts, strict=True)]
        # Where state is cut over replicas these copies exchange, and must not meet the next call's exchanges in another
        # order.
        return in_turn(self.join(tuple(copies)))

    @cached_property
    def plan(self) -> LaunchPlan:
        """The launches of a step."""
        work = self.table.work
        nodes = self._nodes
        mesh_of = {work.device_of[node]: self.meshes[node.stage] for node in nodes}
        # Stages that share a device share its lane, so that one thread launches all that runs there, in the table's
        # order.
        builder = StepBuilder([mesh_of[device] for device in sorted(mesh_of)])
        for node in nodes:
            numbers = [("micro", node, micro) for micro in range(work.num_micros)]
            kept = [(kind, node) for kind in ("params", "fixed", "slots", "at", "resident", "block")]
            kept += [("reduced", node)] if self._histograms else []  # else freed within the step
            builder.keep(work.device_of[node], *kept, *numbers)
        builder.keep(work.device_of[nodes[-1]], "ones", "record")
        programs = {node: self.programs[node.stage].node for node in nodes}
        add_passes(builder, self.table, programs, {node: _values(node) for node in nodes}, lambda micro: ("ones",))
        for node in nodes:
            reads, writes = (("fixed", node), counts_of(node), sums_of(node)), (("reduced", node), ("shared", node))
            builder.add(work.device_of[node], self.programs[node.stage].reduce, reads, writes)
        # Each update reads all of them, and thereby waits for every stage's gradients: clipping and skipping are
        # decisions about the whole network.
        shared = [("shared", node) for node in nodes]
        for node in nodes:
            record: Key = "record" if node == nodes[-1] else NOTHING
            # Read and written under the same names: the new version takes the slot of the one that was donated.
            parts = [(kind, node) for kind in ("params", "fixed", "slots")]
            builder.add(
                work.device_of[node],
                self.programs[node.stage].update,
                [*parts, ("reduced", node), ("at", node), record, *shared],
                [*parts, ("at", node), record if node == nodes[-1] else ("no record", node)],
            )
        return builder.build()

    @cached_property
    def _nodes(self) -> tuple[Node, ...]:
        return tuple(map(Node, range(len(self.stages))))

    @cached_property
    def _whole(self) -> State:
        """The shape of the state of all stages."""
        first = self.stages[0]
        return part_of(replace(first, blocks=(0, len(first.step.network.blocks))))

    @property
    def _histograms(self) -> bool:
        return self.stages[0].step.histograms

    @property
    def peaks(self) -> dict[Node, int]:
        """The most micro batches of which each stage holds something for the backward pass at once."""
        return self.plan.peaks("saved")

    def compile(self, parts: Parts, resident: PyTree, block: PyTree) -> "Dispatcher":
        """Compile the programs of all stages for such a state and block."""
        self._compiled(self._start(parts, resident, block))
        if self._histograms:
            for part in parts:
                _count_values(part["params"], jax.tree.map(lambda leaf: leaf.astype(jnp.float32), part["params"]))
        return self

    def trace(self, parts: Parts, resident: PyTree, block: PyTree) -> Timetable:
        """Return when the actions of the block's first step ran, the second time, on a copy of the state."""
        start = self._start(self.place(jax.device_get(self.copy_to_save(parts))), resident, block)
        steps = self._compiled(start)
        # The first time, memory is allocated and threads are started, which no later step waits for.
        start |= steps(start, 1) | self._constants
        # What is still on its way to the devices would count as time of the first actions.
        jax.block_until_ready(list(start.values()))
        tracer = Tracer(self.table.work)
        steps(start, 1, observe=tracer.observe)
        return tracer.table(self.table)

    def __call__(
        self, parts: Parts, resident: PyTree, block: PyTree, rows: range | None = None
    ) -> tuple[Parts, Metrics]:
        """Run the steps of these rows of a block, or of all of them; the state is donated."""
        rows = range(_num_steps(block)) if rows is None else rows
        start = self._start(parts, resident, block)
        if rows.start:
            first = [place(np.int32(rows.start), replicated(mesh)) for mesh in self.meshes]
            start |= {("at", node): number for node, number in zip(self._nodes, first, strict=True)}
        end = self._compiled(start)(start, len(rows))
        metrics = end["record"]
        if self._histograms:
            counted = [_count_values(end["params", node], end["reduced", node]["grads"]) for node in self._nodes]
            metrics = metrics | {HISTOGRAMS: {name: each for stage in counted for name, each in stage.items()}}
        return tuple({"params": end["params", n]} | end["fixed", n] | end["slots", n] for n in self._nodes), metrics

    def lower(self, resident: PyTree, block: PyTree) -> LoweredSteps:
        """Make XLA's input of all programs from Python, for devices that need not be here."""
        parts = tuple(
            place(own.like, shardings(own.like, mesh, stage.placement))
            for stage, own, mesh in zip(self.stages, self.programs, self.meshes, strict=True)
        )
        constants = {key: place(shapes_of(value), where) for key, (value, where) in self._numbers().items()}
        record = place(shapes_of(self._record(_num_steps(block))), replicated(self.meshes[-1]))
        return self.plan.lower(self._given(parts, resident, block) | constants | {"record": record})

    def _start(self, parts: Parts, resident: PyTree, block: PyTree) -> Values:
        # Made anew for every call, because the update donates it.
        record = place(self._record(_num_steps(block)), replicated(self.meshes[-1]))
        return self._given(parts, resident, block) | self._constants | {"record": record}

    def _given(self, parts: Parts, resident: PyTree, block: PyTree) -> Values:
        start: Values = {}
        for node, part in zip(self._nodes, parts, strict=True):
            start["params", node] = part["params"]
            start["fixed", node] = {key: part[key] for key in FIXED}
            start["slots", node] = {key: part[key] for key in UPDATE_ONLY if key in part}
            start["resident", node] = resident[node.stage] if resident else None
            start["block", node] = block[node.stage]
            start["reduced", node] = None  # until the first step has some
        return start

    def _compiled(self, start: Values) -> CompiledSteps:
        # Of all values only the block may have other shapes in another call.
        return self.plan.compile(start, [("block", node) for node in self._nodes])

    @cached_property
    def _constants(self) -> Values:
        """Small numbers on the devices that the passes read."""
        return {key: place(value, where) for key, (value, where) in self._numbers().items()}

    def _numbers(self) -> dict[Key, tuple[PyTree, NamedSharding]]:
        """Return small numbers that the passes read, and where they belong."""
        found: dict[Key, tuple[PyTree, NamedSharding]] = {}
        for node, mesh in zip(self._nodes, self.meshes, strict=True):
            where = replicated(mesh)
            # Numbers that the passes read are on the devices before a call: sending one for each action would cost
            # about 40 us each time.
            found["at", node] = np.zeros((), np.int32), where
            for micro in range(self.table.work.num_micros):
                found["micro", node, micro] = np.array(micro, np.int32), where
        ones = np.ones(self.stages[-1].step.num_replicas, np.float32)
        # The gradient of the loss with respect to itself, from which the backward passes start.
        found["ones"] = [ones], NamedSharding(self.meshes[-1], EACH)
        return found

    def _record(self, num_steps: int) -> Metrics:
        """Return empty metrics for the steps of a call, in host memory."""
        spec = self.stages[-1].step
        rows: dict[str, Any] = {key: np.zeros(num_steps, np.float32) for key in (*spec.objective.sum_names, *METRICS)}
        if spec.fp_exceptions:
            # True until a block says otherwise: rows of steps that do not run must not look like a failure.
            rows |= {key: np.ones((num_steps, len(spec.network.blocks)), bool) for key in FLAGS}
        return rows


def make_dispatcher(stages: Sequence[StageSpec], devices: np.ndarray, table: Timetable) -> Dispatcher:
    """Return the dispatcher for stages on a grid of devices [replica, device of the replica]."""
    device_of = table.work.device_of
    meshes = tuple(replica_mesh(list(devices[:, device_of[Node(number)]])) for number in range(len(stages)))
    split = [table.work.is_split(Node(number)) for number in range(len(stages))]
    programs = tuple(kept(_make_stage, *given) for given in zip(stages, meshes, split, strict=True))
    return Dispatcher(stages=tuple(stages), meshes=meshes, programs=programs, table=table)


def _make_stage(stage: StageSpec, mesh: Mesh, split: bool) -> StagePrograms:
    like = part_of(stage)  # once: it draws the stage's weights
    return StagePrograms(
        like=like,
        node=make_node(training_node(stage, mesh), split),
        reduce=make_reduce(stage, mesh),
        update=make_update(stage, mesh, like),
        # Gathering is needed across processes only: within one, the host can read the pieces from all devices.
        copy=make_copy(like, mesh, stage.placement, whole=not replicated(mesh).is_fully_addressable),
    )


def _values(node: Node) -> NodeValues:
    return NodeValues(
        params=("params", node),
        fixed=("fixed", node),
        source=lambda micro: (("resident", node), ("block", node), ("at", node), ("micro", node, micro)),
        inputs=(lambda micro: ()) if node.stage == 0 else None,
    )


def _num_steps(block: PyTree) -> int:
    return block[0]["of_step"]["epoch"].shape[0]
