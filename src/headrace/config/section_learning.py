"""The sections of the schema about numerics, learning, validation, checkpoints and logging."""

from dataclasses import dataclass
from typing import Any

from headrace.config.field import Facts, Remark, Rule, conflict, idle, option
from headrace.rows.curves import CURVES
from headrace.rows.optimizers import OPTIMIZERS
from headrace.rows.tasks import LOSSES
from headrace.rows.trackers import TRACKERS
from headrace.rows.values import (
    ANYWHERE,
    BYTES,
    CLASS_WEIGHTS,
    FLOATS,
    LOSS_SCALE,
    PATH,
    all_fractions,
    all_positive,
    at_least,
    class_weights,
    fraction,
    regular_expressions,
    supported_precision,
)

# ruff: noqa: RUF009 (option() makes a dataclass field, with a fresh copy of a mapping each time)


_TRACKING = {name: f"{row.says} (extra {name})." for name, row in TRACKERS.items()}
_TAKE_HISTOGRAMS = tuple(name for name, row in TRACKERS.items() if row.histograms)


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Number formats, rounding, and what happens to non-finite numbers."""

    precision: str = option(
        "32.32",
        "Bits of the computation and of the weights and their update: compute.update.",
        choices=("16.16", "16.32", "32.32"),
        check=supported_precision,
        chosen="chosen for the device",
    )
    half_type: str = option("bfloat16", "The 16-bit number format.", choices=("bfloat16", "float16"))
    matmul_precision: str = option(
        "default",
        "How accelerators multiply float32 values in convolutions and matrix products: default leaves it to XLA, which "
        "may take TF32 on GPUs and bfloat16 on TPUs; tf32 has three digits; float32 has all.",
        choices=("default", "tf32", "float32"),
        synonyms=(("tensorfloat32", "tf32"), ("high", "tf32"), ("highest", "float32")),
    )
    stochastic_rounding: bool = option(
        True,
        "Round 16-bit weights up or down at random, so that small updates are not lost on average.",
        # The reference's other modes ask for what is always so here: all replicas round alike.
        synonyms=(("RI", "on"), ("ON_prng_stable", "on"), ("RI_prng_stable", "on")),
    )
    loss_scaling: float | str = option(
        0.0,
        "Factor on the loss that keeps small float16 gradients from underflowing; dynamic adapts it, stepped and "
        "doubling change it at given epochs, 0 is off.",
        kind=LOSS_SCALE,
        check=lambda value: "" if isinstance(value, str) else at_least(0)(value),
    )
    loss_scaling_params: dict[str, Any] = option(
        {},
        "Settings of a loss scale that changes. dynamic: initial, growth_interval, growth_factor, backoff_factor, max; "
        "stepped: values, and boundaries in epochs; doubling: initial and final, in equal parts of the run.",
    )
    fp_exceptions: bool = option(False, "Find the first layer that produces a non-finite number, and report it.")
    nan_policy: str = option("stop", "What to do about a non-finite loss or gradient.", choices=("stop", "skip"))


def _float16_unscaled(facts: Facts) -> bool:
    numerics, run = facts.config.numerics, facts.config.run
    is_float16 = numerics.precision.startswith("16") and numerics.half_type == "float16"
    return is_float16 and run.training and numerics.loss_scaling in (0, 1)


def _is_32_bit(facts: Facts) -> bool:
    """Say whether the run computes in 32 bits for sure: a precision that nobody gave may be chosen, but not float16."""
    numerics = facts.config.numerics
    return numerics.precision == "32.32" and (facts.given("precision") or numerics.half_type == "float16")


NUMERICS_WARNINGS = (
    Remark(
        when=_float16_unscaled,
        text=lambda facts: (
            f"float16 without loss scaling ({facts.describe('precision')}, {facts.describe('loss_scaling')}): "
            "gradients below about 6e-8 vanish. Use --loss-scaling dynamic, or --half-type bfloat16."
        ),
        option="half_type",
        remedy="Add --loss-scaling dynamic, or choose --half-type bfloat16.",
    ),
)
NUMERICS_NOTES = (
    Remark(
        when=lambda facts: (
            facts.given("stochastic_rounding")
            and facts.config.numerics.stochastic_rounding
            and facts.config.numerics.precision != "16.16"
        ),
        text=lambda facts: (
            f"{facts.describe('stochastic_rounding')} has no effect on 32-bit weights ({facts.describe('precision')})."
        ),
        option="stochastic_rounding",
        remedy="Choose --precision 16.16, or leave stochastic_rounding out.",
    ),
    idle(
        "matmul_precision",
        "precision",
        lambda facts: (
            facts.config.numerics.matmul_precision != "default" and facts.config.numerics.precision != "32.32"
        ),
    ),
    idle(
        "half_type",
        "precision",
        lambda facts: facts.given("half_type") and _is_32_bit(facts),
        remedy="Choose --precision 16.32 (float16 with --loss-scaling dynamic), or leave half_type out.",
    ),
    Remark(
        when=lambda facts: (
            facts.config.numerics.loss_scaling_params and not isinstance(facts.config.numerics.loss_scaling, str)
        ),
        text=lambda facts: (
            f"{facts.describe('loss_scaling_params')} is for a loss scale that changes: dynamic, stepped or doubling."
        ),
        option="loss_scaling_params",
        remedy="Add --loss-scaling dynamic, or leave loss_scaling_params out.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Optimizer, learning rate and regularisation."""

    optimizer: str = option(
        "sgd",
        "Optimizer; sgd applies the learning rate before the momentum, momentum applies it after.",
        aliases=("optimiser",),
        choices=tuple(OPTIMIZERS),
    )
    optimizer_params: dict[str, Any] = option(
        {"momentum": 0},
        "Settings of the optimizer.",
        aliases=("optimiser_params",),
        chosen="momentum 0.9 if the learning rate is chosen, else 0",
    )
    lr_schedule: str = option(
        "const",
        "Shape of the learning rate over the run.",
        choices=tuple(CURVES),
        synonyms=(("polynomial_decay_lr", "polynomial"),),
        chosen="cosine if the learning rate is chosen, else const",
    )
    lr_schedule_params: dict[str, Any] = option(
        {"initial_learning_rate": 0.0001},
        "Settings of lr_schedule; initial_learning_rate is per image, absolute_learning_rate for the global batch.",
    )
    lr_warmup_params: dict[str, Any] | None = option(
        None, "Warm-up of the learning rate: warmup_mode (shift or mask) and warmup_epochs; unset means none."
    )
    lr_staircase: bool = option(False, "Keep the learning rate constant within an epoch.")
    loss: str = option(
        "cross_entropy",
        "Loss: softmax cross entropy, or bce, the mean over the classes of binary cross entropies (sigmoid); of a "
        "regression mse, mae or huber, on targets normalised by target_mean and target_std.",
        choices=LOSSES,
        synonyms=(("smooth_l1", "huber"), ("l1", "mae"), ("l2", "mse")),
        chosen="that of the task: cross_entropy, bce or mse",
    )
    bce_target_threshold: float | None = option(
        None,
        "With bce: classes whose (mixed) target exceeds this count as 1, the others as 0; unset keeps the target.",
        check=fraction,
    )
    label_smoothing: float = option(
        0.0,
        "Fraction of the target that is spread evenly over all classes; with multilabel, that makes it one half.",
        check=fraction,
    )
    label_smoothing_classes: str = option(
        "all",
        "Classes over which label_smoothing s is spread: all (s / C each) or the others (s / (C - 1) each).",
        choices=("all", "others"),
    )
    class_weights: tuple[Any, ...] = option(
        (),
        "Weight of each class in the loss; balanced means images / (number of classes x images of the class).",
        kind=CLASS_WEIGHTS,
        check=class_weights,
    )
    l2_regularization: float = option(
        0.0,
        "Multiple of the weights that is added to the gradients before the optimizer (coupled).",
        aliases=("l2_regularisation",),
        check=at_least(0),
    )
    weight_decay: float = option(
        0.0,
        "Multiple of the weights, times the learning rate, that is subtracted after the optimizer (decoupled); lamb "
        "adds it before its trust ratio.",
        check=at_least(0),
    )
    weight_decay_exclude: tuple[str, ...] = option(
        (),
        "Regular expressions; parameters whose name matches one get no weight decay and no L2 regularization.",
        check=regular_expressions,
    )
    lookahead: int = option(
        0,
        "Steps after which slow weights move halfway to the trained ones, which start again from there; 0 is off, 6 "
        "is usual.",
        check=at_least(0),
    )
    gradient_clipping: float = option(
        0.0, "Largest norm of the whole gradient; longer ones are scaled down to it, 0 is off.", check=at_least(0)
    )
    ema_decay: float = option(
        0.0, "Decay of a moving average of the weights, which is validated separately; 0 is off.", check=fraction
    )


