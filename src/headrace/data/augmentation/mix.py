"""Mix training images and their labels: mixup, cutmix, one of them at random, or both with four labels each.

One definition for NumPy and JAX. Partners are neighbours by position in the micro-batch: what a sample is mixed with
depends on its micro-batch, as with batch norm, and on nothing else in the plan. Mixup draws a weight for each sample,
cutmix a box for each micro-batch, addressed by its first sample. Labels are mixed without the images, so that the
last stage of a pipeline can do it alone. Draws pick from tables made on the host, and the box is in whole numbers, so
that host, device and all stages agree.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from headrace.config.schema import Augment
from headrace.core.rng import Seed, array_module, draw, name_id
from headrace.data.augmentation.colors import Array, Epoch

_TABLE_BITS = 12
_TABLE_SIZE = 1 << _TABLE_BITS  # quantiles: the error of a draw's probability is at most 1/8192
_SHARE, _KEPT, _CENTRE = name_id("mixup/share"), name_id("cutmix/kept"), name_id("cutmix/centre")
_SWITCH = name_id("mix/switch")
_FIXED = 256  # positions per pixel in which the box is placed


class MixedLabels(NamedTuple):
    """Several labels per sample, each with its weight in the target; column 0 is the sample's unmixed label."""

    labels: Any  # int32 [n, k] of classes, else a number for each output [n, k, C]
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
    xp, axis = array_module(labels), 0 if labels.ndim > 1 else None
    columns, weights = [labels], [xp.ones(labels.shape[:1], np.float32)]
    if mix.mixup_alpha > 0:
        kept = mixup_weights(index, epoch, mix)
        columns, weights = [labels, xp.roll(labels, 1, axis)], [kept, 1 - kept]
    if mix.cuts:
        kept, shift = kept_share(cutmix_box(index, epoch, mix), mix), _cut_shift(len(labels))
        columns += [xp.roll(each, shift, axis) for each in columns]
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
