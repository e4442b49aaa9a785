"""Convolution, batch norm, residual and activation on the CPU as calls of our C++ kernels (`native/kernels.cc`).

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from headrace.core.errors import ConfigError
from headrace.native.library import Kernels, kernels_library
from headrace.ops import activation
from headrace.ops.normalization import Shared, totals
from headrace.ops.pool import Padding, Pads, out_size, pad_pixels
from headrace.ops.tracing import constant, is_portable, on_cpu, weights_are_constant

_MODES = ("auto", "on", "no-winograd", "off")
PRODUCT = "headrace_product"  # the name of a convolution's result, for checkpoint policies that keep products
_PRODUCTS, _WINOGRAD, _DEPTHWISE, _GROUPED, _HALF = range(5)  # the last: products of bfloat16 values
# The kernels' numbers of the activations that they apply. Those after a residual must follow from the result's sign.
ACTIVATIONS = {None: 0, "relu": 1, "relu6": 2, "swish": 3, "hard_swish": 4}
_AFTER_RESIDUAL = (None, "relu", "relu6")
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
        return self.method == _DEPTHWISE

    @property
    def is_pointwise(self) -> bool:
        """Whether it is a product for each pixel, in float32."""
        return self.method == _PRODUCTS and self.w[:2] == (1, 1) and self.x[:3] == self.y[:3]

    @property
    def needs_gradient_memory(self) -> bool:
        """Whether the gradient behind it is stored, for the images' gradient, where a norm follows."""
        return self.method == _HALF and (self.w[:2] != (1, 1) or self.x[:3] != self.y[:3])

    def call_attributes(self, act: str | None) -> dict[str, Any]:
        """Return the attributes of a call that multiplies."""
        library, _ = load_kernels()
        assert library is not None
        products = np.int64(library.half if self.method == _HALF else 0)
        return self.attributes() | {"products": products, "activation": np.int64(ACTIVATIONS[act])}

    def attributes(self) -> dict[str, Any]:
        """Return shapes and method."""
        (n, h, w, c), (kh, kw, group, o), (_, ho, wo, _) = self.x, self.w, self.y
        sizes = [n, h, w, c, kh, kw, o, self.stride, self.pads[0][0], self.pads[1][0], ho, wo, group]
        return {"geometry": np.array(sizes, np.int64), "method": np.int64(self.method)}

    def packed_size(self, lanes: int) -> int:
        """Return how many numbers packed weights and shifts have: panels of two vectors, filled up with zeros."""
        kh, kw, inputs, outputs = self.w
        if self.method == _HALF:  # scale and shift stay apart, few inputs are joined (native/bfloat16.cc)
            columns, depth = (1, kw * inputs) if inputs < 16 else (kw, inputs)
            return kh * columns * -(-depth // 32) * 32 * -(-outputs // 32) * 32
        if self.method == _DEPTHWISE:
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
            return _DEPTHWISE if kernel in ((3, 3), (5, 5)) and stride in (1, 2) else None
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
        return replace(window, method=_HALF)
    return None if window.method == _GROUPED else window


# A convolution alone


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve(x_NHWC: Array, w_HWIO: Array, window: Window) -> Array:
    """Convolve; both gradients are the kernels' too."""
    return _product(x_NHWC, w_HWIO, window)


def _product(x_NHWC: Array, w_HWIO: Array, window: Window) -> Array:
    (y,) = call_kernel("convolve", [window.y], x_NHWC, w_HWIO, packed=False, **window.call_attributes(None))
    return checkpoint_name(y, PRODUCT)


# As `symbolic_zeros` passes them: arguments that know whether their gradients are wanted, and gradients that may be 0.
_Primal = jax.custom_derivatives.CustomVJPPrimal
_Cotangent = Array | jax.custom_derivatives.SymbolicZero
_Gradients = tuple[Array | None, Array | None]


def _convolve_forward(x: _Primal, w: _Primal, window: Window) -> tuple[Array, Any]:
    return _product(x.value, w.value, window), (x.value, w.value, _wanted(x, w))


def _convolve_backward(window: Window, kept: Any, dy: _Cotangent) -> _Gradients:
    x, w, wanted = kept
    return _gradients(window, wanted, (_array(dy, x.dtype), x, w), None)


convolve.defvjp(_convolve_forward, _convolve_backward, symbolic_zeros=True)


class _Wanted(NamedTuple):
    """Which gradients are wanted, as the structure of a tree: a static value among the arrays kept."""

    weights: tuple[()] | None
    images: tuple[()] | None


def _wanted(x: _Primal, w: _Primal) -> _Wanted:
    return _Wanted(() if w.perturbed else None, () if x.perturbed else None)


def _array(cotangent: _Cotangent, dtype: Any = jnp.float32) -> Array:
    is_zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return jnp.zeros(cotangent.shape, dtype) if is_zero else cotangent


def _gradients(window: Window, wanted: _Wanted, arrays: tuple[Array, ...], act: str | None) -> _Gradients:
    """Return (dx, dw), None where it is not wanted. `arrays`: dy, x, w[, z, scale, mean, shift, slope, constant]."""
    shapes = [window.w] * (wanted.weights is not None) + [window.x] * (wanted.images is not None)
    if not shapes:
        return None, None
    wants = np.int64((wanted.weights is not None) + 2 * (wanted.images is not None))
    if len(arrays) > 3 and wanted.images is not None and window.needs_gradient_memory:
        shapes.append(window.y)
    results = list(call_kernel("gradients", shapes, *arrays, wants=wants, **window.call_attributes(act)))
    dw = results.pop(0) if wanted.weights is not None else None
    return results[0] if wanted.images is not None else None, dw


# Convolution, batch norm by the batch's statistics, residual and activation


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What follows a convolution."""

    window: Window
    activation: str | None
    epsilon: float
    shared: Shared | None = None

    @property
    def count(self) -> int:
        """The number of values per channel that enter the statistics."""
        return math.prod(self.window.y[:3]) * self.num_sharing

    @property
    def num_sharing(self) -> int:
        """The number of replicas that share statistics."""
        return 1 if self.shared is None else len(self.shared[1][0])


def can_fuse(activation: str | None, has_residual: bool) -> bool:
    """Say whether the kernels apply an activation, behind a residual or not."""
    return activation in (_AFTER_RESIDUAL if has_residual else ACTIVATIONS)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def unit_train(
    x_NHWC: Array, w_HWIO: Array, gamma_O: Array, beta_O: Array, residual_NHWO: Array | None, unit: Unit
) -> tuple[Array, Array, Array]:
    """Return (activation(norm(convolution) + residual), mean, biased variance)."""
    return _train_values((x_NHWC, w_HWIO, gamma_O, beta_O, residual_NHWO), unit)[0]


def _train_values(arrays: tuple[Any, ...], unit: Unit) -> tuple[Any, tuple[Array, ...]]:
    x, w, gamma_O, beta_O, residual = arrays
    channels = jax.ShapeDtypeStruct(unit.window.y[3:], jnp.float32)
    attributes: dict[str, Any] = unit.window.call_attributes(None) | {"packed": False}
    z, mean_O, variance_O = call_kernel("convolve", [unit.window.y, channels, channels], x, w, **attributes)
    z = checkpoint_name(z, PRODUCT)
    if unit.shared is not None:
        # All of them in one exchange, and not sums of squares, which would lose the digits that the kernel kept.
        axis, groups = unit.shared
        means, variances = jnp.moveaxis(
            lax.all_gather(jnp.stack([mean_O, variance_O]), axis, axis_index_groups=groups), 1, 0
        )
        mean_O = jnp.mean(means, 0)
        variance_O = jnp.mean(variances + jnp.square(means - mean_O[None]), 0)
    inverse_O = lax.rsqrt(variance_O + unit.epsilon)
    scale_O = gamma_O * inverse_O
    more = () if residual is None else (residual,)
    act = np.int64(ACTIVATIONS[unit.activation])
    (y,) = call_kernel("activate", [unit.window.y], z, scale_O, mean_O, beta_O, *more, activation=act)
    return (y, mean_O, variance_O), (z, mean_O, inverse_O, scale_O, beta_O)


def _train_forward(
    x: _Primal, w: _Primal, gamma: _Primal, beta: _Primal, residual: _Primal | None, unit: Unit
) -> tuple[Any, Any]:
    arrays = (x.value, w.value, gamma.value, beta.value, None if residual is None else residual.value)
    results, kept = _train_values(arrays, unit)
    y = None if residual is None else results[0]
    return results, (x.value, w.value, y, kept, _wanted(x, w))


def _train_backward(
    unit: Unit, kept: Any, cotangents: tuple[_Cotangent, _Cotangent, _Cotangent]
) -> tuple[Array | None, ...]:
    x, w, y, (z, mean_O, inverse_O, scale_O, beta_O), wanted = kept
    dy, dmean_O, dvariance_O = _array(cotangents[0], z.dtype), *map(_array, cotangents[1:])
    channels, act = jax.ShapeDtypeStruct(unit.window.y[3:], jnp.float32), unit.activation
    sums = [channels, channels] + [unit.window.y] * (y is not None)
    more = () if y is None else (y,)
    found = list(
        call_kernel("sums", sums, dy, z, scale_O, mean_O, beta_O, *more, activation=np.int64(ACTIVATIONS[act]))
    )
    dbeta_O, moment_O = found[:2]
    dgamma_O = moment_O * inverse_O
    # dz = scale (d - mean(d) - centred inverse^2 mean(d centred)), plus what reaches mean and variance themselves. The
    # gradients of gamma and beta stay local: the engine sums them over replicas later.
    slope_O, constant_O = totals(
        2 * dvariance_O - scale_O * jnp.square(inverse_O) * moment_O, dmean_O - scale_O * dbeta_O, unit.shared
    )
    slope_O, constant_O = slope_O / unit.count, constant_O / unit.count
    # Behind a residual the activation's slope is already in d, which is the residual's gradient.
    dresidual = None if y is None else found[2]
    d, act = (dy, act) if dresidual is None else (dresidual, None)
    dx, dw = _gradients(unit.window, wanted, (d, x, w, z, scale_O, mean_O, beta_O, slope_O, constant_O), act)
    return dx, dw, dgamma_O, dbeta_O, dresidual


unit_train.defvjp(_train_forward, _train_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def unit_eval(
    x_NHWC: Array, w_HWIO: Array, scale_O: Array, shift_O: Array, residual_NHWO: Array | None, unit: Unit
) -> Array:
    """Return activation(convolution scale + shift + residual), computed in one pass unless it is differentiated."""
    more = () if residual_NHWO is None else (residual_NHWO,)
    attributes: dict[str, Any] = unit.window.call_attributes(unit.activation) | {"packed": False}
    (y,) = call_kernel("convolve", [unit.window.y], x_NHWC, w_HWIO, scale_O, shift_O, *more, **attributes)
    return y


def pack(w_HWIO: Array, scale_O: Array, shift_O: Array, window: Window) -> Array:
    """Return the weights times the scale of each output, as the kernels read them, and the shifts behind them."""
    library, _ = load_kernels()
    assert library is not None
    shape = (window.packed_size(library.lanes),)
    (packed,) = call_kernel("pack", [shape], w_HWIO, scale_O, shift_O, **window.attributes())
    return packed


def unit_packed(
    x_NHWC: Array, weights: Callable[[], tuple[Array, Array, Array]], residual_NHWO: Array | None, unit: Unit
) -> Array:
    """Return the same for constant weights, (kernel, scale, shift): the kernel times the scale is packed once.

    For bfloat16 products the scale stays apart: a product with it would have to be rounded again.
    """
    window = unit.window

    def prepare() -> tuple[Array, ...]:
        w_HWIO, scale_O, shift_O = weights()
        if window.method != _HALF:
            return (pack(w_HWIO.astype(jnp.float32), scale_O, shift_O, window),)
        geometry = window.attributes()["geometry"]
        (packed,) = call_kernel("pack", [(window.packed_size(0),)], w_HWIO, geometry=geometry)
        return packed, scale_O, shift_O

    more = () if residual_NHWO is None else (residual_NHWO,)
    # Where the residual was, its values are in the cache. A depthwise convolution computes some pixels twice.
    in_place = {2: 0} if more and window.method not in (_DEPTHWISE, _HALF) else None
    attributes = window.call_attributes(unit.activation) | {"packed": True}
    arrays = (x_NHWC, *constant(prepare), *more)
    (y,) = call_kernel("convolve", [window.y], *arrays, in_place=in_place, **attributes)
    return y


def _eval_in_parts(x: Array, w: Array, scale_O: Array, shift_O: Array, residual: Array | None, unit: Unit) -> Array:
    product: Any = convolve(x, w, unit.window)
    y = product * scale_O[None, None, None] + shift_O[None, None, None]
    y = y if residual is None else y + residual
    return y if unit.activation is None else getattr(activation, unit.activation)(y)


def _eval_forward(*arguments: Any) -> tuple[Array, Any]:
    *arrays, unit = arguments
    return jax.vjp(partial(_eval_in_parts, unit=unit), *arrays)


unit_eval.defvjp(_eval_forward, lambda _unit, vjp, dy: vjp(dy))


@dataclass(frozen=True, kw_only=True)
class BatchNorm:
    """A batch norm behind a convolution. With `running` (mean, variance) it does not look at the batch."""

    gamma: Array
    beta: Array
    epsilon: float
    running: tuple[Array, Array] | None = None
    shared: Shared | None = None

    def affine(self) -> tuple[Array, Array]:
        """Return the scale and the shift that the running statistics make of it."""
        assert self.running is not None
        gamma_O, beta_O, mean_O, variance_O = (a.astype(jnp.float32) for a in (self.gamma, self.beta, *self.running))
        scale_O = gamma_O * lax.rsqrt(variance_O + self.epsilon)
        return scale_O, beta_O - mean_O * scale_O


def conv_unit(
    x_NHWC: Array, w_HWIO: Array, window: Window, norm: BatchNorm, residual: Array | None, act: str | None
) -> tuple[Array, Array | None, Array | None]:
    """Return (activation(norm(convolution) + residual), mean, biased variance of the batch); None for running ones."""
    unit = Unit(window=window, activation=act, epsilon=norm.epsilon, shared=norm.shared)
    if norm.running is None:
        gamma_O, beta_O = norm.gamma.astype(jnp.float32), norm.beta.astype(jnp.float32)
        return unit_train(x_NHWC, w_HWIO, gamma_O, beta_O, residual, unit)
    if weights_are_constant():
        return unit_packed(x_NHWC, lambda: (w_HWIO, *norm.affine()), residual, unit), None, None
    return unit_eval(x_NHWC, w_HWIO, *norm.affine(), residual, unit), None, None
