"""Depthwise convolution and its weights' gradient as kernels for NVIDIA GPUs, written in Pallas.

A thread has a few channels of some neighbouring pixels of an output row. It reads each pixel of an input row once for
all window positions that cover it, so that most of its instructions are multiply-adds; padding is what a masked read
returns. Sums are float32. Measured on an H200 in bfloat16, batch 256, microseconds, cuDNN's best beside them:

    forward                 kernel  cuDNN       weights                 kernel  cuDNN
    56x56x96   7x7             363    556       56x56x96   7x7             492    394
    28x28x192  7x7             180    328       28x28x192  7x7             213    204
    14x14x384  7x7              82    176       14x14x384  7x7             105    158
    7x7x768    7x7              43     91       7x7x768    7x7              60  4,134
    28x28x240  5x5             154    198       28x28x240  5x5             319    176
    14x14x672  5x5             106    143       14x14x672  5x5             137    171
    56x56x144  5x5 stride 2    178    210       56x56x144  5x5 stride 2    323    189
    112x112x32 3x3             144    173       112x112x32 3x3             240    240
    56x56x144  3x3             250    199       56x56x144  3x3             534    237
    112x112x96 3x3 stride 2    228    269       112x112x96 3x3 stride 2    412    338

Shapes in names: P pixels of all images, C channels, K positions in the window.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from headrace.ops.pool import Pads, out_size
from headrace.ops.tracing import compute_capability, on_gpu

_MEASURED_ON = ("9.0",)  # Hopper
_WARPS = 4
_WARP = 32
_MOST_BLOCKS = 65_535  # of a grid, in all dimensions but the first
_MOST_VALUES = 2**31  # that a 32-bit index reaches


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)


@dataclass(frozen=True)
class _Tile:
    """What a block of threads computes: some channels of so many columns, as many rows as it has threads for."""

    columns: int
    channels: int
    per_thread: int  # channels

    @property
    def rows(self) -> int:
        return _WARPS * _WARP * self.per_thread // self.channels

    def over(self, width: int, step: int = 1) -> tuple["_Tile", int]:
        """Return the tile that divides rows of a width evenly, in steps of columns, and how many tiles a row has."""
        columns = _ceil_div(_ceil_div(width, _ceil_div(width, self.columns)), step) * step
        return _Tile(columns, self.channels, self.per_thread), _ceil_div(width, columns)


# Fewest microseconds of those tried, by the window: (columns, channels of a thread).
_FORWARD = {3: (7, 8), 5: (7, 4), 7: (14, 4)}
_SMALL_IMAGE = 14 * 14  # pixels of an output image up to which the weights' gradient is faster than the library's
_WEIGHT_BLOCKS = 4096  # of threads, about: enough for all processors, and few partial sums


@dataclass(frozen=True)
class _Geometry:
    """Sizes of images and outputs, and what lies between them."""

    images: int
    height: int
    width: int
    channels: int
    out_height: int
    out_width: int
    window: int
    stride: int
    top: int
    left: int

    @property
    def out_rows(self) -> int:
        return self.images * self.out_height


def _geometry(shape: tuple[int, ...], window: int, stride: int, pads: Pads) -> _Geometry:
    high, wide = out_size(pads, (shape[1], shape[2]), (window, window), stride)
    images, height, width, channels = shape
    return _Geometry(images, height, width, channels, high, wide, window, stride, pads[0][0], pads[1][0])


def _fits(x_NHWC: Array, w_HW1C: Array) -> bool:
    square = w_HW1C.shape[0] == w_HW1C.shape[1] and w_HW1C.shape[0] in _FORWARD
    small = x_NHWC.size < _MOST_VALUES and x_NHWC.dtype.itemsize == 2
    return compute_capability() in _MEASURED_ON and square and small


def suits_forward(x_NHWC: Array, w_HW1C: Array) -> bool:
    """Say whether `depthwise_forward` is faster than the library, and `depthwise_images` than XLA's loops."""
    channels, window = x_NHWC.shape[-1], w_HW1C.shape[0]
    # With 16 channels a block reads a quarter of a cache line at a time, which 3x3 windows do not make up for.
    divides = channels % 32 == 0 or (channels % 16 == 0 and window > 3)
    blocks = x_NHWC.shape[0] * x_NHWC.shape[1] // 8
    return divides and blocks <= _MOST_BLOCKS and _fits(x_NHWC, w_HW1C)


