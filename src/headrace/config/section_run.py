"""The sections of the schema about the run as a whole, its batches and periods, pipeline stages and the compiler."""

from dataclasses import dataclass

from headrace.config.field import both_given, conflict, option
from headrace.rows.tasks import MONITORS
from headrace.rows.values import DURATION, FRACTION, PATH, REPLICAS, above, at_least, between, positive_or_all

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
    time_budget: float | None = option(
        None,
        "Time of the whole run, from its start to its last record: the run ends then, with the learning rate at its "
        "end. The epochs follow; those that are given are the most.",
        kind=DURATION,
        check=above(0),
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
        choices=MONITORS,
        synonyms=(("balanced", "balanced_accuracy"), ("f1", "macro_f1"), ("accuracy", "top1")),
        code_adds=True,
        chosen="that of the task: top1, map (multilabel) or r2 (regression)",
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
    stream_results: bool = option(
        False,
        "Report each step while a call runs, on the progress line and to Callback.on_step, not only at its end; for "
        "calls that last long.",
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


_PACED = "With a time budget nobody knows before how many steps there will be"
RUN_RULES = (
    conflict(
        "time_budget",
        "dry_run_steps",
        lambda facts: facts.config.run.time_budget and facts.config.run.dry_run_steps,
        "A trial ends after its steps.",
        "Leave one of them out.",
    ),
    conflict(
        "time_budget",
        "call_seconds",
        lambda facts: facts.config.run.time_budget and not facts.config.batch.call_seconds,
        "A run looks at the clock between two calls, which must not be as long as an epoch.",
        "Leave call_seconds out.",
    ),
    conflict(
        "time_budget",
        "progressive_resolution",
        lambda facts: facts.config.run.time_budget and facts.config.augment.progressive_resolution is not None,
        f"{_PACED}, and image sizes change after a share of them.",
        "Leave one of them out; --train-image-size trains on smaller images all the time.",
    ),
    conflict(
        "time_budget",
        "loss_scaling",
        lambda facts: facts.config.run.time_budget and facts.config.numerics.loss_scaling == "doubling",
        f"{_PACED}, and this loss scale doubles in equal parts of the run.",
        "Choose --loss-scaling dynamic, or leave time_budget out.",
    ),
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
