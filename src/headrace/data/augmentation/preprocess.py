"""Normalise and augment images: one definition, run by NumPy on the host or by JAX on the device.

The order is: change the colours (AugMix also moves pixels here); normalise; flip; pad every side and crop at random (or
crop from a larger image); shear, shift and rotate; erase. Everything that moves pixels only computes which pixel to
take, so bytes are gathered once and all arithmetic after that is one fused pass over the output. What happens to a
sample depends on (seed, epoch, sample) alone, never on its batch. Positions come from whole numbers and tables, so that
host and device choose the same pixels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from headrace.config.schema import Augment, Data
from headrace.core.errors import ConfigError
from headrace.core.rng import Seed, array_module, draw, name_id
from headrace.data.augmentation.apply_policy import change_colors, source_pixels, take_pixels
from headrace.data.augmentation.augmix import augmix
from headrace.data.augmentation.colors import Array, Epoch, jitter, sometimes
from headrace.data.augmentation.erase import erase
from headrace.data.augmentation.mix import Mix, mix_of
from headrace.data.augmentation.policies import (
    AugMix,
    AutoAugment,
    RandAugment,
    augmix_of,
    moves_pixels,
    policy_of,
)
from headrace.data.dataset import DataInfo

_PURPOSE, _FLIP_PURPOSE, _DOWN_PURPOSE = name_id("augment"), name_id("alternating_flip"), name_id("vertical_flip")
COLOR_OPTIONS = ("color_jitter", "hue_jitter", "grayscale", "gaussian_blur", "rand_augment", "auto_augment")
NO_CHANGES = Augment()
_FLIPS, _CROPS = ("flip", "flip-crop"), ("crop", "flip-crop")


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How bytes become the network's input."""

    augmentation: str  # none | flip | crop | flip-crop
    normalization: str  # per-image | per-channel | centred | zero-one | none
    mean: tuple[float, ...]  # per channel, on the scale 0 to 1
    std: tuple[float, ...]
    seed: Seed
    image_hwc: tuple[int, int, int]
    changes: Augment = NO_CHANGES  # as options say them; policies, mixes and AugMix have values of their own below
    crop_padding: int = 4  # pixels added on every side before a crop of the same size
    reflect: bool = False  # fill them with the mirrored image instead of zeros
    on_device: bool = True  # False: blocks arrive preprocessed
    policy: RandAugment | AutoAugment | None = None
    augmix: AugMix | None = None
    mix: Mix | None = None
    shrunk_hw: tuple[int, int] | None = None  # size that training images are shrunk to before mixing
    # custom: (images, labels, sample of each, epoch) -> images, after the rest and before mixing
    augment: Callable[[Array, Array, Array, Epoch], Array] | None = None

    def with_seed(self, seed: Seed) -> "Preprocess":
        """Return the same with another seed."""
        return replace(
            self,
            seed=seed,
            policy=self.policy and self.policy.with_seed(seed),
            augmix=self.augmix and self.augmix.with_seed(seed),
            mix=self.mix and replace(self.mix, seed=seed),
        )

    def at_size(self, hw: tuple[int, int]) -> "Preprocess":
        """Return the same with training images of a smaller size."""
        return replace(self, shrunk_hw=hw, mix=replace(self.mix, image_hw=hw) if self.mix else None)


def preprocess_spec(data: Data, augment: Augment, info: DataInfo, seed: int) -> Preprocess:
    """Return the preprocessing that a configuration asks for."""
    _refuse_colors(augment, info)
    if augment.alternating_flip and info.augmentation not in _FLIPS:
        raise ConfigError(
            f"alternating_flip is on, but train_augmentation is {info.augmentation}.",
            rule="It says in which epochs an image is flipped.",
            remedy="Add --train-augmentation flip or flip-crop, or leave alternating_flip out.",
        )
    return Preprocess(
        augmentation=info.augmentation,
        normalization=info.normalization,
        mean=info.channel_mean,
        std=info.channel_std,
        seed=seed,
        image_hwc=info.image_hwc,
        changes=augment,
        crop_padding=data.crop_padding,
        reflect=data.crop_fill == "reflect",
        on_device=data.accelerator_side_preprocess,
        policy=policy_of(augment, seed),
        augmix=augmix_of(augment, seed),
        mix=mix_of(augment, seed, info.image_hwc[:2]),
    )


