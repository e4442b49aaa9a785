"""Training calls of a network that is cut into stages, each stage on devices of its own.

To a run it is the same as the device loop of one stage: `program(state, resident, block) -> (state, metrics)`, with a
state whose leaves are on the devices of their stages.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from headrace.core.tree import PyTree, flatten_named, unflatten_named
from headrace.engine.devices import replica_mesh, replicated
from headrace.engine.histograms import HISTOGRAMS, block_histograms
from headrace.engine.kept_programs import kept
from headrace.engine.multiprocess_arrays import in_turn, place, transfer
from headrace.engine.pipeline.nodes import NodePrograms, NodeValues, add_passes, counts_of, make_node, sums_of
from headrace.engine.pipeline.runner import Tracer
from headrace.engine.pipeline.step_plan import EACH, NOTHING, Key, Program, StepBuilder, StepPlan, Values
from headrace.engine.pipeline.training_stages import FIXED, StageSpec, make_reduce, make_update, part_of, training_node
from headrace.engine.state import UPDATE_ONLY, State, make_copy, shardings, snapshot
from headrace.engine.step import PER_STEP, Metrics, put_on
from headrace.plan.schedule import Node
from headrace.plan.timeline import Table

METRICS = ("learning_rate", "grad_norm", "loss_scale", "skipped", "bad")  # beside the sums
FLAGS = ("forward_finite", "gradient_finite")  # with fp_exceptions: one for each block
_count_values = jax.jit(block_histograms)


@dataclass(frozen=True, kw_only=True)
class StagePrograms:
    """All programs of a stage, and the shape of its part of the state."""

    like: State
    node: NodePrograms
    reduce: Program
    update: Program
    copy: Callable[[State], State]
    copy_to_save: Callable[[State], State]  # what every process can read whole


@dataclass(frozen=True, kw_only=True)
class Dispatcher:
    """The stages, their meshes and programs, and the schedule's table."""

    stages: tuple[StageSpec, ...]
    meshes: tuple[Mesh, ...]
    programs: tuple[StagePrograms, ...]
    table: Table

    def place(self, state: State) -> State:
        """Put a state in host memory where its stages have their parts."""
        placed = []
        for spec, like, mesh in zip(self.stages, self._likes, self.meshes, strict=True):
            part = unflatten_named(like, flatten_named(state))
            # From NumPy copies: device_put may alias an array that is already there, and the first donation would
            # delete the source.
            placed.append(place(jax.tree.map(np.array, part), shardings(like, mesh, spec.placement)))
        return self._join(state, placed)

    def put(self, tree: PyTree, kind: str) -> PyTree:
        """Put a block (`steps`) or a resident set where it is needed: images at the first stage, labels at the last."""
        parts = []
        for spec, mesh in zip(self.stages, self.meshes, strict=True):
            # Images are nearly all of a block's bytes: sent to every stage, they would take the room and the time of
            # all of them.
            left_out = () if spec.is_first else ("images",) if spec.is_last else ("images", "labels")
            part = {key: value for key, value in tree.items() if key not in left_out}
            parts.append(put_on(mesh, part, kind))
        return tuple(parts)

    def snapshot(self, state: State) -> State:
        """Copy a state where it is, stage by stage."""
        parts = zip(self.programs, self._split(state), strict=True)
        return self._join(state, [programs.copy(part) for programs, part in parts])

    def copy_to_save(self, state: State) -> State:
        """Copy a state so that this process can read it whole, stage by stage."""
        parts = zip(self.programs, self._split(state), strict=True)
        # Where state is cut over replicas these copies exchange, and must not meet the next call's exchanges in another
        # order.
        return in_turn(self._join(state, [programs.copy_to_save(part) for programs, part in parts]))

    @cached_property
    def plan(self) -> StepPlan:
        """The launches of a step."""
        work = self.table.work
        nodes = [Node(number) for number in range(len(self.stages))]
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

    @property
    def _likes(self) -> list[State]:
        return [programs.like for programs in self.programs]

    @property
    def _histograms(self) -> bool:
        return self.stages[0].step.histograms

    @property
    def peaks(self) -> dict[Node, int]:
        """The most micro batches of which each stage holds something for the backward pass at once."""
        return self.plan.peaks("saved")

    def compile(self, state: State, resident: PyTree, block: PyTree) -> "Dispatcher":
        """Compile the programs of all stages for such a state and block."""
        parts = self._split(state)
        self.plan.compile(self._start(parts, resident, block))
        if self._histograms:
            for part in parts:
                _count_values(part["params"], jax.tree.map(lambda leaf: leaf.astype(jnp.float32), part["params"]))
        return self

    def trace(self, state: State, resident: PyTree, block: PyTree) -> Table:
        """Return when the actions of the block's first step ran, the second time, on a copy of the state."""
        start = self._start(self._split(self.snapshot(state)), resident, block)
        steps = self.plan.compile(start)
        # The first time, memory is allocated and threads are started, which no later step waits for.
        start |= steps(start, 1) | self._constants
        # What is still on its way to the devices would count as time of the first actions.
        jax.block_until_ready(list(start.values()))
        tracer = Tracer(self.table.work)
        steps(start, 1, observe=tracer.observe)
        return tracer.table(self.table)

    def __call__(
        self, state: State, resident: PyTree, block: PyTree, rows: range | None = None
    ) -> tuple[State, Metrics]:
        """Run the steps of these rows of a block, or of all of them; the state is donated."""
        rows = range(_num_steps(block)) if rows is None else rows
        start = self._start(self._split(state), resident, block)
        if rows.start:
            start |= {("at", Node(n)): place(np.int32(rows.start), replicated(m)) for n, m in enumerate(self.meshes)}
        end = self.plan.compile(start)(start, len(rows))
        parts = [
            {"params": end["params", node]} | end["fixed", node] | end["slots", node]
            for node in map(Node, range(len(self.stages)))
        ]
        metrics = end["record"]
        if self._histograms:
            grads = [end["reduced", Node(number)]["grads"] for number in range(len(parts))]
            counted = [_count_values(part["params"], tree) for part, tree in zip(parts, grads, strict=True)]
            metrics = metrics | {HISTOGRAMS: {name: each for stage in counted for name, each in stage.items()}}
        return self._join(state, parts), metrics

    def _start(self, parts: list[State], resident: PyTree, block: PyTree) -> Values:
        start: Values = dict(self._constants)
        for number, part in enumerate(parts):
            node = Node(number)
            of_step = {key: value for key, value in block[number].items() if key in PER_STEP}
            rest = {key: value for key, value in block[number].items() if key not in PER_STEP}
            start["params", node] = part["params"]
            start["fixed", node] = {key: part[key] for key in FIXED}
            start["slots", node] = {key: part[key] for key in UPDATE_ONLY if key in part}
            start["resident", node] = resident[number] if resident else None
            start["block", node] = {"of_step": of_step, "rest": rest}
            start["reduced", node] = None  # until the first step has some
        # Made anew for every call, because the update donates it.
        start["record"] = self._record(_num_steps(block))
        return start

    @cached_property
    def _constants(self) -> Values:
        """Small numbers on the devices that the passes read."""
        found: Values = {}
        for number, mesh in enumerate(self.meshes):
            node, where = Node(number), replicated(mesh)
            # Numbers that the passes read are on the devices before a call: sending one for each action would cost
            # about 40 us each time.
            found["at", node] = place(np.int32(0), where)
            for micro in range(self.table.work.num_micros):
                found["micro", node, micro] = place(np.int32(micro), where)
        ones = np.ones(self.stages[-1].step.num_replicas, np.float32)
        # The gradient of the loss with respect to itself, from which the backward passes start.
        found["ones"] = [place(ones, NamedSharding(self.meshes[-1], EACH))]
        return found

    def _record(self, num_steps: int) -> Metrics:
        """Return empty metrics for the steps of a call, on the last stage's devices."""
        spec = self.stages[-1].step
        rows: dict[str, Any] = {key: np.zeros(num_steps, np.float32) for key in (*spec.sum_names, *METRICS)}
        if spec.numerics.fp_exceptions:
            # True until a block says otherwise: rows of steps that do not run must not look like a failure.
            rows |= {key: np.ones((num_steps, len(spec.network.blocks)), bool) for key in FLAGS}
        return place(rows, replicated(self.meshes[-1]))

    def _split(self, state: State) -> list[State]:
        """Return each stage's part of a state, with its own copy of what all need."""
        flat = flatten_named(state)
        # Leaves that several parts have are scalars which every update advances in the same way, so that any copy is
        # right.
        seen = Counter(name for like in self._likes for name in flatten_named(like))
        # The loss scale, the step and an optimizer's counts.
        shared = {name: flat[name] for name, count in seen.items() if count > 1}
        parts = []
        for spec, like, mesh in zip(self.stages, self._likes, self.meshes, strict=True):
            # Real copies: stages may share a device, and each donates its own.
            copies = snapshot(transfer(shared, replicated(mesh)))
            where = flatten_named(shardings(like, mesh, spec.placement))
            copies = {name: jax.device_put(leaf, where[name]) for name, leaf in copies.items()}
            parts.append(unflatten_named(like, flat | copies))
        return parts

    def _join(self, like: State, parts: list[State]) -> State:
        flat: dict[str, Any] = {}
        for part in parts:
            flat |= flatten_named(part)
        return unflatten_named(like, flat)


