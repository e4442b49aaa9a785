"""The programs of a run, compiled for machines that are not here: their memory, exchanges and operations."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from headrace.core.target import Target
from headrace.core.units import format_bytes, format_count
from headrace.data.dataset import DataSet
from headrace.data.feeding.eval_feed import EvalFeed
from headrace.engine.ahead import compiler_of, devices_of
from headrace.engine.forward import WholeForward, sums_with
from headrace.engine.hlo_text import Collective, collectives, share_beside_work
from headrace.engine.pipeline.dispatch import Dispatcher
from headrace.engine.pipeline.evaluate_stages import StagedEvaluation
from headrace.engine.pipeline.step_plan import LaunchPlan, LoweredSteps
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
    beside_work: float | None  # share of the bytes of all-reduces that are sent while convolutions run; None: none are
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
class AheadStages:
    """The most that devices hold in a step whose stages are programs of their own, the schedule's order assumed."""

    purpose: str
    device_bytes: tuple[int, ...]  # of the devices of a replica
    estimated_bytes: tuple[int, ...] | None  # by the plan


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """A run's programs for machines that are not here."""

    target: Target
    num_devices: int
    compiler: str
    programs: tuple[AheadProgram, ...]
    stages: tuple[AheadStages, ...] = ()

    @property
    def lines(self) -> list[str]:
        """What is said to people."""
        return describe_ahead(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        named = {"target": self.target.name, "num_devices": self.num_devices, "machines": self.target.machines}
        return named | {
            "compiler": self.compiler,
            "device_memory_bytes": self.target.memory_bytes,
            "programs": [each.to_dict() for each in self.programs],
            "stages": [asdict(each) for each in self.stages],
        }


@dataclass(frozen=True, kw_only=True)
class _Input:
    """A program as XLA's input."""

    purpose: str
    lowered: jax.stages.Lowered
    options: Mapping[str, Any]
    estimated_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Steps of many programs, in the order of a plan."""

    purpose: str
    plan: LaunchPlan
    lowered: LoweredSteps
    estimated_bytes: tuple[int, ...] | None = None


def planned_ahead(design: Design, target: Target) -> Ahead:
    """Compile a design's programs for a target; the caller traces for it."""
    programs, stages = compile_ahead(design, devices_of(target))
    return Ahead(
        target=target,
        num_devices=design.plan.num_devices,
        compiler=compiler_of(target),
        programs=programs,
        stages=stages,
    )


def compile_ahead(design: Design, devices: Sequence[Any]) -> tuple[tuple[AheadProgram, ...], tuple[AheadStages, ...]]:
    """Compile a run's programs for devices that are not here; the caller traces for their target."""
    programs: list[AheadProgram] = []
    stages: list[AheadStages] = []
    for each in lower_ahead(design, devices):
        if isinstance(each, _Input):
            programs.append(_compiled(each))
            continue
        extra = {}
        for program, lowered in each.lowered.programs.items():
            options = dict(program.compiler_options)
            found = _compiled(_Input(purpose=f"{each.purpose} {program.name}", lowered=lowered, options=options))
            programs.append(found)
            # Results that are written where arguments were are no more bytes.
            extra[program] = found.temporary_bytes + found.output_bytes - found.donated_bytes
        held = tuple(each.plan.bytes_by_lane(each.lowered, extra))
        stages.append(AheadStages(purpose=each.purpose, device_bytes=held, estimated_bytes=each.estimated_bytes))
    return tuple(programs), tuple(stages)


def lower_ahead(design: Design, devices: Sequence[Any]) -> Iterator[_Input | _Steps]:
    """Yield a run's programs as XLA's input, one after the other; the caller traces for the devices' target."""
    dataset = open_data(design)
    if design.config.run.training:
        yield _training(design, dataset, list(devices))
    if design.config.validation.validation and len(dataset.validation):
        yield _validation(design, dataset, list(devices))


def _training(design: Design, dataset: DataSet, devices: list[Any]) -> _Input | _Steps:
    plan, step = design.plan, 0
    described = replace(plan.feed, only_described=True)
    executor = Calls(design, described, dataset, devices, step).executor
    feed = open_feed(design, dataset, described, executor, step)
    try:
        if isinstance(executor, DeviceLoop):
            return _Input(
                purpose="training",
                lowered=executor.lower(starting_state(design), *feed.described()),
                options=executor.options,
                estimated_bytes=plan.memory.total_bytes,
            )
        assert isinstance(executor, Dispatcher)
        return _Steps(
            purpose="training",
            plan=executor.plan,
            lowered=executor.lower(*feed.described()),
            estimated_bytes=tuple(each.total_bytes for each in plan.memory_by_device),
        )
    finally:
        feed.close()


def _validation(design: Design, dataset: DataSet, devices: list[Any]) -> _Input | _Steps:
    forward, options = make_forward_pass(design, devices, sums_with(design.objective))
    plan, cache = design.plan.validation, design.plan.validation_cache
    described = replace(options, only_described=True)
    feed = EvalFeed(dataset.validation, plan.batch_size, cache.batches_per_block, described, forward.put, cache)
    try:
        weights = design.network.init(0)
        if isinstance(forward, WholeForward):
            lowered = forward.lower(weights, *feed.described())
            return _Input(purpose="validation", lowered=lowered, options=forward.options)
        assert isinstance(forward, StagedEvaluation)
        steps, lowered_steps = forward.lower(weights, *feed.described())
        return _Steps(purpose="validation", plan=steps, lowered=lowered_steps)
    finally:
        feed.close()


def _compiled(given: _Input) -> AheadProgram:
    begin = time.perf_counter()
    compiled = given.lowered.compile(compiler_options=dict(given.options) or None)
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    cost = compiled.cost_analysis()
    return AheadProgram(
        purpose=given.purpose,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        donated_bytes=memory.alias_size_in_bytes,
        estimated_bytes=given.estimated_bytes,
        collectives=tuple(collectives(text)),
        beside_work=share_beside_work(text),
        flops=float(cost["flops"]) if isinstance(cost, dict) and cost.get("flops", 0) > 0 else None,
        seconds=time.perf_counter() - begin,
    )


def describe_ahead(ahead: Ahead) -> list[str]:
    """Return the lines for people."""
    target = ahead.target
    where = f" in {target.machines} machines" if target.machines > 1 else ""
    lines = [
        f"compiled for {ahead.num_devices} of {target.count} {target.name}{where} by {ahead.compiler} "
        f"and jax {jax.__version__}; nothing was run"
    ]
    staged = tuple(each.purpose for each in ahead.stages)
    for each in ahead.programs:
        alone = not each.purpose.startswith(staged)
        fits = _fits(each.total_bytes, target) if alone else ""
        lines.append(
            f"{each.purpose}: {format_bytes(each.total_bytes)} a device{fits} "
            f"(arguments {format_bytes(each.argument_bytes)}, temporaries {format_bytes(each.temporary_bytes)}, "
            f"donated {format_bytes(each.donated_bytes)}); compiled in {each.seconds:.0f} s"
        )
        if each.estimated_bytes is not None:
            lines.append(f"  {_estimated(each.estimated_bytes, each.total_bytes)}")
        exchanged = [f"{one.count} {one.kind} of {format_bytes(one.num_bytes)}" for one in each.collectives]
        if alone or exchanged:
            beside = f"; {each.beside_work:.0%} of the bytes of sums beside convolutions" if each.beside_work else ""
            lines.append(f"  exchanges in the program's text: {', '.join(exchanged) or 'none'}{beside}")
        if alone:
            said = f"{format_count(round(each.flops), short=True)}FLOP" if each.flops else "not said by this compiler"
            lines.append(f"  operations, of each loop's body once: {said}")
    for each in ahead.stages:
        lines.append(f"{each.purpose} in all, its programs in the schedule's order:")
        for device, held in enumerate(each.device_bytes):
            said = f"  device {device}: {format_bytes(held)} at most{_fits(held, target)}"
            if each.estimated_bytes is not None:
                said += f"; {_estimated(each.estimated_bytes[device], held)}"
            lines.append(said)
    return lines


def _fits(num_bytes: int, target: Target) -> str:
    there = target.memory_bytes or 0
    return f", {'fits' if num_bytes <= there else 'does NOT fit'} in {format_bytes(there)}"


def _estimated(estimate: int, compiled: int) -> str:
    return f"the plan's estimate is {format_bytes(estimate)}: {estimate / compiled - 1:+.0%}"
