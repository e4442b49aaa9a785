"""The pipeline of a run as planned: its stages and their costs, devices, schedule, idle time and memory per device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headrace.config.schema import Config
from headrace.core.errors import ConfigError
from headrace.core.units import parse_bytes
from headrace.model.network import Network
from headrace.plan.batch import BatchPlan
from headrace.plan.data_memory import DataMemory
from headrace.plan.device_mapping import DeviceMapping, check_device_mapping
from headrace.plan.memory import MemoryPlan, MemoryRow, bytes_per_parameter, model_rows, widths
from headrace.plan.partition import (
    EVERYWHERE,
    BlockCost,
    Limits,
    SplitFilter,
    best_splits,
    block_costs,
    compare,
    measured,
    splits_by_name,
    stage_ranges,
)
from headrace.plan.recompute import segments
from headrace.plan.schedule import Node, Work, find_schedule, strict_rule
from headrace.plan.simulation import by_shares, make_table
from headrace.plan.timeline import Timetable


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The choices that define a pipeline."""

    splits: Sequence[str] | int  # the names of the blocks that start stages 1, 2 ..., or the number of stages
    device_mapping: Sequence[int] | None = None
    schedule: str = "Interleaved"
    num_micros: int = 1
    micro_batch_size: int = 1
    bytes_per_number: int = 4
    bytes_per_parameter: float = 16.0  # 32-bit weight, gradient, accumulator and one slot of the optimizer
    device_bytes: float | None = None  # limit for an automatic cut
    split_filter: SplitFilter = EVERYWHERE  # where an automatic cut may be
    block_seconds: Mapping[str, float] | None = None  # measured times, instead of estimates from shapes
    recomputation: bool = False
    recompute_points: Sequence[int] = ()  # blocks whose inputs recomputation keeps, in addition to the stages' inputs


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage: its blocks (`first` to `end` - 1) and their costs."""

    index: int
    device: int
    first: int
    end: int
    block_names: tuple[str, ...]
    num_parameters: int
    flops_per_image: int
    stored_bytes: int  # activations kept for the backward pass, per micro batch
    input_bytes: int  # received, per micro batch
    point_bytes: int  # kept by recomputation in addition to the input, per micro batch
    segment_bytes: int  # the largest part of stored_bytes that is recomputed at once
    output_bytes: int  # sent to the next stage, per micro batch
    time_share: float  # of the whole network's time, from shapes or measured

    def kept_bytes(self, recomputation: bool = False) -> int:
        """Return the bytes that one micro batch keeps on the device between its forward and backward pass."""
        return self.input_bytes + (self.point_bytes if recomputation else self.stored_bytes)


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """What is known about a pipeline without a device. `table` has equal durations and is what gets dispatched."""

    stages: tuple[StagePlan, ...]
    device_mapping: DeviceMapping
    schedule: str
    num_micros: int
    bytes_per_parameter: float
    table: Timetable
    recomputation: bool = False
    advice: tuple[str, ...] = ()
    is_cut_named: bool = True  # by --pipeline-splits; else the cut was searched for

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_devices(self) -> int:
        """The devices of one replica."""
        return self.table.work.num_devices

    @property
    def splits(self) -> tuple[str, ...]:
        """The names that give this cut: the first blocks of all stages but stage 0."""
        return tuple(stage.block_names[0] for stage in self.stages[1:])

    @property
    def possible_splits(self) -> tuple[str, ...]:
        """The names of all blocks at which a stage may start."""
        return tuple(name for stage in self.stages for name in stage.block_names)[1:]

    @property
    def bubble(self) -> float:
        """The fraction of device time that is idle if all stages take the same time."""
        return self.table.bubble

    # Cached: simulating a schedule of many micro batches takes a while, and both the text and the record ask for it.
    @cached_property
    def expected_bubble(self) -> float:
        """The idle fraction with the estimated or measured times of these stages."""
        return self.expected_table().bubble

    def expected_table(self, schedule: str | None = None) -> Timetable:
        """Simulate this or another schedule with the stages' times; the whole network's forward pass takes 1."""
        durations = by_shares([stage.time_share for stage in self.stages])
        return make_table(schedule or self.schedule, self.table.work, durations)

    def weight_bytes(self) -> tuple[int, ...]:
        """Return what weights, gradients and optimizer state take on each device."""
        return tuple(round(number * self.bytes_per_parameter) for number in self.parameters_by_device())

    def activation_bytes(self, recomputation: bool = False) -> tuple[int, ...]:
        """Return the peak of stored activations on each device; recomputation adds one recomputed segment."""
        # Handed on are the gradients of the outputs of convolutions and dense layers: what is stored without
        # recomputation has the same shapes.
        stored = self.table.peak_by_device(lambda node: self.stages[node.stage].kept_bytes(recomputation), handed=1)
        again = [max(stage.segment_bytes for stage in stages) * recomputation for stages in self.stages_by_device()]
        return tuple(int(a + b) for a, b in zip(stored, again, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        stages = [
            {name: list(value) if isinstance(value, tuple) else value for name, value in vars(stage).items()}
            for stage in self.stages
        ]
        return {
            "schedule": self.schedule,
            "recomputation": self.recomputation,
            "num_micros": self.num_micros,
            "device_mapping": list(self.device_mapping),
            "splits": list(self.splits),
            "bubble": self.bubble,
            "expected_bubble": self.expected_bubble,
            "ticks": self.table.num_ticks,
            "peak_by_stage": list(self.table.peak_by_stage()),
            "weight_bytes": list(self.weight_bytes()),
            "activation_bytes": list(self.activation_bytes()),
            "activation_bytes_with_recomputation": list(self.activation_bytes(recomputation=True)),
            "stages": stages,
            "advice": list(self.advice),
        }

    def parameters_by_device(self) -> tuple[int, ...]:
        """Return the number of parameters on each device of a replica."""
        return tuple(sum(stage.num_parameters for stage in stages) for stages in self.stages_by_device())

    def stages_by_device(self) -> list[list[StagePlan]]:
        """Return the stages of each device of a replica."""
        return [[stage for stage in self.stages if stage.device == device] for device in range(self.num_devices)]


def make_pipeline_plan(network: Network, options: PipelineOptions) -> PipelinePlan:
    """Cut the network, map its stages to devices and simulate the schedule; impossible requests raise ConfigError."""
    schedule = find_schedule(options.schedule).name
    costs = block_costs(network, options.micro_batch_size, options.bytes_per_number)
    if options.block_seconds:
        costs = measured(costs, options.block_seconds)
    named = None if isinstance(options.splits, int) else splits_by_name(network, options.splits)
    num_stages = options.splits if isinstance(options.splits, int) else len(options.splits) + 1
    if num_stages < 1:
        raise ConfigError(f"{num_stages} pipeline stages are too few.", rule="There is at least one.")
    # Before the cut: how much a stage stores, which may limit the cut, follows from the schedule on these devices.
    mapping = check_device_mapping(options.device_mapping, num_stages)
    table = make_table(schedule, Work(mapping, options.num_micros))
    devices = [table.work.device_of[Node(stage)] for stage in range(num_stages)]
    if named is None:
        options.split_filter.check(network, num_stages)
        allowed = options.split_filter.allowed(network)
        best = cut = best_splits(costs, num_stages, _limits(options, table), devices, allowed)
    else:
        # The best one serves the advice alone, which compares times: memory limits and filters are for automatic cuts.
        best, cut = best_splits(costs, num_stages, None, devices), named
    sentences = (compare(costs, cut, best, devices), _schedule_advice(schedule, table))
    return PipelinePlan(
        stages=_stages(network, costs, stage_ranges(cut, len(costs)), devices, options.recompute_points),
        device_mapping=mapping,
        schedule=schedule,
        num_micros=options.num_micros,
        bytes_per_parameter=options.bytes_per_parameter,
        table=table,
        recomputation=options.recomputation,
        advice=tuple(sentence for sentence in sentences if sentence),
        is_cut_named=named is not None,
    )


def _limits(options: PipelineOptions, table: Timetable) -> Limits | None:
    if options.device_bytes is None:
        return None
    return Limits(
        device_bytes=options.device_bytes,
        bytes_per_parameter=options.bytes_per_parameter,
        stored_micros=table.peak_by_stage(),
    )


def _stages(
    network: Network,
    costs: Sequence[BlockCost],
    ranges: Sequence[tuple[int, int]],
    devices: Sequence[int],
    points: Sequence[int],
) -> tuple[StagePlan, ...]:
    block_flops = [cost.flops for cost in network.costs().values()]
    total = sum(cost.time for cost in costs) or 1.0
    stages = []
    for index, (first, end) in enumerate(ranges):
        mine, parts = costs[first:end], segments(points, first, end)
        stages.append(
            StagePlan(
                index=index,
                device=devices[index],
                first=first,
                end=end,
                block_names=tuple(cost.name for cost in mine),
                num_parameters=sum(cost.num_parameters for cost in mine),
                flops_per_image=sum(block_flops[first:end]),
                stored_bytes=sum(cost.stored_bytes for cost in mine),
                input_bytes=costs[first].input_bytes,
                point_bytes=sum(costs[start].input_bytes for start, _ in parts[1:]),
                segment_bytes=max(sum(cost.stored_bytes for cost in costs[i:j]) for i, j in parts),
                output_bytes=costs[end].input_bytes if end < len(costs) else 0,
                time_share=sum(cost.time for cost in mine) / total,
            )
        )
    return tuple(stages)


def _schedule_advice(schedule: str, table: Timetable) -> str | None:
    """Return a warning if there are too few micro batches to keep the devices busy."""
    work = table.work
    if work.num_devices > 1 and work.num_micros < work.num_stages and schedule != "Sequential":
        return (
            f"With {work.num_micros} micro batch{'es' * (work.num_micros != 1)} per step, the {work.num_devices} "
            f"devices are idle for {table.bubble:.0%} of the time: a larger --gradient-accumulation-count, with a "
            "smaller micro batch if need be, keeps them busy."
        )
    return None


def plan_stages(
    config: Config, batch: BatchPlan, network: Network, recompute_points: tuple[int, ...]
) -> PipelinePlan | None:
    """Return the pipeline that the configuration requests, or None without stages."""
    wanted = config.pipeline
    if not wanted.has_stages:
        return None
    pipeline = make_pipeline_plan(
        network,
        PipelineOptions(
            splits=wanted.cut,
            device_mapping=wanted.device_mapping or None,
            schedule=wanted.pipeline_schedule,
            num_micros=batch.gradient_accumulation_count,
            micro_batch_size=batch.micro_batch_size,
            bytes_per_number=widths(config.numerics.precision)[0],
            bytes_per_parameter=bytes_per_parameter(config),
            device_bytes=parse_bytes(wanted.device_memory) if wanted.device_memory else None,
            split_filter=SplitFilter(include=wanted.split_include_filter, exclude=wanted.split_exclude_filter),
            block_seconds=wanted.block_seconds or None,
            recomputation=wanted.recomputation,
            recompute_points=recompute_points,
        ),
    )
    if wanted.strict_pipeline:
        _check_strict(pipeline)
    return pipeline


def _check_strict(pipeline: PipelinePlan) -> None:
    broken = strict_rule(
        pipeline.schedule, pipeline.num_stages, pipeline.num_micros, device_mapping=pipeline.device_mapping
    )
    if broken:
        raise ConfigError(
            broken,
            rule="--strict-pipeline keeps the rules of the hardware that the schedules were made for.",
            remedy="Change --gradient-accumulation-count or the schedule; without --strict-pipeline any count works.",
        )


def estimate_stage_memory(
    config: Config, pipeline: PipelinePlan, data: DataMemory, *, recomputation: bool
) -> tuple[MemoryPlan, ...]:
    """Return the memory of each device of a replica: the weights of its stages, peak activations, data."""
    activations = pipeline.activation_bytes(recomputation)
    peaks = pipeline.table.peak_by_stage()
    plans = []
    for device, stages in enumerate(pipeline.stages_by_device()):
        row = MemoryRow(
            name="activations",
            num_bytes=activations[device],
            detail=_kept(stages, peaks, recomputation=recomputation),
        )
        mine = {stage.index for stage in stages}
        parameters = sum(stage.num_parameters for stage in stages)
        plans.append(
            MemoryPlan(
                rows=(
                    *model_rows(config, parameters, accumulated=True),
                    row,
                    data.row_of(first=0 in mine, last=pipeline.num_stages - 1 in mine),
                )
            )
        )
    return tuple(plans)


def _kept(stages: list[StagePlan], peaks: tuple[int, ...], *, recomputation: bool) -> str:
    """Return a description such as `micro batches at once: 4 of stage 0, 1 of stage 3`."""
    parts = [f"{peaks[stage.index]} of stage {stage.index}" for stage in stages]
    what = "inputs of micro batches" if recomputation else "micro batches"
    return f"{what} at once: {', '.join(parts)}" + ("; one recomputed" if recomputation else "")
