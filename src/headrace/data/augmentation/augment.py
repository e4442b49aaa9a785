"""Normalise, augment and mix images: one definition, run by NumPy on the host or by JAX on the device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from headrace.config.schema import Augment, Data
from headrace.core.errors import ConfigError
from headrace.core.rng import Seed, draw, name_id
from headrace.data.augmentation.rand_augment import (
    Array,
    Epoch,
    RandAugment,
    array_module,
    change_colors,
    jitter,
    rand_augment_of,
    source_pixels,
)
from headrace.data.dataset import DataInfo

# Mix training images and their labels: mixup, cutmix, one of them at random, or both with four labels each.
#
# One definition for NumPy and JAX. Partners are neighbours by position in the micro-batch: what a sample is mixed with
# depends on its micro-batch, as with batch norm, and on nothing else in the plan. Mixup draws a weight for each sample,
# cutmix a box for each micro-batch, addressed by its first sample. Labels are mixed without the images, so that the
# last stage of a pipeline can do it alone. Draws pick from tables made on the host, and the box is in whole numbers, so
# that host, device and all stages agree.


_TABLE_BITS = 12
_TABLE_SIZE = 1 << _TABLE_BITS  # quantiles: the error of a draw's probability is at most 1/8192
_SHARE, _KEPT, _CENTRE = name_id("mixup/share"), name_id("cutmix/kept"), name_id("cutmix/centre")
_SWITCH = name_id("mix/switch")
_FIXED = 256  # positions per pixel in which the box is placed


class MixedLabels(NamedTuple):
    """Several labels per sample, each with its weight in the target; column 0 is the sample's unmixed label."""

    labels: Any  # int32 [n, k]
    weights: Any  # float32 [n, k]; a row adds up to 1


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What is mixed: `mixup_alpha` 0, `cutmix_lambda` 1 and `cutmix_alpha` 0 are off."""

    mixup_alpha: float
    cutmix_lambda: float
    cutmix_version: int
    cutmix_alpha: float
    seed: Seed
    image_hw: tuple[int, int]
    switch_prob: float | None = None  # probability of cutmix instead of mixup; None: both

    @property
    def cuts(self) -> bool:
        return self.cutmix_alpha > 0 or self.cutmix_lambda < 1


def mix_of(augment: Augment, seed: int, image_hw: tuple[int, int]) -> Mix | None:
    """Return the mixing that the options ask for, or None."""
    mix = Mix(
        mixup_alpha=augment.mixup_alpha,
        cutmix_lambda=augment.cutmix_lambda,
        cutmix_version=augment.cutmix_version,
        cutmix_alpha=augment.cutmix_alpha,
        seed=seed,
        image_hw=image_hw,
        switch_prob=augment.mixup_switch_prob if augment.mixup_alpha > 0 else None,
    )
    mix = mix if mix.cuts else replace(mix, switch_prob=None)
    return mix if mix.cuts or mix.mixup_alpha > 0 else None


def mix_images(images: Array, index: Array, epoch: Epoch, mix: Mix) -> Array:
    """Return the images [n, H, W, C] of a micro-batch, mixed; `index` is the sample of each, `epoch` one number."""
    xp = array_module(images)
    if mix.mixup_alpha > 0:
        kept = mixup_weights(index, epoch, mix)[:, None, None, None]
        # Neighbours are random partners: the order of samples is shuffled.
        images = kept * images + (1 - kept) * xp.roll(images, 1, axis=0)
    if not mix.cuts:
        return images
    top, bottom, left, right = (end[:, None, None, None] for end in cutmix_box(index, epoch, mix))
    row = xp.arange(images.shape[1], dtype=np.int32)[None, :, None, None]
    column = xp.arange(images.shape[2], dtype=np.int32)[None, None, :, None]
    inside = (row >= top) & (row < bottom) & (column >= left) & (column < right)
    # A look-up, not a second roll, for which XLA would compute the mixed images twice: half as fast on a CPU.
    partner = images[(np.arange(len(images)) - _cut_shift(len(images))) % len(images)]
    return xp.where(inside, partner, images)


def mix_labels(labels: Array, index: Array, epoch: Epoch, mix: Mix) -> MixedLabels:
    """Return the labels [n] of a micro-batch mixed as `mix_images` does: 2 for each sample, 4 with mixup and cutmix."""
    xp = array_module(labels)
    columns, weights = [labels], [xp.ones(labels.shape, np.float32)]
    if mix.mixup_alpha > 0:
        kept = mixup_weights(index, epoch, mix)
        columns, weights = [labels, xp.roll(labels, 1)], [kept, 1 - kept]
    if mix.cuts:
        kept, shift = kept_share(cutmix_box(index, epoch, mix), mix), _cut_shift(len(labels))
        columns += [xp.roll(each, shift) for each in columns]
        weights = [each * kept for each in weights] + [xp.roll(each, shift) * (1 - kept) for each in weights]
    return MixedLabels(xp.stack(columns, 1), xp.stack(weights, 1).astype(np.float32))


def mixup_weights(index: Array, epoch: Epoch, mix: Mix) -> Array:
    """Return the weight that each sample keeps, float32 [n]: max(x, 1 - x) with x from Beta(a, a)."""
    # The larger half: an image and its partner mix to the same pair either way, and column 0 stays the main label.
    table = (1 - _beta_table(mix.mixup_alpha, 0.5)).astype(np.float32)
    kept = _pick(table, _draw(index, epoch, mix, _SHARE))
    if mix.switch_prob is None:
        return kept
    return array_module(index).where(_switched(index, epoch, mix), np.float32(1), kept)


def _switched(index: Array, epoch: Epoch, mix: Mix) -> Array:
    """Say whether the micro-batch gets cutmix instead of mixup, bool [1]; addressed by its first sample, as the box."""
    assert mix.switch_prob is not None
    return (_draw(index, epoch, mix, _SWITCH)[:1] >> np.uint32(8)) < np.uint32(round(mix.switch_prob * 2**24))


def cutmix_box(index: Array, epoch: Epoch, mix: Mix) -> tuple[Array, ...]:
    """Return top, bottom, left and right of the micro-batch's box, int32 [1] each, ends exclusive.

    The box has the image's aspect and the area 1 - L. With `cutmix_alpha` its centre may be anywhere and the box
    is clipped to the image (the usual formula); else the centre is moved so that the whole box is inside.
    """
    xp = array_module(index)
    chosen, centre = (_draw(index, epoch, mix, purpose)[:1] for purpose in (_KEPT, _CENTRE))
    side = np.sqrt(1 - kept_quantiles(mix))
    ends = []
    for size, word in zip(mix.image_hw, (centre >> np.uint32(16), centre & np.uint32(0xFFFF)), strict=True):
        half = _pick(np.rint(side * size * _FIXED / 2).astype(np.int32), chosen)
        middle = ((word * np.uint32(size)) >> np.uint32(8)).astype(np.int32)  # 0 to size, in parts of a pixel
        if not mix.cutmix_alpha:
            middle = xp.clip(middle, half, size * _FIXED - half)
        # In 256ths of a pixel, rounded once at the end, so that the area is as close to 1 - L as pixels allow.
        ends += [xp.clip((middle + at + _FIXED // 2) // _FIXED, 0, size) for at in (-half, half)]
    if mix.switch_prob is not None:  # an empty box, where the micro-batch gets mixup
        ends = [xp.where(_switched(index, epoch, mix), end, 0) for end in ends]
    return tuple(ends)


def kept_share(box: tuple[Array, ...], mix: Mix) -> Array:
    """Return the fraction of the image outside the box, float32 [1]: exact after rounding and clipping."""
    top, bottom, left, right = box
    area = ((bottom - top) * (right - left)).astype(np.float32)
    return np.float32(1) - area / np.float32(mix.image_hw[0] * mix.image_hw[1])


def kept_quantiles(mix: Mix) -> np.ndarray:
    """Return equally likely values of L, the fraction of an image to keep, float64 in any order."""
    if mix.cutmix_alpha:
        return _beta_table(mix.cutmix_alpha, 1.0)
    place = _midpoints()
    if mix.cutmix_version == 2:
        return np.full_like(place, mix.cutmix_lambda)
    never = min(max(1.55 * mix.cutmix_lambda - 0.96, 0.0), 1.0)
    u = np.exp(-4) + (1 - np.exp(-4)) * (place - never) / max(1 - never, 1e-9)
    return np.where(place < never, 1.0, 1 + np.log(np.clip(u, np.exp(-4), 1)) / 4)


def beta_quantiles(alpha: float, probabilities: np.ndarray) -> np.ndarray:
    """Return the quantiles of Beta(alpha, alpha) at these probabilities.

    Below 1 the density has a pole at 0, which is gone in the variable t^alpha. The distribution is symmetric, so that
    half of it is enough.
    """
    power = min(alpha, 1.0)
    t = np.linspace(0, 0.5**power, 1 << 16) ** (1 / power)
    density = t ** (alpha - power) * (2 - 2 * t) ** (alpha - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    place = np.interp(np.minimum(probabilities, 1 - probabilities), below / below[-1] / 2, t**power)
    half = place ** (1 / power)
    return np.where(probabilities <= 0.5, half, 1 - half)


@lru_cache(maxsize=8)  # the integral takes milliseconds, and each trace of a step asks several times
def _beta_table(alpha: float, most: float) -> np.ndarray:
    """Return equally likely values of Beta(alpha, alpha) below the quantile of probability `most`."""
    return beta_quantiles(alpha, most * _midpoints())


def _midpoints() -> np.ndarray:
    return (np.arange(_TABLE_SIZE) + 0.5) / _TABLE_SIZE


def _draw(index: Array, epoch: Epoch, mix: Mix, purpose: int) -> Array:
    return draw(mix.seed, epoch, index, purpose)


def _pick(table: np.ndarray, word: Array) -> Array:
    """Return an entry of a table of equally likely values for each 32-bit draw."""
    at = (word >> np.uint32(32 - _TABLE_BITS)).astype(np.int32)
    return array_module(at).asarray(table)[at]


def _cut_shift(count: int) -> int:
    """Return the distance to the partner in the box: 2, since mixup's partner is at 1; 1 in a batch of two."""
    return 2 if count > 2 else 1


