"""The reference's applications as tables: options without a counterpart, the meaning of the others, defaults."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from headrace.config.field import option
from headrace.config.networks import family_of
from headrace.config.section_data import DOWNLOADED, IMAGE_SIZES
from headrace.config.section_learning import CURRENT_TIME
from headrace.config.section_run import DRAWN_SEED
from headrace.rows.values import FLOATS, above, at_least, between, fraction

# The options of the reference's applications that have no counterpart of the same meaning among ours.
#
# None of them reaches a run: the table below translates each into ordinary options, or says why it has no effect. A
# name that merely spells an ordinary option differently is an alias of that option instead.


APPLICATIONS = ("headrace", "tf1", "tf2")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Options of the reference's two applications, translated into the options above."""

    PREFIX_RANK: ClassVar[int] = 1

    application: str = option(
        "headrace",
        "Whose option meanings and defaults apply: Headrace's, or those of the reference's first (tf1) or second (tf2) "
        "application; the scripts of the reference (train.py) choose it by the options they are given.",
        aliases=("dialect",),
        choices=APPLICATIONS,
    )
    base_learning_rate: float | None = option(
        None,
        "Learning rate per image as a power of two: -11 means 2^-11 times the global batch.",
        aliases=("base_learning_rate_exponent",),
        check=between(-60, 20),
    )
    abs_learning_rate: float | None = option(None, "Initial learning rate for the whole global batch.", check=above(0))
    learning_rate_schedule: tuple[float, ...] | None = option(
        None, "Fractions of the run at which a stepped learning rate drops, such as 0.5,0.75.", kind=FLOATS
    )
    learning_rate_decay: float | None = option(
        None, "Factor applied at each drop of a stepped learning rate.", check=above(0)
    )
    lr_decay_rate: float | None = option(
        None, "Factor applied at each drop of an exponential learning rate.", check=above(0)
    )
    lr_drops: float | None = option(
        None, "Number of drops of an exponential learning rate over the whole run.", check=above(0)
    )
    poly_lr_decay_power: float | None = option(None, "Power of a polynomial learning rate.", check=above(0))
    poly_lr_end_ratio: float | None = option(
        None, "Final polynomial learning rate as a fraction of the initial one.", check=at_least(0)
    )
    abs_end_learning_rate: float | None = option(
        None, "Final polynomial learning rate for the whole global batch.", check=at_least(0)
    )
    rmsprop_decay: float | None = option(None, "Decay of RMSprop's mean square.", check=fraction)
    rmsprop_base_decay_exp: float | None = option(
        None, "Decay of RMSprop's mean square given as 1 - 2^N times the global batch.", check=between(-60, 0)
    )
    rmsprop_epsilon: float | None = option(None, "Epsilon added to RMSprop's mean square.", check=at_least(0))
    lars_weight_decay: float | None = option(None, "Weight decay applied inside LARS.", check=at_least(0))
    lars_eeta: float | None = option(None, "Trust coefficient of LARS.", check=above(0))
    lars_epsilon: float | None = option(None, "Epsilon added to the norms in LARS.", check=at_least(0))
    lars_skip_list: tuple[str, ...] = option((), "Parameters that LARS updates at the plain rate: beta gamma bias.")
    iterations: int | None = option(
        None, "Weight updates in the whole run, instead of a number of epochs.", check=at_least(1)
    )
    log_freq: int | None = option(None, "Weight updates between logs, with iterations.", check=at_least(1))
    epochs_per_ckpt: int | None = option(None, "Epochs between checkpoints.", check=at_least(1))
    ckpt_epochs_offset: int | None = option(None, "Epoch of the first checkpoint.", check=at_least(0))
    shards: int | None = option(
        None, "Devices per replica; without pipeline the network is split automatically.", check=at_least(1)
    )
    pipeline: bool | None = option(None, "Run the shards as a pipeline, split at pipeline_splits.")
    disable_variable_offloading: bool | None = option(None, "Keep the optimizer's state on the device.")
    offload_fp32_weight_copy: bool | None = option(
        None, "Keep 16-bit weights on the device and a 32-bit copy in host memory."
    )
    hostside_norm: bool | None = option(None, "Normalise images on the host instead of on the device.")
    hostside_image_mixing: bool | None = option(None, "Mix images on the host instead of on the device.")
    standard_imagenet: bool | None = option(None, "Use the standard input pipeline.")
    train_with_valid_preprocessing: bool | None = option(None, "Crop training images as validation does.")
    restore_path: str | None = option(None, "Directory of a run to resume or validate.")
    select_ipus: tuple[str, ...] = option(
        (), "Number of the first device for training, or AUTO.", aliases=("select_ipu",)
    )
    gc_profile: str | None = option(
        None,
        "Profile the first calls; --gc-profile without a value means IPU_PROFILE.",
        choices=("NO_PROFILE", "DEVICE_PROFILE", "IPU_PROFILE", "TILE_PROFILE"),
        bare_value="IPU_PROFILE",
    )
    syncs_per_epoch: float | None = option(
        None, "How often per epoch the processes synchronise their weights.", check=at_least(0)
    )
    epochs_per_sync: float | None = option(None, "Epochs between synchronisations of the processes.", check=at_least(0))
    identical_replica_seeding: bool | None = option(None, "Use the same seed on all replicas.")
    gather_conv_output: bool | None = option(None, "Combine the small sums over replicas of distributed batch norm.")
    conv_dithering: bool | None = option(
        None, "Spread convolutions over the IPU's tiles.", aliases=("enable_conv_dithering",)
    )
    min_remote_tensor_size: int | None = option(
        None, "Smallest tensor, in bytes, that is kept in the IPU's remote memory.", check=at_least(0)
    )
    scheduling_algorithm: str | None = option(None, "Order of operations on the IPU.")
    num_io_tiles: int | None = option(None, "Tiles of the IPU reserved for input and output.", check=at_least(0))
    on_demand: bool | None = option(None, "Attach to devices only when they are needed.")
    nanoo: bool | None = option(
        None, "Produce NaN where a 16-bit number overflows; off clips to the largest finite number."
    )


