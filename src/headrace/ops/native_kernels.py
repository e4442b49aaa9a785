"""Our C++ kernels on the CPU (`native/kernels.cc`): loaded, checked, and called where they are quicker than XLA's.

XLA's CPU backend runs a convolution at a third to a half of what the processor can do, and every norm and activation as
passes of their own over memory. Here a unit is four calls: the convolution with the sums for the statistics; norm,
residual and activation; in the backward pass the sums for the norm's gradient; and both gradients of the convolution,
with the norm's formed chunk by chunk in the cache. 3x3 windows use Winograd's algorithm where it is faster.

Between the calls are vectors of one number per channel, in plain JAX: so statistics can be shared over replicas. All
sums are added in a fixed order. Two-pass variances (`stable`) and float16 stay with XLA.

Images and weights are float32, or bfloat16 where the processor multiplies such values. Then products are of bfloat16
values, except by Winograd's algorithm and of depthwise convolutions, which compute in float32 between loading and
storing. All sums and vectors are float32. Statistics are those of the convolution's rounded result, as in plain JAX:
that is what the norm normalises.
Shapes in names: N images, H height, W width, C channels in, I per group, O channels out.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace.core.errors import ConfigError
from headrace.native.library import Kernels, kernels_library
from headrace.ops.pool import Padding, Pads, out_size, pad_pixels
from headrace.ops.tracing import is_portable, on_cpu, weights_are_constant

_MODES = ("auto", "on", "no-winograd", "off")
PRODUCT = "headrace_product"  # the name of a convolution's result, for checkpoint policies that keep products
_PRODUCTS, _WINOGRAD, DEPTHWISE, _GROUPED, HALF = range(5)  # the last: products of bfloat16 values
# The kernels' numbers of the activations that they apply. Those after a residual must follow from the result's sign.
ACTIVATIONS = {None: 0, "relu": 1, "relu6": 2, "swish": 3, "hard_swish": 4}
AFTER_RESIDUAL = (None, "relu", "relu6")
_OF_BOTH = ("convolve", "pack", "activate", "sums", "gradients", "max_pool", "max_pool_gradient")
_CALLS = (*_OF_BOTH, *(f"{name}_half" for name in _OF_BOTH), "gate", "bottleneck")  # `_half`: of bfloat16 arrays
_WINOGRAD_POINTS = 36
# In float32 arithmetic, for tests alone; by AVX512_BF16; by AMX.
HALF_PRODUCTS = {"emulated": 1, "avx512_bf16": 2, "amx": 3}


Shaped = Array | jax.ShapeDtypeStruct  # where only shape and dtype matter


class Library(NamedTuple):
    """Registered kernels: the end of their names, the floats in a vector, and whether they are faster than XLA.

    `half`: how they multiply bfloat16 values, one of HALF_PRODUCTS; 0 where the processor has nothing for that.
    """

    suffix: str
    lanes: int
    is_faster: bool
    half: int


def load_kernels() -> tuple[Library | None, str]:
    """Return this processor's kernels, registered with XLA; or None and the reason."""
    found, reason = kernels_library()
    return None if found is None else register(found), reason


@cache
def register(kernels: Kernels) -> Library:
    """Load a library and register its calls with XLA, once."""
    library = ctypes.CDLL(str(kernels.path))
    # A program in the compilation cache names its calls. With the sources' hash in the names, it never meets kernels
    # that take other arguments.
    suffix = f"{kernels.hash}_{library.hr_lanes()}"
    for name in _CALLS:
        capsule = jax.ffi.pycapsule(getattr(library, f"hr_{name}"))
        jax.ffi.register_ffi_target(f"headrace_{name}_{suffix}", capsule, platform="cpu")
    return Library(suffix, library.hr_lanes(), kernels.is_wide, library.hr_half_products())


def check_kernels(mode: str) -> None:
    """Raise ConfigError if kernels are asked for that are not there."""
    library, reason = load_kernels()
    if mode in ("on", "no-winograd") and library is None:
        raise ConfigError(
            f"cpu_kernels is {mode}, but there are no kernels: {reason}.",
            remedy="Change that, or use auto.",
        )


