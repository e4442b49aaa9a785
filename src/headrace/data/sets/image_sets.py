"""Sets of images: recognise how one is stored, list its samples, and choose image size and crops."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import ConfigError, DataError, nearest
from headrace.core.units import format_bytes, parse_bytes
from headrace.data.decoding.crop import CROP_RULES, MIN_CROPPED, CropRule, uncropped_side
from headrace.data.decoding.image import BadImage, read_header
from headrace.data.decoding.image_source import ViewSpec, decoded_source
from headrace.data.decoding.working_source import working_source
from headrace.data.sets.bad_samples import BadSamples
from headrace.data.sets.cached_samples import KEPT, Budget, CachedSamples
from headrace.data.sets.catalog import KNOWN_SETS, numbered_classes
from headrace.data.sets.class_check import check_classes
from headrace.data.sets.csv_set import columns_of, read_csv_set
from headrace.data.sets.folder import ClassFolders, has_class_folders, read_folders, refuse_loose_images
from headrace.data.sets.held_out import hold_out
from headrace.data.sets.indexed_samples import Index, StoredSamples, empty_classes, refuse_new_labels
from headrace.data.sets.known_sets import locate_set
from headrace.data.sets.npz_set import is_npz, read_npz_set
from headrace.data.sets.pack import Pack, is_pack, open_pack
from headrace.data.sets.parquet_set import parquet_files, read_parquet_set
from headrace.data.sets.samples import Samples
from headrace.data.sets.source import Source
from headrace.data.sets.table_set import TableSet
from headrace.data.sets.tar_shards import has_tar_shards, plain_content, tar_index, tar_shards
from headrace.data.sets.tfrecords import (
    IMAGENET,
    TFDS_SHARD,
    has_shards,
    index_of,
    samples_of,
    shards,
    tfds_names,
    tfds_schema,
)

_LARGE = 224  # the usual side
_NUM_SIZED = 64  # images whose sizes decide the network's input size


@dataclass(frozen=True, kw_only=True)
class KindRow:
    """A kind of image set: its name, a description for messages, and how it is recognised."""

    name: str
    description: str
    fits: Callable[[Path], bool]


# The most specific first: nearly any directory of images is a set of class folders.
KINDS = (
    KindRow(name="packed", description="a packed file (*.hrp)", fits=is_pack),
    KindRow(name="npz", description="arrays of images and labels (*.npz)", fits=is_npz),
    KindRow(
        name="parquet", description="tables with images and labels (*.parquet)", fits=lambda p: bool(parquet_files(p))
    ),
    KindRow(name="tfrecord", description="ImageNet's TFRecords (train-00000-of-01024)", fits=has_shards),
    KindRow(
        name="tfds",
        description="records that TFDS prepared (NAME-train.tfrecord-00000-of-00001)",
        fits=lambda path: has_shards(path, TFDS_SHARD),
    ),
    KindRow(name="tar", description="tar shards (*.tar, *.tar.gz)", fits=has_tar_shards),
    KindRow(name="folder", description="class folders (train/CLASS/*.jpg or CLASS/*.jpg)", fits=has_class_folders),
)


def detect_kind(path: Path) -> str | None:
    """Return the kind of image set at a path, or None."""
    return next((row.name for row in KINDS if row.fits(path)), None)


def detect(dataset_path: str) -> str:
    """Return the dataset's name or kind from the contents of a folder; nothing known is a DataError."""
    path = Path(dataset_path).expanduser()
    _refuse_missing(path)
    kind = detect_kind(path)
    if kind is not None:
        return kind
    below = {}
    for name, row in KNOWN_SETS.items():
        with suppress(DataError):
            if row.layouts:
                below[name] = locate_set(row, dataset_path).directory
    if here := [name for name, directory in below.items() if directory == path]:
        return here[0]
    for name, directory in below.items():
        raise DataError(
            f"{path.absolute()} is not a dataset, but {directory.name} in it is {name}.",
            remedy=f"Give --dataset-path {directory}, or add --dataset {name}.",
        )
    refuse_loose_images(path)
    raise DataError(
        f"{path.absolute()} holds no known dataset.",
        rule=f"Known: {'; '.join(row.description for row in KINDS)}; the files of {', '.join(list(KNOWN_SETS)[1:])}.",
        remedy="Give the folder itself with --dataset-path, or name the set with --dataset.",
    )