# How each option of the reference becomes ordinary options: a row per option.
#
# A row names the ordinary settings that an option stands for and converts its value to theirs; `option.key` is a key
# inside an option that is a mapping. An option whose row has `tf1_only` exists in application tf1 only.


Lookup = Callable[[str], Any]  # the value of an option: what was given, else the application's default
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class OptionRow:
    """One option: the settings it stands for, the conversion, and a description for the documentation.

    `no_effect` says why an option does nothing here.
    """

    option: str
    sets: tuple[str, ...] = ()
    convert: Callable[[Any, Lookup], Settings] | None = None
    description: str = ""
    tf1_only: bool = False
    of: str = ""  # the only optimizer it applies to
    no_effect: str = ""
    same: Mapping[str, str] = field(default_factory=dict)  # values that mean no more than the default, and why
    instead: str = ""  # the option to recommend to those who do not use that application


def global_batch(value_of: Lookup) -> int:
    """Return the images of one weight update."""
    each = value_of("micro_batch_size") * (value_of("num_replicas") or 1)
    return value_of("global_batch_size") or each * (value_of("gradient_accumulation_count") or 1)


Value = Callable[[Any, Lookup], Any]


def _as_given(value: object, _value_of: Lookup) -> Any:
    return value


def _row(option: str, setting: str, value: Value = _as_given, **more: Any) -> OptionRow:
    """Return the row of an option that stands for one setting."""
    return OptionRow(
        option=option, sets=(setting,), convert=lambda given, value_of: {setting: value(given, value_of)}, **more
    )


def _no_effect(reason: str, *options: str) -> tuple[OptionRow, ...]:
    """Return the rows of options that do nothing here."""
    return tuple(OptionRow(option=option, no_effect=reason) for option in options)


def _warmup(epochs: float, value_of: Lookup) -> Settings:
    """Rise from 0. A polynomial curve starts after the warm-up; the others run underneath it."""
    if not epochs or value_of("iterations"):
        return {"lr_warmup_params": None}
    mode = "shift" if value_of("lr_schedule") == "polynomial" else "mask"
    return {"lr_warmup_params": {"warmup_mode": mode, "warmup_epochs": epochs, "from_zero": True}}


def _log_freq(steps: int, value_of: Lookup) -> Settings:
    updates = value_of("iterations")
    return {"logs_per_epoch": max(1.0, updates / steps)} if updates else {}


