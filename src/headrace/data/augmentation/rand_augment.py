"""RandAugment: a few operations per image, chosen at random from a table, of one strength or of strengths around it.

Colours change first, in the order drawn, on the image as it is stored; operations that move pixels are composed with
crop and flip into one look-up of the nearest pixel. Coordinates are whole numbers (256ths of a pixel), so that host
and device agree. The ranges are torchvision's; a strength of 30 is their end. Strengths that vary are drawn from 16
equally likely quantiles of a normal distribution, so that all of them can be computed on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from headrace.config.section_augment import RAND_AUGMENT_OPERATIONS, Augment
from headrace.core.rng import Seed, array_module, draw, name_id
from headrace.data.augmentation.colors import (
    Array,
    Epoch,
    autocontrast,
    brightness,
    contrast,
    equalize,
    exact,
    invert,
    posterize,
    saturation,
    sharpness,
    solarize,
)

FULL = 30.0  # the greatest magnitude
_PART = 256  # units per pixel
_UNIT_BITS = 12  # fraction bits of the factors in a transform
_NUM_LEVELS = 16  # strengths, where they vary
_BY_DEFAULT = tuple(name for name in RAND_AUGMENT_OPERATIONS if name != "equalize")


@dataclass(frozen=True, kw_only=True)
class RandAugment:
    """The options of RandAugment: number of operations, strength, and which ones."""

    count: int
    magnitude: float
    operations: tuple[str, ...]
    seed: Seed
    std: float = 0.0  # of the magnitude
    probability: float = 1.0  # that an operation is applied

    @property
    def levels(self) -> tuple[float, ...]:
        """Return the equally likely strengths, from 0 to 1."""
        if not self.std:
            return (self.magnitude / FULL,)
        normal = NormalDist(self.magnitude, self.std)
        drawn = [normal.inv_cdf((at + 0.5) / _NUM_LEVELS) for at in range(_NUM_LEVELS)]
        return tuple(min(max(magnitude, 0.0), FULL) / FULL for magnitude in drawn)

    @property
    def moves_pixels(self) -> bool:
        return any(name in MOVES for name in self.operations)


def rand_augment_of(augment: Augment, seed: int) -> RandAugment | None:
    """Return the RandAugment that the options ask for, or None."""
    if not augment.rand_augment:
        return None
    return RandAugment(
        count=augment.rand_augment,
        magnitude=augment.rand_augment_magnitude,
        operations=augment.rand_augment_operations or _BY_DEFAULT,
        seed=seed,
        std=augment.rand_augment_std,
        probability=augment.rand_augment_probability,
    )


@dataclass(frozen=True)
class ColorRow:
    """An operation on colours, and its strength at a level from 0 to 1 with the sign 1 or -1."""

    apply: Callable[[Array, Array], Array]
    strength: Callable[[float, int], float] = lambda level, sign: 0.0  # for operations that have none


def _factor(level: float, sign: int) -> float:
    return 1 + sign * float(exact(0.9 * level))


COLORS = {
    "brightness": ColorRow(brightness, _factor),
    "contrast": ColorRow(contrast, _factor),
    "color": ColorRow(saturation, _factor),
    "sharpness": ColorRow(sharpness, _factor),
    "posterize": ColorRow(posterize, lambda level, _: 2.0 ** round(4 * level)),
    "solarize": ColorRow(solarize, lambda level, _: 255 * (1 - level)),
    "autocontrast": ColorRow(autocontrast),
    "invert": ColorRow(invert),
    "equalize": ColorRow(equalize),
}

# Where a pixel at (x, y) from the centre comes from, by signed level and size: x' = a x + b y + c, y' = d x + e y + f.
Move = Callable[[float, tuple[int, int]], tuple[float, float, float, float, float, float]]


def _rotation(level: float, _hw: tuple[int, int]) -> tuple[float, float, float, float, float, float]:
    angle = np.deg2rad(30 * level)
    return (np.cos(angle), -np.sin(angle), 0, np.sin(angle), np.cos(angle), 0)


MOVES: dict[str, Move] = {
    "shear_x": lambda level, _: (1, 0.3 * level, 0, 0, 1, 0),
    "shear_y": lambda level, _: (1, 0, 0, 0.3 * level, 1, 0),
    "translate_x": lambda level, hw: (1, 0, int(150 / 331 * hw[1] * level), 0, 1, 0),
    "translate_y": lambda level, hw: (1, 0, 0, 0, 1, int(150 / 331 * hw[0] * level)),
    "rotate": _rotation,
}


def choices(index: Array, epoch: Epoch, spec: RandAugment, layer: int) -> tuple[Array, Array]:
    """Return (number of the operation, number of its strength) of each sample, int32 [n] each.

    An operation that is not applied has the number behind the last one. Strengths are numbered by level and sign:
    2 level + 1 is the negative one.
    """
    word = draw(spec.seed, epoch, index, name_id(f"rand_augment/{layer}"))
    # The high bits choose the operation and the lowest one the sign, so that one draw serves both.
    number = ((word >> np.uint32(16)) * np.uint32(len(spec.operations))) >> np.uint32(16)
    strength = word & np.uint32(1)
    if spec.std or spec.probability < 1:
        more = draw(spec.seed, epoch, index, name_id(f"rand_augment/{layer}/strength"))
        applied = (more >> np.uint32(8)) < np.uint32(round(spec.probability * 2**24))
        number = array_module(number).where(applied, number, np.uint32(len(spec.operations)))
        strength = strength + 2 * ((more & np.uint32(0xFF)) * np.uint32(len(spec.levels)) >> np.uint32(8))
    return number.astype(np.int32), strength.astype(np.int32)


def change_colors(x: Array, index: Array, epoch: Epoch, spec: RandAugment) -> Array:
    """Apply each sample's operations on colours to images of whole numbers from 0 to 255, float32 [n, H, W, C]."""
    for layer in range(spec.count):
        number, which = choices(index, epoch, spec, layer)
        is_strength = which[:, None] == np.arange(2 * len(spec.levels), dtype=np.int32)[None, :]
        changed = x
        for at, name in enumerate(spec.operations):
            row = COLORS.get(name)
            if row is not None:
                table = np.array([row.strength(level, sign) for level in spec.levels for sign in (1, -1)], np.float32)
                # A sum with one term: XLA computes a reduction once per sample, a look-up for every pixel again.
                strength = (is_strength * table[None, :]).sum(1, dtype=np.float32)[:, None, None, None]
                changed = _where(number == at, row, x, strength, changed)
        x = changed
    return x


