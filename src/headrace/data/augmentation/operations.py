"""The operations that a policy chooses from: what each does at a level from 0 to 1, by ranges.

Strengths of a level are made on the host, in float64: a device's own sines and powers would differ in their last bits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from headrace.data.augmentation.colors import (
    Array,
    autocontrast,
    blur,
    blur_weights,
    brightness,
    contrast,
    equalize,
    exact,
    grayscale,
    invert,
    posterize,
    saturation,
    sharpness,
    solarize,
)

Strengths = Callable[[float, int], float | np.ndarray]  # of a level and a sign, 1 or -1


@dataclass(frozen=True)
class ColorRow:
    """An operation on colours, and its strength (a number, or a few) at a level from 0 to 1 with a sign."""

    apply: Callable[[Array, Array], Array]
    strength: Strengths = lambda level, sign: 0.0  # for operations that have none


# Where a pixel at (x, y) from the centre comes from, by signed level and size: x' = a x + b y + c, y' = d x + e y + f.
Move = Callable[[float, tuple[int, int]], tuple[float, float, float, float, float, float]]


def rotation(degrees: float) -> tuple[float, float, float, float, float, float]:
    """Return the move that turns an image counter-clockwise."""
    angle = np.deg2rad(degrees)
    return (np.cos(angle), -np.sin(angle), 0, np.sin(angle), np.cos(angle), 0)


@dataclass(frozen=True)
class Ranges:
    """The operations with their strengths."""

    colors: Mapping[str, ColorRow]
    moves: Mapping[str, Move]


def _factor(most: float) -> Strengths:
    return lambda level, sign: 1 + sign * float(exact(most * level))


def _with_factors(colors: Mapping[str, ColorRow], most: float) -> dict[str, ColorRow]:
    names = ("brightness", "contrast", "color", "sharpness")
    return {name: replace(row, strength=_factor(most)) if name in names else row for name, row in colors.items()}


# torchvision's ranges of RandAugment and AutoAugment.
USUAL = Ranges(
    colors={
        "brightness": ColorRow(brightness, _factor(0.9)),
        "contrast": ColorRow(contrast, _factor(0.9)),
        "color": ColorRow(saturation, _factor(0.9)),
        "sharpness": ColorRow(sharpness, _factor(0.9)),
        "posterize": ColorRow(posterize, lambda level, _: 2.0 ** round(4 * level)),
        "solarize": ColorRow(solarize, lambda level, _: 255 * (1 - level)),
        "autocontrast": ColorRow(autocontrast),
        "invert": ColorRow(invert),
        "equalize": ColorRow(equalize),
    },
    moves={
        "shear_x": lambda level, _: (1, 0.3 * level, 0, 0, 1, 0),
        "shear_y": lambda level, _: (1, 0, 0, 0.3 * level, 1, 0),
        "translate_x": lambda level, hw: (1, 0, int(150 / 331 * hw[1] * level), 0, 1, 0),
        "translate_y": lambda level, hw: (1, 0, 0, 0, 1, int(150 / 331 * hw[0] * level)),
        "rotate": lambda level, _: rotation(30 * level),
    },
)
# Those of TrivialAugment (wide): shifts are in pixels, whatever the size.
WIDE = Ranges(
    colors=_with_factors(USUAL.colors, 0.99)
    | {"posterize": ColorRow(posterize, lambda level, _: 2.0 ** round(6 * level))},
    moves={
        "shear_x": lambda level, _: (1, 0.99 * level, 0, 0, 1, 0),
        "shear_y": lambda level, _: (1, 0, 0, 0.99 * level, 1, 0),
        "translate_x": lambda level, _: (1, 0, int(32 * level), 0, 1, 0),
        "translate_y": lambda level, _: (1, 0, 0, 0, 1, int(32 * level)),
        "rotate": lambda level, _: rotation(135 * level),
    },
)
# Those of 3-Augment: half of the levels are inverted, or the image is blurred by 0.1 to 2 pixels.
THREE = Ranges(
    colors={
        "grayscale": ColorRow(grayscale),
        "solarize": ColorRow(solarize, lambda level, _: 128.0),
        "blur": ColorRow(blur, lambda level, _: blur_weights(0.1 + 1.9 * level)),
    },
    moves={},
)


def _severity(level: float) -> float:
    """Return AugMix's strength as a share of the greatest: severity 3 of 10 draws from 0.1 to 3."""
    return (0.1 + 2.9 * level) / 10


def _whole(level: float, most: float) -> int:
    """Return that share of `most` at a signed level, rounded towards 0."""
    return int(np.sign(level) * int(_severity(abs(level)) * most))


MIXED = Ranges(
    colors={
        "autocontrast": ColorRow(autocontrast),
        "equalize": ColorRow(equalize),
        "posterize": ColorRow(posterize, lambda level, _: 2.0 ** (4 + _whole(level, 4))),
        "solarize": ColorRow(solarize, lambda level, _: 256.0 - _whole(level, 256)),
    },
    moves={
        "rotate": lambda level, _: rotation(_whole(level, 30)),
        "shear_x": lambda level, _: (1, 0.3 * np.sign(level) * _severity(abs(level)), 0, 0, 1, 0),
        "shear_y": lambda level, _: (1, 0, 0, 0.3 * np.sign(level) * _severity(abs(level)), 1, 0),
        "translate_x": lambda level, hw: (1, 0, _whole(level, hw[1] / 3), 0, 1, 0),
        "translate_y": lambda level, hw: (1, 0, 0, 0, 1, _whole(level, hw[0] / 3)),
    },
)
RANGES: Mapping[str, Ranges] = {"usual": USUAL, "wide": WIDE, "three": THREE, "mixed": MIXED}
