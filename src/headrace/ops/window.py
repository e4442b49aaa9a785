"""Windows that slide over an image: how padding is written, and the size that comes out.

Padding is "SAME", "VALID" or explicit `((top, bottom), (left, right))`. SAME is TensorFlow's: as little as needed, the
odd pixel below and to the right.
"""

from typing import Literal

Pads = tuple[tuple[int, int], tuple[int, int]]
Padding = Literal["SAME", "VALID"] | Pads


def pad_pixels(padding: Padding, size: tuple[int, int], window: tuple[int, int], stride: int) -> Pads:
    """Return the padding as explicit (before, after) pixels per spatial dim."""
    if padding == "VALID":
        return (0, 0), (0, 0)
    if padding == "SAME":
        return _same(size[0], window[0], stride), _same(size[1], window[1], stride)
    assert not isinstance(padding, str), padding
    return padding


def out_size(padding: Padding, size: tuple[int, int], window: tuple[int, int], stride: int) -> tuple[int, int]:
    """Return the (height, width) after sliding a window; zero or less where it does not fit."""
    pads = pad_pixels(padding, size, window, stride)
    height, width = ((i + lo + hi - k) // stride + 1 for i, k, (lo, hi) in zip(size, window, pads, strict=True))
    return height, width


def _same(size: int, window: int, stride: int) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    return total // 2, total - total // 2
