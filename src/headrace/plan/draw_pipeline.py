"""A pipelined run as text: a table of its stages, one of the devices of a replica, and the picture of a step."""

from collections.abc import Iterable, Sequence

from headrace.core.units import format_bytes, format_count
from headrace.plan.memory import MemoryPlan
from headrace.plan.picture import draw_text
from headrace.plan.pipeline import PipelinePlan

STAGE_HEAD = ("stage", "blocks", "device", "parameters", "FLOP", "kept", "sent on", "time")
DEVICE_HEAD = ("device", "stages", "weights", "activations", "recomputed", "data", "total")


def draw_pipeline(pipeline: PipelinePlan, memory_by_device: Sequence[MemoryPlan], one_program: bool = False) -> str:
    """Return the stages, the devices of a replica and the schedule as text; of one program, the stages alone."""
    stages = [
        "stages (FLOP per image, forward; kept and sent on: bytes of one micro batch)",
        draw_table(STAGE_HEAD, _stage_rows(pipeline), left=(1,)),
    ]
    if one_program:
        return "\n".join(stages)
    return "\n".join(
        [
            *stages,
            "devices of a replica (estimate; recomputed: the activations with --recomputation)",
            draw_table(DEVICE_HEAD, _device_rows(pipeline, memory_by_device), left=(1,)),
            "one step, if all stages took the same time",
            _indented(draw_text(pipeline.table)),
        ]
    )


def draw_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    """Return rows under their head, columns aligned right but for those of `left`."""
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
    """Return in words what recomputation saves, or would save, where it saves most."""
    full, little = (pipeline.activation_bytes(recomputation) for recomputation in (False, True))
    saved = [a - b for a, b in zip(full, little, strict=True)]
    device = max(range(len(saved)), key=lambda d: saved[d])
    if saved[device] <= 0:
        return "saves nothing here: no stage keeps more than it computes again"
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
    return [
        (
            str(device),
            " ".join(str(stage.index) for stage in stages),
            *(format_bytes(size[device]) for size in (weights, full, little)),
            format_bytes(memory_by_device[device].bytes_of("data")),
            format_bytes(memory_by_device[device].total_bytes),
        )
        for device, stages in enumerate(pipeline.stages_by_device())
    ]


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
