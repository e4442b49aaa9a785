"""A policy's operations on images: colours first, in the order drawn; then the look-up of the pixels that are moved.

Coordinates are whole numbers (256ths of a pixel), so that host and device agree. Operations that move pixels are
composed with each other, and with crop and flip, into one look-up of the nearest pixel.
"""

from collections.abc import Sequence

import numpy as np
from jax import lax

from headrace.core.rng import Seed, array_module, draw, name_id
from headrace.data.augmentation.colors import Array, Epoch
from headrace.data.augmentation.operations import ColorRow, rotation
from headrace.data.augmentation.policies import Policy

_PART = 256  # units per pixel
_UNIT_BITS = 12  # fraction bits of the factors in a transform
_ANGLE_BITS = 10  # of the plain rotation: that many angles, equally likely
_TURN = name_id("rotation")


def change_colors(x: Array, index: Array, epoch: Epoch, spec: Policy) -> Array:
    """Apply each sample's operations on colours to images of whole numbers from 0 to 255, float32 [n, H, W, C]."""
    for layer in range(spec.count):
        number, which = spec.choose(index, epoch, layer)
        is_strength = which[:, None] == np.arange(2 * len(spec.levels), dtype=np.int32)[None, :]
        changed = x
        for at, name in enumerate(spec.operations):
            row = spec.ranges.colors.get(name) if name in spec.names_of(layer) else None
            if row is not None:
                table = np.array([row.strength(level, sign) for level in spec.levels for sign in (1, -1)], np.float32)
                # A sum with one term: XLA computes a reduction once per sample, a look-up for every pixel again.
                if table.ndim == 1:
                    strength = (is_strength * table[None, :]).sum(1, dtype=np.float32)[:, None, None, None]
                else:  # a few numbers
                    strength = (is_strength[:, :, None] * table[None]).sum(1, dtype=np.float32)[:, None, None, :]
                changed = apply_where(number == at, row, x, strength, changed)
        # A barrier, or XLA computes an operation anew for each one after it that looks at the whole image.
        x = changed if isinstance(changed, np.ndarray) or layer == spec.count - 1 else lax.optimization_barrier(changed)
    return x


def apply_where(chosen: Array, row: ColorRow, x: Array, strength: Array, other: Array) -> Array:
    """Return the operation's result for the samples that chose it; NumPy computes no others."""
    # XLA has no branch for single images of a batch: every operation is computed for all of them.
    if not isinstance(x, np.ndarray):
        return array_module(x).where(chosen[:, None, None, None], row.apply(x, strength), other)
    if not chosen.any():
        return other
    result = other.copy()
    result[chosen] = row.apply(x[chosen], strength[chosen])
    return result


def source_pixels(
    index: Array, epoch: Epoch, spec: Policy | None, hw: tuple[int, int], turn: tuple[float, Seed] = (0.0, 0)
) -> tuple[Array, Array]:
    """Return the source row and column of each output pixel, int32 [n, H, W] each; they may be outside the image.

    `turn` is the plain rotation, before the policy: the most degrees to either side, and its seed.
    """
    xp = array_module(index)
    height, width = hw
    half = _PART // 2
    y = (xp.arange(height, dtype=np.int32) * 2 + 1 - height)[None, :, None] * half
    x = (xp.arange(width, dtype=np.int32) * 2 + 1 - width)[None, None, :] * half
    for row in _moves_of(index, epoch, spec, hw, turn):
        a, b, c, d, e, f = (row[:, at, None, None] for at in range(6))
        rounding = 1 << (_UNIT_BITS - 1)
        x, y = ((a * x + b * y + rounding) >> _UNIT_BITS) + c, ((d * x + e * y + rounding) >> _UNIT_BITS) + f
    rows, columns = (y + half * height) >> 8, (x + half * width) >> 8
    full = (len(index), height, width)
    return xp.broadcast_to(rows, full), xp.broadcast_to(columns, full)


def take_pixels(images: Array, rows: Array, columns: Array) -> Array:
    """Gather pixels by flat index: one gather for XLA, and for NumPy three times faster than three indices."""
    xp = array_module(images)
    count, height, width, channels = images.shape
    first_row = xp.arange(count, dtype=np.int32)[:, None, None] * height
    pixel = (first_row + rows) * width + columns
    # Positions are inside already. The default mode of JAX would check every one and fill in NaN.
    return images.reshape(-1, channels).take(pixel, axis=0, mode="clip")


def _moves_of(
    index: Array, epoch: Epoch, spec: Policy | None, hw: tuple[int, int], turn: tuple[float, Seed]
) -> list[Array]:
    """Return the transforms of each sample, int32 [n, 6]: from output to source, so the last operation comes first."""
    xp, found = array_module(index), []
    if spec is not None:
        table = _transform_table(spec, hw)
        for layer in reversed(range(spec.count)):
            number, which = spec.choose(index, epoch, layer)
            found.append(xp.asarray(table)[2 * len(spec.levels) * number + which])
    degrees, seed = turn
    if degrees:
        parts = (np.arange(1 << _ANGLE_BITS) + 0.5) / (1 << (_ANGLE_BITS - 1)) - 1
        table = np.array([_fixed_point(rotation(degrees * part)) for part in parts], np.int32)
        word = draw(seed, epoch, index, _TURN)
        found.append(xp.asarray(table)[(word >> np.uint32(32 - _ANGLE_BITS)).astype(np.int32)])
    return found


def _transform_table(spec: Policy, hw: tuple[int, int]) -> np.ndarray:
    """Return the transforms of all operations, and of none, at all levels with both signs in fixed point,
    int32 [(operations + 1) x levels x 2, 6].
    """
    moves, rows = spec.ranges.moves, []
    for name in (*spec.operations, "identity"):
        for level in (sign * level for level in spec.levels for sign in (1, -1)):
            rows.append(_fixed_point(moves[name](level, hw) if name in moves else (1, 0, 0, 0, 1, 0)))
    return np.array(rows, np.int32)


def _fixed_point(move: Sequence[float]) -> tuple[int, ...]:
    a, b, c, d, e, f = move
    # Sines and cosines are taken by NumPy, in float64: a device's own would move pixels at the edges of rounding.
    factors = np.rint(np.array([a, b, d, e], np.float64) * (1 << _UNIT_BITS)).astype(int)
    return (factors[0], factors[1], round(c * _PART), factors[2], factors[3], round(f * _PART))
