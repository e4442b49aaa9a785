"""The sections of the schema that say what is run: the run, the data, the model, the batches and the periods."""

# ruff: noqa: RUF009 (option() makes a dataclass field, with a fresh copy of a mapping each time)

from dataclasses import dataclass
from typing import Any

from headrace.config.field import option
from headrace.config.values import BYTES, FRACTION, at_least, between, updates

DATASETS = ("digits", "cifar10", "cifar100", "mnist", "fashion_mnist", "generated", "synthetic")
MADE_UP_DATASETS = ("generated", "synthetic")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run as a whole."""

    seed: int = option(
        0,
        "Number from which all randomness of the run derives: weights, order of samples, augmentation, rounding.",
        check=between(0, 2**32 - 1),
    )
    training: bool = option(True, "Train; without it the run only validates.")
    compile_only: bool = option(False, "Compile the programs, report time and memory, and stop.")
    platform: str = option("auto", "Kind of device to run on.", choices=("auto", "cpu", "cuda", "rocm", "tpu"))
    compilation_cache_dir: str | None = option(
        None,
        "Directory of compiled programs kept for later runs; unset means the user's cache directory, none means off.",
        aliases=("executable_cache_path",),
    )
    target_accuracy: float | None = option(
        None,
        "Top-1 accuracy, from 0 to 1, whose first time of reaching it is recorded.",
        check=between(0, 1),
    )


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data set, and how it reaches the device."""

    dataset: str = option("digits", "Data set to train on.", choices=DATASETS)
    dataset_path: str = option(
        ".",
        "Directory that holds the data set or a directory of it; without it $DATASETS_DIR, then $DATA_DIR.",
        aliases=("data_dir",),
    )
    image_size: int | None = option(None, "Height and width of made-up images.", check=at_least(1))
    num_channels: int = option(3, "Channels of made-up images.", check=at_least(1))
    num_classes: int | None = option(None, "Classes of a made-up data set.", check=at_least(2))
    num_samples: int | None = option(None, "Training images of a made-up data set.", check=at_least(1))
    train_augmentation: str = option(
        "auto",
        "Random changes of training images; auto takes what suits the data set.",
        choices=("auto", "none", "crop", "flip", "flip-crop"),
    )
    normalization: str = option(
        "auto",
        "How pixels become numbers for the network; auto takes what suits the data set.",
        aliases=("normalisation",),
        choices=("auto", "per-image", "per-channel", "zero-one", "none"),
    )
    accelerator_side_preprocess: bool = option(True, "Normalise and augment on the device instead of on the host.")
    eight_bit_transfer: bool | None = option(
        None,
        "Send images as 8-bit numbers; unset means whenever preprocessing is on the device.",
        aliases=("eight_bit_io",),
    )
    shuffle: bool = option(True, "Take the training images in a new order in every epoch.")
    dataset_cache: str = option(
        "auto",
        "Where the decoded data set is kept; auto means on the device if it fits dataset_device_budget.",
        choices=("auto", "device", "host"),
        no_value="host",
    )
    dataset_device_budget: str = option("2GiB", "Bytes of device memory that the data set may take.", kind=BYTES)
    pipeline_num_parallel: int | None = option(
        None,
        "Threads that prepare images on the host; unset means as many as there are processors.",
        check=at_least(1),
    )
    prefetch_depth: int = option(2, "Blocks of images prepared ahead of the device.", check=between(1, 255))


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network."""

    model_name: str = option("cifar_resnet8", "Network to train; `headrace models` lists them.", aliases=("model",))
    norm_layer: dict[str, Any] = option(
        {"name": "batch_norm"},
        "Normalisation layer: name batch_norm, group_norm (with num_groups or channels_per_group) or none.",
    )
    bn_momentum: float = option(
        0.97,
        "Share of the running statistics of batch norm that stays at each step.",
        aliases=("bn_decay",),
        check=between(0, 1),
    )
    norm_epsilon: float | None = option(
        None, "Number added to variances in normalisation; unset means the model's own.", check=at_least(0)
    )
    stable_norm: bool = option(False, "Compute variances in two passes: slower and more exact.")
    dbn_replica_group_size: int = option(
        1,
        "Consecutive replicas whose micro-batches share the statistics of batch norm; 1 means each has its own.",
        aliases=("bn_span",),
        check=at_least(1),
    )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Batches, epochs, and how often things happen."""

    micro_batch_size: int = option(
        1, "Images that one replica sees in one forward and backward pass.", aliases=("batch_size",), check=at_least(1)
    )
    num_replicas: int = option(1, "Data-parallel copies of the model.", aliases=("replicas",), check=at_least(1))
    gradient_accumulation_count: int | None = option(
        None,
        "Micro-batches of a replica whose gradients are averaged for one weight update; unset means 1.",
        aliases=("gradient_accumulation",),
        check=at_least(1),
    )
    global_batch_size: int | None = option(
        None, "Images per weight update; given instead of gradient_accumulation_count.", check=at_least(1)
    )
    gradient_accumulation_dtype: str = option(
        "float32", "Number format in which gradients are accumulated.", choices=("float32", "bfloat16", "float16")
    )
    num_epochs: int = option(1, "Passes over the training images.", aliases=("epochs",), check=at_least(1))
    weight_updates_per_epoch: int = option(
        -1, "Weight updates that make an epoch; -1 means as many as the data set has whole batches.", check=updates
    )
    logs_per_epoch: float = option(
        1.0,
        "How often per epoch results come back from the device; below 1 means every so many epochs, 0 only at the end.",
        kind=FRACTION,
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
