"""The programs of a run, compiled for machines that are not here: their memory, exchanges and operations."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from headrace.core.errors import ConfigError
from headrace.core.target import Target
from headrace.core.units import format_bytes, format_count
from headrace.data.feeding.eval_feed import EvalFeed
from headrace.engine.ahead import compiler_of, devices_of
from headrace.engine.forward import WholeForward, sums_with
from headrace.engine.hlo_text import Collective, collectives
from headrace.run.design import Design, open_data, starting_state
from headrace.run.training import Calls, DeviceLoop, open_feed
from headrace.run.validator import make_forward_pass


@dataclass(frozen=True, kw_only=True)
class AheadProgram:
    """What the compiler says of a program; bytes are those of one device."""

    purpose: str
    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    donated_bytes: int  # of the arguments, in which outputs are written
    estimated_bytes: int | None  # by the plan
    collectives: tuple[Collective, ...]
    flops: float | None  # each loop's body counted once; None: this compiler does not say
    seconds: float  # of compiling

    @property
    def total_bytes(self) -> int:
        """The bytes that a device holds while the program runs."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes - self.donated_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return asdict(self) | {"total_bytes": self.total_bytes}


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """A run's programs for machines that are not here."""

    target: Target
    num_devices: int
    compiler: str
    programs: tuple[AheadProgram, ...]

    @property
    def lines(self) -> list[str]:
        """What is said to people."""
        return describe_ahead(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        programs = [each.to_dict() for each in self.programs]
        named = {"target": self.target.name, "num_devices": self.num_devices, "compiler": self.compiler}
        return named | {"device_memory_bytes": self.target.memory_bytes, "programs": programs}


def planned_ahead(design: Design, target: Target) -> Ahead:
    """Compile a design's programs for a target; the caller traces for it."""
    devices = devices_of(target)
    programs = tuple(compile_ahead(design, devices))
    count = design.plan.num_devices
    return Ahead(target=target, num_devices=count, compiler=compiler_of(target), programs=programs)


def compile_ahead(design: Design, devices: Sequence[Any]) -> list[AheadProgram]:
    """Compile a run's programs for devices that are not here; the caller traces for their target."""
    if design.plan.pipeline is not None and not design.plan.one_program:
        raise ConfigError(
            "target is given, and the network is cut into stages.",
            rule="Whole steps are compiled for machines that are not here; stages are many programs.",
            remedy="Leave the stages out to see what one device would need for the whole network.",
        )
    dataset = open_data(design)
    found, step = [], 0
    if design.config.run.training:
        executor = Calls(design, design.plan.feed, dataset, list(devices), step).executor
        assert isinstance(executor, DeviceLoop)
        feed = open_feed(design, dataset, design.plan.feed, executor, step)
        try:
            lower = lambda: executor.lower(starting_state(design), *feed.described())  # noqa: E731
            found.append(_compiled("training", lower, executor.options, design.plan.memory.total_bytes))
        finally:
            feed.close()
    if design.config.validation.validation and len(dataset.validation):
        forward, options = make_forward_pass(design, list(devices), sums_with(design.objective))
        assert isinstance(forward, WholeForward)
        plan = design.plan.validation
        cache = design.plan.validation_cache
        evaluated = EvalFeed(dataset.validation, plan.batch_size, cache.batches_per_block, options, forward.put, cache)
        try:
            lower = lambda: forward.lower(design.network.init(0), *evaluated.described())  # noqa: E731
            found.append(_compiled("validation", lower, forward.options, None))
        finally:
            evaluated.close()
    return found


def _compiled(
    purpose: str, lower: Callable[[], jax.stages.Lowered], options: Mapping[str, Any], estimated: int | None
) -> AheadProgram:
    lowered = lower()
    begin = time.perf_counter()
    compiled = lowered.compile(compiler_options=dict(options) or None)
    memory: Any = compiled.memory_analysis()
    cost = compiled.cost_analysis()
    return AheadProgram(
        purpose=purpose,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        donated_bytes=memory.alias_size_in_bytes,
        estimated_bytes=estimated,
        collectives=tuple(collectives(compiled.as_text() or "")),
        flops=float(cost["flops"]) if isinstance(cost, dict) and cost.get("flops", 0) > 0 else None,
        seconds=time.perf_counter() - begin,
    )


def describe_ahead(ahead: Ahead) -> list[str]:
    """Return the lines for people."""
    target = ahead.target
    lines = [
        f"compiled for {ahead.num_devices} of {target.count} {target.name} by {ahead.compiler} "
        f"and jax {jax.__version__}; nothing was run"
    ]
    for each in ahead.programs:
        total, left = each.total_bytes, (target.memory_bytes or 0) - each.total_bytes
        fits = "fits" if left >= 0 else "does NOT fit"
        lines.append(
            f"{each.purpose}: {format_bytes(total)} a device, {fits} in {format_bytes(target.memory_bytes or 0)} "
            f"(arguments {format_bytes(each.argument_bytes)}, temporaries {format_bytes(each.temporary_bytes)}, "
            f"donated {format_bytes(each.donated_bytes)}); compiled in {each.seconds:.0f} s"
        )
        if each.estimated_bytes is not None:
            share = each.estimated_bytes / total - 1
            lines.append(f"  the plan's estimate is {format_bytes(each.estimated_bytes)}: {share:+.0%}")
        exchanged = [f"{one.count} {one.kind} of {format_bytes(one.num_bytes)}" for one in each.collectives]
        lines.append(f"  exchanges in the program's text: {', '.join(exchanged) or 'none'}")
        said = f"{format_count(round(each.flops), short=True)}FLOP" if each.flops else "not said by this compiler"
        lines.append(f"  operations, of each loop's body once: {said}")
    return lines
