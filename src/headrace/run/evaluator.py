"""The two ways to evaluate, which look alike: the whole network on each device, or through the stages of a pipeline."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from headrace.data.dataset import DataSet
from headrace.data.feeding.cache import fetch, fetch_labels
from headrace.data.feeding.feed import EvalFeed, feed_options
from headrace.engine.devices import replica_mesh, replicated, take
from headrace.engine.forward import EvalSpec, Sums, make_evaluation, total_sums
from headrace.engine.multiprocess_arrays import in_turn, transfer
from headrace.engine.pipeline.evaluate_stages import StagedEvaluation, make_staged_evaluation
from headrace.engine.state import State, evaluated_weights
from headrace.engine.step import put_on
from headrace.job.control import current_group
from headrace.plan.plan import Plan
from headrace.run.design import Design
from headrace.run.training import Compiled, compiled_from, own_share

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
        return transfer(weights, replicated(self.mesh))

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


# Validation inside a run: started behind a call without waiting for it, read when the call has been settled.


_STREAMED_BLOCK_BYTES = 256 << 20  # of images sent at a time when the set is not on the device


@dataclass(frozen=True)
class Started:
    """Evaluations that the devices are working on: {weights: sums still on the device}."""

    parts: dict[str, list[Sums]]
    asked: float  # when, on the performance counter


class Validator:
    """The validation set, the evaluation program and the devices it runs on."""

    def __init__(self, design: Design, dataset: DataSet, devices: list[Any]) -> None:
        config, plan = design.config, design.plan.validation
        options = feed_options(config.data, dataset.info, config.run.seed, plan.num_devices)
        options = replace(options, share=own_share(design.plan))
        batches = plan.num_batches
        if options.cache.where != "device":
            batches = max(1, min(batches, _STREAMED_BLOCK_BYTES // (plan.batch_size * dataset.info.image_bytes)))
        spec = EvalSpec(
            network=design.network,
            fetch=lambda resident, batch: fetch(resident, batch, options.preprocess, train=False),
            fetch_labels=lambda resident, batch: fetch_labels(resident, batch, options.preprocess, train=False),
            compute_dtype=design.precision.compute_dtype,
            half_partials=design.precision.half_partials,
            num_replicas=plan.num_replicas,
        )
        self._evaluator = make_evaluator(design.plan, spec, devices)
        current_group().meet(self._evaluator.meshes)
        self._feed = EvalFeed(dataset.validation, plan.batch_size, batches, options, self._evaluator.put)
        self._compiled: dict[str, Program] = {}  # by the name of the weights

    def compile(self, state: State) -> Compiled:
        """Compile for the weights of such a state ahead of their use, so that the time stays apart."""
        return compiled_from(lambda: self._compile(self._place(state), next(iter(self._feed))))

    def _compile(self, weights: dict[str, Any], block: Any) -> Program:
        programs: dict[tuple[Any, ...], Program] = {}  # by dtypes: averages are float32 where raw weights have 16 bits
        for name, placed in weights.items():
            dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(placed))
            if dtypes not in programs:
                programs[dtypes] = self._evaluator.compile(placed, self._feed.resident, block)
            self._compiled[name] = programs[dtypes]
        return self._compiled["raw"]

    def start(self, state: State) -> Started:
        """Start the evaluation of a state's weights; the state may be donated to the next call right after."""
        asked, weights = time.perf_counter(), self._place(in_turn(state))
        parts: dict[str, list[Sums]] = {name: [] for name in weights}
        for block in self._feed:
            for name, placed in weights.items():
                parts[name].append(in_turn(self._compiled[name](placed, self._feed.resident, block)))
        return Started(parts, asked)

    def finish(self, started: Started, not_before: float = 0.0) -> dict[str, tuple[dict[str, Any], float]]:
        """Wait for the sums; return {weights: (sums, seconds)}, the time of the devices shared out evenly.

        They began when they were asked to, or when the call in front of it ended (`not_before`), if that was later.
        """
        sums = {name: total_sums(parts) for name, parts in started.parts.items()}
        seconds = (time.perf_counter() - max(started.asked, not_before)) / len(sums)
        return {name: (total, seconds) for name, total in sums.items()}

    def close(self) -> None:
        """End the feed's threads."""
        self._feed.close()

    def _place(self, state: State) -> dict[str, Any]:
        return {name: self._evaluator.place(weights) for name, weights in evaluated_weights(state).items()}