# The order is: change the colours; normalise; flip; pad every side and crop at random (or crop from a larger image);
# shear, shift and rotate; erase. Everything that moves pixels only computes which pixel to take, so bytes are gathered
# once and all arithmetic after that is one fused pass over the output. What happens to a sample depends on (seed,
# epoch, sample) alone, never on its batch. Positions come from whole numbers and tables, so that host and device choose
# the same pixels.


# Random erasing: set a rectangle to zero, the mean after normalisation. Areas are 2 to 33 % of the image, aspects 0.3
# to 3.3, uniform in the logarithm; a side that would be longer than the image is cut to its length.


AREA, ASPECT = (0.02, 1 / 3), (0.3, 3.3)
_SIDE = 64  # of the table: 64 areas x 64 aspects
_CHOSEN, _SHAPE, _PLACE = name_id("erase/chosen"), name_id("erase/shape"), name_id("erase/place")


def erase(values: Array, index: Array, epoch: Epoch, fraction: float, seed: Seed) -> Array:
    """Return the images [n, H, W, C] with a rectangle set to zero in a fraction of them."""
    xp = array_module(values)
    height, width = values.shape[1:3]
    chosen, top, left, box_height, box_width = rectangles(index, epoch, fraction, seed, (height, width))
    row = xp.arange(height, dtype=np.int32)[None, :]
    column = xp.arange(width, dtype=np.int32)[None, :]
    in_rows = (row >= top[:, None]) & (row < (top + box_height)[:, None]) & chosen[:, None]
    in_columns = (column >= left[:, None]) & (column < (left + box_width)[:, None])
    inside = in_rows[:, :, None, None] & in_columns[:, None, :, None]
    return xp.where(inside, np.float32(0), values)


