"""The plan as text for the terminal: one line per number with its meaning, and tables of stages and devices."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from headrace.core.units import format_bytes, format_count
from headrace.data.feeding.eval_feed import DEVICE, HOST, STREAMED, EvalCache
from headrace.plan.batch import BatchPlan, ValidationPlan
from headrace.plan.draw.text import draw_timeline
from headrace.plan.memory import MemoryPlan
from headrace.plan.pipeline import PipelinePlan
from headrace.plan.savings import Saving
from headrace.plan.schedule import find_schedule
from headrace.plan.steps import StepPlan

STAGE_HEAD = ("stage", "blocks", "device", "parameters", "FLOP", "kept", "sent on", "time")
DEVICE_HEAD = ("device", "stages", "weights", "activations", "recomputed", "data", "total")


def format_pipeline(pipeline: PipelinePlan, memory_by_device: Sequence[MemoryPlan], one_program: bool = False) -> str:
    """Return the stages, the devices of a replica and the schedule as text; for one program, only the stages."""
    stages = [
        "stages (FLOP per image, forward; kept and sent on: bytes of one micro batch)",
        format_table(STAGE_HEAD, _stage_rows(pipeline), left=(1,)),
        *_splits(pipeline),
    ]
    if one_program:
        return "\n".join(stages)
    return "\n".join(
        [
            *stages,
            "devices of a replica (estimate; recomputed: the activations with --recomputation)",
            format_table(DEVICE_HEAD, _device_rows(pipeline, memory_by_device), left=(1,)),
            "one step, if all stages took the same time",
            textwrap.indent(draw_timeline(pipeline.table), "  "),
        ]
    )


def _splits(pipeline: PipelinePlan) -> list[str]:
    """Return what to type for this cut and the blocks at which others are possible, where the cut was searched for."""
    if pipeline.is_cut_named or pipeline.num_stages == 1:
        return []
    possible = textwrap.wrap(f"possible splits: {', '.join(pipeline.possible_splits)}", 118, subsequent_indent="  ")
    return [f"  this cut by name: --pipeline-splits {' '.join(pipeline.splits)}", *(f"  {line}" for line in possible)]


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    """Return the rows below a header, with columns aligned right except those in `left`."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def recomputation_detail(pipeline: PipelinePlan) -> str:
    """Return a sentence on what recomputation saves, or would save, on the device where it saves most."""
    full, little = (pipeline.activation_bytes(recomputation) for recomputation in (False, True))
    saved = [a - b for a, b in zip(full, little, strict=True)]
    device = max(range(len(saved)), key=lambda d: saved[d])
    if saved[device] <= 0:
        return "saves nothing here: no stage stores more than it would recompute"
    verb = "saves" if pipeline.recomputation else "would save"
    return f"{verb} up to {format_bytes(saved[device])} of activations on a device, for one more forward pass"


def _stage_rows(pipeline: PipelinePlan) -> list[tuple[str, ...]]:
    return [
        (
            str(stage.index),
            stage.block_names[0] + (f" .. {stage.block_names[-1]}" if len(stage.block_names) > 1 else ""),
            str(stage.device),
            format_count(stage.num_parameters),
            format_count(stage.flops_per_image, short=True),
            format_bytes(stage.kept_bytes(pipeline.recomputation)),
            format_bytes(stage.output_bytes) if stage.output_bytes else "-",
            f"{stage.time_share:.1%}",
        )
        for stage in pipeline.stages
    ]


def _device_rows(pipeline: PipelinePlan, memory_by_device: Sequence[MemoryPlan]) -> list[tuple[str, ...]]:
    full, little = (pipeline.activation_bytes(recomputation) for recomputation in (False, True))
    weights = pipeline.weight_bytes()
    images = [
        sum(row.num_bytes for row in memory.rows if row.name in ("data", "validation data"))
        for memory in memory_by_device
    ]
    return [
        (
            str(device),
            " ".join(str(stage.index) for stage in stages),
            *(format_bytes(size[device]) for size in (weights, full, little)),
            format_bytes(images[device]),
            format_bytes(memory_by_device[device].total_bytes),
        )
        for device, stages in enumerate(pipeline.stages_by_device())
    ]


@dataclass(frozen=True)
class PlanLine:
    """One line of the report: name, value and explanation."""

    name: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Section:
    """Lines below a title."""

    title: str
    lines: tuple[PlanLine, ...]


def format_sections(sections: Iterable[Section]) -> str:
    """Return titled lines as aligned text."""
    sections = tuple(sections)
    lines = [line for section in sections for line in section.lines]
    name_width = max(len(line.name) for line in lines)
    value_width = max(len(line.value) for line in lines)
    text = []
    for section in sections:
        text.append(section.title)
        for line in section.lines:
            text.append(f"  {line.name:<{name_width}}  {line.value:>{value_width}}  {line.detail}".rstrip())
    return "\n".join(text)


