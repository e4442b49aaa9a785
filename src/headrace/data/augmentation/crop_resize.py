"""Crop and resize on the device: bilinear with antialiasing, pass by pass.

Of training crops, each pass gathers whole rows, as many as a new pixel has neighbours: on two CPU cores that took 0.4
(64 pixels) and 0.2 (224 pixels) of the time of products with matrices of weights, which are mostly zeros. Views of
evaluation in exported programs are such products: only they can be written for images of any size.
"""

import math
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from headrace.data.augmentation.colors import Array

_HALF = np.float32(0.5)


def crop_resize(images: jax.Array, boxes: jax.Array, hw: tuple[int, int]) -> jax.Array:
    """Return the boxes (top, left, height, width, float32 [n, 4]) of uint8 images [n, H, W, C], each resized to `hw`.

    A box may begin and end inside of pixels; pixels that it does not touch have no influence. The result, uint8, is
    that of data/decoding/resize.py but for rounding: that rounds to whole levels after each of its two passes, this
    once, so they differ by at most one level.
    """
    count, height, width, channels = images.shape
    rows = _resize_rows(images.reshape(count, height, width * channels), boxes[:, 0], boxes[:, 2], hw[0])
    # The second pass gathers rows again, of the transposed image: whole rows are contiguous, columns are not.
    turned = rows.reshape(count, hw[0], width, channels).transpose(0, 2, 1, 3)
    columns = _resize_rows(turned.reshape(count, width, hw[0] * channels), boxes[:, 1], boxes[:, 3], hw[1])
    values = columns.reshape(count, hw[1], hw[0], channels).transpose(0, 2, 1, 3)
    return jnp.clip(jnp.floor(values + _HALF), 0, 255).astype(np.uint8)


def _resize_rows(values: jax.Array, start: jax.Array, length: jax.Array, wanted: int) -> jax.Array:
    """Return [n, wanted, k] of [n, size, k]: `length` rows from `start` on, both [n], become `wanted`.

    Weights are a triangle over the rows around the new one's centre, as wide as a new row is large (Pillow's BILINEAR).
    """
    size = values.shape[1]
    start, length = start[:, None], length[:, None]
    scale = length / np.float32(wanted)
    wide = jnp.maximum(scale, 1)
    centre = start + (np.arange(wanted, dtype=np.float32)[None, :] + _HALF) * scale
    first = jnp.floor(centre - wide + _HALF)
    # As many as the whole image needs: the number is part of the program, while boxes differ from image to image.
    neighbours = [first + np.float32(n) for n in range(2 * math.ceil(max(size / wanted, 1)) + 1)]
    weights = [
        jnp.maximum(1 - jnp.abs(row + _HALF - centre) / wide, 0)
        * ((row >= jnp.floor(start)) & (row < start + length)).astype(np.float32)
        for row in neighbours
    ]
    total = jnp.maximum(reduce(add, weights), np.float32(1e-6))  # blocks have unused rows whose boxes are empty
    gathered = (
        jnp.take_along_axis(values, jnp.clip(row, 0, size - 1).astype(np.int32)[:, :, None], axis=1)
        for row in neighbours
    )
    pairs = zip(gathered, weights, strict=True)
    return reduce(add, (rows.astype(np.float32) * (weight / total)[:, :, None] for rows, weight in pairs))


@dataclass(frozen=True, kw_only=True)
class CentreView:
    """What evaluation takes of an image: its shorter side is resized, then a square is cut from the centre."""

    size: int
    shorter_side: int
    antialias: bool = True
    bicubic: bool = False


# Weights of Pillow's bicubic filter by distance, each a polynomial, highest power first: up to 1, and from 1 to 2.
CUBIC_NEAR, CUBIC_FAR = (1.5, -2.5, 0.0, 1.0), (-0.5, 2.5, -4.0, 2.0)


def centre_view(images: jax.Array, view: CentreView) -> jax.Array:
    """Return that view of uint8 images [n, H, W, C] as float32 whole numbers; H and W may be symbolic dims.

    The pixels are those of `valid_view` and `resize_view` but for a level where a sum ends near a half: there, Pillow's
    whole-number weights are used.
    """
    hw = [jnp.asarray(dim, np.int32) for dim in images.shape[1:3]]
    shorter = jnp.minimum(*hw)
    rows, columns = (_view_matrix(dim, side, shorter, view) for dim, side in zip(images.shape[1:3], hw, strict=True))
    # In full float32: a GPU would round pixels to 10 bits by default.
    x = jnp.einsum("qw,nhwc->nhqc", columns, images.astype(np.float32), precision=lax.Precision.HIGHEST)
    # Across first, as Pillow does, and rounded in between; the plain form is one interpolation.
    x = _levels(x) if view.antialias else x
    return _levels(jnp.einsum("ph,nhqc->npqc", rows, x, precision=lax.Precision.HIGHEST))


def _levels(x: jax.Array) -> jax.Array:
    return jnp.clip(jnp.floor(x + _HALF), 0, 255)


def _view_matrix(dim: Any, side: jax.Array, shorter: jax.Array, view: CentreView) -> jax.Array:
    """Return the weights of the old pixels of one side in the new ones, float32 [size, dim]."""
    resized = side * view.shorter_side // shorter
    scale = side.astype(np.float32) / resized.astype(np.float32)
    outside = resized - view.size
    first = (outside + (outside % 4 == 3).astype(np.int32)) // 2  # halves are rounded to the even number
    centre = ((first + np.arange(view.size, dtype=np.int32)).astype(np.float32) + _HALF) * scale
    distance = jnp.abs(jnp.arange(dim, dtype=np.float32)[None, :] + _HALF - centre[:, None])
    far = distance / (jnp.maximum(scale, 1) if view.antialias else np.float32(1))
    weights = jnp.maximum(1 - far, 0)
    if view.bicubic:
        near, outer = (jnp.polyval(np.array(each, np.float32), far) for each in (CUBIC_NEAR, CUBIC_FAR))
        weights = jnp.where(far < 1, near, jnp.where(far < 2, outer, 0))
    return weights / weights.sum(1, keepdims=True)


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
