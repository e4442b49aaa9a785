"""Measure the training path itself: the same feed, call program and devices as `fit`; no records, no checkpoints."""

import statistics
import time
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import jax

from headrace.config.load import Resolved
from headrace.core.errors import ConfigError
from headrace.data.dataset import DataSet, open_dataset
from headrace.data.feed import feed_options
from headrace.engine.devices import show_devices, start_devices, use_compilation_cache
from headrace.run.design import Design, design_run, starting_state
from headrace.run.executor import make_executor
from headrace.run.group import current_group
from headrace.run.initial import adopt_weights
from headrace.run.measure import with_measured_blocks
from headrace.run.rates import Measured, call_rates, conditions
from headrace.run.settle import Settler
from headrace.run.trainer import Compiled, advise_on_memory, compile_call, open_feed, step_spec


@dataclass(frozen=True, kw_only=True)
class BenchResult(Measured):
    """How fast training went."""

    mode: ClassVar[str] = "training"
    gradient_accumulation_count: int
    global_batch_size: int
    steps_per_call: int
    num_calls: int  # timed ones
    step_milliseconds: float
    final_loss: float


def bench(resolved: Resolved, *, steps_per_call: int, num_calls: int) -> BenchResult:
    """Run `num_calls` + 1 calls of training as fast as they go; the first is left out of the rates."""
    for name, value in (("--steps-per-call", steps_per_call), ("--num-calls", num_calls)):
        if value < 1:
            raise ConfigError(f"{name} is {value}.", rule="At least one is timed.")
    resolved = with_measured_blocks(resolved)
    config = resolved.config
    group = current_group()
    design = _with_calls(design_run(config, None, group.num_processes), steps_per_call, num_calls + 1)
    dataset = open_dataset(config.data, config.run.seed)
    use_compilation_cache(config.run.compilation_cache_dir)
    show_devices(config.legacy.select_ipus, design.plan.num_devices // group.num_processes)
    devices = start_devices(config.run.platform, design.plan.num_devices, group.num_processes)
    with advise_on_memory(design.plan):
        compiled, seconds, loss = _measure(design, dataset, devices)
    batch = design.plan.batch
    return BenchResult(
        conditions=conditions(config, compiled, devices),
        rates=call_rates(steps_per_call * batch.global_batch_size, seconds),
        micro_batch_size=batch.micro_batch_size,
        num_replicas=batch.num_replicas,
        first_call_seconds=seconds[0],
        gradient_accumulation_count=batch.gradient_accumulation_count,
        global_batch_size=batch.global_batch_size,
        steps_per_call=steps_per_call,
        num_calls=num_calls,
        step_milliseconds=1e3 * statistics.median(seconds[1:]) / steps_per_call,
        final_loss=loss,
    )


def _measure(design: Design, dataset: DataSet, devices: list[Any]) -> tuple[Compiled, list[float], float]:
    """Run the design's calls; return the program, the seconds of each call and the loss of the last step."""
    config = design.config
    options = feed_options(config.data, dataset.info, config.run.seed, len(devices), config.augment)
    executor = make_executor(design.plan, step_spec(design, options, dataset), devices, config.pipeline)
    current_group().meet(executor.meshes, config.model.dbn_replica_group_size)
    adopted = adopt_weights(design)
    state = executor.place(starting_state(design, (adopted.params, adopted.stats) if adopted else None))
    ends: list[float] = []

    def settle(metrics: Any) -> None:
        jax.block_until_ready(metrics)
        ends.append(time.perf_counter())

    with (
        closing(open_feed(design, dataset, options, executor, 0)) as feed,
        closing(Settler(settle)) as settler,
    ):
        block = feed.next()
        compiled = compile_call(executor, state, feed.resident, block)
        ends.append(time.perf_counter())
        metrics: dict[str, Any] = {}
        for number in range(num_calls := design.plan.steps.num_calls):
            state, metrics = compiled.program(state, feed.resident, block)
            settler.submit(metrics)
            if number + 1 < num_calls:
                block = feed.next(metrics["loss"])
        settler.drain()
        last = jax.device_get({key: metrics[key][-1] for key in ("loss", "count")})
    return compiled, [after - before for before, after in pairwise(ends)], float(last["loss"] / last["count"])


def _with_calls(design: Design, steps_per_call: int, num_calls: int) -> Design:
    """Return the design with as many calls of that length, whatever the periods of logs and checkpoints."""
    steps = replace(design.plan.steps, steps_per_call=steps_per_call, total_steps=steps_per_call * num_calls)
    return replace(design, plan=replace(design.plan, steps=steps))