def pipeline_lines(pipeline: PipelinePlan, one_program: bool) -> tuple[PlanLine, ...]:
    devices = pipeline.num_devices
    if pipeline.num_stages == 1:
        return (PlanLine("stages", "1", "dispatched by the host, since the optimizer state is not on the device"),)
    if one_program:
        effect = "keeps only the inputs of the stages" if pipeline.recomputation else "would keep only their inputs"
        return (
            PlanLine("stages", str(pipeline.num_stages), "on one device: a call is one program, whatever the schedule"),
            PlanLine("recomputation", "on" if pipeline.recomputation else "off", effect),
        )
    return (
        PlanLine("stages", str(pipeline.num_stages), f"on {devices} device{'s' * (devices != 1)} of a replica"),
        PlanLine("schedule", pipeline.schedule, find_schedule(pipeline.schedule).summary),
        PlanLine("idle", f"{pipeline.bubble:.1%}", "of the devices' time, if all stages took the same time"),
        PlanLine("idle as cut", f"{pipeline.expected_bubble:.1%}", "with these stages' times, from shapes or measured"),
        PlanLine("recomputation", "on" if pipeline.recomputation else "off", recomputation_detail(pipeline)),
    )


def batch_lines(batch: BatchPlan) -> tuple[PlanLine, ...]:
    return (
        PlanLine("micro batch", format_count(batch.micro_batch_size), "images of one replica in one pass"),
        PlanLine("replicas", format_count(batch.num_replicas)),
        PlanLine(
            "accumulation", format_count(batch.gradient_accumulation_count), "micro batches of a replica per step"
        ),
        PlanLine(
            "global batch",
            format_count(batch.global_batch_size),
            f"{batch.micro_batch_size} x {batch.num_replicas} x {batch.gradient_accumulation_count} images per step",
        ),
    )


def step_lines(steps: StepPlan) -> tuple[PlanLine, ...]:
    epoch = steps.epoch
    lines = [PlanLine("steps per epoch", format_count(epoch.updates_per_epoch), f"of {epoch.num_samples:,} images")]
    if epoch.copies > 1:
        lines.append(PlanLine("copies in a step", format_count(epoch.copies), "of each image, augmented differently"))
    if epoch.repeated:
        lines.append(PlanLine("seen twice per epoch", format_count(epoch.repeated), "images, from another shuffle"))
    else:
        lines.append(PlanLine("dropped per epoch", format_count(epoch.dropped), "images, different ones in each epoch"))
    return (
        *lines,
        PlanLine("epochs", format_count(steps.num_epochs)),
        PlanLine("total steps", format_count(steps.total_steps)),
        PlanLine(
            "calls",
            format_count(steps.num_calls),
            f"or more, of at most {steps.steps_per_call:,} steps",
        ),
    )


def event_lines(steps: StepPlan) -> tuple[PlanLine, ...]:
    periods = {
        "log": steps.log_every,
        "checkpoint": steps.checkpoint_every,
        "validation": steps.validate_every,
    }
    lines = {name: _event_line(name, every, steps) for name, every in periods.items()}
    if steps.checkpoint_seconds and steps.checkpoint_every:
        line, minutes = lines["checkpoint"], steps.checkpoint_seconds / 60
        text = f"{line.detail}, or after {minutes:g} minutes; fewer where writing takes over 1 % of the time"
        lines["checkpoint"] = replace(line, detail=text)
    return tuple(lines.values())


def _event_line(name: str, every: Fraction, steps: StepPlan) -> PlanLine:
    if not every:
        return PlanLine(name, "off")
    count = steps.num_events(every)
    spacing = f"every {int(every):,}" if every.denominator == 1 else f"about every {float(every):,.1f}"
    return PlanLine(name, f"{count:,} x", "at the end" if count == 1 else f"{spacing} steps")


def validation_lines(validation: ValidationPlan, cache: EvalCache) -> tuple[PlanLine, ...]:
    return (
        PlanLine("images", format_count(validation.num_samples)),
        PlanLine(
            "batches",
            format_count(validation.num_batches),
            f"of {validation.micro_batch_size} x {validation.num_replicas}, the last padded by {validation.padding}",
        ),
        PlanLine("size", format_bytes(cache.num_bytes), f"{_KEPT[cache.where]}: {cache.reason}"),
    )


_KEPT = {DEVICE: "kept on the device", HOST: "kept in host memory", STREAMED: "decoded for each validation"}


def saving_lines(savings: Iterable[Saving]) -> tuple[PlanLine, ...]:
    return tuple(
        PlanLine(saving.name, format_bytes(saving.num_bytes), f"--{saving.option.replace('_', '-')}, {saving.price}")
        for saving in savings
    )


def memory_lines(memory: MemoryPlan, cache_reason: str) -> tuple[PlanLine, ...]:
    details = {row.name: row.detail for row in memory.rows}
    details["data"] += f"; {cache_reason}"
    lines = [PlanLine(row.name, format_bytes(row.num_bytes), details[row.name]) for row in memory.rows if row.num_bytes]
    return (*lines, PlanLine("total", format_bytes(memory.total_bytes)))