def rectangles(index: Array, epoch: Epoch, fraction: float, seed: Seed, hw: tuple[int, int]) -> tuple[Array, ...]:
    """Return (chosen or not, top, left, height, width) of each sample's rectangle, [n] each."""
    xp = array_module(index)
    dice, shape, place = (draw(seed, epoch, index, purpose) for purpose in (_CHOSEN, _SHAPE, _PLACE))
    at = (shape >> np.uint32(20)).astype(np.int32)
    # From a table made by NumPy: exp and sqrt differ in their last bits between host and device, and would round to
    # other sides.
    box_height, box_width = (xp.asarray(sides)[at] for sides in _sides(hw))
    top, left = (
        ((word * (np.uint32(size + 1) - box.astype(np.uint32))) >> np.uint32(16)).astype(np.int32)
        for word, size, box in zip(
            (place >> np.uint32(16), place & np.uint32(0xFFFF)), hw, (box_height, box_width), strict=True
        )
    )
    return (dice >> np.uint32(8)) < np.uint32(round(fraction * 2**24)), top, left, box_height, box_width


def _sides(hw: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return heights and widths, int32 [4096], all equally likely."""
    middle = (np.arange(_SIDE) + 0.5) / _SIDE
    area = (AREA[0] + (AREA[1] - AREA[0]) * middle)[:, None] * (hw[0] * hw[1])
    aspect = np.exp(np.log(ASPECT[0]) + np.log(ASPECT[1] / ASPECT[0]) * middle)[None, :]
    height, width = np.sqrt(area * aspect), np.sqrt(area / aspect)
    return tuple(
        np.clip(np.rint(side), 1, size).astype(np.int32).ravel() for side, size in zip((height, width), hw, strict=True)
    )


_PURPOSE = name_id("augment")
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
    crop_padding: int = 4  # pixels added on every side before a crop of the same size
    reflect: bool = False  # fill them with the mirrored image instead of zeros
    on_device: bool = True  # False: blocks arrive preprocessed
    color_jitter: float = 0.0
    hue_jitter: float = 0.0
    random_erasing: float = 0.0
    rand_augment: RandAugment | None = None
    mix: Mix | None = None
    shrunk_hw: tuple[int, int] | None = None  # size that training images are shrunk to before mixing
    # custom: (images, labels, sample of each, epoch) -> images, after the rest and before mixing
    augment: Callable[[Array, Array, Array, Epoch], Array] | None = None

    def with_seed(self, seed: Seed) -> "Preprocess":
        """Return the same with another seed."""
        chosen = self.rand_augment and replace(self.rand_augment, seed=seed)
        return replace(self, seed=seed, rand_augment=chosen, mix=self.mix and replace(self.mix, seed=seed))

    def at_size(self, hw: tuple[int, int]) -> "Preprocess":
        """Return the same with training images of a smaller size."""
        return replace(self, shrunk_hw=hw, mix=replace(self.mix, image_hw=hw) if self.mix else None)


def preprocess_spec(data: Data, augment: Augment, info: DataInfo, seed: int) -> Preprocess:
    """Return the preprocessing that a configuration asks for."""
    _refuse_colors(augment, info)
    return Preprocess(
        augmentation=info.augmentation,
        normalization=info.normalization,
        mean=info.channel_mean,
        std=info.channel_std,
        seed=seed,
        image_hwc=info.image_hwc,
        crop_padding=data.crop_padding,
        reflect=data.crop_fill == "reflect",
        on_device=data.accelerator_side_preprocess,
        color_jitter=augment.color_jitter,
        hue_jitter=augment.hue_jitter,
        random_erasing=augment.random_erasing,
        rand_augment=rand_augment_of(augment, seed),
        mix=mix_of(augment, seed, info.image_hwc[:2]),
    )


def _refuse_colors(augment: Augment, info: DataInfo) -> None:
    """Refuse colour changes that are not defined for these images."""
    if augment.hue_jitter and info.image_hwc[2] != 3:
        raise ConfigError(
            f"hue_jitter is {augment.hue_jitter:g}, but the images of {info.name} have {info.image_hwc[2]} channels.",
            rule="A hue needs red, green and blue.",
            remedy="Leave hue_jitter out.",
        )
    if info.image_dtype != "uint8" and (augment.color_jitter or augment.hue_jitter or augment.rand_augment):
        raise ConfigError(
            f"Colour changes were requested, but the images are {info.image_dtype}.",
            rule="color_jitter, hue_jitter and rand_augment are defined on whole numbers from 0 to 255.",
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
        values = (_take(images, rows, columns, xp).astype(np.float32) - centre) * scale
        if inside is not None:
            # After normalisation: the padding is 0 for the network, which is the mean colour, and not black.
            values = xp.where(inside, values.reshape(inside.shape), np.float32(0)).reshape(values.shape)
    return erase(values, index, epoch, spec.random_erasing, spec.seed) if train and spec.random_erasing else values


def draw_offsets(
    index: Array, epoch: Epoch, spec: Preprocess, places: tuple[int, int] | None = None
) -> tuple[Array, Array, Array]:
    """Return (rows down, columns right, flip or not) of each sample; the middle one of the places leaves it in place.

    One draw serves all three: its bits 0-14 and 15-29 choose the offsets, its last bit the flip.
    """
    places = places or (2 * spec.crop_padding + 1, 2 * spec.crop_padding + 1)
    word = draw(spec.seed, epoch, index, _PURPOSE)
    # A product and a shift instead of a remainder, which is slow on devices; as even as 15 bits allow.
    mask, shift = np.uint32(0x7FFF), np.uint32(15)
    down = ((word & mask) * np.uint32(places[0])) >> shift
    right = (((word >> shift) & mask) * np.uint32(places[1])) >> shift
    return down.astype(np.int32), right.astype(np.int32), (word >> np.uint32(31)) == np.uint32(1)


def _moves(spec: Preprocess) -> bool:
    return spec.augmentation != "none" or (spec.rand_augment is not None and spec.rand_augment.moves_pixels)


def _recolored(images: Array, index: Array, epoch: Epoch, spec: Preprocess) -> Array:
    """Return the images with their colours changed, as bytes; unchanged if no option asks for it."""
    if not (spec.color_jitter or spec.hue_jitter or spec.rand_augment):
        return images
    x = images.astype(np.float32)
    if spec.color_jitter or spec.hue_jitter:
        x = jitter(x, index, epoch, (spec.color_jitter, spec.hue_jitter), spec.seed)
    if spec.rand_augment is not None:
        x = change_colors(x, index, epoch, spec.rand_augment)
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
    warped = train and spec.rand_augment is not None and spec.rand_augment.moves_pixels
    if warped and spec.rand_augment is not None:
        rows, columns = source_pixels(index, epoch, spec.rand_augment, (height, width))
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
    return xp.clip(rows, 0, source_hw[0] - 1), xp.clip(columns, 0, source_hw[1] - 1), inside


def _reflected(at: Array, size: int, xp: ModuleType) -> Array:
    """Return positions mirrored at the first and the last pixel, which are not repeated."""
    at = xp.abs(at)
    return xp.minimum(at, 2 * (size - 1) - at)


def _take(images: Array, rows: Array, columns: Array, xp: ModuleType) -> Array:
    """Gather pixels by flat index: one gather for XLA, and for NumPy three times faster than three indices."""
    count, height, width, channels = images.shape
    first_row = xp.arange(count, dtype=np.int32)[:, None, None] * height
    pixel = (first_row + rows) * width + columns
    # Positions are inside already. The default mode of JAX would check every one and fill in NaN.
    return images.reshape(-1, channels).take(pixel, axis=0, mode="clip")


# Shrinking on the device: bilinear with antialiasing, as two matrix products


def shrink(values: Array, hw: tuple[int, int]) -> Array:
    """Return images [n, H, W, C] of float32 numbers at a smaller size."""
    rows, columns = (shrink_matrix(size, wanted) for size, wanted in zip(values.shape[1:3], hw, strict=True))
    count, height, width, channels = values.shape
    # In full float32 (a GPU would round to 10 bits by default): it costs little, and host and device agree.
    by_rows = _product(rows, values.reshape(count, height, width * channels))
    return _product(columns, by_rows.reshape(count * hw[0], width, channels)).reshape(count, *hw, channels)


def shrink_matrix(size: int, wanted: int) -> np.ndarray:
    """Return the weights of `size` old pixels in each of `wanted` new ones, float32 [wanted, size].

    A triangle over the old pixels around the new one's centre, as wide as a new pixel is large (Pillow's BILINEAR).
    """
    scale = size / wanted
    centre = (np.arange(wanted) + 0.5) * scale
    distance = np.abs(np.arange(size)[None, :] + 0.5 - centre[:, None])
    weights = np.maximum(1 - distance / max(scale, 1.0), 0)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def _product(matrix: np.ndarray, values: Array) -> Array:
    if isinstance(values, np.ndarray):
        return np.matmul(matrix, values)
    return jnp.einsum("ps,nsk->npk", matrix, values, precision=lax.Precision.HIGHEST)
