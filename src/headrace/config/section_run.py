"""The sections of the schema about the run as a whole, its batches and periods, and pipeline stages; their rules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.config.field import (
    BYTES,
    COMMAND_LINE,
    DEFAULT,
    FRACTION,
    NUMBERS,
    REPLICAS,
    Facts,
    Remark,
    Rule,
    at_least,
    between,
    both_given,
    conflict,
    idle,
    option,
    positive_or_all,
)

if TYPE_CHECKING:
    from headrace.config.schema import Config

DRAWN_SEED = -1  # asks for a new seed in each run
PLATFORMS = ("auto", "cpu", "cuda", "rocm", "tpu")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run as a whole."""

    seed: int = option(
        0,
        "Seed of all randomness in the run: weights, order of samples, augmentation, rounding; -1 draws one.",
        check=between(DRAWN_SEED, 2**32 - 1),
    )
    training: bool = option(True, "Train; without it the run only validates.")
    dry_run_steps: int | None = option(
        None,
        "Stop after this many weight updates and validation batches, otherwise as planned: a quick trial.",
        check=at_least(1),
    )
    compile_only: bool = option(False, "Compile the programs, report time and memory, and stop.")
    platform: str = option(
        "auto",
        "Kind of device to run on; gpu means cuda.",
        aliases=("device",),
        choices=PLATFORMS,
        synonyms=(("gpu", "cuda"),),  # JAX's own `gpu` asks for ROCm as well, and fails without it
    )
    first_device: int | None = option(
        None, "Number of the first GPU to use; unset leaves the choice to JAX.", check=at_least(0)
    )
    profile: bool = option(
        False, "Record a few calls after the first ones, and print where the time went, by kind of work and by block."
    )
    distributed: bool = option(
        False,
        "Take the other processes of the job from $TF_CONFIG; num_replicas then counts those of one process.",
    )
    compilation_cache_dir: str | None = option(
        None,
        "Directory in which compiled programs are cached; unset means the user's cache directory, none is off.",
        aliases=("executable_cache_path",),
    )
    target_accuracy: float | None = option(
        None,
        "Top-1 accuracy, from 0 to 1, at which the run ends; the time at which it is reached is recorded.",
        check=between(0, 1),
    )
    early_stopping: int | None = option(
        None, "End the run when this many validations in a row bring no better top-1 accuracy.", check=at_least(1)
    )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Batch sizes, epochs, and how often things happen."""

    batch_size: int | None = option(
        None,
        "Images of one weight update, over all replicas. Micro-batches follow from it: the largest of at most "
        "micro_batch_size, if that is given.",
        check=at_least(1),
        chosen="chosen for the dataset",
    )
    micro_batch_size: int | None = option(
        None,
        "Images that one replica processes in one forward and backward pass; unset follows from batch_size.",
        check=at_least(1),
    )
    num_replicas: int | None = option(
        None,
        "Data-parallel copies of the model; auto makes one for each device, or group of devices for the stages. Unset "
        "means auto on accelerators, 1 on CPUs.",
        aliases=("replicas",),
        kind=REPLICAS,
        check=at_least(1),
    )
    gradient_accumulation_count: int | None = option(
        None,
        "Micro-batches per replica whose gradients are averaged for one weight update; unset means 1.",
        aliases=("gradient_accumulation",),
        check=at_least(1),
    )
    global_batch_size: int | None = option(
        None,
        "Images per weight update, rounded to a multiple of micro_batch_size x num_replicas; batch_size is exact.",
        check=at_least(1),
    )
    gradient_accumulation_dtype: str = option(
        "float32", "Number format in which gradients are accumulated.", choices=("float32", "bfloat16", "float16")
    )
    num_epochs: int = option(
        1,
        "Passes over the training images.",
        aliases=("epochs",),
        check=at_least(1),
        chosen="chosen for the dataset",
    )
    weight_updates_per_epoch: int = option(
        -1, "Weight updates per epoch; -1 means as many as the dataset has whole batches.", check=positive_or_all
    )
    logs_per_epoch: float = option(
        1.0,
        "How often per epoch results are fetched from the device; below 1 means every few epochs, 0 only at the end.",
        kind=FRACTION,
        check=at_least(0),
    )
    events_divide_epoch: bool = option(
        False,
        "Move events to the nearest frequency that divides an epoch; off has each after the step nearest to its time.",
    )
    max_steps_per_call: int | None = option(
        None,
        "Most weight updates per call of the device program; unset means no limit.",
        aliases=("batches_per_step",),
        check=at_least(1),
    )
    call_seconds: float = option(
        1.0,
        "Longest call in seconds, 0 for no limit. Between two calls progress is shown and signals are obeyed.",
        check=at_least(0),
    )
    ckpts_per_epoch: float | None = option(
        None,
        "How often per epoch a checkpoint is saved; unset means logs_per_epoch, at most 1; 0 only at the end.",
        kind=FRACTION,
        check=at_least(0),
    )
    validations_per_epoch: float | None = option(
        None,
        "How often per epoch the model is validated; unset means logs_per_epoch, at most 1; 0 only at the end.",
        kind=FRACTION,
        check=at_least(0),
    )


BATCH_RULES = (
    both_given(
        "gradient_accumulation_count",
        "global_batch_size",
        lambda facts: (
            None not in (facts.config.batch.gradient_accumulation_count, facts.config.batch.global_batch_size)
        ),
        "global_batch_size = micro_batch_size * num_replicas * gradient_accumulation_count.",
    ),
    both_given(
        "batch_size",
        "global_batch_size",
        lambda facts: None not in (facts.config.batch.batch_size, facts.config.batch.global_batch_size),
        "Both are the images of one weight update.",
    ),
)


# The section of the schema about pipeline stages, and its rules.


# ruff: noqa: RUF009 (option() makes a dataclass field, with a fresh copy of a mapping each time)


SCHEDULES = ("Grouped", "Interleaved", "Sequential", "GPipe")


def stages_of_splits(splits: tuple[str, ...]) -> int:
    """Return how many stages the words of pipeline_splits ask for."""
    return 1 + (int(splits[0]) if _is_number(splits) else len(splits))


def _is_number(splits: tuple[str, ...]) -> bool:
    return len(splits) == 1 and splits[0].isdecimal()


@dataclass(frozen=True, kw_only=True)
class Pipeline:
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
        """Whether the plan has stages: there are several, or the optimizer's state lives elsewhere."""
        return self.num_stages > 1 or self.state_elsewhere

    @property
    def one_program(self) -> bool:
        """Whether a call is one device program: all stages are on one device, and so is the optimizer's state."""
        several = self.num_stages > 1 and (not self.device_mapping or max(self.device_mapping) > 0)
        return not several and not self.state_elsewhere

    @property
    def state_elsewhere(self) -> bool:
        """Whether the optimizer's state lives elsewhere than whole on every device."""
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
    )


PIPELINE_NOTES = (
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
