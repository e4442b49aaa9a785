"""The interface to datasets: `find_set` finds and lists one, once; facts and opened splits are made of what it found.

`describe_dataset` and `open_dataset` are for those who need only one of both.
"""

import sys
import textwrap
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config.schema import Data
from headrace.config.section_data import FOLDER_SETS, IMAGE_DATASETS, OF_LABELS
from headrace.core.download import terminal_progress
from headrace.core.errors import ConfigError, DataError, did_you_mean
from headrace.core.local_path import is_address
from headrace.core.units import parse_bytes
from headrace.data.sets.bad_samples import BadSamples
from headrace.data.sets.catalog import KNOWN_SETS, SetFacts, SetRow, numbered_classes, usual_statistics
from headrace.data.sets.digits import read_digits
from headrace.data.sets.duplicates import quick_duplicates
from headrace.data.sets.file_problem import SplitPart, raise_problems
from headrace.data.sets.get import PUBLISHED, datasets_directory, get_set
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.image_sets import detect, imagenet_is_there, open_image_set
from headrace.data.sets.image_views import crop_rule, image_size_of, sent_size, sources_of, working_size
from headrace.data.sets.known_sets import SPLITS, Found, class_names, locate_folder, locate_set, read_split
from headrace.data.sets.named_places import named_place
from headrace.data.sets.output_labels import count_labels, normalised, refuse_kind, scale_of
from headrace.data.sets.source import Source, memory_source
from headrace.data.sets.stored_place import stand_in
from headrace.data.sets.synthetic import Synthetic, distinct_images, generated_source, synthetic_source
from headrace.rows.row import NO_SCALE, Scale
from headrace.rows.tasks import CLASSIFICATION, REGRESSION, TASKS

SYNTHETIC_SETS = ("generated", "synthetic")
_MOST_NAMED = 12  # classes whose names are shown
# As CIFAR-10 has.
_SYNTHETIC_SIZE, _SYNTHETIC_CLASSES, _SYNTHETIC_SAMPLES = 32, 10, 50_000


