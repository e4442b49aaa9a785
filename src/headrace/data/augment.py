"""Normalise and augment images: one definition, run by NumPy on the host or by JAX on the device.

Meaning: normalise, then flip, then pad 4 zeros on every side and crop at random. Work: the crop and the flip only say
which pixel to take, so bytes are gathered once and all arithmetic after that is one fused pass over the output.
What happens to a sample depends on (seed, epoch, sample) alone, never on the batch it is in.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from headrace.config.schema import Augment, Data
from headrace.core.rng import bits, name_id
from headrace.data.dataset import DataInfo
from headrace.data.mix import Mix, mix_of

PAD = 4
_PURPOSE = name_id("augment")
_FLIPS, _CROPS = ("flip", "flip-crop"), ("crop", "flip-crop")


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How bytes become what the network sees."""

    augmentation: str  # none | flip | crop | flip-crop
    normalization: str  # per-image | per-channel | zero-one | none
    mean: tuple[float, ...]  # per channel, on the scale 0 to 1
    std: tuple[float, ...]
    seed: int
    image_hwc: tuple[int, int, int]
    on_device: bool = True  # False: blocks arrive preprocessed
    mix: Mix | None = None


def preprocess_spec(data: Data, augment: Augment, info: DataInfo, seed: int) -> Preprocess:
    """Return the preprocessing that a configuration asks for."""
    return Preprocess(
        augmentation=info.augmentation,
        normalization=info.normalization,
        mean=info.channel_mean,
        std=info.channel_std,
        seed=seed,
        image_hwc=info.image_hwc,
        on_device=data.accelerator_side_preprocess,
        mix=mix_of(augment, seed, info.image_hwc[:2]),
    )


def preprocess(images: Any, index: Any, epoch: Any, spec: Preprocess, train: bool) -> Any:
    """Return float32 [n, H, W, C] from images of 0..255 [n, H, W, C], or of any float32 numbers where nothing is
    normalised; NumPy arrays stay NumPy's.

    `index` is the sample of each image, `epoch` one number or one per image; both matter only for training.
    """
    xp = np if isinstance(images, np.ndarray) else jnp
    centre, scale = _normal(images, spec, xp)
    if not train or spec.augmentation == "none":
        return (images.astype(np.float32) - centre) * scale
    rows, columns, inside = _places(draw_moves(index, epoch, spec, xp), spec, xp)
    values = (_take(images, rows, columns, xp).astype(np.float32) - centre) * scale
    if inside is None:
        return values
    return xp.where(inside, values.reshape(inside.shape), np.float32(0)).reshape(values.shape)


def draw_moves(index: Any, epoch: Any, spec: Preprocess, xp: Any) -> tuple[Any, Any, Any]:
    """Return (rows down, columns right, flip or not) of each sample; offsets are 0..8, and 4 leaves it where it is.

    One draw serves all three: its bits 0-14 and 15-29 choose the offsets, its last bit the flip.
    """
    epoch = xp.asarray(epoch).astype(np.uint32)
    word = bits(spec.seed, epoch, index.astype(np.uint32), _PURPOSE)
    mask, places, shift = np.uint32(0x7FFF), np.uint32(2 * PAD + 1), np.uint32(15)
    down = ((word & mask) * places) >> shift
    right = (((word >> shift) & mask) * places) >> shift
    return down.astype(np.int32), right.astype(np.int32), (word >> np.uint32(31)) == np.uint32(1)


def _normal(images: Any, spec: Preprocess, xp: Any) -> tuple[Any, Any]:
    """Return what to subtract and what to multiply with, as [n, 1, 1, 1], [1, 1, W, C] or single numbers."""
    if spec.normalization == "per-image":
        return _per_image(images, xp)
    if spec.normalization == "per-channel":
        # A whole row of constants: NumPy's inner loop is then W * C long, not C, and five times faster.
        mean, std = (
            np.tile(np.array(each, np.float64), (1, 1, spec.image_hwc[1], 1)) for each in (spec.mean, spec.std)
        )
        return (255 * mean).astype(np.float32), (1 / (255 * std)).astype(np.float32)
    return np.float32(0), np.float32(1 / 255 if spec.normalization == "zero-one" else 1)


def _per_image(images: Any, xp: Any) -> tuple[Any, Any]:
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


def _places(moves: tuple[Any, Any, Any], spec: Preprocess, xp: Any) -> tuple[Any, Any, Any]:
    """Return which row [n, H] and column [n, W] comes to each place, and what is inside the image, [n, H, W * C]."""
    down, right, flip = moves
    height, width, channels = spec.image_hwc
    if spec.augmentation not in _CROPS:
        down, right = xp.full_like(down, PAD), xp.full_like(right, PAD)
    rows = xp.arange(height, dtype=np.int32)[None, :] + down[:, None] - PAD
    columns = xp.arange(width, dtype=np.int32)[None, :] + right[:, None] - PAD
    inside = None
    if spec.augmentation in _CROPS:
        inside_columns = xp.repeat((columns >= 0) & (columns < width), channels, axis=1)
        inside = ((rows >= 0) & (rows < height))[:, :, None] & inside_columns[:, None, :]
    if spec.augmentation in _FLIPS:
        columns = xp.where(flip[:, None], width - 1 - columns, columns)
    return xp.clip(rows, 0, height - 1), xp.clip(columns, 0, width - 1), inside


def _take(images: Any, rows: Any, columns: Any, xp: Any) -> Any:
    """Gather pixels by flat number: one gather for XLA, and for NumPy three times faster than three indices."""
    count, height, width, channels = images.shape
    first_row = xp.arange(count, dtype=np.int32)[:, None] * height
    pixel = (first_row + rows)[:, :, None] * width + columns[:, None, :]
    return images.reshape(-1, channels).take(pixel, axis=0, mode="clip")