def _where(chosen: Array, row: ColorRow, x: Array, strength: Array, other: Array) -> Array:
    """Return the operation's result for the samples that chose it; NumPy computes no others."""
    # XLA has no branch for single images of a batch: every operation is computed for all of them.
    if not isinstance(x, np.ndarray):
        return array_module(x).where(chosen[:, None, None, None], row.apply(x, strength), other)
    if not chosen.any():
        return other
    result = other.copy()
    result[chosen] = row.apply(x[chosen], strength[chosen])
    return result


def source_pixels(index: Array, epoch: Epoch, spec: RandAugment, hw: tuple[int, int]) -> tuple[Array, Array]:
    """Return the source row and column of each output pixel, int32 [n, H, W] each; they may be outside the image."""
    xp = array_module(index)
    height, width = hw
    half = _PART // 2
    y = (xp.arange(height, dtype=np.int32) * 2 + 1 - height)[None, :, None] * half
    x = (xp.arange(width, dtype=np.int32) * 2 + 1 - width)[None, None, :] * half
    table = _transform_table(spec, hw)
    for layer in reversed(range(spec.count)):  # from output to source, so the last operation is undone first
        number, which = choices(index, epoch, spec, layer)
        row = xp.asarray(table)[2 * len(spec.levels) * number + which]
        a, b, c, d, e, f = (row[:, at, None, None] for at in range(6))
        rounding = 1 << (_UNIT_BITS - 1)
        x, y = ((a * x + b * y + rounding) >> _UNIT_BITS) + c, ((d * x + e * y + rounding) >> _UNIT_BITS) + f
    rows, columns = (y + half * height) >> 8, (x + half * width) >> 8
    full = (len(index), height, width)
    return xp.broadcast_to(rows, full), xp.broadcast_to(columns, full)


def _transform_table(spec: RandAugment, hw: tuple[int, int]) -> np.ndarray:
    """Return the transforms of all operations, and of none, at all levels with both signs in fixed point,
    int32 [(operations + 1) x levels x 2, 6].
    """
    rows = []
    for name in (*spec.operations, "identity"):
        for level in (sign * level for level in spec.levels for sign in (1, -1)):
            a, b, c, d, e, f = MOVES[name](level, hw) if name in MOVES else (1, 0, 0, 0, 1, 0)
            # Sines and cosines are taken by NumPy, in float64: a device's own would move pixels at the edges of
            # rounding.
            factors = np.rint(np.array([a, b, d, e], np.float64) * (1 << _UNIT_BITS)).astype(int)
            rows.append((factors[0], factors[1], round(c * _PART), factors[2], factors[3], round(f * _PART)))
    return np.array(rows, np.int32)
