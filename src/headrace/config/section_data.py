"""The sections of the schema about the dataset, how it reaches the device, and augmentation; their rules."""

from dataclasses import dataclass

from headrace.config.field import Facts, Remark, Rule, both_given, conflict, idle, option
from headrace.core.local_path import is_address, is_set_name, scheme_of
from headrace.rows.formats import FORMATS
from headrace.rows.tasks import TASKS
from headrace.rows.values import (
    ANYWHERE,
    BYTES,
    FLOATS,
    PATH,
    all_fractions,
    all_positive,
    at_least,
    between,
    fraction,
    pattern_of_one_group,
)

SYNTHETIC_DATASETS = ("generated", "synthetic")
FOLDER_SETS = ("imagenette", "imagenette160")  # published as class folders
IMAGE_DATASETS = ("auto", "imagenet", *FOLDER_SETS, *FORMATS)
# Height and width of the images of datasets that have one shape.
IMAGE_SIZES = {"digits": 32, "cifar10": 32, "cifar100": 32, "mnist": 28, "fashion_mnist": 28}
GREY_DATASETS = ("digits", "mnist", "fashion_mnist")
_PUBLISHED = tuple(IMAGE_SIZES)
DOWNLOADED = (*_PUBLISHED[1:], *FOLDER_SETS)  # the digits come with the package
KNOWN_SHAPES = (*_PUBLISHED, "imagenet")  # sets whose shape and number are known without their files
DATASETS = (*_PUBLISHED, *IMAGE_DATASETS, *SYNTHETIC_DATASETS)


OF_LABELS = ("labels", "image_column", "label_column", "image_suffix", "label_pattern")  # where labels come from


