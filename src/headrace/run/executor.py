"""The two ways to run a training call, which look alike: the device loop of one stage, the dispatcher of a pipeline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh

from headrace.config.schema import Pipeline
from headrace.engine.devices import replica_mesh, take
from headrace.engine.dispatch import make_dispatcher
from headrace.engine.home import Home, host_memory_of
from headrace.engine.loop import make_call, put_on
from headrace.engine.stage import StageSpec
from headrace.engine.state import State, put_state, snapshot
from headrace.engine.step import StepSpec, make_step
from headrace.plan.plan import Plan


class Executor(Protocol):
    """Where a state lies, how blocks reach the devices, and the call `(state, resident, block) -> (state, metrics)`."""

    @property
    def meshes(self) -> Sequence[Mesh]:
        """The devices that exchange something."""
        ...

    def put(self, tree: Any, kind: str) -> Any:
        """Put a block (`steps`) or a resident set (`replicated`) on the devices."""
        ...

    def place(self, state: State) -> State:
        """Put a state in host memory on the devices."""
        ...

    def snapshot(self, state: State) -> State:
        """Copy a state on its devices, so that it outlives the call that the original is donated to."""
        ...

    def copy_to_save(self, state: State) -> State:
        """Copy a state so that it outlives the next call and this process can read it whole."""
        ...

    def compile(self, state: State, resident: Any, block: Any) -> Callable[..., Any]:
        """Return the call's program, compiled; the state is left as it is."""
        ...


@dataclass(frozen=True)
class DeviceLoop:
    """One stage: K steps in one device program."""

    spec: StepSpec
    mesh: Mesh

    @property
    def meshes(self) -> Sequence[Mesh]:
        """The one mesh over the replicas."""
        return (self.mesh,)

    def put(self, tree: Any, kind: str) -> Any:
        """Put a block or a resident set on the mesh."""
        return put_on(self.mesh)(tree, kind)

    def place(self, state: State) -> State:
        """Put a state on every device."""
        return put_state(state, self.mesh)

    def snapshot(self, state: State) -> State:
        """Copy a state."""
        return snapshot(state)

    def copy_to_save(self, state: State) -> State:
        """Copy a state: it is whole on every device."""
        return snapshot(state)

    def compile(self, state: State, resident: Any, block: Any) -> Callable[..., Any]:
        """Compile the call ahead of its first use."""
        lowered = make_call(make_step(self.spec), self.mesh, block).lower(state, resident, block)
        return lowered.compile(compiler_options=dict(self.spec.compiler_options))


def make_executor(plan: Plan, spec: StepSpec, devices: list[Any], wanted: Pipeline) -> Executor:
    """Return what runs the calls of a plan on the first devices of the list."""
    replicas, pipeline = plan.batch.num_replicas, plan.pipeline
    if pipeline is None or plan.one_program:
        return DeviceLoop(spec, replica_mesh(take(devices, replicas)))
    grid = np.array(take(devices, replicas * pipeline.num_devices)).reshape(replicas, pipeline.num_devices)
    home = Home(
        in_host_memory=wanted.optimizer_state_offloading and host_memory_of(devices[0]),
        sharded=wanted.replicated_optimizer_state_sharding,
    )
    stages = [
        StageSpec(
            step=spec,
            blocks=(stage.first, stage.end),
            recompute=wanted.recomputation,
            home=home,
        )
        for stage in pipeline.stages
    ]
    return make_dispatcher(stages, grid, pipeline.table)