def _end_ratio(rate: float, value_of: Lookup) -> float:
    first = (
        value_of("learning_rate")
        or value_of("abs_learning_rate")
        or 2.0 ** value_of("base_learning_rate") * global_batch(value_of)
    )
    return rate / first


def _shards(shards: int, value_of: Lookup) -> Settings:
    """Without a pipeline the network is split automatically, with one micro-batch in flight at a time."""
    if value_of("pipeline") or shards == 1:
        return {}
    return {"num_pipeline_stages": shards, "pipeline_schedule": "Sequential"}


def _pipeline(on: bool, value_of: Lookup) -> Settings:
    """With one shard all stages share a device: their splits are the points that recomputation starts from."""
    splits = value_of("pipeline_splits")
    if not on or (value_of("shards") or 1) > 1 or not splits:
        return {}
    return {"device_mapping": (0,) * (len(splits) + 1), "pipeline_schedule": "Sequential"}


def _profile(kind: str, value_of: Lookup) -> Settings:
    """Profile the first calls; with stages, also measure their schedule."""
    on = kind != "NO_PROFILE"
    stages = value_of("pipeline_splits") or max(value_of("num_pipeline_stages"), value_of("shards") or 1) > 1
    return {"profile": on, "trace_schedule": on} if stages else {"profile": on}


def _first_device(given: tuple[str, ...], value_of: Lookup) -> Settings:
    """Take the number of training's first device; the second number, validation's, has no use here."""
    return {"first_device": int(given[0])} if given and given[0].isdecimal() else {}


_LR = "lr_schedule_params."

