"""What goes together in a pipeline, and what does not."""

from collections.abc import Callable

from headrace.config.field import COMMAND_LINE, DEFAULT
from headrace.config.rule import Facts, Remark, Rule
from headrace.config.schema import Config
from headrace.config.sections_pipeline import stages_of_splits


def _with_stages(option: str, on: Callable[[Config], object]) -> Rule:
    """Refuse an option that says something of stages when there is only one."""
    return Rule(
        broken=lambda facts: bool(on(facts.config)) and facts.config.pipeline.num_stages == 1,
        problem=lambda facts: f"{facts.told(option)} without pipeline stages.",
        rule=f"{option} is about the stages of a pipeline: two or more.",
        remedy=f"Name them with --pipeline-splits or --num-pipeline-stages, or leave {option} out.",
    )


def _contradicting_stages(facts: Facts) -> bool:
    """Say whether both options give a number of stages, and not the same. A 1 counts only if typed by the user."""
    pipeline = facts.config.pipeline
    typed = facts.origins.get("num_pipeline_stages", DEFAULT) == COMMAND_LINE
    said = pipeline.num_pipeline_stages > 1 or typed
    return (
        said
        and bool(pipeline.pipeline_splits)
        and pipeline.num_pipeline_stages != stages_of_splits(pipeline.pipeline_splits)
    )


PIPELINE_RULES = (
    Rule(
        broken=_contradicting_stages,
        problem=lambda facts: (
            f"{facts.told('pipeline_splits')} makes {stages_of_splits(facts.config.pipeline.pipeline_splits)} stages, "
            f"but {facts.told('num_pipeline_stages')}."
        ),
        rule="N splits make N + 1 stages; one of the two options is enough.",
        remedy="Leave one of them out.",
    ),
    _with_stages("device_mapping", lambda config: config.pipeline.device_mapping),
    _with_stages("pipeline_validation_model", lambda config: config.validation.pipeline_validation_model),
    Rule(
        broken=lambda facts: (
            bool(facts.config.pipeline.recomputation_points) and not facts.config.pipeline.recomputation
        ),
        problem=lambda facts: f"{facts.told('recomputation_points')} without recomputation.",
        rule="The points say where recomputation starts anew.",
        remedy="Add --recomputation, or leave the points out.",
    ),
    Rule(
        broken=lambda facts: facts.config.pipeline.measure_splits and isinstance(facts.config.pipeline.cut, tuple),
        problem=lambda facts: f"{facts.told('measure_splits')} with {facts.told('pipeline_splits')}.",
        rule="Blocks are measured to find a cut; here it is given.",
        remedy="Say how many stages to make with --num-pipeline-stages instead, or leave --measure-splits out.",
    ),
    _with_stages("measure_splits", lambda config: config.pipeline.measure_splits),
)

PIPELINE_NOTES = (
    Remark(
        when=lambda facts: facts.config.pipeline.strict_pipeline and facts.config.pipeline.num_stages == 1,
        text=lambda facts: f"{facts.told('strict_pipeline')} has no effect without pipeline stages.",
    ),
    Remark(
        when=lambda facts: facts.config.pipeline.trace_schedule and facts.config.pipeline.one_program,
        text=lambda facts: (
            f"{facts.told('trace_schedule')} has no effect where all stages are on one device: a call is one program."
        ),
    ),
    Remark(
        when=lambda facts: facts.config.pipeline.device_memory is not None and facts.config.pipeline.num_stages == 1,
        text=lambda facts: f"{facts.told('device_memory')} has no effect without pipeline stages.",
    ),
    Remark(
        when=lambda facts: (
            facts.config.pipeline.replicated_optimizer_state_sharding and facts.config.batch.num_replicas == 1
        ),
        text=lambda facts: f"{facts.told('replicated_optimizer_state_sharding')} has no effect with one replica.",
    ),
)
