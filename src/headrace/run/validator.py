"""Validate while training: the forward program, launched after calls, over the validation images."""

import time
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from headrace.core.tree import PyTree
from headrace.data.dataset import DataSet
from headrace.data.feeding.block_reader import FeedOptions
from headrace.data.feeding.eval_feed import EvalFeed
from headrace.data.feeding.feed import TrainFeed
from headrace.data.feeding.fetch import FetchSamples
from headrace.engine.compiler import compiler_options
from headrace.engine.devices import replica_mesh, take
from headrace.engine.forward import (
    LOGITS,
    EvalSpec,
    Forward,
    ForwardProgram,
    Reducer,
    Sums,
    WholeForward,
    sums_with,
    total_sums,
)
from headrace.engine.multiprocess_arrays import in_turn, readable
from headrace.engine.objective import SCORES
from headrace.engine.pipeline.evaluate_stages import make_staged_evaluation
from headrace.engine.ready import Ready, outputs
from headrace.engine.state import State, evaluated_weights
from headrace.job import current_group
from headrace.run.design import Design
from headrace.run.training import Compiled, compiled_from, process_shard

_PREDICTED_BATCHES = 16  # in a block: bounds the logits that are on the devices at a time


def make_forward_pass(design: Design, devices: list[Any], reducer: Reducer) -> tuple[Forward, FeedOptions]:
    """Return the forward pass that a design plans for its validation, and the options of the feed it needs.

    Only sums are computed through the stages of a pipeline; anything else runs on replicas with the whole network.
    """
    plan = design.plan.validation
    options = replace(design.plan.feed, shard=process_shard(design.plan))
    # Forward passes alone compile faster with all algorithms: the plans that cuDNN recommends for a convolution with
    # its bias and activation are generated, compiled one by one.
    compiler = replace(design.config.compiler, convolution_tuning="full", concurrent_kernels="off")
    preprocess = options.preprocess.with_seed(0)  # nothing is drawn: every seed has the same program
    spec = EvalSpec(
        network=design.network,
        fetch=FetchSamples(preprocess, train=False),
        compute_dtype=design.precision.compute_dtype,
        half_partials=design.precision.half_partials,
        matmul_precision=design.precision.matmul_precision,
        stable_norm=design.config.model.stable_norm,
        cpu_kernels=design.config.compiler.cpu_kernels,
        compiler_options=tuple(compiler_options(compiler).items()),
        num_replicas=plan.num_replicas,
        reducer=reducer,
        flip=design.config.validation.validation_flip,
        shift=design.config.validation.validation_shift,
    )
    pipeline = design.plan.pipeline
    # Stages of an evaluation hand on sums only; the logits of all batches would have to cross to one place.
    if not reducer.adds or pipeline is None or plan.devices_per_replica == 1:
        return WholeForward(replica_mesh(take(devices, plan.num_replicas)), spec), options
    grid = np.array(take(devices, plan.num_devices)).reshape(plan.num_replicas, pipeline.num_devices)
    ranges = [(stage.first, stage.end) for stage in pipeline.stages]
    mapping = [stage.device for stage in pipeline.stages]
    return make_staged_evaluation(spec, ranges, grid, mapping), options


@dataclass(frozen=True)
class Started:
    """Evaluations that the devices are working on: {weights: sums still on the devices}."""

    parts: dict[str, list[Sums]]
    launches: list[tuple[float, Sums]]  # in order, each with its time on the performance counter
    requested: float  # when, on the performance counter


