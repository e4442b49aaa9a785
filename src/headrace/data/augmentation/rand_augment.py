"""Operations on the colours of images, and RandAugment, which chooses some of them at random."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import jax.numpy as jnp
import numpy as np

from headrace.config.section_augment import RAND_AUGMENT_OPERATIONS, Augment
from headrace.core.rng import HostOrDevice, Seed, array_module, draw, name_id

# Operations on the colours of images: one definition, run by NumPy on the host or by JAX on the device.
#
# Images are float32 [n, H, W, C] with whole numbers from 0 to 255, before and after each operation, as if they were
# bytes; `strength` is one number or [n, 1, 1, 1]. The meaning is Pillow's (ImageEnhance, ImageOps), to one level of
# 255.


Array = HostOrDevice
Epoch = Array | np.integer | int
Strength = Array | np.float32 | float
TOP = np.float32(255)


def exact(strength: np.ndarray | float) -> np.ndarray:
    """Return the nearest multiple of 1/4096: such a factor times a level is exact in float32 on host and device."""
    return (np.rint(np.asarray(strength, np.float64) * 4096) / 4096).astype(np.float32)


def levels(x: Array) -> Array:
    """Return the nearest whole numbers from 0 to 255."""
    xp = array_module(x)
    return xp.clip(xp.round(x), np.float32(0), TOP)


def grey(x: Array) -> Array:
    """Return the brightness of each pixel, [n, H, W, 1]: Rec. 601 for RGB, else the mean of the channels."""
    xp = array_module(x)
    if x.shape[3] != 3:
        return levels(x.mean(3, keepdims=True, dtype=np.float32))
    red, green, blue = x[..., 0:1], x[..., 1:2], x[..., 2:3]
    # whole numbers below 2^24: exact in float32
    total = np.float32(19595) * red + np.float32(38470) * green + np.float32(7471) * blue + np.float32(32768)
    return xp.floor(total / np.float32(65536))


def brightness(x: Array, strength: Strength) -> Array:
    """Multiply: 0 is black, 1 changes nothing."""
    return levels(strength * x)


def contrast(x: Array, strength: Strength) -> Array:
    """Move away from the image's mean brightness, or (below 1) towards it."""
    xp = array_module(x)
    # Rounded as Pillow does: the mean is a whole level.
    middle = xp.floor(grey(x).mean((1, 2, 3), keepdims=True, dtype=np.float32) + np.float32(0.5))
    return _away_from(middle, x, strength)


def saturation(x: Array, strength: Strength) -> Array:
    """Move away from grey: 0 is a grey image, 1 changes nothing."""
    return _away_from(grey(x), x, strength)


def sharpness(x: Array, strength: Strength) -> Array:
    """Move away from the image smoothed over 3 x 3 pixels; the border stays."""
    xp = array_module(x)
    if min(x.shape[1:3]) < 3:
        return x
    three = x[:, :-2] + x[:, 1:-1] + x[:, 2:]
    nine = three[:, :, :-2] + three[:, :, 1:-1] + three[:, :, 2:]
    # Pillow's SMOOTH kernel: ones around a five, divided by 13.
    smooth = levels((nine + np.float32(4) * x[:, 1:-1, 1:-1]) / np.float32(13))
    inner = _away_from(smooth, x[:, 1:-1, 1:-1], strength)
    at_border = np.ones((1, *x.shape[1:3], 1), bool)
    at_border[:, 1:-1, 1:-1] = False
    return xp.where(at_border, x, xp.pad(inner, ((0, 0), (1, 1), (1, 1), (0, 0))))


def posterize(x: Array, strength: Strength) -> Array:
    """Round down to multiples of `strength`."""
    return array_module(x).floor(x / strength) * strength


def solarize(x: Array, strength: Strength) -> Array:
    """Invert values that are not below `strength`."""
    return array_module(x).where(x >= strength, TOP - x, x)


def invert(x: Array, strength: object = None) -> Array:
    return TOP - x


def autocontrast(x: Array, strength: object = None) -> Array:
    """Stretch each channel so that its darkest value is 0 and its brightest 255."""
    xp = array_module(x)
    low, high = x.min((1, 2), keepdims=True), x.max((1, 2), keepdims=True)
    scale = TOP / xp.maximum(high - low, np.float32(1))
    return xp.where(high > low, levels((x - low) * scale), x)