def _refuse_colors(augment: Augment, info: DataInfo) -> None:
    """Refuse colour changes that are not defined for these images."""
    for name, rule in (("hue_jitter", "A hue needs"), ("grayscale", "A colour image has")):
        value, channels = getattr(augment, name), info.image_hwc[2]
        if value and channels != 3:
            raise ConfigError(
                f"{name} is {value:g}, but the images of {info.name} have {channels} channels.",
                rule=f"{rule} red, green and blue.",
                remedy=f"Leave {name} out.",
            )
    asked = [name for name in COLOR_OPTIONS if getattr(augment, name)]
    if info.image_dtype != "uint8" and asked:
        raise ConfigError(
            f"Colour changes were requested ({asked[0]}), but the images are {info.image_dtype}.",
            rule=f"{', '.join(COLOR_OPTIONS[:-1])} and {COLOR_OPTIONS[-1]} are defined on whole numbers from 0 to 255.",
            remedy="Give the images as uint8, or leave these options out.",
        )


def preprocess(images: Array, index: Any, epoch: Epoch, spec: Preprocess, train: bool) -> Any:
    """Return float32 [n, H, W, C] from images of 0..255 [n, H, W, C], or of any float32 numbers where nothing is
    normalised; NumPy arrays give NumPy arrays. Images that are larger than `spec` says are cropped to it.

    `index` is the sample of each image, `epoch` one number or one per image; both matter only for training.
    """
    xp = array_module(images)
    if train:
        images = _recolored(images, index, epoch, spec)
    # Before the pixels are moved: per-image statistics are those of the whole image, not of the crop with its padding.
    centre, scale = _normal(images, spec, xp)
    if images.shape[1:3] == spec.image_hwc[:2] and not (train and _moves(spec)):
        values = (images.astype(np.float32) - centre) * scale
    else:
        rows, columns, inside = _places(index, epoch, spec, images.shape[1:3], train)
        values = (take_pixels(images, rows, columns).astype(np.float32) - centre) * scale
        if inside is not None:
            # After normalisation: the padding is 0 for the network, which is the mean colour, and not black.
            values = xp.where(inside, values.reshape(inside.shape), np.float32(0)).reshape(values.shape)
    erased = spec.changes.random_erasing if train else 0.0
    return erase(values, index, epoch, erased, spec.seed) if erased else values


def draw_offsets(
    index: Array, epoch: Epoch, spec: Preprocess, places: tuple[int, int] | None = None
) -> tuple[Array, Array, Array]:
    """Return (rows down, columns right, flip or not) of each sample; the middle one of the places leaves it in place.

    One draw serves all three: its bits 0-14 and 15-29 choose the offsets, its last bit the flip. A flip that
    alternates is drawn for the first epoch alone, and is the other one in every second epoch.
    """
    places = places or (2 * spec.crop_padding + 1, 2 * spec.crop_padding + 1)
    word = draw(spec.seed, epoch, index, _PURPOSE)
    # A product and a shift instead of a remainder, which is slow on devices; as even as 15 bits allow.
    mask, shift = np.uint32(0x7FFF), np.uint32(15)
    down = ((word & mask) * np.uint32(places[0])) >> shift
    right = (((word >> shift) & mask) * np.uint32(places[1])) >> shift
    flip = word >> np.uint32(31)
    if spec.changes.alternating_flip:
        first = draw(spec.seed, 0, index, _FLIP_PURPOSE) >> np.uint32(31)
        flip = first ^ (array_module(index).asarray(epoch).astype(np.uint32) & np.uint32(1))
    return down.astype(np.int32), right.astype(np.int32), flip == np.uint32(1)


def _moves(spec: Preprocess) -> bool:
    return spec.augmentation != "none" or spec.changes.vertical_flip or _warps(spec)


def _warps(spec: Preprocess) -> bool:
    """Say whether pixels are moved by more than a crop and flips."""
    return bool(spec.changes.rotation) or (spec.policy is not None and moves_pixels(spec.policy))


def _recolored(images: Array, index: Array, epoch: Epoch, spec: Preprocess) -> Array:
    """Return the images with their colours changed, as bytes; unchanged if no option asks for it."""
    by = spec.changes
    if not any((by.color_jitter, by.hue_jitter, by.grayscale, by.gaussian_blur, spec.policy, spec.augmix)):
        return images
    x = images.astype(np.float32)
    if by.color_jitter or by.hue_jitter:
        x = jitter(x, index, epoch, (by.color_jitter, by.hue_jitter), spec.seed)
    if by.grayscale or by.gaussian_blur:
        x = sometimes(x, index, epoch, (by.grayscale, by.gaussian_blur), spec.seed)
    if spec.policy is not None:
        x = change_colors(x, index, epoch, spec.policy)
    if spec.augmix is not None:
        x = augmix(x, index, epoch, spec.augmix)
    # Back to bytes, as if the file had these colours: host and device then normalise the same numbers.
    return x.astype(np.uint8)


