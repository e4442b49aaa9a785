"""Validation inside a run: started behind a call without waiting for it, read when the call has been settled."""

import time
from dataclasses import dataclass, replace
from typing import Any

import jax

from headrace.data.dataset import DataSet
from headrace.data.feed import EvalFeed, feed_options
from headrace.data.fetch import fetch, fetch_labels
from headrace.engine.evaluate import EvalSpec, Sums, total_sums
from headrace.engine.spread import in_turn
from headrace.engine.state import State, evaluated_weights
from headrace.run.design import Design
from headrace.run.evaluator import Program, make_evaluator
from headrace.run.group import current_group
from headrace.run.trainer import Compiled, compiled_from, own_share

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