def equalize(x: Array, strength: object = None) -> Array:
    """Spread each channel so that all values become about equally frequent."""
    xp = array_module(x)
    counts = _histogram(x)  # int32 [n, C, 256]
    level = xp.arange(256, dtype=np.int32)[None, None, :]
    greatest = xp.where(counts > 0, level, 0).max(2, keepdims=True)
    at_greatest = xp.where(level == greatest, counts, 0).sum(2, keepdims=True)
    # As in Pillow's equalize, which leaves the brightest level out of the count.
    step = (x.shape[1] * x.shape[2] - at_greatest) // 255
    below = xp.cumsum(counts, 2) - counts
    table = xp.where(step > 0, xp.minimum((step // 2 + below) // xp.maximum(step, 1), 255), level).astype(np.int32)
    flat = xp.moveaxis(x.reshape(len(x), -1, x.shape[3]), 1, 2).astype(np.int32)
    found = xp.take_along_axis(table, flat, 2).astype(np.float32)
    return xp.moveaxis(found, 1, 2).reshape(x.shape)


def turn_hue(x: Array, strength: Strength) -> Array:
    """Rotate the hue by a fraction of the colour circle, in HSV; for 3 channels."""
    xp = array_module(x)
    red, green, blue = x[..., 0:1], x[..., 1:2], x[..., 2:3]
    value = xp.maximum(xp.maximum(red, green), blue)
    spread = value - xp.minimum(xp.minimum(red, green), blue)
    safe = xp.maximum(spread, np.float32(1))
    sixth = xp.where(
        value == red,
        (green - blue) / safe,
        xp.where(value == green, (blue - red) / safe + np.float32(2), (red - green) / safe + np.float32(4)),
    )
    sixth = sixth + np.float32(6) * strength

    def channel(offset: int) -> Array:
        k = (sixth + np.float32(offset)) % np.float32(6)
        return value - spread * xp.clip(xp.minimum(k, np.float32(4) - k), np.float32(0), np.float32(1))

    return levels(xp.concatenate([channel(5), channel(3), channel(1)], 3))


def jitter(x: Array, index: Array, epoch: Epoch, strengths: tuple[float, float], seed: Seed) -> Array:
    """Change brightness, contrast and saturation, in this order, by factors from 1 - s to 1 + s, then rotate the hue.

    `strengths` are s and the largest rotation of the hue; each factor is drawn for each sample.
    """
    strength, turn = strengths

    def drawn(name: str, middle: float, spread: float) -> Array:
        """Draw one of 4,096 evenly spaced values from middle - spread to middle + spread for each sample."""
        table = exact(middle + spread * ((np.arange(4096) + 0.5) / 2048 - 1))
        random_bits = draw(seed, epoch, index, name_id(f"jitter/{name}"))
        return array_module(index).asarray(table)[(random_bits >> np.uint32(20)).astype(np.int32)][:, None, None, None]

    if strength:
        for name, change in (("brightness", brightness), ("contrast", contrast), ("saturation", saturation)):
            x = change(x, drawn(name, 1.0, strength))
    return turn_hue(x, drawn("hue", 0.0, turn)) if turn else x


def _away_from(base: Array, x: Array, strength: Strength) -> Array:
    return levels(base + strength * (x - base))


def _histogram(x: Array) -> Array:
    if isinstance(x, np.ndarray):
        count, channels = x.shape[0], x.shape[3]
        row = np.arange(count)[:, None, None, None] * channels + np.arange(channels)
        place = (row * 256 + x.astype(np.int64)).ravel()
        return np.bincount(place, minlength=count * channels * 256).reshape(count, channels, 256).astype(np.int32)
    # XLA fuses the comparison with the sum: no scatter, and the [.., 256] comparison is never stored
    level = jnp.arange(256, dtype=np.float32)[None, None, None, None, :]
    return (x[..., None] == level).sum((1, 2), dtype=np.int32)


# RandAugment: a few operations per image, chosen at random from a table, of one strength or of strengths around it.
#
# Colours change first, in the order drawn, on the image as it is stored; operations that move pixels are composed with
# crop and flip into one look-up of the nearest pixel. Coordinates are whole numbers (256ths of a pixel), so that host
# and device agree. The ranges are torchvision's; a strength of 30 is their end. Strengths that vary are drawn from 16
# equally likely quantiles of a normal distribution, so that all of them can be computed on the host.


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
