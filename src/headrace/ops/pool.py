"""Sliding windows (padding, output sizes), max and average pooling.

Padding is "SAME", "VALID" or explicit `((top, bottom), (left, right))`. SAME is TensorFlow's: as little as needed, with
the odd pixel at the bottom and on the right.
"""

from collections.abc import Iterator
from functools import partial, reduce
from itertools import product
from operator import add
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from headrace.ops.tracing import on_gpu

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
    """Return the (height, width) of the output; zero or less where the window does not fit."""
    pads = pad_pixels(padding, size, window, stride)
    height, width = ((i + lo + hi - k) // stride + 1 for i, k, (lo, hi) in zip(size, window, pads, strict=True))
    return height, width


def _same(size: int, window: int, stride: int) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    return total // 2, total - total // 2


def gradient_pads(
    pads: Pads, window: tuple[int, ...], stride: int, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> Pads:
    """Return the pads for the images' gradient: the dilated output gradient convolved with the rotated window.

    `shapes` are those of the images and of the output's gradient.
    """
    around = []
    for (lo, _), k, i, o in zip(pads, window, shapes[0][1:3], shapes[1][1:3], strict=True):
        before = k - 1 - lo
        around.append((before, i - ((o - 1) * stride + 1) - before + k - 1))
    return tuple(around)


_Size = tuple[int, int]


class Windows(NamedTuple):
    """The square windows of a pool."""

    width: int
    stride: int
    pads: Pads


def max_pool(x_NHWC: Array, window: int, stride: int, padding: Padding = "VALID") -> Array:
    """Take the largest value of each window, ignoring padding. Among equal pixels the first gets the gradient."""
    size = (x_NHWC.shape[1], x_NHWC.shape[2])
    return _max_pool(x_NHWC, Windows(window, stride, pad_pixels(padding, size, (window, window), stride)), size)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _max_pool(x_NHWC: Array, windows: Windows, _size: _Size) -> Array:
    """Compare strided slices, one for each position in the window, and save the position of the maximum."""
    # XLA's gradient searches the window again: with it a ResNet-50 step took 1.1 % longer (H200), and the stem's pool,
    # forward and backward, 138 ms instead of 22 on two CPU cores (8x112x112x64).
    return largest_and_place(x_NHWC, windows)[0]


def _max_pool_forward(x_NHWC: Array, windows: Windows, _size: _Size) -> tuple[Array, Array]:
    return largest_and_place(x_NHWC, windows)


def largest_and_place(x_NHWC: Array, windows: Windows) -> tuple[Array, Array]:
    """Return the largest value of each window and its position there, by rows."""
    width, stride, pads = windows
    # One value more than there are places, for none of them.
    places = np.uint8 if width * width < 256 else np.uint16
    lowest = np.array(-np.inf, x_NHWC.dtype)
    padded = lax.pad(x_NHWC, lowest, ((0, 0, 0), (*pads[0], 0), (*pads[1], 0), (0, 0, 0)))
    rows, columns = ((size - width) // stride * stride + 1 for size in padded.shape[1:3])
    slices = [padded[:, i : i + rows : stride, j : j + columns : stride] for i, j in np.ndindex(width, width)]
    best, winner = slices[0], jnp.zeros(slices[0].shape, places)
    for position, pixels in enumerate(slices[1:], start=1):
        # A strict comparison, so that of equal pixels the first one wins.
        winner = jnp.where(pixels > best, places(position), winner)
        best = jnp.maximum(best, pixels)  # unlike the comparison, propagates NaN
    return best, winner


class Neighbours(NamedTuple):
    """The windows that are `shift` windows away from a pixel's row and column, and which of their places it is in.

    Pixels are [row, phase, column, phase], the phase being the place modulo the stride: those of one phase have the
    same places in their windows.
    """

    shift: _Size
    rows: np.ndarray  # [phase]
    columns: np.ndarray  # [phase]
    inside: np.ndarray  # [phase, phase]: whether the place is one of the window

    def values(self, a_NHWC: Array, counts: _Size) -> Array:
        """Return what the windows have, for each row and column of phases."""
        ends = zip(self.shift, counts, a_NHWC.shape[1:3], strict=True)
        around = ((0, 0, 0), *((-each, count + each - windows, 0) for each, count, windows in ends), (0, 0, 0))
        return lax.pad(a_NHWC, np.zeros((), a_NHWC.dtype), around)[:, :, None, :, None]


def neighbours(window: _Size, stride: int, pads: Pads) -> Iterator[Neighbours]:
    """Yield the windows that a pixel may be in. With 3x3 windows two pixels apart, it is in at most four."""
    sizes = zip(window, pads, strict=True)
    for shift in product(*(range(-((k - 1 - lo) // stride), (stride - 1 + lo) // stride + 1) for k, (lo, _) in sizes)):
        rows, columns = (np.arange(stride) + lo - stride * each for (lo, _), each in zip(pads, shift, strict=True))
        inside = ((rows >= 0) & (rows < window[0]))[:, None] & ((columns >= 0) & (columns < window[1]))
        if inside.any():
            yield Neighbours((shift[0], shift[1]), rows, columns, inside)


def count_phases(size: _Size, stride: int) -> _Size:
    """Return how many rows and columns of phases images of a size have."""
    return -(-size[0] // stride), -(-size[1] // stride)


def join_phases(x: Array, size: _Size) -> Array:
    """Return images from [image, row, phase, column, phase, channel]."""
    n, rows, stride, columns, _, channels = x.shape
    return x.reshape(n, rows * stride, columns * stride, channels)[:, : size[0], : size[1]]


def spread_to_places(
    dy: Array, winner: Array, windows: Windows, size: _Size, dtype: jax.typing.DTypeLike | None = None
) -> Array:
    """Add to each pixel, in a dtype, the gradients of the few windows in which it was the maximum."""
    # All in one expression: XLA took 0.51 ms for four phases that are interleaved at the end, and takes 0.38 for this
    # (256x112x112x64 in bfloat16, H200).
    width, stride, pads = windows
    counts = count_phases(size, stride)

    def share(near: Neighbours) -> Array:
        place = np.where(near.inside, near.rows[:, None] * width + near.columns, width * width).astype(winner.dtype)
        won, slope = near.values(winner, counts), near.values(dy, counts)
        given = jnp.where(won == place[None, None, :, None, :, None], slope, np.zeros((), dy.dtype))
        return given.astype(dtype or dy.dtype)

    return join_phases(reduce(add, map(share, neighbours((width, width), stride, pads))), size)


def _max_pool_backward(windows: Windows, size: _Size, winner: Array, dy: Array) -> tuple[Array]:
    # What comes in is stored, too: each window is read for all its pixels, and XLA would compute the gradients of the
    # norm and the activation behind the pool for each of them (a FastNet's step at batch 2,000 took 5.3 ms, and 4.9
    # with this and a frozen stem, of which this is 0.3; H200).
    dy = lax.optimization_barrier(dy) if on_gpu() else dy
    # Stored once: XLA would otherwise compute it again for the sums and for the gradient of the batch norm before it.
    return (lax.optimization_barrier(spread_to_places(dy, winner, windows, size)),)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)


def materialised(x_NHWC: Array) -> Array:
    """Return images that a GPU writes to memory before it averages them."""
    # XLA would compute the activation before in the kernel of the mean, which is made for sums. That moves less memory,
    # but EfficientNet-B0 was no faster with it on H200s: a forward pass at batch 256 took 7.45 ms instead of 7.12.
    return _materialised(x_NHWC) if on_gpu() else x_NHWC


@jax.custom_vjp
def _materialised(x_NHWC: Array) -> Array:
    return lax.optimization_barrier(x_NHWC)


# JAX's gradient of a barrier is another one: that of a mean, one value for all pixels, would be written out for each.
_materialised.defvjp(lambda x: (_materialised(x), None), lambda _, dy: (dy,))


def global_average_pool(x_NHWC: Array) -> Array:
    """Average each channel over the image, with sums in float32."""
    return jnp.mean(materialised(x_NHWC).astype(jnp.float32), axis=(1, 2)).astype(x_NHWC.dtype)


def average_pool(x_NHWC: Array, window: int, stride: int, padding: Padding = "VALID") -> Array:
    """Average the pixels of each window that lie in the image, with sums in float32."""
    size = (x_NHWC.shape[1], x_NHWC.shape[2])
    pads = pad_pixels(padding, size, (window, window), stride)
    rows, columns = out_size(pads, size, (window, window), stride)

    def total(pixels: Array) -> Array:
        padded = jnp.pad(pixels, ((0, 0), *pads, (0, 0)))
        ends = ((rows - 1) * stride + 1, (columns - 1) * stride + 1)
        parts = (padded[:, i : i + ends[0] : stride, j : j + ends[1] : stride] for i, j in np.ndindex(window, window))
        return reduce(jnp.add, parts)

    # Windows at the edge cover fewer pixels: padding must not enter the mean.
    counts = total(jnp.ones((1, *size, 1), jnp.float32))
    return (total(x_NHWC.astype(jnp.float32)) / counts).astype(x_NHWC.dtype)


def blur_pool(x_NHWC: Array, stride: int) -> Array:
    """Average each 3x3 neighbourhood with weights 1 2 1 down and across, with sums in float32; keep every stride-th.

    The pixels at the edge are mirrored: the one before the first is the second.
    """
    y = x_NHWC.astype(jnp.float32)
    for axis in (1, 2):
        size = y.shape[axis]
        around = [(1, 1) if each == axis else (0, 0) for each in range(4)]
        # One pixel has no second one to mirror.
        padded = jnp.pad(y, around, mode="reflect" if size > 1 else "edge")
        before, middle, after = (lax.slice_in_dim(padded, i, i + size, stride, axis) for i in range(3))
        y = (before + after) / 4 + middle / 2
    return y.astype(x_NHWC.dtype)


def share_matrix(pixels: int, cells: int) -> np.ndarray:
    """Return the weights [cells, pixels] that average pixels into a number of cells of nearly equal size.

    Cell i covers the pixels from floor(i p / c) to ceil((i + 1) p / c), as in PyTorch's adaptive pooling; cells overlap
    where the numbers do not divide, and repeat pixels where there are fewer pixels than cells.
    """
    weights = np.zeros((cells, pixels), np.float32)
    for i in range(cells):
        first, last = i * pixels // cells, -(-(i + 1) * pixels // cells)
        weights[i, first:last] = 1 / (last - first)
    return weights


def resize_by_average(x_NHWC: Array, size: int) -> Array:
    """Average the pixels into `size` x `size` cells, with sums in float32."""
    _, height, width, _ = x_NHWC.shape
    if height == width == size:
        return x_NHWC
    down, across = (share_matrix(pixels, size) for pixels in (height, width))
    # HIGHEST: by default a GPU may multiply in TF32, and a mean of equal pixels would not be that pixel.
    y = jnp.einsum("ih,nhwc,jw->nijc", down, x_NHWC.astype(jnp.float32), across, precision=lax.Precision.HIGHEST)
    return y.astype(x_NHWC.dtype)