def _decays_beside_adam(facts: Facts) -> bool:
    learning = facts.config.learning
    return learning.weight_decay > 0 and OPTIMIZERS[learning.optimizer].decay == "none"


LEARNING_RULES = (
    conflict(
        "weight_decay",
        "optimizer",
        _decays_beside_adam,
        "Adam's decay is coupled; decoupled, it is adamw.",
        "Choose --optimizer adamw, or give --l2-regularization.",
    ),
    conflict(
        "class_weights",
        "loss",
        lambda facts: facts.config.learning.loss == "bce" and facts.config.learning.class_weights,
        "They are weights of the softmax cross entropy.",
        "Leave one of them out; --balanced-sampling also evens out the classes.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.logging.histograms
            and not any(getattr(facts.config.logging, name) for name in _TAKE_HISTOGRAMS)
        ),
        problem=lambda facts: f"{facts.describe('histograms')} without --{' or --'.join(_TAKE_HISTOGRAMS)}.",
        rule="Histograms go to trackers; the run's own records have none.",
        remedy=f"Add --{' or --'.join(_TAKE_HISTOGRAMS)}, or leave --histograms out.",
    ),
    *(
        Rule(
            broken=lambda facts, name=name: (
                getattr(facts.config.checkpoint, name)
                and (facts.config.checkpoint.clean_dir or not facts.config.checkpoint.checkpoints)
            ),
            problem=lambda facts, name=name: (
                f"{facts.describe(name)} with "
                f"{facts.describe('clean_dir' if facts.config.checkpoint.clean_dir else 'checkpoints')}."
            ),
            rule="Checkpoints are averaged once the run has ended: they must have been saved, and not deleted.",
            remedy="Leave one of them out.",
        )
        for name in ("average_last_epochs", "average_decays")
    ),
)
LEARNING_WARNINGS = (
    Remark(
        # Measured: ResNet-8 on digits, 8 epochs at tf2's default rate reaches 15 % with a decay of 1, 56 % without.
        when=lambda facts: facts.config.learning.weight_decay >= 1,
        text=lambda facts: (
            f"{facts.describe('weight_decay')} takes the learning rate's fraction of every weight at each step, which "
            "leaves little to learn. --weight-decay 0 turns it off; 1e-4 is usual."
        ),
    ),
)
LEARNING_NOTES = (
    idle(
        "bce_target_threshold",
        "without --loss bce",
        lambda facts: facts.given("bce_target_threshold") and facts.config.learning.loss != "bce",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Validation on held-out images."""

    validation: bool = option(True, "Measure the accuracy on held-out images, during training and at its end.")
    validation_micro_batch_size: int | None = option(
        None,
        "Images per replica in one validation pass; unset means micro_batch_size.",
        aliases=("valid_batch_size",),
        check=at_least(1),
    )
    validation_num_replicas: int | None = option(
        None, "Replicas that validate; unset means one on each device of the training replicas.", check=at_least(1)
    )
    validation_cache: str = option(
        "auto",
        "Where decoded validation images are kept; auto means on the device, else on the host, within the budgets.",
        choices=("auto", "device", "host", "none"),
    )
    validation_device_budget: str = option(
        "1GiB", "Bytes of a device's memory for validation images, unless dataset_cache keeps them there.", kind=BYTES
    )
    validation_host_budget: str = option("8GiB", "Bytes of a process's memory for validation images.", kind=BYTES)
    validation_flip: bool = option(
        False, "Validate the mean of the class scores of an image and of its mirror image; takes twice as long."
    )
    validation_shift: int = option(
        0,
        "Validate with images moved by so many pixels, too, up and to the left and down and to the right: half of the "
        "mean of the class scores. Takes three times as long.",
        check=at_least(0),
    )
    pipeline_validation_model: bool = option(
        False, "Validate through the stages of the pipeline instead of with the whole network on each device."
    )


CURRENT_TIME = "current_time"  # in a path: when the run starts


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """What is saved, and how long it is kept."""

    checkpoints: bool = option(True, "Save checkpoints.")
    checkpoint_dir: str | None = option(
        None,
        "Directory of the checkpoints; unset means `checkpoints` in the run's directory. current_time in its name "
        "stands for the time at which the run starts.",
        kind=PATH,
    )
    clean_dir: bool = option(False, "Delete the checkpoints when the run has finished successfully.")
    max_ckpts_to_keep: int = option(3, "Number of newest checkpoints to keep.", check=at_least(1))
    keep_best: int = option(
        1, "Number of best checkpoints, by validation accuracy, to keep in addition.", check=at_least(0)
    )
    average_last_epochs: tuple[float, ...] | None = option(
        None,
        "After training, average the checkpoints of the last N epochs, for each N given; keeps all checkpoints.",
        aliases=("weight_avg_n",),
        kind=FLOATS,
        check=all_positive,
    )
    average_decays: tuple[float, ...] | None = option(
        None,
        "After training, take an exponential average of all checkpoints, for each decay given; keeps all checkpoints.",
        aliases=("weight_avg_exp",),
        kind=FLOATS,
        check=all_fractions,
    )


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Where results are recorded."""

    log_dir: str = option(
        "runs", "Directory in which each run gets a directory of its own, here or in a store.", kind=ANYWHERE
    )
    run_name: str | None = option(None, "Name of the run's directory; unset means model, dataset and time.")
    resume: str = option(
        "never",
        "What train does if its run directory already holds a run of the same configuration; auto resumes it.",
        choices=("never", "auto"),
        bare_value="auto",
    )
    progress: str = option(
        "auto",
        "What the console shows; auto means a live bar on a terminal and plain lines elsewhere.",
        choices=("auto", "bar", "plain", "none"),
    )
    report: bool = option(True, "Write report.html, with curves and results, when a process of the run ends.")
    tensorboard: bool = option(False, _TRACKING["tensorboard"])
    wandb: bool = option(False, _TRACKING["wandb"])
    mlflow: bool = option(False, _TRACKING["mlflow"])
    trackio: bool = option(False, _TRACKING["trackio"])
    histograms: bool = option(
        False,
        "Send histograms of each block's weights and gradients to TensorBoard, W&B and Trackio with every record.",
    )
    wandb_project: str = option("headrace", "Weights & Biases project of the run.")
    wandb_run_name: str | None = option(
        None, "Weights & Biases name of the run; unset means the name of its directory."
    )
    wandb_tags: tuple[str, ...] = option((), "Weights & Biases tags of the run.")
