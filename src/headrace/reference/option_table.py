"""How each option of the reference becomes ordinary options: a row per option.

A row names the ordinary settings that an option stands for and converts its value to theirs; `option.key` is a key
inside an option that is a mapping. An option whose row has `tf1_only` exists in application tf1 only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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


def _as_given(value: Any, _value_of: Lookup) -> Any:
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
