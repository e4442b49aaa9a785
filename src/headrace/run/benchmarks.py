"""Measure training and inference with the feed, programs and devices of a run; no records, no checkpoints.

Throughput is that of calls of several batches, prepared ahead. Latency is that of one batch at a time, from its
images in host memory (or on the device, for synthetic ones) to its scores in host memory.
"""

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import jax

from headrace.config.load import Resolved
from headrace.config.schema import Config
from headrace.core import __version__
from headrace.core.errors import ConfigError
from headrace.core.tree import PyTree
from headrace.core.units import format_measured
from headrace.data.dataset import DataSet
from headrace.engine.devices import start_run_devices
from headrace.job import current_group
from headrace.plan.steps import NEVER
from headrace.run.choices import settle
from headrace.run.design import Design, design_run, open_data, starting_state, with_set
from headrace.run.memory_advice import advise_on_memory
from headrace.run.profiling import (
    LEAST_STEPS,
    NUM_CALLS,
    WARM_UP_CALLS,
    CallProfile,
    summarise_profile,
    with_measured_blocks,
)
from headrace.run.start_weights import adopt_weights
from headrace.run.training import Calls, Compiled, compile_call, open_feed
from headrace.telemetry.call_reader import CallReader
from headrace.telemetry.device_trace import ProfileSummary

_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Images per second of each timed call; the first call of all is never among them."""

    each: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the middle rate, which a slow call does not move."""
        return statistics.median(self.each)

    @property
    def mean(self) -> float:
        """Return the average rate, as the reference's users work it out by hand."""
        return statistics.fmean(self.each)

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the rates, 0 of a single one."""
        return statistics.stdev(self.each) if len(self.each) > 1 else 0.0

    def to_dict(self) -> dict[str, float | list[float]]:
        """Return the figures as plain values."""
        return {
            "images_per_second": self.median,
            "mean": self.mean,
            "standard_deviation": self.deviation,
            "lowest": min(self.each),
            "highest": max(self.each),
            "each_call": [round(rate, 3) for rate in self.each],
        }

    def __str__(self) -> str:
        numbers = (self.median, self.mean, self.deviation, min(self.each), max(self.each))
        median, mean, deviation, lowest, highest = map(format_measured, numbers)
        return f"{median} img/s (median of {len(self.each)}; mean {mean} ± {deviation}, {lowest} to {highest})"


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What was measured, on what, and what compiling it took."""

    model: str
    dataset: str
    precision: str
    compile_seconds: float
    compile_cache: str
    device_bytes: int
    device: str
    versions: dict[str, str]


def conditions(config: Config, compiled: Compiled, devices: list[Any]) -> Conditions:
    """Return the conditions that a program ran under."""
    return Conditions(
        model=config.model.model_name,
        dataset=config.data.dataset,
        precision=config.numerics.precision,
        compile_seconds=compiled.seconds,
        compile_cache=str(compiled.counts),
        device_bytes=compiled.device_bytes,
        device=f"{len(devices)} x {devices[0].device_kind}",
        versions={"headrace": __version__, "jax": jax.__version__},
    )


