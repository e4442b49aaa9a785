"""Profiling: a few calls of a run, one step's pipeline schedule as it ran, and each block of a network alone."""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from headrace.config.field import Origin
from headrace.config.load import Resolved
from headrace.core.errors import HeadraceError
from headrace.core.files import write_atomic
from headrace.core.json_text import parse_json
from headrace.core.tree import PyTree
from headrace.core.units import format_duration
from headrace.engine.devices import start_run_devices
from headrace.engine.hlo_text import HloProgram, Instruction, block_of, is_backward, kind_of, parse_program
from headrace.engine.pipeline.dispatch import Dispatcher
from headrace.job import current_group
from headrace.model.context import Ctx, Draws
from headrace.model.network import Network
from headrace.ops import conv2d
from headrace.plan.draw.diagram import FORMATS, write_diagram
from headrace.plan.pipeline import PipelinePlan
from headrace.plan.timeline import Timetable
from headrace.report.run_files import PROFILE_FILE
from headrace.run.design import NOTHING, CustomParts, Design, design_run
from headrace.telemetry.device_trace import (
    OpFacts,
    ProfileSummary,
    TraceEvent,
    Workload,
    kind_by_name,
    name_instructions,
    read_trace,
    summarise,
    summary_from,
)
from headrace.telemetry.profile_text import profile_lines

