"""Pipelines: per-stage programs dispatched in the order of a table. JAX's asynchronous dispatch gives the overlap.

To the run it looks like the one-stage device loop: `program(state, resident, block) -> (state, metrics)`, with a state
whose leaves lie on the devices of their stages.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.core.tree import flatten_named, unflatten_named
from headrace.engine.devices import REPLICA, replica_mesh, replicated
from headrace.engine.multiprocess_arrays import in_turn, place, transfer
from headrace.engine.pipeline.schedule_runner import Observer, Tracer, Walk
from headrace.engine.pipeline.stage_programs import StagePrograms, StageSpec, make_stage, part_of
from headrace.engine.pipeline.state_placement import shardings
from headrace.engine.state import State, snapshot
from headrace.engine.step import Metrics, put_on
from headrace.plan.schedule import Node
from headrace.plan.table import Table

ONCE = ("loss_scale", "step")  # parts of the state that every stage holds a copy of
PASSES = ("params", "stats", *ONCE)  # what the forward and backward programs need of it
METRICS = ("loss", "top1", "top5", "count", "learning_rate", "grad_norm", "loss_scale", "skipped", "bad")
FLAGS = ("forward_finite", "gradient_finite")  # with fp_exceptions: one for each block


@dataclass(frozen=True, kw_only=True)
class Dispatcher:
    """The stages, their meshes and programs, and the table whose actions make a step."""

    stages: tuple[StageSpec, ...]
    meshes: tuple[Mesh, ...]
    programs: tuple[StagePrograms, ...]
    table: Table
    likes: tuple[State, ...]  # the shape of each stage's part of the state
    numbers: dict[tuple[int, int], jax.Array] = field(default_factory=dict)  # (stage, n) -> n on the stage's devices
    peaks: dict[Node, int] = field(default_factory=dict)  # most micro batches that a stage held at once, as it ran

    def place(self, state: State) -> State:
        """Put a state in host memory where its stages have their parts."""
        placed = []
        for spec, like, mesh in zip(self.stages, self.likes, self.meshes, strict=True):
            part = unflatten_named(like, flatten_named(state))
            placed.append(place(jax.tree.map(np.array, part), shardings(like, mesh, spec.home)))
        return self._join(state, placed)

    def put(self, tree: Any, kind: str) -> Any:
        """Put a block (`steps`) or a resident set where it is needed: images at the first stage, labels at the last."""
        parts = []
        for spec, mesh in zip(self.stages, self.meshes, strict=True):
            left_out = () if spec.is_first else ("images",) if spec.is_last else ("images", "labels")
            part = {key: value for key, value in tree.items() if key not in left_out}
            parts.append(put_on(mesh)(part, kind))
        return tuple(parts)

    def snapshot(self, state: State) -> State:
        """Copy a state where it lies, stage by stage."""
        parts = zip(self.programs, self._split(state), strict=True)
        return self._join(state, [programs.copy(part) for programs, part in parts])

    def copy_to_save(self, state: State) -> State:
        """Copy a state so that this process can read it whole, stage by stage."""
        parts = zip(self.programs, self._split(state), strict=True)
        return in_turn(self._join(state, [programs.copy_to_save(part) for programs, part in parts]))

    def compile(self, state: State, resident: Any, block: Any) -> "Dispatcher":
        """Compile every program of every stage by running the block's first step on a copy of the state."""
        parts = self._split(self.snapshot(state))
        jax.block_until_ready(self._step(parts, self._record(block), (resident, block, 0)))
        return self

    def trace(self, state: State, resident: Any, block: Any) -> Table:
        """Return when the actions of the block's first step really ran, on a copy of the state."""
        parts = self._split(self.snapshot(state))
        jax.block_until_ready(parts)
        tracer = Tracer(self.table.work)
        self._step(parts, self._record(block), (resident, block, 0), tracer.observe)
        return tracer.table()

    def __call__(self, state: State, resident: Any, block: Any) -> tuple[State, Metrics]:
        """Run the steps of a block; the state is donated."""
        parts, record = self._split(state), self._record(block)
        for number in range(_num_steps(block)):
            parts, record = self._step(parts, record, (resident, block, number))
        return self._join(state, parts), {key: value for key, value in record.items() if key != "at"}

    def _record(self, block: Any) -> Metrics:
        """Return empty metrics for the steps of a call, on the last stage's devices."""
        spec, steps = self.stages[-1].step, _num_steps(block)
        rows: dict[str, Any] = {key: np.zeros(steps, np.float32) for key in METRICS}
        if spec.numerics.fp_exceptions:
            rows |= {key: np.ones((steps, len(spec.network.blocks)), bool) for key in FLAGS}
        return place(rows | {"at": np.int32(0)}, replicated(self.meshes[-1]))

    def _step(
        self, parts: list[State], record: Any, source: tuple[Any, Any, int], observe: Observer | None = None
    ) -> tuple[list[State], Any]:
        needed = [{key: part[key] for key in PASSES} for part in parts]
        fresh = [programs.fresh(part) for programs, part in zip(self.programs, needed, strict=True)]
        passes = _Passes(self, needed, [counts for counts, _ in fresh], [grads for _, grads in fresh], source)
        walk = Walk(work=self.table.work, programs=passes, observe=observe)
        self.peaks.update(walk.run(action for _, action in self.table.in_order()).peaks)
        reduced = [
            programs.reduce(part["loss_scale"], counts, grads)
            for programs, part, counts, grads in zip(self.programs, needed, passes.counts, passes.grads, strict=True)
        ]
        updated = []
        for number, programs in enumerate(self.programs):
            is_last = number == len(self.stages) - 1
            kept = record if is_last else {"at": self._number(number, 0) + 0}
            part, kept = programs.update(parts[number], reduced[number], self._whole(reduced, number), kept)
            record = kept if is_last else record
            updated.append(part)
        return updated, record

    def _whole(self, reduced: list[Any], stage: int) -> dict[str, Any]:
        """Return what a stage's update must know of all stages: loss, gradient norms and, at the last, the flags."""
        names = [key for key in FLAGS if key in reduced[0]] if stage == len(self.stages) - 1 else []
        parts = ([part["square"] for part in reduced], reduced[-1]["sums"]["loss"])
        flags = {key: [part[key] for part in reduced] for key in names}
        (squares, loss), flags = transfer((parts, flags), replicated(self.meshes[stage]))
        joined = {key: jnp.concatenate(values) for key, values in flags.items()}
        return {"squares": jnp.stack(squares), "loss": loss, "flags": joined}

    def _ones(self, stage: int) -> Any:
        key = (stage, -1)
        if key not in self.numbers:
            ones = np.ones(self.stages[stage].step.num_replicas, np.float32)
            self.numbers[key] = place(ones, NamedSharding(self.meshes[stage], P(REPLICA)))
        return self.numbers[key]

    def _number(self, stage: int, number: int) -> jax.Array:
        key = (stage, number)
        if key not in self.numbers:
            self.numbers[key] = place(np.int32(number), replicated(self.meshes[stage]))
        return self.numbers[key]

    def _split(self, state: State) -> list[State]:
        """Return each stage's part of a state, with its own copy of what all need."""
        flat = flatten_named(state)
        seen = Counter(name for like in self.likes for name in flatten_named(like))
        shared = {name: flat[name] for name, count in seen.items() if count > 1}  # `ONCE`, and an optimizer's counts
        parts = []
        for spec, like, mesh in zip(self.stages, self.likes, self.meshes, strict=True):
            # Real copies: stages may share a device, and each donates its own.
            copies = snapshot(transfer(shared, replicated(mesh)))
            where = flatten_named(shardings(like, mesh, spec.home))
            copies = {name: jax.device_put(leaf, where[name]) for name, leaf in copies.items()}
            parts.append(unflatten_named(like, flat | copies))
        return parts

    def _join(self, like: State, parts: list[State]) -> State:
        """Return the whole state from its parts."""
        flat: dict[str, Any] = {}
        for part in parts:
            flat |= flatten_named(part)
        return unflatten_named(like, flat)


