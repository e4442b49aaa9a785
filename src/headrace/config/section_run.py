"""The sections of the schema about the run as a whole, its batches and periods, pipeline stages and the compiler."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.config.field import (
    COMMAND_LINE,
    DEFAULT,
    TRANSLATED,
    Facts,
    Origin,
    Remark,
    Rule,
    both_given,
    conflict,
    idle,
    option,
)
from headrace.rows.metrics import METRICS
from headrace.rows.values import (
    BYTES,
    FLOATS,
    FRACTION,
    NUMBERS,
    PATH,
    REPLICAS,
    at_least,
    between,
    positive_or_all,
    regular_expressions,
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
        kind=PATH,
    )
    target_accuracy: float | None = option(
        None,
        "Accuracy, from 0 to 1, at which the run ends (top-1, or what monitor names); the time at which it is reached "
        "is recorded.",
        check=between(0, 1),
    )
    early_stopping: int | None = option(
        None,
        "End the run when this many validations in a row have not improved the top-1 accuracy, or what monitor names.",
        check=at_least(1),
    )
    monitor: str = option(
        "top1",
        "Metric that decides which checkpoint is the best, and that early_stopping and target_accuracy look at; of "
        "equal ones the lower loss is better. balanced_accuracy and macro_f1 count every class the same.",
        choices=tuple(METRICS),
        synonyms=(("balanced", "balanced_accuracy"), ("f1", "macro_f1"), ("accuracy", "top1")),
        code_adds=True,
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
        "Move events to the nearest frequency that divides an epoch; off puts each after the step nearest to its time.",
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


# The section of the schema about the compiler, its rules, and on which backends an option has no effect.


CPU_KERNELS = ("auto", "on", "no-winograd", "off")
TUNINGS = ("auto", "full", "quick")
SWITCH = ("auto", "on", "off")
TARGETS = ("cycles", "memory", "balanced")


def _percentages(values: tuple[float, ...]) -> str:
    """Limit to more than 0 and at most 100."""
    return "" if all(0 < value <= 100 for value in values) else "must be more than 0 and at most 100"


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """Options of the compiler. Those without effect on the device are listed when a run starts."""

    PREFIX_RANK: ClassVar[int] = 1  # so that these long names take no abbreviation from the others

    half_partials: bool = option(
        False,
        "Let matrix products return 16-bit sums, as convolutions do; off means 32-bit sums, rounded when used.",
        aliases=("enable_half_partials",),
    )
    internal_exchange_optimization_target: str | None = option(
        None,
        "What the compiler optimises for: cycles (time), memory, or a balance of both.",
        aliases=("internal_exchange_optimisation_target",),
        choices=TARGETS,
    )
    max_cross_replica_buffer_size: int | None = option(
        None, "Most bytes of gradients that are combined into one all-reduce; 0 combines none.", check=at_least(0)
    )
    max_reduce_many_buffer_size: int | None = option(
        None,
        "Most bytes that are combined into one reduce-scatter or all-gather; 0 combines none.",
        check=at_least(0),
    )
    cpu_kernels: str = option(
        "auto",
        "Compute convolutions on the CPU with Headrace's kernels instead of XLA's: auto where they are compiled "
        "and faster, on (an error where they are missing), no-winograd (on, by plain products), or off.",
        choices=CPU_KERNELS,
    )
    convolution_tuning: str = option(
        "auto",
        "On one NVIDIA GPU, try every algorithm that cuDNN has for each convolution of training (full), or only those "
        "that it recommends (quick): compiling takes less time, and steps of large images and batches up to 7 % more. "
        "auto is quick where a micro batch is little work.",
        choices=TUNINGS,
    )
    concurrent_kernels: str = option(
        "auto",
        "On one NVIDIA GPU, run kernels of a training step at the same time where none needs the other's results: "
        "small networks, images and batches train 3 to 28 % faster, in up to 30 % more memory. auto does so where "
        "convolutions are tuned quickly.",
        choices=SWITCH,
    )
    available_memory_proportion: tuple[float, ...] = option(
        (),
        "Percentage of a device's memory for the workspace of convolutions and matrix products; one value, or two per "
        "stage.",
        kind=FLOATS,
        check=_percentages,
    )


COMPILER_RULES = (
    Rule(
        broken=lambda facts: any(value < 1 for value in facts.config.compiler.available_memory_proportion),
        problem=lambda facts: f"{facts.describe('available_memory_proportion')}.",
        rule="It is a percentage (15), not a fraction (0.15).",
        remedy="Multiply it by 100, or add --application tf1, where it is a fraction.",
    ),
)

CPU, GPU, TPU = "cpu", "gpu", "tpu"
EVERYWHERE = (CPU, GPU, TPU)
BACKENDS = {"cpu": CPU, "cuda": GPU, "rocm": GPU, "tpu": TPU}  # of the platforms that name one; auto does not
_ONLY_GPU = "Only XLA's GPU backend has a limit to set for this."


@dataclass(frozen=True, kw_only=True)
class NoEffect:
    """An option, the backends on which it does nothing, and the reason; `applies` picks the values concerned."""

    section: str
    option: str
    reason: str
    backends: tuple[str, ...] = EVERYWHERE
    applies: Callable[[Any], bool] = lambda value: value not in (None, (), False)


NO_EFFECT = (
    NoEffect(
        section="compiler",
        option="half_partials",
        backends=(CPU,),
        reason="XLA's CPU backend computes 16-bit products in 32 bits and rounds the result.",
    ),
    NoEffect(
        section="compiler",
        option="internal_exchange_optimization_target",
        applies=lambda value: value == "balanced",
        reason="balanced is what XLA does anyway.",
    ),
    *(
        NoEffect(
            section="compiler",
            option=option,
            backends=(CPU, TPU),
            applies=lambda value: value not in (None, ()),  # 0 is a limit, too
            reason=_ONLY_GPU,
        )
        for option in (
            "max_cross_replica_buffer_size",
            "max_reduce_many_buffer_size",
            "available_memory_proportion",
        )
    ),
    NoEffect(
        section="compiler",
        option="cpu_kernels",
        backends=(GPU, TPU),
        applies=lambda value: value != "auto",
        reason="They are for the CPU.",
    ),
    NoEffect(
        section="compiler",
        option="convolution_tuning",
        backends=(CPU, TPU),
        applies=lambda value: value == "quick",
        reason="It is cuDNN's algorithms that are tried.",
    ),
    NoEffect(
        section="compiler",
        option="concurrent_kernels",
        backends=(CPU, TPU),
        applies=lambda value: value == "on",
        reason="It is kernels of CUDA graphs that run at the same time.",
    ),
    NoEffect(
        section="numerics",
        option="matmul_precision",
        backends=(CPU,),
        applies=lambda value: value != "default",
        reason="CPUs multiply float32 values as they are.",
    ),
    NoEffect(
        section="run",
        option="first_device",
        backends=(CPU, TPU),
        reason="Virtual CPU devices are alike, and a TPU's are chosen by its environment.",
    ),
)


def without_effect(config: "Config", backend: str, origins: Mapping[str, Origin]) -> dict[str, str]:
    """Return {option: reason} of the options given that do nothing on a backend.

    What follows from other options of an application was not given; what was only put into other units was.
    """
    return {
        row.option: row.reason
        for row in NO_EFFECT
        if backend in row.backends
        and (origins[row.option].kind != TRANSLATED or row.option in origins[row.option].where)
        and row.applies(getattr(getattr(config, row.section), row.option))
    }


def describe_without_effect(config: "Config", backend: str, origins: Mapping[str, Origin]) -> list[str]:
    """Return the sentence that lists them, if there are any."""
    found = without_effect(config, backend, origins)
    if not found:
        return []
    listed = "; ".join(f"{name} ({reason.rstrip('.')})" for name, reason in found.items())
    return [f"without effect on {backend}: {listed}"]
