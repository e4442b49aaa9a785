"""What is taken of a set's images: their size, random crops, decoding once, and the sources that follow from it."""

from dataclasses import replace

from headrace.config.schema import Data
from headrace.core.errors import ConfigError
from headrace.core.units import format_bytes, parse_bytes
from headrace.data.decoding.crop import CROP_RULES, MIN_CROPPED, CropRule, uncropped_side
from headrace.data.decoding.image_source import ViewSpec, decoded_source
from headrace.data.decoding.working_source import working_source
from headrace.data.sets.bad_samples import BadSamples
from headrace.data.sets.cached_samples import KEPT, Budget, CachedSamples
from headrace.data.sets.image_set import ImageSet
from headrace.data.sets.source import Source
from headrace.rows.tasks import REGRESSION

_LARGE = 224  # the usual side


def image_size_of(images: ImageSet, data: Data) -> int:
    """Return the side of the network's square input: as configured, or fitted to the images."""
    if data.image_size is not None:
        return data.image_size
    typical = images.typical_side or _LARGE
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
            if size < MIN_CROPPED or data.task == REGRESSION.name  # a part of an image may have another number
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


WORKING_RATIO = 2  # working size to image size; benchmarks/dated/2026-11-16-image-files.md has the accuracy


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
    training = training_view(data, size, seed)
    train, validation = images.train, images.validation
    if data.dataset_cache in KEPT:
        budget, decoded = Budget(parse_bytes(data.dataset_host_budget)), data.dataset_cache == "decoded"
        train, validation = (
            CachedSamples(part, budget, decoded=decoded, channels=data.num_channels, quick=quick)
            for part, quick in ((train, rule is not None), (validation, False))
        )
    validated = decoded_source(validation, evaluation, "validation", bad)
    return decoded_source(train, training, "train", bad), validated, bad


def training_view(data: Data, size: int, seed: int) -> ViewSpec:
    """Return what training takes of an image that is decoded for each of its views."""
    # Without random crops training sees what validation sees, but for the reduced decoding.
    training = replace(
        evaluation_view(data, size, data.num_channels), crop=crop_rule(data, size), seed=seed, reduced=True
    )
    sent = sent_size(data, size)
    # Without random crops the whole shorter side is sent, and the device crops it.
    return training if sent is None else replace(training, size=sent, shorter_side=sent)


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