@dataclass(frozen=True, kw_only=True)
class BenchedCalls:
    """What all benchmarks report: the conditions and the rates of the calls after the first."""

    mode: ClassVar[str]
    conditions: Conditions
    rates: Rates
    micro_batch_size: int
    num_replicas: int
    first_call_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values, on one level."""
        plain = asdict(self)
        del plain["rates"]
        return {"mode": self.mode} | plain.pop("conditions") | plain | self.rates.to_dict()


def call_rates(images_per_call: int, seconds: Sequence[float]) -> Rates:
    """Return the rates of calls that took these seconds, the first one left out."""
    return Rates(each=tuple(images_per_call / each for each in seconds[1:]))


def latencies(seconds: Sequence[float]) -> dict[str, float]:
    """Return least, mean, percentiles and most of some times, in milliseconds; a percentile is one of the times."""
    ordered = sorted(1e3 * each for each in seconds)
    # The nearest rank: a percentile is a time that was measured, not one between two.
    found = {f"p{share}": ordered[-(-share * len(ordered) // 100) - 1] for share in _PERCENTILES}
    return {"min": ordered[0], "mean": statistics.fmean(ordered)} | found | {"max": ordered[-1]}


@dataclass(frozen=True, kw_only=True)
class BenchResult(BenchedCalls):
    """The throughput of training."""

    mode: ClassVar[str] = "training"
    gradient_accumulation_count: int
    global_batch_size: int
    steps_per_call: int
    num_calls: int  # timed ones
    step_milliseconds: float
    final_loss: float


def refuse_less(least: int, **counts: int) -> None:
    for name, count in counts.items():
        if count < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {count}.", rule=f"It must be {least} or more.")


def bench(resolved: Resolved, *, steps_per_call: int, num_calls: int) -> BenchResult:
    """Run `num_calls` + 1 calls of training back to back; the first is left out of the rates."""
    refuse_less(1, steps_per_call=steps_per_call, num_calls=num_calls)
    if resolved.config.run.profile:
        raise ConfigError("A benchmark is not profiled.", remedy="headrace profile takes the same options.")
    found = with_set(resolved.config, absent_ok=True)
    resolved = with_measured_blocks(settle(resolved, found), found)
    config, group = resolved.config, current_group()
    design = with_calls(design_run(config, found, group.num_processes), steps_per_call, num_calls + 1)
    dataset = open_data(design)
    devices = start_run_devices(config.run, design.plan.num_devices, group.num_processes)
    with advise_on_memory(design):
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


def profile_calls(resolved: Resolved, directory: Path, *, steps_per_call: int) -> ProfileSummary:
    """Record a few calls of training after the first ones, write trace and summary, and return the summary."""
    refuse_less(1, steps_per_call=steps_per_call)
    found = with_set(resolved.config, absent_ok=True)
    config = settle(resolved, found).config
    num_calls = WARM_UP_CALLS + max(NUM_CALLS, -(-LEAST_STEPS // steps_per_call))
    design = with_calls(design_run(config, found), steps_per_call, num_calls)
    dataset = open_data(design)
    devices = start_run_devices(config.run, design.plan.num_devices)
    with advise_on_memory(design), closing(CallProfile(directory)) as profile:
        _measure(design, dataset, devices, profile)
        return summarise_profile(profile, design, devices)


def _measure(
    design: Design, dataset: DataSet, devices: list[Any], profile: CallProfile | None = None
) -> tuple[Compiled, list[float], float]:
    """Run the design's calls; return the program, the seconds of each call and the loss of the last step."""
    profile = profile or CallProfile(Path(), wanted=False)
    config = design.config
    options = design.plan.feed
    executor = Calls(design, options, dataset, devices, 0).executor
    current_group().connect_devices(executor.meshes, config.model.dbn_replica_group_size)
    state = executor.place(starting_state(design, given_weights(design)))
    ends: list[float] = []

    # In the reader's thread: on a GPU launching a call takes as long as running it, so that times taken by the
    # launching thread would be those of launches.
    def wait(metrics: object) -> None:
        jax.block_until_ready(metrics)
        ends.append(time.perf_counter())

    with (
        closing(open_feed(design, dataset, options, executor, 0)) as feed,
        closing(CallReader(wait)) as reader,
    ):
        block = feed.next()
        compiled = compile_call(executor, state, feed.resident, block)
        ends.append(time.perf_counter())
        metrics: dict[str, Any] = {}
        for number in range(num_calls := design.plan.steps.num_calls):
            profile.launching()
            state, metrics = compiled.program(state, feed.resident, block, feed.rows)
            profile.called(metrics, len(feed.rows))
            reader.submit(metrics)
            if number + 1 < num_calls:
                # After the launch: the next block is fetched while this call runs.
                block = feed.next(metrics["loss"])
        reader.drain()
        last = jax.device_get({key: metrics[key][-1] for key in ("loss", "count")})
    return compiled, [after - before for before, after in pairwise(ends)], float(last["loss"] / last["count"])


def given_weights(design: Design) -> tuple[PyTree, PyTree] | None:
    """Return the (params, stats) that an option names or code gives; None where they are drawn."""
    adopted = adopt_weights(design)
    return adopted.raw if adopted else design.custom.weights


def with_calls(design: Design, steps_per_call: int, num_calls: int) -> Design:
    """Return the design with as many calls of that length, whatever the periods of logs and checkpoints."""
    steps = replace(
        design.plan.steps,
        steps_per_call=steps_per_call,
        total_steps=steps_per_call * num_calls,
        log_every=NEVER,
        checkpoint_every=NEVER,
        validate_every=NEVER,
    )
    # Of several image sizes the last alone: a call that ends where the size changes is shorter than the others.
    sizes = (replace(design.sizes[-1], first_step=0),)
    return replace(design, plan=replace(design.plan, steps=steps), sizes=sizes)