@dataclass(frozen=True, kw_only=True)
class DataInfo(SetFacts):
    """What a run needs to know about its dataset; augmentation and normalization are resolved, never `auto`."""

    image_dtype: str = "uint8"  # or float32, for arrays passed from Python
    varies: bool = False  # views differ from epoch to epoch (random crops), so the set cannot be kept on a device
    place: str = ""  # the path of an image set and how it was split
    synthetic_on: str = ""  # where synthetic images are generated: host or device
    sent_hw: tuple[int, int] | None = None  # of training images, where they are larger than the network's
    decoded_once: bool = False  # whole training images of `sent_hw` are kept, and cropped at random on the device
    train_counts: tuple[int, ...] = ()  # training images of each class or label; empty where they are not known
    task: str = CLASSIFICATION.name
    scale: Scale = NO_SCALE  # of the targets of a regression
    remarks: tuple[str, ...] = ()  # what the user should know about the files, such as skipped ones

    @property
    def size_text(self) -> str:
        """The classes, by name if they are few, and the images of both parts, in words."""
        few = self.class_names[:_MOST_NAMED] if self.num_classes <= _MOST_NAMED else ()
        named = few if few != numbered_classes(len(few)) else ()
        # Names come from files: one line, whatever is in them.
        names = ", ".join(textwrap.shorten(ascii(name)[1:-1] if not name.isprintable() else name, 40) for name in named)
        parts = f"{self.num_train:,} training and {self.num_validation:,} validation images"
        row = TASKS[self.task]
        word = row.output if self.num_classes == 1 else row.outputs
        return f"{self.num_classes:,} {word}{f' ({names})' if names else ''}, {parts}"

    @property
    def num_values(self) -> int:
        """Return how many numbers one image has."""
        return int(np.prod(self.image_hwc))

    @property
    def image_bytes(self) -> int:
        """Return the size of one image in bytes, as the source holds it."""
        return self.num_values * np.dtype(self.image_dtype).itemsize

    @property
    def num_train_values(self) -> int:
        """Return how many numbers one training image has when it reaches the device."""
        return int(np.prod((*(self.sent_hw or self.image_hwc[:2]), self.image_hwc[2])))

    @property
    def train_image_bytes(self) -> int:
        """Return the size of one training image in bytes, as the source holds it."""
        return self.num_train_values * np.dtype(self.image_dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """An opened dataset."""

    info: DataInfo
    train: Source
    validation: Source
    bad: BadSamples | None = None  # the broken images met so far, for sets that can have them

    def __repr__(self) -> str:
        info = self.info
        size, images = "x".join(map(str, info.image_hwc)), f"{len(self.train):,} training and {len(self.validation):,}"
        return f"DataSet({info.name}: {images} validation images, {size}, {info.num_classes:,} classes)"


# Options that say which set it is and what is listed of it; the others say what is made of its images.
LISTED = (
    *("dataset", "dataset_path", "dataset_disk_budget", "dataset_host_budget", "download"),
    *("generated_data", "synthetic_data", "task", *OF_LABELS[1:]),  # and labels, the list itself
    *("validation_path", "validation_split"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundSet:
    """A dataset as options find it: which it is, where it is, and its images listed, if it has files."""

    given: Data
    dataset: str
    dataset_path: str
    images: ImageSet | None = None
    is_absent: bool = False  # an ImageNet that is not on this machine, described as it was published

    def is_of(self, data: Data) -> bool:
        """Say whether options find the same set."""
        return _listed(data) == _listed(self.given)

    def info(self, data: Data) -> DataInfo:
        """Return the facts of the set as options take it, without reading its images."""
        data = self.placed(data)
        info = _describe_images(self.images, data) if self.images else _describe(data)
        return with_pixel_options(info, data)

    def open(self, data: Data, seed: int) -> DataSet:
        """Open the set; missing or damaged files are a DataError. Synthetic images depend on `seed`."""
        assert not self.is_absent
        data = self.placed(data)
        return open_images(self.images, data, seed) if self.images else _open(self.info(data), data, seed)

    def placed(self, data: Data) -> Data:
        """Return options with the name and the place of the set that was found."""
        return replace(data, dataset=self.dataset, dataset_path=self.dataset_path)


def _listed(data: Data) -> list[Any]:
    labels = data.labels and Path(data.labels).expanduser().absolute()  # as a run keeps it
    return [labels, *(getattr(data, name) for name in LISTED)]


def find_set(data: Data, *, absent_ok: bool = False) -> FoundSet:
    """Find the configured set and list its images; with `absent_ok` a missing ImageNet is one as published."""
    placed = resolved_set(data)
    found = FoundSet(given=data, dataset=placed.dataset, dataset_path=placed.dataset_path)
    if placed.dataset not in IMAGE_DATASETS or placed.synthetic_on:
        return found
    # Plans for ImageNet are made on laptops that do not have it.
    if placed.dataset == "imagenet" and absent_ok and not imagenet_is_there(placed):
        return replace(found, is_absent=True)
    return replace(found, images=open_image_set(placed, placed.dataset))


def describe_dataset(data: Data, *, absent_ok: bool = False) -> DataInfo:
    """Return what is known about the configured set without reading its images.

    With `absent_ok` a missing ImageNet is described as published, for planning.
    """
    return find_set(data, absent_ok=absent_ok).info(data)


def open_dataset(data: Data, seed: int) -> DataSet:
    """Read the configured set; missing or damaged files are a DataError. Synthetic images depend on `seed`."""
    return find_set(data).open(data, seed)


def _describe(data: Data) -> DataInfo:
    """Return the facts of a set that has no images listed: synthetic, absent, or known without its files."""
    if data.task != CLASSIFICATION.name:
        refuse_kind(data.task, f"the dataset {data.dataset}")
    if data.dataset in SYNTHETIC_SETS:
        return _describe_synthetic(data)
    if data.dataset == "imagenet":
        return _describe_imagenet(data)
    row = KNOWN_SETS.get(data.dataset)
    if row is None:
        raise ConfigError(
            f"There is no dataset {data.dataset}.", remedy=did_you_mean(data.dataset, [*KNOWN_SETS, *SYNTHETIC_SETS])
        )
    _refuse_contradictions(data, row)
    published: dict[str, Any] = {fact.name: getattr(row, fact.name) for fact in fields(SetFacts)}
    return replace(
        DataInfo(
            **published,
            place=_synthetic_place(data),
            synthetic_on=data.synthetic_on,
            train_counts=() if data.synthetic_on else row.train_counts,
        ),
        augmentation=_or(data.train_augmentation, row.augmentation),
        normalization=_or(data.normalization, row.normalization),
    )


def _open(info: DataInfo, data: Data, seed: int) -> DataSet:
    if info.synthetic_on:
        train, validation = (_synthetic(info, data, seed, split) for split in SPLITS)
        return DataSet(info=info, train=train, validation=validation)
    if info.name == "digits":
        return _from_parts(info, read_digits())
    row = KNOWN_SETS[info.name]
    found = _located(row, data)
    if found.missing:
        raise DataError(
            f"The dataset {row.name} in {found.directory} lacks {', '.join(found.missing)}.", remedy=row.how_to_get
        )
    parts = {split: read_split(found, row, split) for split in SPLITS}
    names = class_names(found, row)
    return _from_parts(replace(info, class_names=names), parts)


def _located(row: SetRow, data: Data) -> Found:
    """Return where the files of a set are; download them first if that was asked for and they are not there."""
    try:
        found = locate_set(row, data.dataset_path)
        if not (data.download and found.missing):
            return found
    except DataError:
        if not data.download:
            raise
    _download(row.name, data)
    return locate_set(row, data.dataset_path)


def _download(name: str, data: Data) -> None:
    directory = None if data.dataset_path == "." else Path(data.dataset_path).expanduser()
    print(f"downloading {name}, which was not found, to {directory or datasets_directory()}", file=sys.stderr)
    get_set(name, directory, tell=terminal_progress())


def _class_folders(data: Data) -> Path:
    """Return where a published set of class folders is; download it first if that was asked for and it is not there."""
    published = PUBLISHED[data.dataset]
    try:
        return locate_folder(published, data.dataset_path)
    except DataError:
        if not data.download:
            raise
    _download(published.name, data)
    return locate_folder(published, data.dataset_path)


def resolved_set(data: Data) -> Data:
    """Return the options with the dataset that `auto` finds, and the path of this machine at which it is read.

    A published set of class folders is these folders; for a place in a store there are stand-ins, for a name or a
    pattern a folder of links.
    """
    if data.dataset in IMAGE_DATASETS and (place := named_place(data.dataset_path)) is not None:
        data = replace(data, dataset_path=str(place))
    if is_address(data.dataset_path) and data.dataset not in ("digits", *SYNTHETIC_SETS) and not data.synthetic_on:
        budget = parse_bytes(data.dataset_disk_budget)
        data = replace(data, dataset_path=str(stand_in(data.dataset_path, budget)))
    if data.dataset in FOLDER_SETS:
        return replace(data, dataset="folder", dataset_path=str(_class_folders(data)))
    if data.dataset != "auto":
        return data
    kind = "csv" if data.labels else "folder" if data.label_pattern else detect(data.dataset_path)
    return replace(data, dataset=kind)


def open_images(images: ImageSet, data: Data, seed: int) -> DataSet:
    """Return a set of images that has been listed, opened as the options say."""
    info = with_pixel_options(_describe_images(images, data), data)
    train, validation, bad = sources_of(images, data, info.image_hwc[0], seed)
    # At the start of every run: images that are in both splits make an accuracy look better than it is, and nobody
    # would notice later.
    duplicates = quick_duplicates((images.train, images.validation))
    info = replace(info, remarks=(*info.remarks, *duplicates))
    return DataSet(info=info, train=scaled(train, info), validation=scaled(validation, info), bad=bad)


def scaled(source: Source, info: DataInfo) -> Source:
    """Return a split with the targets of a regression on their scale; any other as it is."""
    return source if info.task != REGRESSION.name else replace(source, labels=normalised(source.labels, info.scale))


def _describe_images(images: ImageSet, data: Data) -> DataInfo:
    size, channels = image_size_of(images, data), data.num_channels
    working = working_size(images, data, size)
    random_crops, sent = crop_rule(data, size) is not None, working or sent_size(data, size)
    form = f"decoded once as {sent}x{sent}" if working else f"sent as {sent}x{sent}" if sent else ""
    place = ", ".join(part for part in (images.place, images.split_by, form) if part)
    mean, std = usual_statistics(channels)
    is_regression = data.task == REGRESSION.name
    # Mirrored or cropped, an image may have another number: an angle, a place, a size. Else random crops of the decoder
    # are the crop; only images that arrive larger, or uncropped, are cropped on the device.
    augmentation = "none" if is_regression else "flip" if working or (random_crops and not sent) else "flip-crop"
    return DataInfo(
        name=images.kind,
        image_hwc=(size, size, channels),
        class_names=images.class_names,
        num_train=len(images.train),
        num_validation=len(images.validation),
        augmentation=_or(data.train_augmentation, augmentation),
        normalization=_or(data.normalization, "per-channel"),
        channel_mean=mean,
        channel_std=std,
        varies=random_crops and not working,
        place=place,
        sent_hw=(sent, sent) if sent else None,
        decoded_once=working is not None,
        train_counts=count_labels(images.train.labels, len(images.class_names)),
        task=data.task,
        scale=scale_of(images.train.labels, images.class_names, data, images.place) if is_regression else NO_SCALE,
        remarks=images.remarks,
    )


def _describe_imagenet(data: Data) -> DataInfo:
    """Return ImageNet (LSVRC 2012) as it was published."""
    size, channels = data.image_size or 224, data.num_channels
    sent, (mean, std) = sent_size(data, size), usual_statistics(channels)
    return DataInfo(
        name="imagenet",
        image_hwc=(size, size, channels),
        class_names=numbered_classes(1000),
        num_train=1_281_167,
        num_validation=50_000,
        augmentation=_or(data.train_augmentation, "flip-crop" if sent else "flip"),
        normalization=_or(data.normalization, "per-channel"),
        channel_mean=mean,
        channel_std=std,
        varies=not data.synthetic_on,
        place=_synthetic_place(data) or "not there, planned as published",
        synthetic_on=data.synthetic_on,
        sent_hw=(sent, sent) if sent else None,
    )


def _synthetic_place(data: Data) -> str:
    return f"synthetic, made on the {data.synthetic_on}" if data.synthetic_on else ""


def _from_parts(info: DataInfo, parts: dict[str, SplitPart]) -> DataSet:
    raise_problems(info.name, [finding for part in parts.values() for finding in part.findings])
    train, validation = (memory_source(parts[split].images, parts[split].labels) for split in SPLITS)
    return DataSet(info=info, train=train, validation=validation)


def _describe_synthetic(data: Data) -> DataInfo:
    size, channels = data.image_size or _SYNTHETIC_SIZE, data.num_channels
    num_classes = data.num_classes or _SYNTHETIC_CLASSES
    num_train = data.num_samples or _SYNTHETIC_SAMPLES
    return DataInfo(
        name=data.dataset,
        image_hwc=(size, size, channels),
        class_names=numbered_classes(num_classes),
        num_train=num_train,
        # An evaluation needs at least one image.
        num_validation=max(1, num_train // 5),
        augmentation=_or(data.train_augmentation, "none"),
        normalization=_or(data.normalization, "per-channel"),
        channel_mean=(0.5,) * channels,  # of uniform bytes
        channel_std=(0.28975,) * channels,
        synthetic_on=data.synthetic_on,
    )


def _synthetic(info: DataInfo, data: Data, seed: int, split: str) -> Source:
    num_samples = info.num_train if split == "train" else info.num_validation
    spec = Synthetic(
        seed=seed,
        split=split,
        image_hwc=info.image_hwc,
        num_classes=info.num_classes,
        num_distinct=distinct_images(num_samples, info.image_bytes, parse_bytes(data.dataset_device_budget)),
    )
    return synthetic_source(spec, num_samples) if info.synthetic_on == "device" else generated_source(spec, num_samples)


def _refuse_contradictions(data: Data, row: SetRow) -> None:
    """Refuse sizes that contradict the set's. Three channels are the option's default, so they are not checked."""
    facts = {
        "image_size": (data.image_size, row.image_hwc[0]),
        "num_channels": (None if data.num_channels == 3 else data.num_channels, row.image_hwc[2]),
        "num_classes": (data.num_classes, row.num_classes),
        "num_samples": (data.num_samples, row.num_train),
    }
    for name, (given, actual) in facts.items():
        if given is not None and given != actual:
            raise ConfigError(
                f"{name} is {given}, but the dataset {row.name} has {actual}.",
                rule=f"{name} is for the datasets generated and synthetic.",
                remedy=f"Leave --{name.replace('_', '-')} out.",
            )


def with_pixel_options(info: DataInfo, data: Data) -> DataInfo:
    """Return the facts with the mean and standard deviation of pixels that options give."""
    if data.pixel_mean is None and data.pixel_std is None:
        return info
    return replace(
        info,
        normalization=_or(data.normalization, "per-channel"),
        channel_mean=_for_channels("pixel_mean", data.pixel_mean, info.channel_mean),
        channel_std=_for_channels("pixel_std", data.pixel_std, info.channel_std),
    )


def _for_channels(name: str, given: tuple[float, ...] | None, default: tuple[float, ...]) -> tuple[float, ...]:
    if given is None:
        return default
    if len(given) not in (1, len(default)):
        raise ConfigError(
            f"{name} has {len(given)} numbers, but images have {len(default)} channel(s).",
            rule="Give one number for each channel, or one for all.",
        )
    return given * len(default) if len(given) == 1 else given


def _or(given: str, default: str) -> str:
    return default if given == "auto" else given