ROWS = (
    _row(
        "base_learning_rate",
        f"{_LR}initial_learning_rate",
        lambda power, value_of: 2.0**power,
        description="2^N per image",
        tf1_only=True,
        instead="--learning-rate",
    ),
    _row("abs_learning_rate", f"{_LR}absolute_learning_rate", tf1_only=True, instead="--learning-rate"),
    _row("learning_rate_schedule", f"{_LR}drops", tf1_only=True),
    _row("learning_rate_decay", f"{_LR}factor", tf1_only=True),
    OptionRow(
        option="warmup_epochs",
        sets=("lr_warmup_params",),
        convert=_warmup,
        description="from 0, mask (polynomial: shift)",
    ),
    _row("lr_decay_rate", f"{_LR}decay_rate", tf1_only=True),
    _row(
        "lr_drops",
        f"{_LR}epochs_per_drop",
        lambda drops, value_of: value_of("num_epochs") / drops,
        description="epochs / N",
        tf1_only=True,
    ),
    _row("poly_lr_decay_power", f"{_LR}power", tf1_only=True),
    _row("poly_lr_end_ratio", f"{_LR}end_learning_rate_ratio", tf1_only=True),
    _row(
        "abs_end_learning_rate",
        f"{_LR}end_learning_rate_ratio",
        _end_ratio,
        description="X / first rate",
        tf1_only=True,
    ),
    _row("momentum", "optimizer_params.momentum"),
    _row("rmsprop_decay", "optimizer_params.decay", of="rmsprop"),
    _row("rmsprop_base_decay_exp", "optimizer_params.base_decay_exponent", of="rmsprop"),
    _row("rmsprop_epsilon", "optimizer_params.epsilon", of="rmsprop"),
    _row("lars_weight_decay", "optimizer_params.weight_decay", of="lars"),
    _row("lars_eeta", "optimizer_params.eeta", of="lars"),
    _row("lars_epsilon", "optimizer_params.epsilon", of="lars"),
    OptionRow(option="lars_skip_list", description="only beta gamma bias, which LARS always updates at the plain rate"),
    OptionRow(
        option="iterations",
        sets=("weight_updates_per_epoch", "num_epochs"),
        convert=lambda steps, value_of: {"weight_updates_per_epoch": steps, "num_epochs": 1},
        description="one epoch of N updates, without warm-up",
    ),
    OptionRow(option="log_freq", sets=("logs_per_epoch",), convert=_log_freq, description="iterations / N"),
    _row("epochs_per_ckpt", "ckpts_per_epoch", lambda epochs, value_of: 1 / epochs, description="1 / N"),
    *_no_effect("Checkpoints are placed so that the last one is at the end of the run.", "ckpt_epochs_offset"),
    OptionRow(
        option="shards",
        sets=("num_pipeline_stages", "pipeline_schedule"),
        convert=_shards,
        description="without --pipeline N stages, one after the other; with it N - 1 splits are required",
        tf1_only=True,
        instead="--num-pipeline-stages",
    ),
    OptionRow(
        option="pipeline",
        sets=("device_mapping", "pipeline_schedule"),
        convert=_pipeline,
        description="with one shard all stages are on one device",
        tf1_only=True,
        instead="--pipeline-splits or --num-pipeline-stages",
    ),
    _row(
        "disable_variable_offloading",
        "optimizer_state_offloading",
        lambda off, value_of: not off,
        description="off",
    ),
    *_no_effect(
        "--precision 16.32 keeps 32-bit weights on the device; --optimizer-state-offloading moves the rest.",
        "offload_fp32_weight_copy",
    ),
    _row(
        "hostside_norm",
        "accelerator_side_preprocess",
        lambda on, value_of: not on,
        description="off; on with no-",
    ),
    *_no_effect("Images are mixed on the device as part of the step, at no cost to the host.", "hostside_image_mixing"),
    *_no_effect("There is a single input pipeline, fast and reproducible.", "standard_imagenet"),
    OptionRow(
        option="train_with_valid_preprocessing",
        sets=("train_crop",),
        description="valid",
        convert=lambda on, value_of: {"train_crop": "valid"} if on else {},
    ),
    OptionRow(option="restore_path", description="train resumes that run, validation measures its checkpoints"),
    OptionRow(
        option="select_ipus",
        sets=("first_device",),
        convert=_first_device,
        description="number of the first device; AUTO leaves the choice open",
    ),
    OptionRow(
        option="gc_profile",
        sets=("profile", "trace_schedule"),
        description="on, unless NO_PROFILE; the schedule where there are stages",
        convert=_profile,
        same=dict.fromkeys(
            ("DEVICE_PROFILE", "TILE_PROFILE"),
            "XLA's profile has one kind: programs, kernels and the host, from which viewers choose.",
        ),
    ),
    *_no_effect(
        "Processes hold the same weights at every step; there is nothing to synchronise.",
        "syncs_per_epoch",
        "epochs_per_sync",
    ),
    *_no_effect("Random numbers are drawn per sample and per weight, not per replica.", "identical_replica_seeding"),
    *_no_effect("The sums of a batch norm cross replicas in one exchange anyway.", "gather_conv_output"),
    *_no_effect("It is about the IPU's tiles; other devices have none.", "conv_dithering", "num_io_tiles"),
    *_no_effect("State is moved to host memory as a whole.", "min_remote_tensor_size"),
    *_no_effect(
        "XLA orders operations itself; internal_exchange_optimization_target says what to optimise for.",
        "scheduling_algorithm",
    ),
    *_no_effect("Devices are always opened when a run needs them, not before.", "on_demand"),
    *_no_effect("Numbers that overflow become infinite, and a step with such a gradient changes no weight.", "nanoo"),
)
BY_OPTION: Mapping[str, OptionRow] = {row.option: row for row in ROWS}


# Ordinary options whose names mean another option in tf1, and what they say there where that is not its help.
MEANS_IN_TF1: Mapping[str, tuple[str, str]] = {
    "batch_size": ("micro_batch_size", "Images that one replica processes in one forward and backward pass."),
    "weight_decay": ("l2_regularization", ""),
    "available_memory_proportion": (
        "available_memory_proportion",
        "Share of the device's memory that the compiler plans with, as a fraction: 0.15.",
    ),
}


# The defaults of the reference's first application (tf1), by model family and dataset, and of its second (tf2).
#
# Where its documents state a default, it is that one (tests/seeds/options.yml has them all), even where the program was
# known to have another.


NORM_PARAMETERS = ("(beta|gamma)$",)
_SMALL = ("cifar10", "cifar100", "mnist", "fashion_mnist", "digits")


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """A family's defaults on one kind of dataset; `powers` are base learning rates by optimizer."""

    micro_batch_size: int
    num_epochs: int
    weight_decay: float
    powers: Mapping[str, float]
    drops: tuple[float, ...]
    label_smoothing: float = 0.0
    group_norm: bool = False
    stable_norm: bool = False


_LARGE_DROPS, _SMALL_DROPS = (0.3, 0.6, 0.8, 0.9), (0.5, 0.75)
_LARGE_POWERS = {"sgd": -8.0, "momentum": -11.0, "lars": -11.0, "rmsprop": -14.0}
_SMALL_POWERS = dict.fromkeys(_LARGE_POWERS, -6.0)


