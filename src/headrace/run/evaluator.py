"""The two ways to evaluate, which look alike: the whole network on each device, or through the stages of a pipeline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from headrace.engine.devices import replica_mesh, replicated, take
from headrace.engine.evaluate import EvalSpec, Sums, make_evaluation
from headrace.engine.evaluate_stages import StagedEvaluation, make_staged_evaluation
from headrace.engine.loop import put_on
from headrace.engine.spread import hop
from headrace.plan.plan import Plan

Program = Callable[[Any, Any, Any], Sums]  # (placed weights, resident set, block) -> sums


class Evaluator(Protocol):
    """Where weights and batches go, and the program that evaluates a block of batches."""

    @property
    def meshes(self) -> Sequence[Mesh]:
        """The devices that exchange something."""
        ...

    def put(self, tree: Any, kind: str) -> Any:
        """Put batches or a resident set on the devices."""
        ...

    def place(self, weights: tuple[Any, Any]) -> Any:
        """Put (params, stats) on the devices."""
        ...

    def compile(self, placed: Any, resident: Any, block: Any) -> Program:
        """Return the program, compiled for such weights."""
        ...


@dataclass(frozen=True)
class WholeEvaluator:
    """The whole network on each device."""

    spec: EvalSpec
    mesh: Mesh

    @property
    def meshes(self) -> Sequence[Mesh]:
        """The one mesh over the replicas."""
        return (self.mesh,)

    def put(self, tree: Any, kind: str) -> Any:
        """Put batches or a resident set on the mesh."""
        return put_on(self.mesh)(tree, kind)

    def place(self, weights: tuple[Any, Any]) -> Any:
        """Put the weights on every device."""
        return hop(weights, replicated(self.mesh))

    def compile(self, placed: Any, resident: Any, block: Any) -> Program:
        """Compile ahead of the first use."""
        params, stats = placed
        compiled = make_evaluation(self.spec, self.mesh).lower(params, stats, resident, block).compile()
        return lambda placed, resident, block: compiled(placed[0], placed[1], resident, block)


@dataclass(frozen=True)
class StagedEvaluator:
    """The stages of the pipeline, each on its devices."""

    evaluation: StagedEvaluation

    @property
    def meshes(self) -> Sequence[Mesh]:
        """The replicas of each stage."""
        return self.evaluation.meshes

    def put(self, tree: Any, kind: str) -> Any:
        """Put batches or a resident set where the first and the last stage need them."""
        return self.evaluation.put(tree, kind)

    def place(self, weights: tuple[Any, Any]) -> Any:
        """Put the weights on the devices of their stages."""
        return self.evaluation.place(weights)

    def compile(self, placed: Any, resident: Any, block: Any) -> Program:
        """Compile every stage by evaluating the block once."""
        jax.block_until_ready(self.evaluation(placed, resident, block))
        return self.evaluation


def make_evaluator(plan: Plan, spec: EvalSpec, devices: list[Any]) -> Evaluator:
    """Return what evaluates as the plan says, on the first devices of the list."""
    validation, pipeline = plan.validation, plan.pipeline
    mine = take(devices, validation.num_devices)
    if pipeline is None or validation.devices_per_replica == 1:
        return WholeEvaluator(spec, replica_mesh(mine))
    grid = np.array(mine).reshape(validation.num_replicas, pipeline.num_devices)
    ranges = [(stage.first, stage.end) for stage in pipeline.stages]
    mapping = [stage.device for stage in pipeline.stages]
    return StagedEvaluator(make_staged_evaluation(spec, ranges, grid, mapping))
