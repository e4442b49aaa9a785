"""Find out in which format a set of images is, and list it: the rows of `rows/formats.py`."""

import importlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from headrace.config.schema import Data
from headrace.core.errors import DataError, nearest
from headrace.data.sets.catalog import KNOWN_SETS, numbered_classes
from headrace.data.sets.formats.folder import refuse_loose_images
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.known_sets import locate_set
from headrace.data.sets.mirror import mirror_of
from headrace.data.sets.output_labels import refuse_kind
from headrace.data.sets.selected import said_of
from headrace.rows.formats import DETECTED, FORMATS
from headrace.rows.tasks import CLASSIFICATION


def detect_kind(path: Path) -> str | None:
    """Return the kind of image set at a path, or None."""
    return next((row.name for row in DETECTED if importlib.import_module(row.module).fits(path)), None)


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
        rule=f"Known: {'; '.join(row.says for row in DETECTED)}; the files of {', '.join(list(KNOWN_SETS)[1:])}.",
        remedy="Give the folder itself with --dataset-path, or name the set with --dataset.",
    )


def _refuse_missing(path: Path) -> None:
    if not path.exists():
        there = path.parent.iterdir() if path.parent.is_dir() else ()
        guess = nearest(path.name, (entry.name for entry in there))
        remedy = f"Did you mean {path.parent / guess}?" if guess else "Give the path of your data with --dataset-path."
        raise DataError(f"{path.absolute()} does not exist.", remedy=remedy)


def imagenet_is_there(data: Data) -> bool:
    """Say whether dataset_path holds ImageNet; class folders in the current directory, the default, do not count."""
    path = Path(data.dataset_path).expanduser()
    found = detect_kind(path) if path.exists() else None
    return found is not None and not (data.dataset_path == "." and found == "folder")


def open_image_set(data: Data, kind: str) -> ImageSet:
    """List the set; `kind` is the name of a format, or `imagenet` for whichever of them is there."""
    path = Path(data.dataset_path).expanduser()
    if kind == "imagenet" or FORMATS[kind].is_detected:
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
        known = "; ".join(row.says for row in DETECTED)
        raise DataError(f"{path.absolute()} holds no images.", rule=f"Searched for {known}.")
    if data.task != CLASSIFICATION.name and not FORMATS[found].any_label:
        refuse_kind(data.task, str(path.absolute()))
    images = importlib.import_module(FORMATS[found].module).open_set(path, data)
    if mirror := mirror_of(path):
        images = replace(images, place=mirror.store.address)
    if said := said_of(path):
        images = replace(images, place=said)
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
