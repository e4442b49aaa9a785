"""Pipelines: per-stage programs dispatched in the order of a table. JAX's asynchronous dispatch gives the overlap.

To the run it looks like the one-stage device loop: `program(state, resident, block) -> (state, metrics)`, with a state
whose leaves lie on the devices of their stages.
"""

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
from headrace.engine.loop import block_specs
from headrace.engine.stage import StagePrograms, StageSpec, make_stage
from headrace.engine.state import State, make_state, snapshot
from headrace.engine.step import Metrics

ONCE = ("loss_scale", "step")  # parts of the state that every stage holds a copy of
METRICS = ("loss", "top1", "top5", "count", "learning_rate", "grad_norm", "loss_scale", "skipped", "bad")


@dataclass(frozen=True, kw_only=True)
class Dispatcher:
    """The stages, their meshes and programs, and the order in which a step's actions are dispatched."""

    stages: tuple[StageSpec, ...]
    meshes: tuple[Mesh, ...]
    programs: tuple[StagePrograms, ...]
    actions: tuple[tuple[int, bool, int], ...]  # (stage, is it forward, micro)
    likes: tuple[State, ...]  # the shape of each stage's part of the state
    numbers: dict[tuple[int, int], jax.Array] = field(default_factory=dict)  # (stage, n) -> n on the stage's devices

    def place(self, state: State) -> State:
        """Put a state in host memory on the devices of its stages."""
        parts = self._split(state)
        placed = [
            jax.device_put(jax.tree.map(np.array, part), replicated(mesh))
            for part, mesh in zip(parts, self.meshes, strict=True)
        ]
        return self._join(state, placed)

    def put(self, tree: Any, kind: str) -> Any:
        """Put a block (`steps`) or a resident set where it is needed: images at the first stage, labels at the last."""
        parts = []
        for spec, mesh in zip(self.stages, self.meshes, strict=True):
            left_out = () if spec.is_first else ("images",) if spec.is_last else ("images", "labels")
            part = {key: value for key, value in tree.items() if key not in left_out}
            parts.append(_put_block(part, mesh) if kind == "steps" else jax.device_put(part, replicated(mesh)))
        return tuple(parts)

    def snapshot(self, state: State) -> State:
        """Copy a state on its devices, stage by stage."""
        return self._join(state, [snapshot(part) for part in self._split(state)])

    def compile(self, state: State, resident: Any, block: Any) -> "Dispatcher":
        """Compile every program of every stage by running the block's first step on a copy of the state."""
        parts = self._split(self.snapshot(state))
        jax.block_until_ready(self._step(parts, self._record(block), (resident, block, 0)))
        return self

    def __call__(self, state: State, resident: Any, block: Any) -> tuple[State, Metrics]:
        """Run the steps of a block; the state is donated."""
        parts, record = self._split(state), self._record(block)
        for number in range(_num_steps(block)):
            parts, record = self._step(parts, record, (resident, block, number))
        return self._join(state, parts), {key: record[key] for key in METRICS}

    def _record(self, block: Any) -> Metrics:
        """Return empty metrics for the steps of a call, on the last stage's devices."""
        rows = {key: np.zeros(_num_steps(block), np.float32) for key in METRICS}
        return jax.device_put(rows | {"at": np.int32(0)}, replicated(self.meshes[-1]))

    def _step(self, parts: list[State], record: Any, source: tuple[Any, Any, int]) -> tuple[list[State], Any]:
        work = [programs.fresh(part) for programs, part in zip(self.programs, parts, strict=True)]
        self._run_actions(parts, work, source)
        reduced = [programs.reduce(*pair) for programs, *pair in zip(self.programs, parts, work, strict=True)]
        updated = []
        for number, (programs, mesh) in enumerate(zip(self.programs, self.meshes, strict=True)):
            here = replicated(mesh)
            squares = jnp.stack(jax.device_put([part["square"] for part in reduced], here))
            loss = jax.device_put(reduced[-1]["sums"]["loss"], here)
            is_last = number == len(self.stages) - 1
            kept = record if is_last else {"at": self._number(number, 0) + 0}
            part, kept = programs.update(parts[number], reduced[number], squares, loss, kept)
            record = kept if is_last else record
            updated.append(part)
        return updated, record

    def _run_actions(self, parts: list[State], work: list[Any], source: tuple[Any, Any, int]) -> None:
        """Dispatch the forwards and backwards of a step; `work` holds each stage's sums and is updated in place."""
        inputs: dict[tuple[int, int], Any] = {}
        saved: dict[tuple[int, int], Any] = {}
        gradients: dict[tuple[int, int], Any] = {}
        last = len(self.stages) - 1
        for stage, is_forward, micro in self.actions:
            programs, here = self.programs[stage], (stage, micro)
            feed = self._source(stage, micro, source)
            x = inputs.get(here)
            if is_forward:
                y, saved[here], work[stage] = programs.forward(parts[stage], work[stage], x, feed)
                if stage < last:
                    inputs[stage + 1, micro] = self._hop(y, stage + 1)
                else:
                    gradients[here] = self._ones(stage)
            else:
                inputs.pop(here, None)
                dx, work[stage] = programs.backward(
                    parts[stage], work[stage], x, saved.pop(here), gradients.pop(here), feed
                )
                if stage > 0:
                    gradients[stage - 1, micro] = self._hop(dx, stage - 1)

    def _source(self, stage: int, micro: int, source: tuple[Any, Any, int]) -> Any:
        """Return what a stage fetches from: the resident set, the block, and which micro-batch of it."""
        resident, block, number = source
        rest = {key: value for key, value in block[stage].items() if key != "epoch"}
        at = self._number(stage, number), self._number(stage, micro)
        return (resident[stage] if resident else None), {"epoch": block[stage]["epoch"], "rest": rest}, at

    def _hop(self, array: Any, stage: int) -> Any:
        return jax.device_put(array, NamedSharding(self.meshes[stage], P(REPLICA)))

    def _ones(self, stage: int) -> Any:
        key = (stage, -1)
        if key not in self.numbers:
            ones = np.ones(self.stages[stage].step.num_replicas, np.float32)
            self.numbers[key] = jax.device_put(ones, NamedSharding(self.meshes[stage], P(REPLICA)))
        return self.numbers[key]

    def _number(self, stage: int, number: int) -> jax.Array:
        key = (stage, number)
        if key not in self.numbers:
            self.numbers[key] = jax.device_put(np.int32(number), replicated(self.meshes[stage]))
        return self.numbers[key]

    def _split(self, state: State) -> list[State]:
        """Return each stage's part of a state, with its own copy of what all need."""
        flat = flatten_named(state)
        parts = []
        for like, mesh in zip(self.likes, self.meshes, strict=True):
            part = unflatten_named(like, flat)
            # Real copies: stages may share a device, and each donates its own.
            parts.append(part | snapshot(jax.device_put({key: part[key] for key in ONCE}, replicated(mesh))))
        return parts

    def _join(self, like: State, parts: list[State]) -> State:
        """Return the whole state from its parts."""
        flat: dict[str, Any] = {}
        for part in parts:
            flat |= flatten_named(part)
        return unflatten_named(like, flat)