def _large(micro: int, **changes: Any) -> Defaults:
    row = {"num_epochs": 100, "weight_decay": 1e-4, "powers": _LARGE_POWERS, "drops": _LARGE_DROPS, "group_norm": True}
    return Defaults(micro_batch_size=micro, **(row | changes))


def _small(micro: int, **changes: Any) -> Defaults:
    row = {"num_epochs": 160, "weight_decay": 1e-6, "powers": _SMALL_POWERS, "drops": _SMALL_DROPS}
    return Defaults(micro_batch_size=micro, **(row | changes))


_EFFICIENT_POWERS = {"sgd": -7.0, "momentum": -10.0, "lars": -10.0, "rmsprop": -14.0}

# family -> (large images, small images)
TABLE: Mapping[str, tuple[Defaults, Defaults]] = {
    "resnet": (_large(4), _small(32)),
    "resnext": (_large(1, stable_norm=True), _small(8)),
    "efficientnet": (
        _large(
            4,
            num_epochs=350,
            weight_decay=1e-5,
            powers=_EFFICIENT_POWERS,
            label_smoothing=0.1,
            stable_norm=True,
        ),
        _small(8, num_epochs=300, group_norm=True),
    ),
    "squeezenet": (_large(2, group_norm=False), _small(128)),
}

# Independent of the family. Loss scaling suits float16, the only 16-bit format there.
_COMMON: Mapping[str, Any] = {
    "model_name": "resnet",
    "precision": "16.16",
    "half_type": "float16",
    "loss_scaling": 128.0,
    "label_smoothing_classes": "others",
    "lr_schedule": "stepped",
    "optimizer": "sgd",
    "pipeline_schedule": "Grouped",
    "seed": DRAWN_SEED,
    "logs_per_epoch": 16.0,
    "ckpts_per_epoch": 1.0,
    "validations_per_epoch": 1.0,
    "max_ckpts_to_keep": 999_999,
    "max_steps_per_call": 1000,
    "cutmix_version": 2,
    "momentum": 0.9,
    "warmup_epochs": 5.0,
    "learning_rate_decay": 0.1,
    "lr_decay_rate": 0.97,
    "lr_drops": 146.0,
    "poly_lr_decay_power": 2.0,
    "poly_lr_end_ratio": 1e-5,
    "rmsprop_epsilon": 1e-3,
    "lars_eeta": 0.001,
    "lars_epsilon": 0.0,
    "log_freq": 500,
    "num_replicas": 1,
}
_PATH_PARTS = (("imagenet", "imagenet"), ("cifar100", "cifar100"), ("cifar-100", "cifar100"), ("cifar", "cifar10"))

_TF2: Mapping[str, Any] = {
    "model_name": "toy_model",
    "dataset": "cifar10",
    "micro_batch_size": 1,
    "precision": "16.16",
    "half_type": "float16",
    "stochastic_rounding": False,
    "weight_decay": 1.0,
    "pipeline_schedule": "Grouped",
    "events_divide_epoch": True,
    "num_replicas": 1,
    "seed": DRAWN_SEED,
    "checkpoint_dir": f"/tmp/checkpoints_{CURRENT_TIME}",
    "clean_dir": True,
    "eight_bit_transfer": False,
    "pipeline_num_parallel": 48,
    "max_cross_replica_buffer_size": 0,
    "max_reduce_many_buffer_size": 0,
}


# Settings of the choices that the document of tf2 names without them, by the option that chooses. LARS and polynomial
# have those of tf1. The decay of LARS is left to weight_decay, which that application has beside it.
TF2_SETTINGS: Mapping[str, tuple[str, Mapping[str, Mapping[str, float]]]] = {
    "optimizer": (
        "optimizer_params",
        {"lars": {"weight_decay": 0.0, "eeta": _COMMON["lars_eeta"], "epsilon": _COMMON["lars_epsilon"]}},
    ),
    "lr_schedule": (
        "lr_schedule_params",
        {
            "polynomial": {
                "power": _COMMON["poly_lr_decay_power"],
                "end_learning_rate_ratio": _COMMON["poly_lr_end_ratio"],
            }
        },
    ),
}
# Options of tf1 that say what is so without them, and why.
SO_ANYWAY: Mapping[str, tuple[bool, str]] = {
    "hostside_norm": (False, "images are normalised on the device unless --hostside-norm is given"),
    "eight_bit_transfer": (True, "images cross to the device as 8 bits wherever it normalises them"),
}