class Validator:
    """The validation split, the program that evaluates it, and the devices it runs on.

    In a run an evaluation is started behind a call, without waiting for the call; it is read once the call's results
    have been read.
    """

    def __init__(self, design: Design, dataset: DataSet, devices: list[Any]) -> None:
        batch_size, cache = design.plan.validation.batch_size, design.plan.validation_cache
        self._forward, options = make_forward_pass(design, devices, sums_with(design.objective))
        current_group().connect_devices(self._forward.meshes)
        self._feed = EvalFeed(
            dataset.validation, batch_size, cache.batches_per_block, options, self._forward.put, cache
        )
        self._compiled: dict[str, ForwardProgram] = {}  # by the name of the weights
        self._compiling: Future[Compiled] | None = None

    def compile(self, state: State) -> Compiled:
        """Compile for the weights of such a state ahead of their use, so that the time stays apart."""
        return compiled_from(lambda: self._compile(self._place(state), *self._feed.described()))

    def compile_beside(self, state: State, threads: Executor) -> None:
        """Compile in a thread, while the run trains; `compiled` waits for it."""
        # Described, since the first call takes over the memory of the state.
        weights = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), self._place(state)
        )
        self._compiling = threads.submit(compiled_from, lambda: self._compile(weights, *self._feed.described()))

    def compiled(self) -> Compiled | None:
        """Wait for what compiles in a thread, and return it once."""
        compiling, self._compiling = self._compiling, None
        return compiling.result() if compiling else None

    def _compile(self, weights: dict[str, Any], resident: object, block: object) -> ForwardProgram:
        programs: dict[
            tuple[Any, ...], ForwardProgram
        ] = {}  # by dtypes: averages are float32 where raw weights have 16 bits
        for name, placed in weights.items():
            dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(placed))
            if dtypes not in programs:
                programs[dtypes] = self._forward.compile(placed, resident, block)
            self._compiled[name] = programs[dtypes]
        return self._compiled["raw"]

    def prefetch(self, training: TrainFeed) -> None:
        """Read validation images from now on, whenever no training images are being prepared."""
        # Training images come first: a device that waits for them stands still, while validation can be read in any
        # pause.
        training.hold(self._feed.gate)
        self._feed.prefetch()

    def start(self, state: State) -> Started:
        """Start the evaluation of a state's weights; the state may be donated to the next call right after."""
        requested, weights = time.perf_counter(), self._place(in_turn(state))
        parts: dict[str, list[Sums]] = {name: [] for name in weights}
        ready: dict[str, Ready] = {}
        launches: list[tuple[float, Sums]] = []
        resident = self._feed.resident  # waits until it is there, which is no time of the devices
        # Blocks outside, weights inside: each block of images is read and sent once for all sets of weights.
        for block in self._feed:
            for name, placed in weights.items():
                launched = time.perf_counter()
                # On several CPU devices one program at a time: collectives of two that overlap may wait for each other
                # forever.
                if name not in ready:
                    ready[name] = Ready.of(self._compiled[name], placed, resident, block)
                    in_turn(ready[name].prepared)
                sums = in_turn(ready[name](resident, block))
                if SCORES in sums:  # those of each process's images
                    sums = sums | {SCORES: jax.tree.map(readable, sums[SCORES])}
                parts[name].append(sums)
                launches.append((launched, sums))
        return Started(parts, launches, requested)

    def finish(self, started: Started) -> dict[str, tuple[dict[str, Any], float]]:
        """Wait for the sums; return {weights: (sums, seconds)}, with the time since the start divided evenly."""
        sums = {name: total_sums(parts) for name, parts in started.parts.items()}
        seconds = (time.perf_counter() - started.requested) / len(sums)
        return {name: (total, seconds) for name, total in sums.items()}

    def close(self, *, wait: bool = True) -> None:
        """End the feed's threads; wait for what they are in the middle of, or do not."""
        self._feed.close(wait=wait)

    def _place(self, state: State) -> dict[str, Any]:
        return {name: self._forward.place(weights) for name, weights in evaluated_weights(state).items()}


def predict_all(design: Design, dataset: DataSet, devices: list[Any], weights: tuple[PyTree, PyTree]) -> np.ndarray:
    """Return the logits [N, classes], float32, of the whole validation split with these (params, stats)."""
    forward, options = make_forward_pass(design, devices, LOGITS)
    size = design.plan.validation.batch_size
    with closing(EvalFeed(dataset.validation, size, _PREDICTED_BATCHES, options, forward.put)) as feed:
        # Still on the devices: reading them here would wait for each block before the next one is launched.
        parts = [readable(part) for part in outputs(forward, weights, feed, feed.resident)]
    logits = np.concatenate([part.reshape(-1, design.network.num_classes) for part in jax.device_get(parts)])
    # The last batch was padded, so that all batches have the compiled size.
    return logits[: len(dataset.validation)]
