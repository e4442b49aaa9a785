"""The section of the schema about pipeline stages, and its rules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.config.field import COMMAND_LINE, DEFAULT, Facts, Remark, Rule, conflict, idle, option
from headrace.rows.values import BYTES, NUMBERS, at_least, regular_expressions

if TYPE_CHECKING:
    from headrace.config.schema import Config


# ruff: noqa: RUF009 (option() makes a dataclass field, with a fresh copy of a mapping each time)


SCHEDULES = ("Grouped", "Interleaved", "Sequential", "GPipe", "ZeroBubble")


def stages_of_splits(splits: tuple[str, ...]) -> int:
    """Return how many stages the words of pipeline_splits ask for."""
    return 1 + (int(splits[0]) if _is_number(splits) else len(splits))


def _is_number(splits: tuple[str, ...]) -> bool:
    return len(splits) == 1 and splits[0].isdecimal()


@dataclass(frozen=True, kw_only=True)
class PipelineSection:
    """The pipeline stages of the network, and in which order and where they run."""

    pipeline_splits: tuple[str, ...] = option(
        (), "Blocks that start a new pipeline stage; or one number: that many splits, chosen to balance the stages."
    )
    num_pipeline_stages: int = option(
        1,
        "Number of pipeline stages, split so that they are balanced; an alternative to pipeline_splits.",
        check=at_least(1),
    )
    split_include_filter: tuple[str, ...] = option(
        (),
        "Parts of block names: stages that are split automatically start only at blocks that have one of them.",
        aliases=("sharding_include_filter",),
    )
    split_exclude_filter: tuple[str, ...] = option(
        (),
        "Parts of block names: stages that are split automatically never start at blocks that have one of them.",
        aliases=("sharding_exclude_filter",),
    )
    device_mapping: tuple[int, ...] = option(
        (), "Device of each stage, such as 0 1 1 0; unset means one device per stage.", kind=NUMBERS
    )
    pipeline_schedule: str = option(
        "Interleaved", "Order in which the stages process the micro-batches of a step.", choices=SCHEDULES
    )
    recomputation: bool = option(
        False,
        "Keep only the inputs of a stage for the backward pass, and recompute the rest.",
        aliases=("enable_recomputation", "enable_recompute", "xla_recompute"),
    )
    recomputation_points: tuple[str, ...] = option(
        (),
        "Regular expressions of blocks whose inputs recomputation keeps in addition to those of the stages.",
        check=regular_expressions,
    )
    optimizer_state_offloading: bool = option(
        False,
        "Keep the optimizer's state (and averaged weights) in host memory, and stream it in for each update.",
        aliases=("offload_weight_update_variables", "variable_offloading"),
    )
    replicated_optimizer_state_sharding: bool = option(
        False,
        "Shard the optimizer's state (and averaged weights) over the replicas; each updates its part.",
        aliases=("rts",),
    )
    measure_splits: bool = option(
        False, "Time every block on the device first, and split the stages by these times instead of by estimates."
    )
    block_seconds: dict[str, Any] = option(
        {}, "Seconds that each block takes, instead of an estimate; --measure-splits fills it in."
    )
    device_memory: str | None = option(
        None, "Memory of a device, such as 16GiB, into which automatically split stages must fit.", kind=BYTES
    )
    trace_schedule: bool = option(
        False,
        "Measure the schedule of one step as it really runs, and plot it next to the planned one in the run directory.",
    )
    strict_pipeline: bool = option(
        False, "Refuse numbers of micro-batches that the schedule does not accept on the hardware it was designed for."
    )

    @property
    def num_stages(self) -> int:
        """How many stages there are, by whichever option says so."""
        return max(self.num_pipeline_stages, stages_of_splits(self.pipeline_splits))

    @property
    def has_stages(self) -> bool:
        """Whether the plan has stages: there are several, or the optimizer's state is stored elsewhere."""
        return self.num_stages > 1 or self.state_elsewhere

    @property
    def one_program(self) -> bool:
        """Whether a call is one device program: all stages are on one device, and so is the optimizer's state."""
        several = self.num_stages > 1 and (not self.device_mapping or max(self.device_mapping) > 0)
        return not several and not self.state_elsewhere

    @property
    def state_elsewhere(self) -> bool:
        """Whether the optimizer's state is stored other than whole on every device."""
        return self.optimizer_state_offloading or self.replicated_optimizer_state_sharding

    @property
    def cut(self) -> tuple[str, ...] | int:
        """The names of the blocks that start stages 1, 2 ..., or the number of stages to make."""
        named = bool(self.pipeline_splits) and not _is_number(self.pipeline_splits)
        return self.pipeline_splits if named else self.num_stages


def needs_stages(option: str, on: "Callable[[Config], object]") -> Rule:
    """Refuse an option that says something of stages when there is only one."""
    return Rule(
        broken=lambda facts: bool(on(facts.config)) and facts.config.pipeline.num_stages == 1,
        problem=lambda facts: f"{facts.describe(option)} without pipeline stages.",
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
            f"{facts.describe('pipeline_splits')} makes "
            f"{stages_of_splits(facts.config.pipeline.pipeline_splits)} stages, "
            f"but {facts.describe('num_pipeline_stages')}."
        ),
        rule="N splits make N + 1 stages; one of the two options is enough.",
        remedy="Leave one of them out.",
    ),
    needs_stages("device_mapping", lambda config: config.pipeline.device_mapping),
    Rule(
        broken=lambda facts: (
            bool(facts.config.pipeline.recomputation_points) and not facts.config.pipeline.recomputation
        ),
        problem=lambda facts: f"{facts.describe('recomputation_points')} without recomputation.",
        rule="The points say where recomputation starts anew.",
        remedy="Add --recomputation, or leave the points out.",
    ),
    conflict(
        "measure_splits",
        "pipeline_splits",
        lambda facts: facts.config.pipeline.measure_splits and isinstance(facts.config.pipeline.cut, tuple),
        "Blocks are measured to find a cut; here it is given.",
        "Say how many stages to make with --num-pipeline-stages instead, or leave --measure-splits out.",
    ),
    needs_stages("measure_splits", lambda config: config.pipeline.measure_splits),
)


def _idle_filter(option: str) -> Remark:
    """Note a filter where nothing is split automatically."""

    def without_effect(facts: Facts) -> bool:
        pipeline = facts.config.pipeline
        return bool(getattr(pipeline, option)) and (pipeline.num_stages == 1 or isinstance(pipeline.cut, tuple))

    return Remark(
        when=without_effect,
        text=lambda facts: (
            f"{facts.describe(option)} has no effect "
            + ("without pipeline stages." if facts.config.pipeline.num_stages == 1 else "where the splits are named.")
        ),
        option=option,
    )


PIPELINE_NOTES = (
    idle(
        "pipeline_schedule",
        "without pipeline stages",
        lambda facts: facts.asked("pipeline_schedule") and facts.config.pipeline.num_stages == 1,
        refused=False,
    ),
    _idle_filter("split_include_filter"),
    _idle_filter("split_exclude_filter"),
    *(
        idle(
            name,
            "without pipeline stages",
            lambda facts, name=name: getattr(facts.config.pipeline, name) and facts.config.pipeline.num_stages == 1,
        )
        for name in ("strict_pipeline", "device_memory")
    ),
    idle(
        "trace_schedule",
        "with all stages on one device: a call is one program",
        lambda facts: facts.config.pipeline.trace_schedule and facts.config.pipeline.one_program,
    ),
)
