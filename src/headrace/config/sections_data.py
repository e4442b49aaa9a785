"""The section of the schema that names the data set and says how it reaches the device."""

from dataclasses import dataclass

from headrace.config.field import option
from headrace.config.values import BYTES, at_least, between

DATASETS = ("digits", "cifar10", "cifar100", "mnist", "fashion_mnist", "generated", "synthetic")
MADE_UP_DATASETS = ("generated", "synthetic")


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