def make_dispatcher(stages: Sequence[StageSpec], devices: np.ndarray, table: Table) -> Dispatcher:
    """Return the dispatcher for stages on a grid of devices [replica, device of the replica]."""
    device_of = table.work.device_of
    meshes = tuple(replica_mesh(list(devices[:, device_of[Node(number)]])) for number in range(len(stages)))
    programs = tuple(kept(_make_stage, *given) for given in zip(stages, meshes, strict=True))
    return Dispatcher(stages=tuple(stages), meshes=meshes, programs=programs, table=table)


def _make_stage(stage: StageSpec, mesh: Mesh) -> StagePrograms:
    like = part_of(stage)  # once: it draws the stage's weights
    return StagePrograms(
        like=like,
        node=make_node(training_node(stage, mesh)),
        reduce=make_reduce(stage, mesh),
        update=make_update(stage, mesh, like),
        copy=make_copy(like, mesh, stage.placement),
        # Gathering is needed across processes only: within one, the host can read the pieces from all devices.
        copy_to_save=make_copy(like, mesh, stage.placement, whole=not replicated(mesh).is_fully_addressable),
    )


def _values(node: Node) -> NodeValues:
    return NodeValues(
        params=("params", node),
        fixed=("fixed", node),
        source=lambda micro: (("resident", node), ("block", node), ("at", node), ("micro", node, micro)),
        inputs=(lambda micro: ()) if node.stage == 0 else None,
    )


def _num_steps(block: PyTree) -> int:
    return block[0]["epoch"].shape[0]