def make_dispatcher(
    stages: Sequence[StageSpec], devices: np.ndarray, device_mapping: Sequence[int], actions: Sequence[Any]
) -> Dispatcher:
    """Return the dispatcher for stages on a grid of devices [replica, device of the replica]."""
    meshes = tuple(replica_mesh(list(devices[:, device])) for device in device_mapping)
    return Dispatcher(
        stages=tuple(stages),
        meshes=meshes,
        programs=tuple(make_stage(stage, mesh) for stage, mesh in zip(stages, meshes, strict=True)),
        actions=tuple(actions),
        likes=tuple(part_of(stage) for stage in stages),
    )


def part_of(stage: StageSpec) -> State:
    """Return the shape of a stage's part of the state."""
    spec = stage.step
    params, stats = spec.network.init(0)
    names = stage.block_names
    params, stats = ({name: tree[name] for name in names if name in tree} for tree in (params, stats))
    return jax.eval_shape(
        lambda: make_state(spec.optimizer, spec.precision, spec.numerics, params, stats, ema=spec.ema_decay > 0)
    )


def _num_steps(block: Any) -> int:
    return block[0]["epoch"].shape[0]


def _put_block(block: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    specs = block_specs(block)
    return {key: jax.device_put(value, NamedSharding(mesh, specs[key])) for key, value in block.items()}
