"""Shrink images on the device: bilinear with antialiasing, as two products with matrices; NumPy does the same."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def shrink(values: Any, hw: tuple[int, int]) -> Any:
    """Return images [n, H, W, C] of float32 numbers at a smaller size."""
    rows, columns = (shrink_matrix(size, wanted) for size, wanted in zip(values.shape[1:3], hw, strict=True))
    count, height, width, channels = values.shape
    # In full float32 (a GPU would round to 10 bits): it is little work, and host and device agree.
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


def _product(matrix: np.ndarray, values: Any) -> Any:
    if isinstance(values, np.ndarray):
        return np.matmul(matrix, values)
    return jnp.einsum("ps,nsk->npk", matrix, values, precision=lax.Precision.HIGHEST)