def _refuse_missing(path: Path) -> None:
    if not path.exists():
        there = path.parent.iterdir() if path.parent.is_dir() else ()
        guess = nearest(path.name, (entry.name for entry in there))
        remedy = f"Did you mean {path.parent / guess}?" if guess else "Give the path of your data with --dataset-path."
        raise DataError(f"{path.absolute()} does not exist.", remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """A set of images: its path, its classes and its two splits."""

    kind: str
    place: str
    class_names: tuple[str, ...]
    train: Samples
    validation: Samples
    split_by: str = ""  # how the splits were separated
    remarks: tuple[str, ...] = ()  # what the user should know, such as files that are not read


def _from_folders(path: Path, data: Data) -> ImageSet:
    elsewhere = Path(data.validation_path).expanduser() if data.validation_path else None
    return _from_files("folder", path, read_folders(path, data.validation_split, elsewhere, data.label_pattern))


def _from_csv(path: Path, data: Data) -> ImageSet:
    if data.labels is None:
        raise DataError("The dataset is csv, but no CSV file is given.", remedy="Give it with --labels FILE.")
    file = Path(data.labels).expanduser()
    return _from_files("csv", file, read_csv_set(file, data.dataset_path, data.validation_split, columns_of(data)))


def _from_files(kind: str, path: Path, found: ClassFolders) -> ImageSet:
    return ImageSet(
        kind=kind,
        place=str(path),
        class_names=found.class_names,
        train=found.train,
        validation=found.validation,
        split_by=found.split_by,
        remarks=(*map(str, found.skipped), *found.remarks),
    )


def _from_records(path: Path, data: Data) -> ImageSet:
    reader = _Reader(
        kind="tfrecord",
        index=lambda files: index_of(files, IMAGENET),
        samples=lambda files, part: samples_of(files, part, IMAGENET),
    )
    return _from_shards(path, data, reader, shards(path, "train"), shards(path, "validation"))


def _from_tfds(path: Path, data: Data) -> ImageSet:
    schema, names = tfds_schema(path), tfds_names(path)
    reader = _Reader(
        kind="tfds",
        index=lambda files: index_of(files, schema, names),
        samples=lambda files, part: samples_of(files, part, schema),
    )
    train = shards(path, "train", TFDS_SHARD)
    validation = shards(path, "validation", TFDS_SHARD) or shards(path, "test", TFDS_SHARD)
    return _from_shards(path, data, reader, train, validation)


def _from_tar(path: Path, data: Data) -> ImageSet:
    train, validation = tar_shards(path)
    reader = _Reader(
        kind="tar",
        index=lambda files: tar_index(files, path),
        samples=lambda files, part: StoredSamples(files, part, plain_content),
    )
    return _from_shards(path, data, reader, train, validation)


def _from_npz(path: Path, data: Data) -> ImageSet:
    return _from_table("npz", path, data, read_npz_set(path))


def _from_parquet(path: Path, data: Data) -> ImageSet:
    return _from_table("parquet", path, data, read_parquet_set(path, parse_bytes(data.dataset_host_budget)))


def _from_table(kind: str, path: Path, data: Data, table: TableSet) -> ImageSet:
    train, validation, split_by, remarks = table.train, table.validation, "its two parts", ()
    parts = [part.labels for part in (train, validation) if part is not None]
    doubts = check_classes(str(path), table.class_names, np.concatenate(parts))
    if validation is None:
        rows = tuple(map(str, range(len(train))))
        held_out = hold_out(rows, train.labels, data.validation_split, table.class_names, str(path), table.add)
        train, validation = train.take(np.flatnonzero(~held_out.mask)), train.take(np.flatnonzero(held_out.mask))
        split_by, remarks = held_out.text, held_out.remarks
    slow = (
        f"The images do not fit --dataset-host-budget {data.dataset_host_budget}: a whole group of rows is decoded for "
        "each image. `headrace data pack` makes a file that is read faster."
    )
    return ImageSet(
        kind=kind,
        place=str(path),
        class_names=table.class_names,
        train=train,
        validation=validation,
        split_by=split_by,
        remarks=(*doubts, *remarks, *((slow,) if table.slow else ())),
    )


def _from_pack(path: Path, data: Data) -> ImageSet:
    pack = open_pack(path)
    return ImageSet(
        kind="packed",
        place=str(path),
        class_names=pack.class_names,
        train=pack.train,
        validation=pack.validation,
        split_by=pack.split_by,
        remarks=_packed_remark(pack) if len(pack.validation) else (),
    )


def _packed_remark(pack: Pack) -> tuple[str, ...]:
    return (
        f"Validation images are {pack.split_by}: encoded once more, they are other pixels than those of the original "
        "files, and so is the accuracy.",
    )


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """How shards of one kind are listed, and how their samples are read."""

    kind: str
    index: Callable[[list[Path]], Index]
    samples: Callable[[list[Path], Index], Samples]


def _from_shards(path: Path, data: Data, reader: _Reader, files: list[Path], validation: list[Path]) -> ImageSet:
    """Return a set of shards; without validation shards, hold out a fraction of each class by file and offset."""
    index = reader.index(files or validation)
    remarks = ()
    if not files:
        splits = reader.samples(validation, index.take(np.zeros(0, np.int64))), reader.samples(validation, index)
        split_by = f"{len(validation):,} validation shards alone"
    elif validation:
        listed = reader.index(validation)
        refuse_new_labels(path, index, listed)
        splits = reader.samples(files, index), reader.samples(validation, listed)
        split_by = f"{len(files):,} and {len(validation):,} shards"
    else:
        # Names of files, not paths: the split stays the same when the dataset is moved.
        names = [f"{files[file].name}#{offset}" for file, offset in zip(index.file, index.offset, strict=True)]
        held_out = hold_out(
            names, index.labels, data.validation_split, index.class_names, str(path), "shards of validation images"
        )
        parts = (index.take(np.flatnonzero(mask)) for mask in (~held_out.mask, held_out.mask))
        splits = tuple(reader.samples(files, part) for part in parts)
        split_by, remarks = held_out.text, held_out.remarks
    return ImageSet(
        kind=reader.kind,
        place=str(path),
        class_names=index.class_names,
        train=splits[0],
        validation=splits[1],
        split_by=split_by,
        remarks=(*empty_classes(index), *remarks) if files else (),
    )


OPENERS: dict[str, Callable[[Path, Data], ImageSet]] = {
    "folder": _from_folders,
    "tfrecord": _from_records,
    "tfds": _from_tfds,
    "tar": _from_tar,
    "packed": _from_pack,
    "csv": _from_csv,
    "npz": _from_npz,
    "parquet": _from_parquet,
}


def imagenet_is_there(data: Data) -> bool:
    """Say whether dataset_path holds ImageNet; class folders in the current directory, the default, do not count."""
    path = Path(data.dataset_path).expanduser()
    found = detect_kind(path) if path.exists() else None
    return found is not None and not (data.dataset_path == "." and found == "folder")


def open_image_set(data: Data, kind: str) -> ImageSet:
    """List the set; `kind` is a name in KINDS, csv, or `imagenet` for whichever of them is there."""
    path = Path(data.dataset_path).expanduser()
    if kind != "csv":
        _refuse_missing(path)
    found = detect_kind(path) if kind == "imagenet" else kind
    if kind == "imagenet" and data.dataset_path == "." and not imagenet_is_there(data):
        # The current directory is the option's default, so its folders were probably not meant as ImageNet.
        raise DataError(
            "The path of ImageNet is not given.",
            remedy="Give its TFRecords, tar shards, packed file or class folders with --dataset-path; or train on "
            "synthetic images of its shape with --generated-data or --synthetic-data.",
        )
    if found is None:
        known = "; ".join(row.description for row in KINDS)
        raise DataError(f"{path.absolute()} holds no images.", rule=f"Searched for {known}.")
    images = OPENERS[found](path, data)
    if not len(images.validation):
        raise DataError(
            f"{images.place} has no validation images.",
            rule="Without any of its own, --validation-split of each class of two or more images are held out.",
            remedy="Check --dataset-path and --validation-split.",
        )
    if kind == "imagenet" and images.kind == "tfrecord":  # also for a part of it, so that its weights fit
        names = images.class_names
        return replace(images, class_names=(*names, *numbered_classes(1000)[len(names) :]))
    return images


def image_size_of(images: ImageSet, data: Data) -> int:
    """Return the side of the network's square input: as configured, or fitted to the images."""
    if data.image_size is not None:
        return data.image_size
    samples = images.train if len(images.train) else images.validation
    count, sides = len(samples), []
    # Spread over the set: the first ones may all be of one class.
    for sample in np.unique(np.linspace(0, count - 1, min(count, _NUM_SIZED)).astype(int)).tolist():
        try:
            encoded = samples.content(sample).image
            header = None if isinstance(encoded, np.ndarray) else read_header(encoded)
        except BadImage:
            continue
        sides.append(min(encoded.shape[:2]) if header is None else min(header.height, header.width))
    # The median: a few very large photographs must not decide.
    typical = int(np.median(sides)) if sides else _LARGE
    # Multiples of 32, the total stride of most networks.
    return _LARGE if typical >= 200 else max(32, -(-typical // 32) * 32)


def sent_size(data: Data, size: int) -> int | None:
    """Return the side of training images as they are sent to the device, if larger than the network's."""
    sent = data.sent_image_size
    if sent is not None and sent < size:
        raise ConfigError(
            f"sent_image_size is {sent}, but the image size is {size}.",
            rule="The device crops its image out of the one that is sent.",
            remedy="Leave --sent-image-size out, or raise it.",
        )
    return None if sent == size else sent


def crop_rule(data: Data, size: int) -> CropRule | None:
    """Return how training images are cropped: as configured, or fitted to their size. None: as in evaluation."""
    name = data.train_crop
    if name == "auto":
        name = (
            "valid"
            if size < MIN_CROPPED
            else "reference"
            if data.dataset in ("imagenet", "tfrecord")
            else "torchvision"
        )
    if name == "valid":
        if data.crop_area is not None or data.crop_aspect is not None:
            raise ConfigError(
                "crop_area and crop_aspect are given, but nothing is cropped at random.",
                rule="With train_crop valid, or images too small to crop, training sees what validation sees.",
                remedy="Choose --train-crop torchvision or reference, or leave them out.",
            )
        return None
    row = CROP_RULES[name]
    return CropRule(
        area=_range(data.crop_area, row.area, "crop_area"),
        aspect=_range(data.crop_aspect, row.aspect, "crop_aspect"),
        reference=row.reference,
    )


WORKING_RATIO = 2  # working size to image size; docs/tutorials/photographs.md has the measured accuracy


def working_size(images: ImageSet, data: Data, size: int) -> int | None:
    """Return the side at which training images are decoded once; None where they are decoded for every crop."""
    if data.decode_once == "off":
        return None
    side = data.sent_image_size or WORKING_RATIO * size
    problem = _against_decoding_once(images, data, size, side)
    if problem and data.decode_once == "on":
        raise ConfigError(
            f"decode_once is on, but {problem[0]}.",
            rule="Images that are decoded once are kept as bytes in memory and cropped at random on the device.",
            remedy=f"Leave --decode-once out, or {problem[1]}.",
        )
    return None if problem else side


def _against_decoding_once(images: ImageSet, data: Data, size: int, side: int) -> tuple[str, str] | None:
    """Return why images are not decoded once, and what would change that."""
    train = len(images.train) * (side * side * data.num_channels + 4)
    need = train + len(images.validation) * (size * size * data.num_channels + 4)
    on_device, on_host = parse_bytes(data.dataset_device_budget), parse_bytes(data.dataset_host_budget)
    automatic = data.decode_once == "auto"
    reasons = (
        (crop_rule(data, size) is None, "nothing is cropped at random", "choose --train-crop torchvision"),
        (not data.accelerator_side_preprocess, "the host preprocesses", "add --accelerator-side-preprocess"),
        (data.eight_bit_transfer is False, "images are sent as numbers of 32 bits", "add --eight-bit-transfer"),
        (not data.resize_antialias, "resize_antialias is off", "add --resize-antialias"),
        (data.dataset_cache in (*KEPT, "none"), f"dataset_cache is {data.dataset_cache}", "leave --dataset-cache out"),
        (automatic and data.dataset_cache == "host", "dataset_cache is host", "choose --decode-once on"),
        (
            automatic and data.sent_image_size is not None,
            "crops of sent_image_size are sent",
            "choose --decode-once on",
        ),
        (automatic and need > on_device, f"{format_bytes(need)} exceed the device's budget", "raise it"),
        (
            (need > on_device or data.dataset_cache == "host") and data.dataset_cache != "device" and train > on_host,
            f"{format_bytes(train)} of images of {side}x{side} exceed dataset_host_budget",
            "raise --dataset-host-budget or lower --sent-image-size",
        ),
    )
    return next(((problem, change) for applies, problem, change in reasons if applies), None)


def sources_of(images: ImageSet, data: Data, size: int, seed: int) -> tuple[Source, Source, BadSamples]:
    """Return the sources of training and validation, and the list of bad samples that they share."""
    bad = BadSamples(images.place or images.kind, len(images.train) + len(images.validation), data.max_bad_samples)
    evaluation = evaluation_view(data, size, data.num_channels)
    working, rule = working_size(images, data, size), crop_rule(data, size)
    if working is not None and rule is not None:
        whole = replace(evaluation, size=working, whole=True, seed=seed)
        train = working_source(images.train, whole, "train", bad, rule)
        return train, decoded_source(images.validation, evaluation, "validation", bad), bad
    # Without random crops training sees what validation sees, but for the reduced decoding.
    training, sent = replace(evaluation, crop=rule, seed=seed, reduced=True), sent_size(data, size)
    if sent is not None:  # without random crops the whole shorter side is sent, and the device crops it
        training = replace(training, size=sent, shorter_side=sent)
    train, validation = images.train, images.validation
    if data.dataset_cache in KEPT:
        budget, decoded = Budget(parse_bytes(data.dataset_host_budget)), data.dataset_cache == "decoded"
        train, validation = (
            CachedSamples(part, budget, decoded=decoded, channels=data.num_channels, quick=quick)
            for part, quick in ((train, rule is not None), (validation, False))
        )
    validated = decoded_source(validation, evaluation, "validation", bad)
    return decoded_source(train, training, "train", bad), validated, bad


def evaluation_view(data: Data, size: int, channels: int) -> ViewSpec:
    """Return what validation takes of an image."""
    shorter = data.eval_resize_size or uncropped_side(size)
    if shorter is not None and shorter < size:
        raise ConfigError(
            f"eval_resize_size is {shorter}, but the image size is {size}.",
            rule="The centre is cut out of the resized image, so its shorter side must be at least as long.",
            remedy="Leave --eval-resize-size out, or raise it.",
        )
    return ViewSpec(
        size=size,
        channels=channels,
        shorter_side=shorter,
        antialias=data.resize_antialias,
        bicubic=data.eval_interpolation == "bicubic",
        reduced=data.eval_reduced_decoding,
    )


def _range(given: tuple[float, ...] | None, default: tuple[float, float], name: str) -> tuple[float, float]:
    if given is None:
        return default
    top = 1.0 if name == "crop_area" else float("inf")
    if len(given) != 2 or not 0 < given[0] <= given[1] <= top:
        raise ConfigError(
            f"{name} is {' '.join(f'{value:g}' for value in given)}.",
            rule="It is two numbers, the least and the most" + (", above 0 and at most 1." if top == 1 else "."),
            remedy=f"For example --{name.replace('_', '-')} {default[0]:g} {default[1]:g}.",
        )
    return given[0], given[1]
