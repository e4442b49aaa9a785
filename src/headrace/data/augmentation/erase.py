"""Random erasing: set a rectangle to zero, the mean after normalisation.

Areas are 2 to 33 % of the image, aspects 0.3 to 3.3, uniform in the logarithm; a side that would be longer than the
image is cut to its length.
"""

import numpy as np

from headrace.core.rng import Seed, array_module, draw, name_id
from headrace.data.augmentation.colors import Array, Epoch

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