@dataclass(frozen=True)
class _Passes:
    """The passes of one step, for the walk; `counts` and `grads` of each stage are replaced as they grow."""

    owner: Dispatcher
    needed: list[State]
    counts: list[Any]
    grads: list[Any]
    source: tuple[Any, Any, int]  # resident set, block, number of the step in it

    def forward(self, node: Node, micro: int, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        """Run a stage forward; what leaves it is the value alone."""
        stage = node.stage
        x = inputs[0] if inputs else None
        forward = self.owner.programs[stage].forward
        y, saved, self.counts[stage] = forward(self.needed[stage], self.counts[stage], x, self._fetched(stage, micro))
        return self._in_turn(y), saved

    def backward(
        self, node: Node, micro: int, inputs: tuple[Any, ...], saved: Any, gradients: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Run a stage backward; its weights' gradients go into the sums."""
        stage = node.stage
        x = inputs[0] if inputs else None
        dy = gradients[0] if gradients else self.owner._ones(stage)
        backward, fetched = self.owner.programs[stage].backward, self._fetched(stage, micro)
        dx, self.grads[stage] = backward(self.needed[stage], self.grads[stage], x, saved, dy, fetched)
        return (self._in_turn(dx),)

    def transfer(self, value: Any, node: Node) -> Any:
        """Put a value on the devices of a stage, replica by replica."""
        return transfer(value, NamedSharding(self.owner.meshes[node.stage], P(REPLICA)))

    def _in_turn(self, value: Any) -> Any:
        """Wait for a pass, where passes exchange the statistics of batch norms."""
        return in_turn(value) if self.owner.stages[0].step.norm_group_size > 1 else value

    def _fetched(self, stage: int, micro: int) -> Any:
        """Return what a stage fetches from: the resident set, the block, and which micro-batch of it."""
        resident, block, number = self.source
        rest = {key: value for key, value in block[stage].items() if key != "epoch"}
        at = self.owner._number(stage, number), self.owner._number(stage, micro)
        return (resident[stage] if resident else None), {"epoch": block[stage]["epoch"], "rest": rest}, at


def make_dispatcher(stages: Sequence[StageSpec], devices: np.ndarray, table: Table) -> Dispatcher:
    """Return the dispatcher for stages on a grid of devices [replica, device of the replica]."""
    device_of = table.work.device_of
    meshes = tuple(replica_mesh(list(devices[:, device_of[Node(number)]])) for number in range(len(stages)))
    return Dispatcher(
        stages=tuple(stages),
        meshes=meshes,
        programs=tuple(make_stage(stage, mesh) for stage, mesh in zip(stages, meshes, strict=True)),
        table=table,
        likes=tuple(part_of(stage) for stage in stages),
    )


def _num_steps(block: Any) -> int:
    return block[0]["epoch"].shape[0]
