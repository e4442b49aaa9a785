"""Sets of pictures: found, listed, and described, whatever way they are stored."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headrace.config.schema import Data
from headrace.core.errors import ConfigError, DataError
from headrace.data.bad import BadSamples
from headrace.data.crop import CROP_RULES, CropRule
from headrace.data.detect import KINDS, detect_kind
from headrace.data.folder import read_folders
from headrace.data.picture import BadPicture, read_header
from headrace.data.picture_source import Look, PictureSource
from headrace.data.samples import Samples

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GREY_MEAN, GREY_STD = (0.449,), (0.226,)  # the same, weighed over the channels
_LARGE, _SMALL = 224, 96  # the usual side; below the other, pictures are too small to crop anything away
_LOOKED_AT = 64  # pictures whose size decides


@dataclass(frozen=True, kw_only=True)
class PictureSet:
    """A set of pictures: where it lies, its classes and its two splits."""

    kind: str
    place: str
    class_names: tuple[str, ...]
    train: Samples
    validation: Samples
    how: str = ""  # the splits were told apart


def _from_folders(path: Path, data: Data) -> PictureSet:
    found = read_folders(path, data.validation_split)
    return PictureSet(
        kind="folder",
        place=str(path),
        class_names=found.class_names,
        train=found.train,
        validation=found.validation,
        how=found.how,
    )


OPENERS: dict[str, Callable[[Path, Data], PictureSet]] = {"folder": _from_folders}


def open_pictures(data: Data, kind: str) -> PictureSet:
    """List the set; `kind` is a row of detect.KINDS, or `imagenet` for whichever of them is there."""
    path = Path(data.dataset_path).expanduser()
    if not path.exists():
        raise DataError(f"{path.absolute()} does not exist.", remedy="Give the place of your data with --dataset-path.")
    found = detect_kind(path) if kind == "imagenet" else kind
    if found is None:
        words = "; ".join(row.words for row in KINDS)
        raise DataError(f"{path.absolute()} holds no pictures.", rule=f"Looked for {words}.")
    pictures = OPENERS[found](path, data)
    for split, samples in (("training", pictures.train), ("validation", pictures.validation)):
        if not len(samples):
            raise DataError(f"{pictures.place} has no {split} pictures.", remedy="Check --dataset-path.")
    return pictures


def image_size_of(pictures: PictureSet, data: Data) -> int:
    """Return the side of the square that the network sees: as told, or fitted to the pictures."""
    if data.image_size is not None:
        return data.image_size
    count = len(pictures.train)
    sides = []
    for sample in np.unique(np.linspace(0, count - 1, min(count, _LOOKED_AT)).astype(int)).tolist():
        try:
            encoded = pictures.train.encoded(sample)
            header = None if isinstance(encoded, np.ndarray) else read_header(encoded)
        except BadPicture:
            continue
        sides.append(min(encoded.shape[:2]) if header is None else min(header.height, header.width))
    typical = int(np.median(sides)) if sides else _LARGE
    return _LARGE if typical >= 200 else max(32, -(-typical // 32) * 32)


def crop_rule(data: Data, size: int) -> CropRule | None:
    """Return how training pictures are cropped: as told, or fitted to their size. None: as in evaluation."""
    name = data.train_crop
    if name == "auto":
        name = "valid" if size < _SMALL else "reference" if data.dataset == "imagenet" else "torchvision"
    if name == "valid":
        if data.crop_area is not None or data.crop_aspect is not None:
            raise ConfigError(
                "crop_area and crop_aspect are given, but nothing is cropped at random.",
                rule="With train_crop valid, and for pictures below 96 pixels, training sees what validation sees.",
                remedy="Choose --train-crop torchvision or reference, or leave them out.",
            )
        return None
    row = CROP_RULES[name]
    return CropRule(
        area=_range(data.crop_area, row.area, "crop_area"),
        aspect=_range(data.crop_aspect, row.aspect, "crop_aspect"),
        reference=row.reference,
    )


def sources_of(
    pictures: PictureSet, data: Data, size: int, seed: int
) -> tuple[PictureSource, PictureSource, BadSamples]:
    """Return the sources of training and validation, and the list of bad samples that they share."""
    bad = BadSamples(pictures.place, len(pictures.train) + len(pictures.validation), data.max_bad_samples)
    shorter = data.eval_resize_size or (size if size < _SMALL else None)
    if shorter is not None and shorter < size:
        raise ConfigError(
            f"eval_resize_size is {shorter}, but the image size is {size}.",
            rule="The centre is cut out of the resized picture, so its shorter side must be at least as long.",
            remedy="Leave --eval-resize-size out, or raise it.",
        )
    look = Look(size=size, channels=data.num_channels, seed=seed, shorter_side=shorter, antialias=data.resize_antialias)
    return (
        PictureSource(pictures.train, replace(look, crop=crop_rule(data, size)), "train", bad),
        PictureSource(pictures.validation, look, "validation", bad),
        bad,
    )


def _range(given: tuple[float, ...] | None, own: tuple[float, float], name: str) -> tuple[float, float]:
    if given is None:
        return own
    top = 1.0 if name == "crop_area" else float("inf")
    if len(given) != 2 or not 0 < given[0] <= given[1] <= top:
        raise ConfigError(
            f"{name} is {' '.join(f'{value:g}' for value in given)}.",
            rule="It is two numbers, the least and the most" + (", above 0 and at most 1." if top == 1 else "."),
            remedy=f"For example --{name.replace('_', '-')} {own[0]:g} {own[1]:g}.",
        )
    return given[0], given[1]
