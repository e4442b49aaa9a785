"""The defaults of the reference's first application (tf1), by model family and dataset, and of its second (tf2).

Where its documents state a default, it is that one (tests/seeds/options.yml has them all), even where the program was
known to have another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config.model_table import family_of
from headrace.config.section_data import DOWNLOADED
from headrace.config.section_learning import CURRENT_TIME
from headrace.config.section_run import DRAWN_SEED
from headrace.reference.option_table import Lookup

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


def tf2_defaults(value_of: Lookup) -> dict[str, Any]:
    """Return the defaults of application tf2 where they differ from ours.

    Images are preprocessed on the host, unless they cross as 8 bits, which leaves that to the device. Datasets that can
    be downloaded are, if they are not found.
    """
    made_up = value_of("generated_data") or value_of("synthetic_data")
    defaults = {
        **_TF2,
        "download": (value_of("dataset") or _TF2["dataset"]) in DOWNLOADED and not made_up,
        "accelerator_side_preprocess": bool(value_of("eight_bit_transfer")),
        "optimizer_state_offloading": _offloads(
            value_of, {"momentum": value_of("momentum"), **(value_of("optimizer_params") or {})}
        ),
    }
    if value_of("batch_size"):
        del defaults["micro_batch_size"]  # the batch of a step is not an option there
    if value_of("clean_dir") is False:
        del defaults["checkpoint_dir"]  # what is to be kept belongs to the run
    return defaults


def _offloads(value_of: Lookup, optimizer_params: Mapping[str, Any]) -> bool:
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
        "group_norm": row.group_norm and family_of(name) in TABLE,
    }
    if dataset == "imagenet":
        family["normalise_input"] = False
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