@dataclass(frozen=True, kw_only=True)
class Data:
    """The dataset, and how it reaches the device."""

    dataset: str = option(
        "digits",
        "Dataset to train on; auto detects the kind of files in dataset_path.",
        choices=DATASETS,
        synonyms=(("gc_imagenet", "imagenet"),),
        path_option="dataset_path",
    )
    dataset_path: str = option(
        ".",
        "Directory of the dataset or its parent, or its address in a store (s3://, gs://, az://, hf://, https://); if "
        "not given $DATASETS_DIR, then $DATA_DIR.",
        aliases=("data_dir",),
        kind=ANYWHERE,
    )
    validation_path: str | None = option(
        None,
        "Folder of validation images, one folder per class, if they are not in dataset_path; all images of "
        "dataset_path (or of train in it) are then for training.",
        kind=PATH,
    )
    task: str = option(
        "classification",
        "What the network says of an image: its class, any number of labels (multilabel), or one or several numbers "
        "(regression). Labels of the last two come from a CSV file (labels), an .npz file or arrays.",
        choices=tuple(TASKS),
        synonyms=(("classify", "classification"), ("regress", "regression"), ("tagging", "multilabel")),
    )
    labels: str | None = option(
        None,
        "CSV file that lists images: columns path, label and, optionally, split (train, val, test). Several labels of "
        "an image are separated by |, ; or spaces.",
        kind=PATH,
    )
    image_column: str | None = option(
        None, "Name of the column of images in the CSV file of labels; unset means path, file, image and the like."
    )
    label_column: str | None = option(
        None,
        "Name of the column of classes in the CSV file of labels; unset means label, class, target and the like. For "
        "regression and multilabel also several names, separated by commas, of columns of numbers or of 0 and 1.",
    )
    target_mean: tuple[float, ...] | None = option(
        None,
        "What is subtracted from each target of a regression in training; unset means the mean of the training images.",
        kind=FLOATS,
        chosen="that of the training images",
    )
    target_std: tuple[float, ...] | None = option(
        None,
        "What each target of a regression is then divided by; unset means the standard deviation in training.",
        kind=FLOATS,
        check=all_positive,
        chosen="that of the training images",
    )
    image_suffix: str | None = option(
        None, "What follows each value in the column of images, such as .jpg, where it holds names without it."
    )
    label_pattern: str | None = option(
        None,
        "Regular expression whose one group is the class in the name of an image file: '(.+)_[0-9]+[.]jpg' for "
        "cat_12.jpg; folders are then no classes.",
        check=pattern_of_one_group,
    )
    download: bool = option(False, "Download the dataset if its files are not found, as headrace data get does.")
    generated_data: bool = option(
        False, "Replace the dataset's images with random ones of the same shape and number, generated on the host."
    )
    synthetic_data: str | None = option(
        None,
        "Replace the dataset's images with random ones, generated on the device (ipu means the same), or on the host "
        "as with generated_data.",
        choices=("device", "ipu", "host"),
        synonyms=(("cpu", "host"),),
        bare_value="device",
    )
    image_size: int | None = option(
        None,
        "Height and width of images as the network sees them; unset fits the dataset.",
        check=at_least(1),
    )
    sent_image_size: int | None = option(
        None,
        "Height and width of training images as they are sent; the device crops image_size from each at random. "
        "Unset sends image_size.",
        check=at_least(1),
    )
    decode_once: str = option(
        "auto",
        "Decode each training image once, to sent_image_size (unset: twice image_size), keep it in memory, and crop it "
        "at random on the device; auto means on an accelerator, if all fit dataset_device_budget.",
        choices=("auto", "on", "off"),
        bare_value="on",
        no_value="off",
    )
    num_channels: int = option(3, "Channels of synthetic or decoded images: 3 (RGB) or 1 (grey).", check=at_least(1))
    num_classes: int | None = option(None, "Classes of a synthetic dataset.", check=at_least(2))
    num_samples: int | None = option(None, "Training images of a synthetic dataset.", check=at_least(1))
    validation_split: float = option(
        0.1,
        "Fraction of each class that is held out if a dataset of image files has no validation part.",
        check=fraction,
    )
    train_crop: str = option(
        "auto",
        "How training images are cropped: at random, as in the reference or torchvision, or as in validation.",
        choices=("auto", "reference", "torchvision", "valid"),
    )
    crop_area: tuple[float, ...] | None = option(
        None,
        "Smallest and largest fraction of an image that a random crop covers; unset means train_crop's.",
        kind=FLOATS,
    )
    crop_aspect: tuple[float, ...] | None = option(
        None,
        "Smallest and largest aspect ratio (width to height) of a random crop; unset means train_crop's.",
        kind=FLOATS,
    )
    crop_padding: int = option(
        4,
        "Pixels added on every side of a training image that is then cropped at random to its own size.",
        check=between(0, 64),
    )
    crop_fill: str = option(
        "zero", "What crop_padding adds: zeros, or the image mirrored at its edge.", choices=("zero", "reflect")
    )
    eval_resize_size: int | None = option(
        None,
        "Shorter side of validation images before the centre crop; unset means image_size * 256 / 224.",
        check=at_least(1),
    )
    eval_interpolation: str = option(
        "bilinear",
        "How validation images are resized; bicubic is for weights that were trained elsewhere with it.",
        choices=("bilinear", "bicubic"),
    )
    eval_reduced_decoding: bool = option(
        False,
        "Decode JPEGs that are at least twice as large as needed at 1/2, 1/4 or 1/8 of their size in a run's "
        "validations: quicker, but other pixels, whose accuracies are not comparable with those of other programs.",
    )
    resize_antialias: bool = option(
        True, "Average over all pixels when an image is shrunk; off interpolates between four neighbours."
    )
    verify_dataset: bool = option(
        False, "Check the whole dataset before the first step, as headrace data verify does, and stop at any problem."
    )
    max_bad_samples: float = option(
        0.001,
        "Fraction of broken images above which a run stops (one is always allowed, unless it is 0); each is replaced "
        "by the next of its class.",
        check=fraction,
    )
    train_augmentation: str = option(
        "auto",
        "Random changes of training images; auto chooses what suits the dataset.",
        choices=("auto", "none", "crop", "flip", "flip-crop"),
    )
    normalization: str = option(
        "auto",
        "How pixels become numbers for the network; auto chooses what suits the dataset.",
        aliases=("normalisation",),
        choices=("auto", "per-image", "per-channel", "centred", "zero-one", "none"),
    )
    pixel_mean: tuple[float, ...] | None = option(
        None,
        "Mean of each channel's pixels, from 0 to 1, for normalization per-channel or centred; unset means the "
        "dataset's.",
        kind=FLOATS,
        check=all_fractions,
    )
    pixel_std: tuple[float, ...] | None = option(
        None,
        "Standard deviation of each channel's pixels, on the scale of pixel_mean, for normalization per-channel; unset "
        "means the dataset's.",
        kind=FLOATS,
        check=all_positive,
    )
    accelerator_side_preprocess: bool = option(True, "Normalise and augment on the device instead of on the host.")
    eight_bit_transfer: bool | None = option(
        None,
        "Send images as 8-bit numbers; unset means whenever preprocessing is on the device.",
        aliases=("eight_bit_io",),
    )
    fused_preprocessing: bool = option(
        False, "Normalise in one pass; this is always done on the device, and no fourth channel is added."
    )
    shuffle: bool = option(True, "Shuffle the training images anew in every epoch.")
    balanced_sampling: bool = option(False, "Sample every class equally often, repeating the images of small ones.")
    repeated_augmentation: int = option(
        1,
        "How often each image of a step occurs in it, augmented differently each time; an epoch keeps its length, and "
        "so uses only that fraction of the images.",
        check=between(1, 64),
    )
    dataset_cache: str = option(
        "auto",
        "Where the dataset is kept; auto means on the device if it fits dataset_device_budget, raw and decoded (for "
        "images) in the host's memory.",
        choices=("auto", "device", "host", "raw", "decoded", "none"),
        no_value="none",
    )
    dataset_host_budget: str = option(
        "4GiB",
        "Bytes of host memory for images kept raw or decoded, or decoded once beyond dataset_device_budget.",
        kind=BYTES,
    )
    dataset_disk_budget: str = option(
        "200GiB", "Bytes of this machine's disk for what was fetched from a store; 0 keeps nothing.", kind=BYTES
    )
    dataset_device_budget: str = option("2GiB", "Bytes of device memory that the dataset may take.", kind=BYTES)
    pipeline_num_parallel: int | None = option(
        None,
        "Threads that prepare images on the host; unset means as many as there are processors.",
        check=at_least(1),
    )
    prefetch_depth: int = option(2, "Blocks of images prepared ahead of the device.", check=between(1, 255))

    @property
    def synthetic_on(self) -> str:
        """Return where synthetic images are generated: host or device; empty for real ones."""
        if self.generated_data or self.dataset == "generated" or self.synthetic_data == "host":
            return "host"
        return "device" if self.synthetic_data or self.dataset == "synthetic" else ""


