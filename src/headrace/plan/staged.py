"""The pipeline of a run, from its configuration; and what each of its devices holds."""

from headrace.config.schema import Config
from headrace.core.errors import ConfigError
from headrace.core.units import parse_bytes
from headrace.model.network import Network
from headrace.plan.batch import BatchPlan
from headrace.plan.data_memory import DataMemory
from headrace.plan.memory import MemoryPlan, MemoryRow, bytes_per_parameter, model_rows, widths
from headrace.plan.pipeline import PipelineOptions, PipelinePlan, StagePlan, make_pipeline_plan
from headrace.plan.schedule import strict_rule
from headrace.plan.shards import refuse_missing_splits


def plan_stages(
    config: Config, batch: BatchPlan, network: Network, recompute_points: tuple[int, ...]
) -> PipelinePlan | None:
    """Return the pipeline that the configuration asks for, None where it asks for no stages."""
    wanted = config.pipeline
    refuse_missing_splits(config, network)
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
    """Return what each device of a replica holds: the weights of its stages, activations at their peak, data."""
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
    """Return what is kept in words, such as `4 micro batches of stage 0, 1 of stage 3`."""
    parts = [f"{peaks[stage.index]} of stage {stage.index}" for stage in stages]
    what = "inputs of micro batches" if recomputation else "micro batches"
    return f"{what} at once: {', '.join(parts)}" + ("; one computed again" if recomputation else "")