def describe_missing_kernels(mode: str) -> list[str]:
    """Return what to know where kernels would be used, were they there."""
    library, reason = load_kernels()
    if mode != "auto" or library is not None:
        return []
    return [f"XLA computes convolutions here, two to twenty times slower than Headrace's own kernels: {reason}"]


def call_kernel(
    name: str,
    shapes: Sequence[Sequence[int] | jax.ShapeDtypeStruct],
    *args: Array,
    in_place: dict[int, int] | None = None,
    **attributes: Any,
) -> list[Array]:
    """Call a kernel. `in_place` says which results reuse an argument's memory.

    Results have the dtype of the first argument unless their shape says another.
    """
    library, _ = load_kernels()
    assert library is not None
    dtype = args[0].dtype
    name += "_half" if dtype == jnp.bfloat16 else ""
    results = tuple(
        shape if isinstance(shape, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(tuple(shape), dtype)
        for shape in shapes
    )
    call = jax.ffi.ffi_call(f"headrace_{name}_{library.suffix}", results, input_output_aliases=in_place)
    return list(call(*args, **attributes))


@dataclass(frozen=True, kw_only=True)
class Window:
    """A convolution that the kernels can compute: its shapes, and the method."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    stride: int
    pads: Pads
    method: int

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel has a window of its own."""
        return self.method == DEPTHWISE

    @property
    def is_pointwise(self) -> bool:
        """Whether it is a product for each pixel, in float32."""
        return self.method == _PRODUCTS and self.w[:2] == (1, 1) and self.x[:3] == self.y[:3]

    @property
    def needs_gradient_memory(self) -> bool:
        """Whether the gradient behind it is stored, for the images' gradient, where a norm follows."""
        return self.method == HALF and (self.w[:2] != (1, 1) or self.x[:3] != self.y[:3])

    def call_attributes(self, act: str | None) -> dict[str, Any]:
        """Return the attributes of a call that multiplies."""
        library, _ = load_kernels()
        assert library is not None
        products = np.int64(library.half if self.method == HALF else 0)
        return self.attributes() | {"products": products, "activation": np.int64(ACTIVATIONS[act])}

    def attributes(self) -> dict[str, Any]:
        """Return shapes and method."""
        (n, h, w, c), (kh, kw, group, o), (_, ho, wo, _) = self.x, self.w, self.y
        sizes = [n, h, w, c, kh, kw, o, self.stride, self.pads[0][0], self.pads[1][0], ho, wo, group]
        return {"geometry": np.array(sizes, np.int64), "method": np.int64(self.method)}

    def packed_size(self, lanes: int) -> int:
        """Return how many numbers packed weights and shifts have: panels of two vectors, filled up with zeros."""
        kh, kw, inputs, outputs = self.w
        if self.method == HALF:  # scale and shift stay apart, few inputs are joined (native/bfloat16.cc)
            columns, depth = (1, kw * inputs) if inputs < 16 else (kw, inputs)
            return kh * columns * -(-depth // 32) * 32 * -(-outputs // 32) * 32
        if self.method == DEPTHWISE:
            return math.prod(self.w) + outputs
        if self.method == _GROUPED:
            block = _block_size(outputs, inputs, lanes)
            return outputs // block * kh * kw * block * _in_panels(block, lanes) + outputs
        rows = _WINOGRAD_POINTS * inputs if self.method == _WINOGRAD else kh * kw * inputs
        return rows * _in_panels(outputs, lanes) + outputs


def _in_panels(outputs: int, lanes: int) -> int:
    return -(-outputs // (2 * lanes)) * 2 * lanes


def _block_size(channels: int, group: int, lanes: int) -> int:
    """Return how many channels of a grouped convolution are computed together (native/grouped.hh)."""
    fits = [together for together in range(2, lanes // group + 1) if channels // group % together == 0]
    return max(fits, default=1) * group


def _library_for(mode: str) -> Library | None:
    assert mode in _MODES, mode
    if mode == "off" or not on_cpu() or is_portable():
        return None
    library, _ = load_kernels()
    return None if library is None or (mode == "auto" and not library.is_faster) else library


def uses_kernels(mode: str) -> bool:
    """Say whether convolutions are the kernels' where these can compute them."""
    return _library_for(mode) is not None


def find_window(x_NHWC: Shaped, w_HWIO: Array, stride: int, padding: Padding, groups: int, mode: str) -> Window | None:
    """Return how the kernels would compute a convolution, or None where XLA is to do it."""
    library, dtypes = _library_for(mode), {x_NHWC.dtype, w_HWIO.dtype}
    is_half = dtypes == {jnp.dtype(jnp.bfloat16)} and library is not None and bool(library.half)
    if library is None or (dtypes != {jnp.dtype(jnp.float32)} and not is_half):
        return None
    if not all(isinstance(size, int) for size in x_NHWC.shape):  # a program for any batch size
        return None
    size, kernel = (x_NHWC.shape[1], x_NHWC.shape[2]), (w_HWIO.shape[0], w_HWIO.shape[1])
    pads = pad_pixels(padding, size, kernel, stride)
    height, width = out_size(pads, size, kernel, stride)
    shapes: Any = {"x": x_NHWC.shape, "w": w_HWIO.shape, "y": (x_NHWC.shape[0], height, width, w_HWIO.shape[3])}
    # Windows that see nothing but padding are left to XLA.
    if min(height, width, *x_NHWC.shape) < 1 or any(max(pad) >= k for pad, k in zip(pads, kernel, strict=True)):
        return None
    method = _method(shapes, stride, groups, library.lanes, mode)
    if method is None:
        return None
    window = Window(**shapes, stride=stride, pads=pads, method=method)
    if method == _WINOGRAD and not _winograd_wins(window, is_half):
        window = replace(window, method=_PRODUCTS)
    return _half_window(window, library.half) if is_half else window


def _method(shapes: dict[str, Any], stride: int, groups: int, lanes: int, mode: str) -> int | None:
    o, c, kernel = shapes["y"][3], shapes["x"][3], shapes["w"][:2]
    if groups > 1:
        if groups == c == o:
            return DEPTHWISE if kernel in ((3, 3), (5, 5)) and stride in (1, 2) else None
        return _GROUPED if c == o else None
    fits = kernel == (3, 3) and stride == 1 and c % lanes == 0 and o % lanes == 0
    return _WINOGRAD if fits and mode != "no-winograd" else _PRODUCTS


def _winograd_wins(window: Window, is_half: bool) -> bool:
    """Say whether tiles of 4x4 outputs are worth the 36 products that they take; plain ones are 9 for each output."""
    (n, height, width, o), c = window.y, window.x[3]
    tiles = n * -(-height // 4) * -(-width // 4)
    # Constant weights are read as their 36 points. For few tiles of many channels (7x7 pixels, 512 channels) that costs
    # more than it saves. In training such points are computed where they are used.
    if weights_are_constant() and c * o > 128 * 128 and tiles * 16 * 1024 < c * o:
        return False
    # Of small images, products of bfloat16 values compute the weights' gradient mostly with the zeros around them: 6.3
    # ms for 16 images of 2x2 pixels and 512 channels, 2.0 by Winograd's algorithm, 1.5 in float32.
    return n * height * width >= 5 * tiles or (is_half and not weights_are_constant())


def _half_window(window: Window, products: int) -> Window | None:
    """Return how to convolve bfloat16 values, from how to convolve float32.

    AMX has no need of Winograd's algorithm, which computes in float32: 16 cores took 216 instead of 236 ms for a step
    of ResNet-50 at batch 16 without it. Two cores with AVX512_BF16 take 3.5 instead of 4.2 ms for a layer with it.
    """
    if window.method == _PRODUCTS or (window.method == _WINOGRAD and products == HALF_PRODUCTS["amx"]):
        return replace(window, method=HALF)
    return None if window.method == _GROUPED else window


def pack(w_HWIO: Array, scale_O: Array, shift_O: Array, window: Window) -> Array:
    """Return the weights times the scale of each output, as the kernels read them, and the shifts behind them."""
    library, _ = load_kernels()
    assert library is not None
    shape = (window.packed_size(library.lanes),)
    (packed,) = call_kernel("pack", [shape], w_HWIO, scale_O, shift_O, **window.attributes())
    return packed
