"""Profiling: the first calls of a run, one step's pipeline schedule as it ran, and each block of a network alone."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.config.field import Origin
from headrace.config.load import Resolved
from headrace.core.units import format_duration
from headrace.engine.devices import start_devices, use_compilation_cache
from headrace.engine.pipeline.dispatch import Dispatcher
from headrace.engine.state import State
from headrace.job import current_group
from headrace.model.context import Ctx, Draws
from headrace.model.network import Network
from headrace.plan.pipeline import PipelinePlan
from headrace.plan.timeline import Table
from headrace.plan.timeline_files import FORMATS, write_diagram
from headrace.run.design import NOTHING, CustomParts, design_run

FOLDER = "profile"
NUM_CALLS = 2  # the first shows the start, the second how calls follow each other


class FirstCalls:
    """Counts calls, and ends the profile after the last one that it should hold."""

    def __init__(self, num_calls: int) -> None:
        self.left = num_calls

    def called(self, outputs: Any) -> None:
        """Note that a call was launched; `outputs` are ready when it is over."""
        if self.left:
            self.left -= 1
            if not self.left:
                jax.block_until_ready(outputs)
                jax.profiler.stop_trace()

    def close(self) -> None:
        """End a profile that saw fewer calls than it could hold."""
        if self.left:
            self.left = 0
            jax.profiler.stop_trace()


@contextmanager
def profile_first_calls(wanted: bool, run: Path) -> Iterator[FirstCalls]:
    """Profile the first calls made in the block into RUN/profile, if wanted."""
    calls = FirstCalls(NUM_CALLS if wanted else 0)
    if wanted:
        jax.profiler.start_trace(str(run / FOLDER))
    try:
        yield calls
    finally:
        calls.close()


def describe_profile(wanted: bool, run: Path) -> list[str]:
    """Say where the profile is and what opens it."""
    if not wanted:
        return []
    return [f"profile of the first {NUM_CALLS} calls: {run / FOLDER} (TensorBoard's profile plugin, ui.perfetto.dev)"]


def trace_schedule(
    dispatcher: Dispatcher, pipeline: PipelinePlan, source: tuple[State, Any, Any], directory: Path | None
) -> list[str]:
    """Trace the first step of a block on a copy of the state and plot it; return a summary, in sentences.

    `source` is (state, resident set, block). Where `directory` is None another process plots its times.
    """
    measured = dispatcher.trace(*source)
    if directory is None:
        return []
    tables = {"planned, with the stages' times from shapes or measured blocks": pipeline.expected_table()}
    tables["measured"] = measured
    for suffix in FORMATS:
        write_diagram(directory / f"schedule{suffix}", tables)
    return [
        f"schedule: the passes of a step took {format_duration(measured.total_time)}, devices idle "
        f"{measured.bubble:.1%} (planned {pipeline.expected_bubble:.1%}); see {directory / 'schedule.svg'}",
        f"stages' shares of the time: {_shares(measured)} (planned "
        + " ".join(f"{stage.time_share:.0%}" for stage in pipeline.stages)
        + ")",
    ]


def _shares(table: Table) -> str:
    times = dict.fromkeys(range(table.work.num_stages), 0.0)
    for cell in table.cells:
        times[cell.action.stage] += cell.end - cell.start
    total = sum(times.values()) or 1.0
    return " ".join(f"{time / total:.0%}" for time in times.values())


MIN_SECONDS = 0.05  # each block is repeated for at least this long, far above the resolution of the clock
ROUNDS = 3  # of which the fastest counts: other work on the machine only adds time


def measure_blocks(network: Network, micro_batch_size: int, compute_dtype: Any, device: Any) -> dict[str, float]:
    """Return the seconds that a forward and a backward pass of each block takes on a micro batch."""
    params, stats = network.init(0)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((micro_batch_size, *network.input_hwc), np.float32)
    x = jax.device_put(jnp.asarray(images, compute_dtype), device)
    samples = jnp.arange(micro_batch_size, dtype=jnp.int32)
    ctx = Ctx(train=True, compute_dtype=compute_dtype, draws=Draws(0, jnp.int32(0), samples))
    seconds = {}
    for number, name in enumerate(network.block_names):
        weights = jax.device_put(tuple({name: tree[name]} if name in tree else {} for tree in (params, stats)), device)

        def forward(params: Any, x: Any, stats: Any, number: int = number) -> tuple[Any, Any]:
            return network.apply_range(number, number + 1, params, stats, x, ctx)

        def both(params: Any, stats: Any, x: Any, forward: Any = forward) -> tuple[Any, Any]:
            y, back, _ = jax.vjp(lambda p, v: forward(p, v, stats), params, x, has_aux=True)
            return y, back(jax.tree.map(jnp.ones_like, y))

        program = jax.jit(both)
        x_next, _ = jax.block_until_ready(program(*weights, x))  # compiles
        seconds[name] = min(_seconds(program, (*weights, x)) for _ in range(ROUNDS))
        x = x_next
    return seconds


def _seconds(program: Any, arguments: tuple[Any, ...]) -> float:
    runs, begin = 0, time.perf_counter()
    while True:
        result = program(*arguments)
        runs += 1
        if runs % 4 == 0 or runs == 1:  # only now and then: waiting for each run would measure the host, too
            jax.block_until_ready(result)
            taken = time.perf_counter() - begin
            if taken > MIN_SECONDS:
                return taken / runs


def with_measured_blocks(resolved: Resolved, custom: CustomParts = NOTHING) -> Resolved:
    """Return the configuration with `block_seconds` filled in, if it asks to measure; else as it is.

    The times become part of the configuration, so that the run, its records and a later resume have the same stages.
    """
    config = resolved.config
    if not config.pipeline.measure_splits:
        return resolved
    # Designed from shapes first: whatever cannot work is refused before a device is used.
    group = current_group()
    design = design_run(config, custom, group.num_processes)
    use_compilation_cache(config.run.compilation_cache_dir)
    device = start_devices(config.run.platform, design.plan.num_devices, group.num_processes)[0]

    def measure() -> dict[str, float]:
        micro, dtype = design.plan.batch.micro_batch_size, design.precision.compute_dtype
        seconds = measure_blocks(design.network, micro, dtype, device)
        return {name: float(f"{value:.4g}") for name, value in seconds.items()}

    rounded = group.broadcast(group.on_first_process(measure))  # one process measures: all must have the same stages
    pipeline = replace(config.pipeline, block_seconds=rounded, measure_splits=False)
    origins = {**resolved.origins, "block_seconds": Origin(kind="measured", where=device.device_kind)}
    return replace(resolved, config=replace(config, pipeline=pipeline), origins=origins)
