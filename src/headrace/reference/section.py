"""The options of the reference's applications that have no counterpart of the same meaning among ours.

None of them reaches a run: option_table.py translates each into ordinary options, or says why it has no effect. A name
that merely spells an ordinary option differently is an alias of that option instead.
"""

from dataclasses import dataclass
from typing import ClassVar

from headrace.config.field import option
from headrace.config.values import FLOATS, above, at_least, between, fraction

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
