"""The section of the schema for the reference's first application (dialect tf1): options that are said otherwise here.

None of them reaches a run: legacy_table.py turns each into settings of the other sections. A name that only spells an
option differently is an alias of that option instead.
"""

from dataclasses import dataclass

from headrace.config.field import option
from headrace.config.values import FLOATS, above, at_least, between, share


@dataclass(frozen=True, kw_only=True)
class Legacy:
    """Names of the reference's first application (dialect tf1), which stand for options above."""

    base_learning_rate: float | None = option(
        None,
        "Learning rate per image as a power of two: -11 means 2^-11 times the global batch.",
        aliases=("base_learning_rate_exponent",),
        check=between(-60, 20),
    )
    abs_learning_rate: float | None = option(
        None, "First learning rate itself, for the whole global batch.", check=above(0)
    )
    learning_rate_schedule: tuple[float, ...] | None = option(
        None, "Shares of the run at which a stepped learning rate drops, such as 0.5,0.75.", kind=FLOATS
    )
    learning_rate_decay: float | None = option(None, "Factor of each drop of a stepped rate.", check=above(0))
    warmup_epochs: float | None = option(
        None, "Epochs in which the rate rises from 0; 0 turns it off.", check=at_least(0)
    )
    lr_decay_rate: float | None = option(None, "Factor of each drop of an exponential rate.", check=above(0))
    lr_drops: float | None = option(None, "Drops of an exponential rate in the whole run.", check=above(0))
    poly_lr_decay_power: float | None = option(None, "Power of a polynomial rate.", check=above(0))
    poly_lr_end_ratio: float | None = option(None, "Last polynomial rate as a share of the first.", check=at_least(0))
    abs_end_learning_rate: float | None = option(None, "Last polynomial rate itself.", check=at_least(0))
    momentum: float | None = option(None, "Momentum of the optimizers that have one.", check=share)
    rmsprop_decay: float | None = option(None, "Share of the mean square that stays at each step.", check=share)
    rmsprop_base_decay_exp: float | None = option(
        None, "The same as 1 - 2^N times the global batch.", check=between(-60, 0)
    )
    rmsprop_epsilon: float | None = option(None, "Number added to RMSprop's mean square.", check=at_least(0))
    lars_weight_decay: float | None = option(None, "Weight decay inside LARS.", check=at_least(0))
    lars_eeta: float | None = option(None, "Trust coefficient of LARS.", check=above(0))
    lars_epsilon: float | None = option(None, "Number added to the norms of LARS.", check=at_least(0))
    lars_skip_list: tuple[str, ...] = option((), "Names that LARS leaves at the plain rate: beta gamma bias.")
    iterations: int | None = option(
        None, "Weight updates of the whole run, given instead of epochs.", check=at_least(1)
    )
    log_freq: int | None = option(None, "Weight updates from one log to the next, with iterations.", check=at_least(1))
    epochs_per_ckpt: int | None = option(None, "Epochs from one checkpoint to the next.", check=at_least(1))
    ckpt_epochs_offset: int | None = option(None, "Epoch at which the checkpoints start.", check=at_least(0))
    shards: int | None = option(
        None, "Devices of one replica; without pipeline the network is cut by itself.", check=at_least(1)
    )
    pipeline: bool | None = option(None, "Run the shards as a pipeline, cut at pipeline_splits.")
    sharding_exclude_filter: tuple[str, ...] = option((), "Places where automatic sharding must not cut.")
    sharding_include_filter: tuple[str, ...] = option((), "Places where automatic sharding may cut.")
    disable_variable_offloading: bool | None = option(None, "Keep the optimizer's state on the device.")
    offload_fp32_weight_copy: bool | None = option(
        None, "Keep 16-bit weights on the device and a 32-bit copy elsewhere."
    )
    hostside_norm: bool | None = option(None, "Normalise images on the host instead of on the device.")
    hostside_image_mixing: bool | None = option(None, "Mix images on the host instead of on the device.")
    standard_imagenet: bool | None = option(None, "The plain input pipeline.")
    train_with_valid_preprocessing: bool | None = option(None, "Crop training images as validation does.")
    weight_avg_n: tuple[float, ...] | None = option(
        None, "After training, the mean of the checkpoints of the last N epochs, for each N.", kind=FLOATS
    )
    weight_avg_exp: tuple[float, ...] | None = option(
        None, "After training, an exponential average of the checkpoints, for each decay.", kind=FLOATS
    )
    restore_path: str | None = option(None, "Directory of a run to go on with, or to validate.")
    select_ipus: tuple[str, ...] = option((), "First device of training, or AUTO.", aliases=("select_ipu",))
    gc_profile: str | None = option(
        None,
        "Profile of the first call; a bare --gc-profile means IPU_PROFILE.",
        choices=("NO_PROFILE", "DEVICE_PROFILE", "IPU_PROFILE", "TILE_PROFILE"),
        bare_value="IPU_PROFILE",
    )
    syncs_per_epoch: float | None = option(None, "Times per epoch that processes are made equal.", check=at_least(0))
    epochs_per_sync: float | None = option(None, "Epochs between two such times.", check=at_least(0))
    identical_replica_seeding: bool | None = option(None, "Seed all replicas alike.")
