"""Convolution in float64 by the definition, with both gradients: slow, and written without looking at ops."""

from typing import Any

import numpy as np


def pixels(padding: str | tuple[int, int], size: int, window: int, stride: int) -> tuple[int, int]:
    """Return explicit padding for one dim, TensorFlow's rule for SAME."""
    if not isinstance(padding, str):
        return padding
    outputs = -(-size // stride)
    missing = max((outputs - 1) * stride + window - size, 0) if padding == "SAME" else 0
    return missing // 2, missing - missing // 2


def conv(x: Any, w: Any, stride: int, padding: Any, groups: int = 1, dy: Any = None) -> tuple[np.ndarray, ...]:
    """Return (y,); with dy (y, dx, dw)."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    n, height, width, _ = x.shape
    kh, kw, per_group, filters = w.shape
    per_dim = (padding, padding) if isinstance(padding, str) else padding
    top, bottom = pixels(per_dim[0], height, kh, stride)
    left, right = pixels(per_dim[1], width, kw, stride)
    padded = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)))
    out_h, out_w = (padded.shape[1] - kh) // stride + 1, (padded.shape[2] - kw) // stride + 1
    y = np.zeros((n, out_h, out_w, filters))
    dpadded, dw = np.zeros_like(padded), np.zeros((kh, kw, per_group, groups, filters // groups))
    w = w.reshape(dw.shape)
    for i in range(out_h):
        for j in range(out_w):
            place = np.s_[:, i * stride : i * stride + kh, j * stride : j * stride + kw]
            patch = padded[place].reshape(n, kh, kw, groups, per_group)
            y[:, i, j] = np.einsum("nhwgc,hwcgo->ngo", patch, w).reshape(n, filters)
            if dy is not None:
                d = dy[:, i, j].reshape(n, groups, -1)
                dpadded[place] += np.einsum("ngo,hwcgo->nhwgc", d, w).reshape(n, kh, kw, -1)
                dw += np.einsum("nhwgc,ngo->hwcgo", patch, d)
    dw = dw.reshape(kh, kw, per_group, filters)
    return (y,) if dy is None else (y, dpadded[:, top : top + height, left : left + width], dw)