def suits_weights(x_NHWC: Array, w_HW1C: Array, size: tuple[int, int], pads: Pads) -> bool:
    """Say whether `depthwise_weights` is faster than the library, by the size of the output and the padding."""
    # The library needs images in which uneven padding is written, which takes 0.29 ms more (256x112x112x96).
    pays = size[0] * size[1] <= _SMALL_IMAGE or any(before != after for before, after in pads)
    return pays and x_NHWC.shape[-1] % 32 == 0 and _fits(x_NHWC, w_HW1C)


def _channels(count: int, most: int) -> int:
    """Return the largest power of two that divides a number of channels, up to `most`."""
    return min(most, count & -count)


# Equal convolutions of a network are traced once: a kernel takes 0.2 s of Python.
@partial(jax.jit, static_argnums=(2, 3))
def depthwise_forward(x_NHWC: Array, w_HW1C: Array, stride: int, pads: Pads) -> Array:
    """Convolve each channel with its own window."""
    window, channels = w_HW1C.shape[0], x_NHWC.shape[-1]
    of = _geometry(x_NHWC.shape, window, stride, pads)
    columns, per_thread = _FORWARD.get(window, (7, 4))
    tile, count = _Tile(columns, _channels(channels, 32), per_thread).over(of.out_width)
    y_PC = _call(
        partial(_forward_kernel, of=of, tile=tile),
        jax.ShapeDtypeStruct((of.out_rows * of.out_width, channels), x_NHWC.dtype),
        (channels // tile.channels, count, _ceil_div(of.out_rows, tile.rows)),
        "depthwise",
    )(x_NHWC.reshape(-1, channels), w_HW1C.reshape(-1, channels))
    return y_PC.reshape(of.images, of.out_height, of.out_width, channels)


@partial(jax.jit, static_argnums=(2, 3, 4))
def depthwise_images(g_NHWC: Array, w_HW1C: Array, stride: int, pads: Pads, size: tuple[int, int]) -> Array:
    """Return the gradient of images of a size, for strides above 1; others are a convolution with the turned window."""
    window, (images, *_, channels) = w_HW1C.shape[0], g_NHWC.shape
    of = _geometry((images, *size, channels), window, stride, pads)
    tile, count = _Tile(14, _channels(channels, 32), 4).over(of.width, stride)
    blocks = _ceil_div(images * _ceil_div(of.height, stride), tile.rows)
    dx_PC = _call(
        partial(_images_kernel, of=of, tile=tile),
        jax.ShapeDtypeStruct((images * of.height * of.width, channels), g_NHWC.dtype),
        (channels // tile.channels, count, blocks * stride),
        "depthwise_images",
    )(g_NHWC.reshape(-1, channels), w_HW1C.reshape(-1, channels))
    return dx_PC.reshape(images, *size, channels)


@partial(jax.jit, static_argnums=(2, 3, 4))
def depthwise_weights(x_NHWC: Array, g_NHWC: Array, window: int, stride: int, pads: Pads) -> Array:
    """Return the gradient of the weights [window, window, 1, C], float32."""
    channels = x_NHWC.shape[-1]
    of = _geometry(x_NHWC.shape, window, stride, pads)
    some = _channels(channels, 64)
    tile, count = _Tile(14, some, some // 16).over(of.out_width)
    steps = _ceil_div(of.out_rows, tile.rows) * count
    others = window * (channels // tile.channels)
    each = _ceil_div(steps, max(1, min(steps, _WEIGHT_BLOCKS // others)))
    parts = _ceil_div(steps, each)
    sums_SKC = _call(
        partial(_weights_kernel, of=of, tile=tile, tiles=count, steps=each),
        jax.ShapeDtypeStruct((parts, window * window, channels), jnp.float32),
        (window, channels // tile.channels, parts),  # a block's neighbours read the same pixels
        "depthwise_weights",
    )(x_NHWC.reshape(-1, channels), g_NHWC.reshape(-1, channels))
    return jnp.sum(sums_SKC, 0).reshape(window, window, 1, channels)


def _call(kernel: Any, result: Any, grid: tuple[int, ...], name: str) -> Any:
    # Not at the top: other backends do not need it, and importing takes 0.2 s.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    params = triton.CompilerParams(num_warps=_WARPS, num_stages=1)
    # In tests there is no GPU.
    return pl.pallas_call(
        kernel, out_shape=result, grid=grid, compiler_params=params, interpret=not on_gpu(), name=name
    )


class _Block:
    """Where a block of threads is: its channels, and reads and writes of their pixels."""

    def __init__(self, tile: _Tile, first_channel: Any) -> None:
        from jax.experimental.pallas import triton

        self._triton, self._shape = triton, (tile.rows, tile.channels)
        self.channels = first_channel + jnp.arange(tile.channels)

    def _at(self, ref_PC: Any, pixels: Array) -> Any:
        return ref_PC.at[pixels[:, None], self.channels[None, :]]

    def _mask(self, inside: Array) -> Array:
        return jnp.broadcast_to(inside[:, None], self._shape)

    def read(self, ref_PC: Any, pixels: Array, inside: Array) -> Array:
        """Return a pixel of each row, float32; 0 outside."""
        value = self._triton.load(self._at(ref_PC, pixels), mask=self._mask(inside), other=0)
        return value.astype(jnp.float32)

    def write(self, ref_PC: Any, pixels: Array, inside: Array, value: Array) -> None:
        self._triton.store(self._at(ref_PC, pixels), value.astype(ref_PC.dtype), mask=self._mask(inside))

    def read_vector(self, ref: Any, row: Any) -> Array:
        return self._triton.load(ref.at[row, self.channels]).astype(jnp.float32)

    def write_vector(self, ref: Any, row: tuple[Any, ...], value: Array) -> None:
        self._triton.store(ref.at[(*row, self.channels)], value)

    def zeros(self, count: int) -> tuple[Array, ...]:
        return tuple(jnp.zeros(self._shape, jnp.float32) for _ in range(count))


@dataclass(frozen=True)
class _Rows:
    """The output rows of a block, from a column on."""

    of: _Geometry
    tile: _Tile
    rows: Array
    first_column: Any

    @property
    def live(self) -> Array:
        return self.rows < self.of.out_rows

    def outputs(self, column: int) -> tuple[Array, Array]:
        """Return a column's pixels, and which of them there are."""
        pixels = self.rows * self.of.out_width + self.first_column + column
        if self.of.out_width % self.tile.columns == 0:
            return pixels, self.live
        return pixels, self.live & (self.first_column + column < self.of.out_width)

    def inputs(self, block: _Block, x_PC: Any, row: Any) -> Any:
        """Yield the input pixels under a row of the window, with the (output, window) columns that each belongs to."""
        of, tile = self.of, self.tile
        height = jnp.full_like(self.rows, of.out_height)
        high = lax.rem(self.rows, height) * of.stride + (row - of.top)
        inside = self.live & (high >= 0) & (high < of.height)
        first = (lax.div(self.rows, height) * of.height + high) * of.width + (self.first_column * of.stride - of.left)
        whole = tile.columns >= of.out_width  # the first column is 0: what is outside is known now
        for shift in range(of.stride * (tile.columns - 1) + of.window):
            places = [(*divmod(shift - place, of.stride), place) for place in range(of.window)]
            uses = [(out, place) for out, rest, place in places if rest == 0 and 0 <= out < tile.columns]
            if whole and not 0 <= shift - of.left < of.width:
                continue
            column = self.first_column * of.stride + (shift - of.left)
            there = inside if whole else inside & (column >= 0) & (column < of.width)
            yield block.read(x_PC, first + shift, there), uses


def _forward_kernel(x_PC: Any, w_KC: Any, y_PC: Any, *, of: _Geometry, tile: _Tile) -> None:
    from jax.experimental import pallas as pl

    block = _Block(tile, pl.program_id(0) * tile.channels)
    rows = _Rows(of, tile, pl.program_id(2) * tile.rows + jnp.arange(tile.rows), pl.program_id(1) * tile.columns)

    def add_row(row: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        weights = [block.read_vector(w_KC, row * of.window + place)[None, :] for place in range(of.window)]
        totals = list(sums)
        for value, uses in rows.inputs(block, x_PC, row):
            for out, place in uses:
                totals[out] = totals[out] + value * weights[place]
        return tuple(totals)

    sums = lax.fori_loop(0, of.window, add_row, block.zeros(tile.columns))
    for column, total in enumerate(sums):
        block.write(y_PC, *rows.outputs(column), total)


def _images_kernel(g_PC: Any, w_KC: Any, dx_PC: Any, *, of: _Geometry, tile: _Tile) -> None:
    from jax.experimental import pallas as pl

    block = _Block(tile, pl.program_id(0) * tile.channels)
    column = pl.program_id(1) * tile.columns
    # All rows of a block have the same phase: they are under the same rows of the window.
    stride, number = jnp.int32(of.stride), pl.program_id(2)
    phase, rows = lax.rem(number, stride), lax.div(number, stride) * tile.rows + jnp.arange(tile.rows)
    high_count = jnp.full_like(rows, _ceil_div(of.height, of.stride))
    image, high = lax.div(rows, high_count), lax.rem(rows, high_count) * of.stride + phase
    live = (image < of.images) & (high < of.height)
    first_place = lax.rem(phase + of.top, stride)

    def add_row(step: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        row = first_place + step * of.stride
        # Exact, but for rows above the images, which are outside in any case.
        out_high = lax.div(high + (of.top - row), jnp.full_like(high, of.stride))
        inside = live & (row < of.window) & (high + (of.top - row) >= 0) & (out_high < of.out_height)
        first = (image * of.out_height + out_high) * of.out_width + lax.div(column, stride)
        row = jnp.minimum(row, of.window - 1)
        weights = [block.read_vector(w_KC, row * of.window + place)[None, :] for place in range(of.window)]
        totals = list(sums)
        for shift in range((of.left - of.window + 1) // of.stride, (tile.columns - 1 + of.left) // of.stride + 1):
            uses = [(shift * of.stride + place - of.left, place) for place in range(of.window)]
            out_column = lax.div(column, stride) + shift
            there = inside & (out_column >= 0) & (out_column < of.out_width)
            value = block.read(g_PC, first + shift, there)
            for out, place in uses:
                if 0 <= out < tile.columns:
                    totals[out] = totals[out] + value * weights[place]
        return tuple(totals)

    sums = lax.fori_loop(0, _ceil_div(of.window, of.stride), add_row, block.zeros(tile.columns))
    pixels = (image * of.height + high) * of.width + column
    for each, total in enumerate(sums):
        block.write(dx_PC, pixels + each, live & (column + each < of.width), total)


def _weights_kernel(x_PC: Any, g_PC: Any, sums_SKC: Any, *, of: _Geometry, tile: _Tile, tiles: int, steps: int) -> None:
    from jax.experimental import pallas as pl

    row, part = pl.program_id(0), pl.program_id(2)
    block = _Block(tile, pl.program_id(1) * tile.channels)

    def add_tile(step: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        number = part * steps + step
        column = 0 if tiles == 1 else lax.rem(number, jnp.int32(tiles)) * tile.columns
        first = lax.div(number, jnp.int32(tiles)) * tile.rows
        rows = _Rows(of, tile, first + jnp.arange(tile.rows), column)
        gradients = [block.read(g_PC, *rows.outputs(column)) for column in range(tile.columns)]
        totals = list(sums)
        for value, uses in rows.inputs(block, x_PC, row):
            for out, place in uses:
                totals[place] = totals[place] + value * gradients[out]
        return tuple(totals)

    sums = lax.fori_loop(0, steps, add_tile, block.zeros(of.window))
    for place, total in enumerate(sums):
        block.write_vector(sums_SKC, (part, row * of.window + place), jnp.sum(total, 0))