def _normal(images: Array, spec: Preprocess, xp: ModuleType) -> tuple[Array | np.float32, Array | np.float32]:
    """Return what to subtract and what to multiply with, as [n, 1, 1, 1], [1, 1, W, C] or single numbers."""
    if spec.normalization == "per-image":
        return _per_image(images, xp)
    if spec.normalization in ("per-channel", "centred"):
        # A whole row of constants: NumPy's inner loop is then W * C long, not C, and five times faster.
        mean, std = (
            np.tile(np.array(each, np.float64), (1, 1, spec.image_hwc[1], 1)) for each in (spec.mean, spec.std)
        )
        if spec.normalization == "centred":
            return (255 * mean).astype(np.float32), np.float32(1)
        return (255 * mean).astype(np.float32), (1 / (255 * std)).astype(np.float32)
    return np.float32(0), np.float32(1 / 255 if spec.normalization == "zero-one" else 1)


def _per_image(images: Array, xp: ModuleType) -> tuple[Array, Array]:
    """Return each image's mean and 1 / max(standard deviation, 1 / sqrt(number of values)), taken on 0..255."""
    flat = images.reshape(len(images), -1)
    size = flat.shape[1]
    # Two passes: a sum of bytes is exact in float32 (up to 65,793 of them), a sum of their squares is not.
    values = flat.astype(np.float32)
    mean = (values.sum(1) / np.float32(size))[:, None]
    deviation = values - mean
    variance = (deviation * deviation).sum(1) / np.float32(size)
    std = xp.maximum(xp.sqrt(variance), np.float32(1 / np.sqrt(size)))
    return mean[:, :, None, None], (np.float32(1) / std)[:, None, None, None]


def _places(
    index: Array, epoch: Epoch, spec: Preprocess, source_hw: tuple[int, ...], train: bool
) -> tuple[Array, Array, Array | None]:
    """Return the source row [n, H, 1 or W] and column [n, 1 or H, W] of each pixel, and which are in the image.

    The last is [n, H, W * C] or None for all: NumPy is fast on whole rows.
    """
    xp = array_module(index)
    height, width, channels = spec.image_hwc
    warped = train and _warps(spec)
    if warped:
        rows, columns = source_pixels(index, epoch, spec.policy, (height, width), (spec.changes.rotation, spec.seed))
    else:
        rows, columns = (xp.arange(size, dtype=np.int32) for size in (height, width))
        rows, columns = rows[None, :, None], columns[None, None, :]
    spare = source_hw[0] - height, source_hw[1] - width
    padded = train and spec.augmentation in _CROPS and spare == (0, 0)
    if train:
        places = None if padded else (spare[0] + 1, spare[1] + 1)
        down, right, flip = (move[:, None, None] for move in draw_offsets(index, epoch, spec, places))
    else:
        down = right = flip = xp.zeros((len(index), 1, 1), np.int32)
    if not train or spec.augmentation not in _CROPS:
        down, right = down * 0 + spare[0] // 2, right * 0 + spare[1] // 2
    elif padded:
        down, right = down - spec.crop_padding, right - spec.crop_padding
    rows, columns, inside = rows + down, columns + right, None
    if spec.reflect:
        rows, columns = (_reflected(at, size, xp) for at, size in zip((rows, columns), source_hw, strict=True))
    if warped or (padded and not spec.reflect):
        # Before clipping, which moves all positions into the image.
        in_rows = (rows >= 0) & (rows < source_hw[0])
        in_columns = xp.repeat((columns >= 0) & (columns < source_hw[1]), channels, axis=2)
        inside = (xp.repeat(in_rows, channels, axis=2) if warped else in_rows) & in_columns
    if train and spec.augmentation in _FLIPS:
        # After the padding was found: it is the same for a mirrored image.
        columns = xp.where(flip, source_hw[1] - 1 - columns, columns)
    if train and spec.changes.vertical_flip:
        turned = draw(spec.seed, epoch, index, _DOWN_PURPOSE)[:, None, None] >> np.uint32(31) == np.uint32(1)
        rows = xp.where(turned, source_hw[0] - 1 - rows, rows)
    return xp.clip(rows, 0, source_hw[0] - 1), xp.clip(columns, 0, source_hw[1] - 1), inside


def _reflected(at: Array, size: int, xp: ModuleType) -> Array:
    """Return positions mirrored at the first and the last pixel, which are not repeated."""
    at = xp.abs(at)
    return xp.minimum(at, 2 * (size - 1) - at)
