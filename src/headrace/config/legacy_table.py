"""The table that turns options of the reference's first application (dialect tf1) into settings of ours.

A row says which settings an option stands for and how its value becomes theirs. `option.key` is a key inside an option
that is a mapping. Rows with `selects` have a meaning in dialect tf1 only, and so select it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ViewSpec = Callable[[str], Any]  # the value of an option so far: what was given, else the dialect's default
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Legacy:
    """One option: the settings it stands for, its conversion, and in words what it does here.

    `no_effect` says why an option does nothing.
    """

    option: str
    sets: tuple[str, ...] = ()
    convert: Callable[[Any, ViewSpec], Settings] | None = None
    words: str = ""
    selects: bool = False
    of: str = ""  # the only optimizer that it concerns
    no_effect: str = ""


def global_batch(look: ViewSpec) -> int:
    """Return the images of one weight update."""
    each = look("micro_batch_size") * look("num_replicas")
    return look("global_batch_size") or each * (look("gradient_accumulation_count") or 1)


def _key(name: str) -> Callable[[Any, ViewSpec], Settings]:
    return lambda value, look: {name: value}


def _row(option: str, setting: str, of: str = "") -> Legacy:
    """Return the row of an option that is one key of one of ours."""
    return Legacy(option=option, sets=(setting,), convert=_key(setting), of=of)


def _rate_row(option: str, setting: str, words: str = "") -> Legacy:
    return Legacy(option=option, sets=(setting,), convert=_key(setting), words=words, selects=True)


def _warmup(epochs: float, look: ViewSpec) -> Settings:
    """Rise from 0; a polynomial rate starts after that, the others run underneath."""
    if not epochs or look("iterations"):
        return {"lr_warmup_params": None}
    mode = "shift" if look("lr_schedule") == "polynomial" else "mask"
    return {"lr_warmup_params": {"warmup_mode": mode, "warmup_epochs": epochs, "from_zero": True}}


def _log_freq(steps: int, look: ViewSpec) -> Settings:
    updates = look("iterations")
    return {"logs_per_epoch": max(1.0, updates / steps)} if updates else {}


def _abs_end_rate(rate: float, look: ViewSpec) -> Settings:
    first = look("abs_learning_rate") or 2.0 ** look("base_learning_rate") * global_batch(look)
    return {"lr_schedule_params.end_learning_rate_ratio": rate / first}


def _shards(shards: int, look: ViewSpec) -> Settings:
    """Without a pipeline the network is cut by itself, and one micro batch is under way at a time."""
    if look("pipeline") or shards == 1:
        return {}
    return {"num_pipeline_stages": shards, "pipeline_schedule": "Sequential"}


def _pipeline(on: bool, look: ViewSpec) -> Settings:
    """With one shard all stages are on one device: their cuts are the points that recomputation starts from."""
    splits = look("pipeline_splits")
    if not on or (look("shards") or 1) > 1 or not splits:
        return {}
    return {"device_mapping": (0,) * (len(splits) + 1), "pipeline_schedule": "Sequential"}


def _profile(kind: str, look: ViewSpec) -> Settings:
    """Profile the first calls, and where there are stages measure their schedule."""
    on = kind != "NO_PROFILE"
    stages = look("pipeline_splits") or max(look("num_pipeline_stages"), look("shards") or 1) > 1
    return {"profile": on, "trace_schedule": on} if stages else {"profile": on}


_OWN_PIPELINE = "Images are read and prepared in one way only, fast and reproducible at once."
_EQUAL = "Processes hold the same weights at every step; there is nothing to make equal."
_MIXED = "Images are mixed on the device, as part of the step, at no cost to the host."

ROWS = (
    Legacy(
        option="base_learning_rate",
        sets=("lr_schedule_params.initial_learning_rate",),
        convert=lambda power, look: {"lr_schedule_params.initial_learning_rate": 2.0**power},
        words="2^N per image",
        selects=True,
    ),
    Legacy(
        option="abs_learning_rate",
        sets=("lr_schedule_params.absolute_learning_rate",),
        convert=_key("lr_schedule_params.absolute_learning_rate"),
        selects=True,
    ),
    _rate_row("learning_rate_schedule", "lr_schedule_params.drops"),
    _rate_row("learning_rate_decay", "lr_schedule_params.factor"),
    Legacy(
        option="warmup_epochs",
        sets=("lr_warmup_params",),
        convert=_warmup,
        words="from 0, mask (polynomial: shift)",
        selects=True,
    ),
    _rate_row("lr_decay_rate", "lr_schedule_params.decay_rate"),
    Legacy(
        option="lr_drops",
        sets=("lr_schedule_params.epochs_per_drop",),
        convert=lambda drops, look: {"lr_schedule_params.epochs_per_drop": look("num_epochs") / drops},
        words="epochs / N",
        selects=True,
    ),
    _rate_row("poly_lr_decay_power", "lr_schedule_params.power"),
    _rate_row("poly_lr_end_ratio", "lr_schedule_params.end_learning_rate_ratio"),
    Legacy(
        option="abs_end_learning_rate",
        sets=("lr_schedule_params.end_learning_rate_ratio",),
        convert=_abs_end_rate,
        words="X / first rate",
        selects=True,
    ),
    _row("momentum", "optimizer_params.momentum"),
    _row("rmsprop_decay", "optimizer_params.decay", of="rmsprop"),
    _row("rmsprop_base_decay_exp", "optimizer_params.base_decay_exponent", of="rmsprop"),
    _row("rmsprop_epsilon", "optimizer_params.epsilon", of="rmsprop"),
    _row("lars_weight_decay", "optimizer_params.weight_decay", of="lars"),
    _row("lars_eeta", "optimizer_params.eeta", of="lars"),
    _row("lars_epsilon", "optimizer_params.epsilon", of="lars"),
    Legacy(option="lars_skip_list", words="only beta gamma bias, which LARS always leaves at the plain rate"),
    Legacy(
        option="iterations",
        sets=("weight_updates_per_epoch", "num_epochs"),
        convert=lambda steps, look: {"weight_updates_per_epoch": steps, "num_epochs": 1},
        words="one epoch of N updates, without warm-up",
    ),
    Legacy(option="log_freq", sets=("logs_per_epoch",), convert=_log_freq, words="iterations / N"),
    Legacy(
        option="epochs_per_ckpt",
        sets=("ckpts_per_epoch",),
        convert=lambda epochs, look: {"ckpts_per_epoch": 1 / epochs},
        words="1 / N",
    ),
    Legacy(
        option="ckpt_epochs_offset",
        no_effect="Checkpoints fall so that the last one is at the end of the run.",
    ),
    Legacy(
        option="shards",
        sets=("num_pipeline_stages", "pipeline_schedule"),
        convert=_shards,
        words="without --pipeline N stages, one after the other; with it N - 1 splits are asked for",
        selects=True,
    ),
    Legacy(
        option="pipeline",
        sets=("device_mapping", "pipeline_schedule"),
        convert=_pipeline,
        words="with one shard all stages are on one device",
        selects=True,
    ),
    *(
        Legacy(
            option=f"sharding_{kind}_filter",
            no_effect="Cuts are found from the time and memory of blocks, not by name.",
        )
        for kind in ("exclude", "include")
    ),
    Legacy(
        option="disable_variable_offloading",
        sets=("optimizer_state_offloading",),
        words="off",
        convert=lambda off, look: {"optimizer_state_offloading": not off},
    ),
    Legacy(
        option="offload_fp32_weight_copy",
        no_effect="--precision 16.32 keeps 32-bit weights on the device; --optimizer-state-offloading moves the rest.",
    ),
    Legacy(
        option="hostside_norm",
        sets=("accelerator_side_preprocess",),
        words="off; on with no-",
        convert=lambda on, look: {"accelerator_side_preprocess": not on},
    ),
    Legacy(option="hostside_image_mixing", no_effect=_MIXED),
    Legacy(option="standard_imagenet", no_effect=_OWN_PIPELINE),
    Legacy(
        option="train_with_valid_preprocessing",
        sets=("train_crop",),
        words="valid",
        convert=lambda on, look: {"train_crop": "valid"} if on else {},
    ),
    *(
        Legacy(
            option=option,
            sets=("max_ckpts_to_keep",),
            convert=lambda values, look: {"max_ckpts_to_keep": 1_000_000} if values else {},
            words="averages made and validated after training, from all checkpoints",
        )
        for option in ("weight_avg_n", "weight_avg_exp")
    ),
    Legacy(option="restore_path", words="train goes on with that run, validation measures its checkpoints"),
    Legacy(option="select_ipus", words="number of the first device; AUTO means 0"),
    Legacy(
        option="gc_profile",
        sets=("profile", "trace_schedule"),
        words="on, unless NO_PROFILE; the schedule where there are stages",
        convert=_profile,
    ),
    Legacy(option="syncs_per_epoch", no_effect=_EQUAL),
    Legacy(option="epochs_per_sync", no_effect=_EQUAL),
    Legacy(option="identical_replica_seeding", no_effect="Randomness belongs to samples and weights, not to replicas."),
)
BY_OPTION: Mapping[str, Legacy] = {row.option: row for row in ROWS}