FOLDER, SUMMARY_FILE = PROFILE_FILE.split("/")  # the folder of the trace in a run, and the summary in it
WARM_UP_CALLS, NUM_CALLS, LEAST_STEPS = 2, 3, 10
_BUILD = re.compile(r"_[0-9a-f]{16}_\d+$")  # the end of a CPU kernel's name: of which sources, for which vectors
_MOST_STEPS = 32  # of a recorded call: a trace of many thousand kernels tells no more, and takes minutes to read
_PUBLISHED_FLOPS = {  # of one device per second, dense, in bfloat16 (float16 for the oldest)
    **{"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12, "V100": 125e12, "T4": 65e12},
    **{"TPU v4": 275e12, "TPU v5p": 459e12, "TPU v5 lite": 197e12, "TPU v6 lite": 918e12},
}


class CallProfile:
    """Records a few calls with JAX's profiler, once the first ones have warmed up the devices."""

    def __init__(self, directory: Path, *, wanted: bool = True) -> None:
        self.directory, self.num_steps = directory, 0
        self._warm_up, self._left = (WARM_UP_CALLS, NUM_CALLS) if wanted else (0, 0)
        self._last: Any = None
        self._recording = False
        self.modules: list[Any] = []  # the programs of the process, while they are certain to be there

    def limit(self, num_steps: int) -> int:
        """Return how many steps the next call may have, of those that it would have."""
        return min(num_steps, _MOST_STEPS) if self._left else num_steps

    def launching(self, *, is_last: bool = False) -> None:
        """Begin to record where the next call should be, with nothing else left on the devices.

        The last call of a run is, even if nothing has warmed up the devices: a short run has no better one.
        """
        if is_last:
            self._warm_up = 0
        if self._left and not self._warm_up and not self._recording:
            jax.block_until_ready(self._last)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Python's calls would be most of the trace
            jax.profiler.start_trace(str(self.directory), profiler_options=options)
            self._recording = True

    def called(self, outputs: object, num_steps: int) -> None:
        """Note that a call was launched; `outputs` are ready when it is over."""
        self._last = outputs if self._left else None
        if self._warm_up:
            self._warm_up -= 1
        elif self._left:
            self.num_steps += num_steps
            self._left = max(self._left - 1, 0 if self.num_steps >= LEAST_STEPS else 1)  # the first calls are short
            if not self._left:
                self.close()

    def close(self) -> None:
        """End the recording, after however many calls."""
        self._left = 0
        if self._recording:
            jax.block_until_ready(self._last)
            jax.profiler.stop_trace()
            # While they are certain to be there: a program that is dropped takes its HLO with it.
            executables = jax.local_devices()[0].client.live_executables()
            self.modules = [module for each in executables for module in each.hlo_modules()]
        self._recording, self._last = False, None

    @property
    def found(self) -> bool:
        """Whether calls were recorded."""
        return self.num_steps > 0 and not self._recording


def summarise_profile(profile: CallProfile, design: Design, devices: Sequence[Any]) -> ProfileSummary:
    """Read what was recorded, write the summary beside the trace, and return it."""
    device, plan = devices[0], design.plan
    dtype = design.precision.compute_dtype
    peak_flops, peak_bytes = measure_ceilings(device, dtype)
    kind = device.device_kind
    # The published numbers are for 16 bits.
    published = next((each for name, each in _PUBLISHED_FLOPS.items() if name in kind and dtype != jnp.float32), 0.0)
    workload = Workload(
        model=design.network.name,
        device=kind,
        num_devices=plan.batch.num_replicas * plan.devices_per_replica,
        num_steps=profile.num_steps,
        num_images=profile.num_steps * plan.batch.global_batch_size,
        # The backward pass computes two products for each of the forward pass.
        flops_per_image=3 * design.network.total_cost().flops,
        peak_flops=peak_flops,
        published_flops=published,
        peak_bytes=peak_bytes,
    )
    traces = read_trace(profile.directory)
    seen = {event.module for events in traces.values() for event in events}
    programs = [parse_program(module.to_string()) for module in profile.modules if module.name in seen]
    named = {device: name_instructions(events, programs) for device, events in traces.items()}
    found = summarise(named, OpTable(programs, design.network.block_names), workload)
    write_atomic(profile.directory / SUMMARY_FILE, json.dumps(found.to_dict()).encode())
    return found


def describe_profile(profile: CallProfile, design: Design, devices: Sequence[Any]) -> list[str]:
    """Return what was recorded, for people."""
    profile.close()
    if not profile.found:
        return [f"profile: nothing was recorded, as the run ended within its first {WARM_UP_CALLS} calls"]
    try:
        lines = profile_lines(summarise_profile(profile, design, devices))
    except HeadraceError as error:
        lines = [f"profile: {error}"]
    return ["\n".join((*lines, f"trace: {profile.directory} (TensorBoard's profile plugin, ui.perfetto.dev)"))]


def read_profile(directory: Path) -> ProfileSummary | None:
    """Return the summary in a folder of traces, None where there is none that can be read."""
    try:
        return summary_from(parse_json((directory / SUMMARY_FILE).read_bytes()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


class OpTable:
    """Says what an event of a trace is: by its program's instructions, else by the names in the trace."""

    def __init__(self, programs: Sequence[HloProgram], blocks: Sequence[str]) -> None:
        self._blocks = tuple(blocks)
        self._programs: dict[str, list[HloProgram]] = {}
        for program in programs:
            self._programs.setdefault(program.name, []).append(program)
        self._known: dict[tuple[str, ...], OpFacts] = {}

    def __call__(self, event: TraceEvent) -> OpFacts:
        key = (event.module, event.op, event.op_name, event.kernel)
        if key not in self._known:
            self._known[key] = self._describe(event)
        return self._known[key]

    def _describe(self, event: TraceEvent) -> OpFacts:
        found = [each for each in self._programs.get(event.module, ()) if event.op in each.instructions]
        if not found:
            block = block_of([event.op_name], self._blocks)
            return OpFacts(
                kind=kind_by_name(event.kernel), block=block, backward=is_backward(event.op_name), by_name=True
            )
        all_facts = [
            replace(
                self._facts(program.inside(event.op), event),
                num_bytes=program.num_bytes(event.op),
                container=event.op in program.containers,
                target=_BUILD.sub("", program.instructions[event.op].target),
            )
            for program in found
        ]
        # Programs of several stages may share names: what they do not agree on is not known.
        if len({facts.block for facts in all_facts}) > 1:
            return replace(all_facts[0], block="", backward=False, num_bytes=min(each.num_bytes for each in all_facts))
        return all_facts[0]

    def _facts(self, inside: tuple[Instruction, ...], event: TraceEvent) -> OpFacts:
        names = [name for name in (event.op_name, *(each.op_name for each in inside)) if name]
        block = block_of(names, self._blocks)
        backward = bool(names) and is_backward(next((name for name in names if block_of([name], [block])), names[0]))
        return OpFacts(kind=kind_of(inside), block=block, backward=backward)


def measure_ceilings(device: Any, dtype: jax.typing.DTypeLike) -> tuple[float, float]:
    """Return the FLOPs per second of a large product and the bytes per second of a large sum; 0 where none fits.

    What this device reaches with the simplest programs is a fairer limit than a data sheet. On a CPU the product is a
    convolution, as XLA multiplies bfloat16 values in float32; and the sum is repeated, in a number of times that XLA
    does not know, since the system fills a new result's pages with zeros, which takes longer than to write them.
    """
    on_cpu = device.platform == "cpu"
    side, length, times = (1024, 32 << 20, 16) if on_cpu else (8192, 256 << 20, 1)
    try:
        square = jax.device_put(jnp.ones((side, side), dtype), device)
        if on_cpu:
            product = _fastest(lambda a: conv2d(a.reshape(1, 32, side // 32, side), a[None, None]), square)
        else:
            product = _fastest(lambda a: a @ a, square)
        del square
        row = jax.device_put(jnp.ones(length, jnp.float32), device)
        if on_cpu:
            added = _fastest(lambda a, n: lax.fori_loop(0, n, lambda _, b: b + 1, a), row, times)
        else:
            added = _fastest(lambda a: a + 1, row)
    except jax.errors.JaxRuntimeError:  # the run left too little memory
        return 0.0, 0.0
    return 2 * side**3 / product, times * 8 * length / added


def _fastest(function: Callable[..., Any], *arguments: Any) -> float:
    program = jax.jit(function)
    jax.block_until_ready(program(*arguments))
    return min(_seconds(program, arguments) for _ in range(ROUNDS))


def trace_schedule(
    dispatcher: Dispatcher, pipeline: PipelinePlan, source: tuple[PyTree, PyTree, PyTree], directory: Path | None
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


def _shares(table: Timetable) -> str:
    times = dict.fromkeys(range(table.work.num_stages), 0.0)
    for cell in table.cells:
        times[cell.action.stage] += cell.end - cell.start
    total = sum(times.values()) or 1.0
    return " ".join(f"{time / total:.0%}" for time in times.values())


MIN_SECONDS = 0.05  # each block is repeated for at least this long, far above the resolution of the clock
ROUNDS = 3  # of which the fastest counts: other work on the machine only adds time


def measure_blocks(network: Network, micro_batch_size: int, ctx: Ctx, device: Any) -> dict[str, float]:
    """Return the seconds that a forward and a backward pass of each block takes on a micro batch."""
    compute_dtype, (params, stats) = ctx.compute_dtype, network.init(0)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((micro_batch_size, *network.input_hwc), np.float32)
    x = jax.device_put(jnp.asarray(images, compute_dtype), device)
    samples = jnp.arange(micro_batch_size, dtype=jnp.int32)
    ctx = replace(ctx, train=True, draws=Draws(0, jnp.int32(0), samples))
    seconds = {}
    for number, name in enumerate(network.block_names):
        weights = jax.device_put(tuple({name: tree[name]} if name in tree else {} for tree in (params, stats)), device)

        def forward(params: PyTree, x: Any, stats: PyTree, number: int = number) -> tuple[Any, Any]:
            return network.apply_range(number, number + 1, params, stats, x, ctx)

        def both(params: PyTree, stats: PyTree, x: Any, forward: Any = forward) -> tuple[Any, Any]:
            y, back, _ = jax.vjp(lambda p, v: forward(p, v, stats), params, x, has_aux=True)
            return y, back(jax.tree.map(jnp.ones_like, y))

        program = jax.jit(both)
        x_next, _ = jax.block_until_ready(program(*weights, x))  # compiles
        seconds[name] = min(_seconds(program, (*weights, x)) for _ in range(ROUNDS))
        # Each block gets what the one before it really puts out: sparse activations and their magnitudes are part of
        # its time.
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
    device = start_run_devices(config.run, design.plan.num_devices, group.num_processes)[0]

    def measure() -> dict[str, float]:
        ctx = Ctx(
            train=True,
            compute_dtype=design.precision.compute_dtype,
            half_partials=design.precision.half_partials,
            matmul_precision=design.precision.matmul_precision,
            stable_norm=config.model.stable_norm,
            cpu_kernels=config.compiler.cpu_kernels,
        )
        seconds = measure_blocks(design.network, design.plan.batch.micro_batch_size, ctx, device)
        return {name: float(f"{value:.4g}") for name, value in seconds.items()}

    rounded = group.broadcast(group.on_first_process(measure))  # one process measures: all must have the same stages
    pipeline = replace(config.pipeline, block_seconds=rounded, measure_splits=False)
    origins = {**resolved.origins, "block_seconds": Origin(kind="measured", where=device.device_kind)}
    return replace(resolved, config=replace(config, pipeline=pipeline), origins=origins)