def _only_for(name: str, datasets: tuple[str, ...], what: str) -> Rule:
    """Refuse an option that another dataset would ignore."""

    def broken(facts: Facts) -> bool:
        given = getattr(facts.config.data, name) != getattr(Data(), name)
        return given and facts.config.data.dataset not in datasets

    return Rule(
        broken=broken,
        problem=lambda facts: (
            f"{facts.describe(name)} is given for the dataset {facts.config.data.dataset}, which defines it."
        ),
        rule=f"{name} describes {what}: the datasets {', '.join(datasets)}.",
        remedy=f"Leave {name} out, or choose --dataset {datasets[-1]}.",
    )


IMAGE_OPTIONS = (
    "validation_split",
    "train_crop",
    "crop_area",
    "crop_aspect",
    "sent_image_size",
    "decode_once",
    "eval_resize_size",
    "eval_interpolation",
    "eval_reduced_decoding",
    "resize_antialias",
    "max_bad_samples",
)

DATA_RULES = (
    # Other paths are refused when they are read; this one may come from a variable that is there for other programs.
    Rule(
        broken=lambda facts: (
            scheme_of(facts.config.data.dataset_path)
            and not is_address(facts.config.data.dataset_path)
            and not is_set_name(facts.config.data.dataset_path)
            and facts.config.data.dataset not in ("digits", *SYNTHETIC_DATASETS)
        ),
        problem=lambda facts: f"{facts.describe('dataset_path')}.",
        rule="Only paths of this machine work.",
        remedy="Copy the files, or mount them, and give their path with --dataset-path.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.data.download
            and (facts.config.data.dataset not in DOWNLOADED or bool(facts.config.data.synthetic_on))
        ),
        problem=lambda facts: f"{facts.describe('download')} for the dataset {facts.config.data.dataset}.",
        rule=f"The datasets that are downloaded by name are {', '.join(DOWNLOADED)}.",
        remedy="Choose one with --dataset, or leave --download out.",
    ),
    *(_only_for(name, SYNTHETIC_DATASETS, "synthetic images") for name in ("num_classes", "num_samples")),
    *(
        _only_for(name, IMAGE_DATASETS + SYNTHETIC_DATASETS, "image files and synthetic images")
        for name in ("image_size", "num_channels")
    ),
    *(_only_for(name, IMAGE_DATASETS, "image files") for name in IMAGE_OPTIONS),
    conflict(
        "eval_interpolation",
        "resize_antialias",
        lambda facts: facts.config.data.eval_interpolation == "bicubic" and not facts.config.data.resize_antialias,
        "Without antialiasing, images are interpolated between four neighbours, which is bilinear.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.data.validation_path is not None and facts.config.data.dataset not in ("auto", "folder")
        ),
        problem=lambda facts: f"{facts.describe('validation_path')} for the dataset {facts.config.data.dataset}.",
        rule="It belongs to folders of images; other datasets contain both splits.",
        remedy="Leave --dataset out, or --validation-path.",
    ),
    *(
        Rule(
            broken=lambda facts, name=name: (
                getattr(facts.config.data, name) is not None and facts.config.data.labels is None
            ),
            problem=lambda facts, name=name: f"{facts.describe(name)}, and there is no CSV file.",
            rule=f"{name} is about the file that labels names.",
            remedy=f"Add --labels FILE, or leave {name} out.",
        )
        for name in ("image_column", "label_column", "image_suffix")
    ),
    Rule(
        broken=lambda facts: (
            facts.config.data.label_pattern is not None
            and (facts.config.data.labels is not None or facts.config.data.dataset not in ("auto", "folder"))
        ),
        problem=lambda facts: f"{facts.describe('label_pattern')}, and the labels are given in another way.",
        rule="label_pattern finds the class of an image in the name of its file.",
        remedy="Leave it out, or give a folder of images alone: --dataset-path FOLDER.",
    ),
    Rule(
        broken=lambda facts: facts.config.data.labels is not None and facts.config.data.dataset not in ("auto", "csv"),
        problem=lambda facts: f"{facts.describe('labels')} for the dataset {facts.config.data.dataset}.",
        rule="A CSV file lists the images and labels of a dataset itself.",
        remedy="Leave --dataset out, or --labels.",
    ),
    *(
        Rule(
            broken=lambda facts, name=name, fitting=fitting: (
                getattr(facts.config.data, name) is not None and facts.config.data.normalization not in fitting
            ),
            problem=lambda facts, name=name: (
                f"{facts.describe(name)}, but the normalization is {facts.config.data.normalization}."
            ),
            rule=f"{name} is for normalization {' and '.join(fitting[1:])}.",
            remedy=f"Leave {name} or normalization out.",
        )
        for name, fitting in (
            ("pixel_mean", ("auto", "per-channel", "centred")),
            ("pixel_std", ("auto", "per-channel")),
        )
    ),
    Rule(
        broken=lambda facts: any(value > 1 for value in facts.config.data.pixel_std or ()),
        problem=lambda facts: f"{facts.describe('pixel_std')}.",
        rule="Pixels are taken from 0 to 1, so their standard deviation is below 1.",
        remedy="Divide the numbers by 255.",
    ),
    Rule(
        broken=lambda facts: (
            facts.config.data.dataset_cache in ("raw", "decoded") and facts.config.data.dataset not in IMAGE_DATASETS
        ),
        problem=lambda facts: f"{facts.describe('dataset_cache')} for the dataset {facts.config.data.dataset}.",
        rule="raw and decoded are for image files; other datasets are in memory as they are.",
        remedy="Choose auto, device or host.",
    ),
    conflict(
        "dataset_host_budget",
        "dataset_cache",
        lambda facts: (
            facts.config.data.dataset_host_budget != Data().dataset_host_budget
            and facts.config.data.dataset_cache not in ("raw", "decoded")
            and facts.config.data.decode_once != "on"
        ),
        "The budget is for image files kept in the host's memory.",
        "Add --dataset-cache raw or decoded, or --decode-once on, or leave the budget out.",
    ),
    *(
        Rule(
            broken=lambda facts, name=name: (
                getattr(facts.config.data, name) is not None and is_address(facts.config.data.dataset_path)
            ),
            problem=lambda facts, name=name: f"{facts.describe(name)}, and {facts.describe('dataset_path')}.",
            rule="Images in a store are shards, tables, packed files, or class folders with folders train and val.",
            remedy=f"Leave --{name.replace('_', '-')} out, or copy the images to this machine.",
        )
        for name in ("labels", "validation_path", "label_pattern")
    ),
    Rule(
        broken=lambda facts: facts.config.data.download and is_address(facts.config.data.dataset_path),
        problem=lambda facts: f"{facts.describe('download')}, and {facts.describe('dataset_path')}.",
        rule="A dataset is downloaded to this machine.",
        remedy="Leave one of them out.",
    ),
    conflict(
        "dataset_disk_budget",
        "dataset_path",
        lambda facts: (
            facts.config.data.dataset_disk_budget != Data().dataset_disk_budget
            and not is_address(facts.config.data.dataset_path)
            and not is_set_name(facts.config.data.dataset_path)
        ),
        "The budget is for images that are fetched from a store.",
        "Give the address of a store with --dataset-path, or leave the budget out.",
    ),
    Rule(
        broken=lambda facts: bool(facts.config.data.sent_image_size and facts.config.data.synthetic_on),
        problem=lambda facts: f"{facts.describe('sent_image_size')}, but the images are synthetic.",
        rule="sent_image_size is for real images: synthetic ones are not cropped.",
        remedy="Leave sent_image_size out, or raise image_size.",
    ),
    conflict(
        "sent_image_size",
        "train_augmentation",
        lambda facts: (
            facts.config.data.sent_image_size
            and facts.config.data.train_augmentation in ("none", "flip")
            and facts.config.data.decode_once != "on"
        ),
        "Larger images are sent so that the device can crop them at random.",
        "Choose --train-augmentation crop or flip-crop, or --decode-once on, or leave one of the two out.",
    ),
    both_given(
        "generated_data",
        "synthetic_data",
        lambda facts: facts.config.data.generated_data and facts.config.data.synthetic_data is not None,
        "Generated images are made on the host and sent, synthetic ones are made on the device.",
    ),
    *(
        Rule(
            broken=lambda facts, name=name: (
                bool(getattr(facts.config.data, name)) and facts.config.data.dataset not in KNOWN_SHAPES
            ),
            problem=lambda facts, name=name: (
                f"{facts.describe(name)} for the dataset {facts.config.data.dataset}, "
                "whose shape is known only from its files."
            ),
            rule=f"Synthetic images can take the shape of {', '.join(KNOWN_SHAPES)}.",
            remedy="Choose one of these, or --dataset generated or synthetic with --image-size and --num-classes.",
        )
        for name in ("generated_data", "synthetic_data")
    ),
    Rule(
        broken=lambda facts: (
            facts.config.data.dataset in IMAGE_DATASETS and facts.config.data.num_channels not in (1, 3)
        ),
        problem=lambda facts: f"{facts.describe('num_channels')} for image files.",
        rule="Image files are decoded to 3 channels (RGB) or 1 (grey).",
        remedy="Leave num_channels out, or give 1.",
    ),
    conflict(
        "eight_bit_transfer",
        "accelerator_side_preprocess",
        lambda facts: facts.config.data.eight_bit_transfer and not facts.config.data.accelerator_side_preprocess,
        "Images preprocessed on the host are floating-point numbers; only raw pixels can cross as 8 bits.",
        "Set accelerator_side_preprocess, or leave eight_bit_transfer out.",
    ),
    conflict(
        "fused_preprocessing",
        "accelerator_side_preprocess",
        lambda facts: facts.config.data.fused_preprocessing and not facts.config.data.accelerator_side_preprocess,
        "What is fused is the device's preprocessing.",
    ),
    conflict(
        "balanced_sampling",
        "shuffle",
        lambda facts: facts.config.data.balanced_sampling and not facts.config.data.shuffle,
        "Which images of a class come, and when, is drawn at random.",
    ),
    conflict(
        "balanced_sampling",
        "dataset",
        lambda facts: facts.config.data.balanced_sampling and facts.config.data.dataset in SYNTHETIC_DATASETS,
        "Synthetic images have random labels, about equally many of each.",
        "Leave balanced_sampling out.",
    ),
    conflict(
        "repeated_augmentation",
        "shuffle",
        lambda facts: facts.config.data.repeated_augmentation > 1 and not facts.config.data.shuffle,
        "An epoch sees only a part of the images, which must be another one each time.",
    ),
    conflict(
        "repeated_augmentation",
        "balanced_sampling",
        lambda facts: facts.config.data.repeated_augmentation > 1 and facts.config.data.balanced_sampling,
        "Both say how often an image occurs in an epoch.",
    ),
)

DATA_WARNINGS = (
    Remark(
        when=lambda facts: facts.config.data.eval_reduced_decoding and facts.config.validation.validation,
        text=lambda facts: (
            f"Validation decodes large JPEGs at a fraction of their size, {facts.describe('eval_reduced_decoding')}: "
            "its accuracy is not comparable with that of the exact pixels."
        ),
    ),
)

DATA_NOTES = (
    idle(
        "dataset_path",
        "dataset",
        lambda facts: (
            facts.config.data.dataset in ("digits", "synthetic")
            and facts.given("dataset_path")
            and facts.origins["dataset_path"].kind != "environment"
        ),
    ),
    Remark(
        when=lambda facts: facts.config.data.fused_preprocessing,
        text=lambda facts: (
            f"{facts.describe('fused_preprocessing')} changes nothing: the device always normalises in one pass, and "
            "images keep their channels (no fourth one is added)."
        ),
    ),
    *(
        idle(
            name,
            "train_augmentation",
            lambda facts, name=name: facts.given(name) and facts.config.data.train_augmentation in ("none", "flip"),
        )
        for name in ("crop_padding", "crop_fill")
    ),
)