def tf2_defaults(value_of: Lookup) -> dict[str, Any]:
    """Return the defaults of application tf2 where they differ from ours.

    Images are preprocessed on the host, unless they cross as 8 bits, which leaves that to the device, or a call is to
    be longer than an epoch: their bytes then stay on the device, which makes the pixels that the host would make. Who
    says how often to log says how long a call is. Datasets that can be downloaded are, if they are not found.
    """
    synthetic = value_of("generated_data") or value_of("synthetic_data")
    logs, stored = value_of("logs_per_epoch"), (value_of("dataset") or _TF2["dataset"]) in IMAGE_SIZES
    defaults = {
        **_TF2,
        "download": (value_of("dataset") or _TF2["dataset"]) in DOWNLOADED and not synthetic,
        "accelerator_side_preprocess": bool(value_of("eight_bit_transfer"))
        or (stored and logs is not None and logs < 1),
        "optimizer_state_offloading": _offloads(
            value_of, {"momentum": value_of("momentum"), **(value_of("optimizer_params") or {})}
        ),
    }
    if logs is not None:
        defaults["call_seconds"] = 0.0
    if value_of("batch_size"):
        del defaults["micro_batch_size"]  # the batch of a step is not an option there
    if value_of("clean_dir") is False:
        del defaults["checkpoint_dir"]  # what is to be kept belongs to the run
    return defaults


def _offloads(value_of: Lookup, optimizer_params: Mapping[str, object]) -> bool:
    """Say whether the optimizer's state (plain SGD has none) is kept in host memory: where it is idle for several micro
    batches, with gradient accumulation or a pipeline.
    """
    stages = value_of("pipeline_splits") or (value_of("num_pipeline_stages") or 1) > 1
    accumulates = (value_of("gradient_accumulation_count") or 1) > 1 or value_of("global_batch_size")
    has_state = (value_of("optimizer") or "sgd") != "sgd" or bool(optimizer_params.get("momentum"))
    return bool((stages or accumulates) and has_state)


def tf1_defaults(value_of: Lookup) -> dict[str, Any]:
    """Return the defaults of application tf1 where they differ from ours, and those of its own options."""
    dataset = value_of("dataset") or dataset_of_path(value_of("dataset_path"))
    name = value_of("model_name") or _COMMON["model_name"]
    small = dataset in _SMALL
    row = TABLE.get(family_of(name) or "resnet", TABLE["resnet"])[small]
    optimizer = value_of("optimizer") or _COMMON["optimizer"]
    decays = optimizer != "lars"
    family = {
        "dataset": dataset,
        "micro_batch_size": row.micro_batch_size,
        "num_epochs": row.num_epochs,
        "base_learning_rate": row.powers.get(optimizer, row.powers["momentum"]),
        "learning_rate_schedule": row.drops,
        "l2_regularization": row.weight_decay if decays else 0.0,
        "lars_weight_decay": row.weight_decay,
        "weight_decay_exclude": () if small else NORM_PARAMETERS,
        "label_smoothing": row.label_smoothing,
        "stable_norm": row.stable_norm,
    }
    if row.group_norm and family_of(name) in TABLE:
        family["norm_layer"] = {"name": "group_norm"}
    if dataset == "imagenet":
        family["normalization"] = "centred"
    if family_of(name) == "efficientnet":
        family["rmsprop_base_decay_exp"] = -14.0
    else:
        family["rmsprop_decay"] = 0.9
    return {**_COMMON, "optimizer_state_offloading": _offloads(value_of, {}), **family}


def dataset_of_path(path: str) -> str:
    """Return the dataset that a path names, or the folders in it if they name a single one; else auto."""
    if named := _named_in(path):
        return named
    try:
        inside = {_named_in(child.name) for child in Path(path).iterdir() if child.is_dir()} - {""}
    except OSError:
        inside = set()
    return inside.pop() if len(inside) == 1 else "auto"


def _named_in(path: str) -> str:
    text = path.lower()
    return next((name for word, name in _PATH_PARTS if word in text), "")
