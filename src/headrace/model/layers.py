"""The layers as frozen values with pure methods, basic ones and composites, and the initial values of weights.

A layer has `shape(hwc)`, `init(rng_at, hwc) -> (params, stats)`, `apply(params, stats, x, ctx) -> (y, batch_stats)` and
`cost(hwc)`. A shape is one image's: (height, width, channels), or (features,) after pooling or flattening.
Shapes in names: N images, H height, W width, C channels in, I channels in per group, O channels out.

The parameters of a composite are {layer name: parameters of the layer}; layers without parameters have no entry.

`split_layers` turns a composite into a sequence of layers that computes the same, so that a pipeline can be cut inside
it. Within a residual unit two values are passed on, the body's and the shortcut's: the layers there take and return
pairs, and their shapes are pairs too. Parameters keep their full names whether or not a composite is split.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from headrace import ops
from headrace.core.errors import ConfigError
from headrace.core.tree import PyTree
from headrace.model.context import Cost, Ctx
from headrace.ops.pool import Padding, out_size, pad_pixels

# The standard deviation of a unit normal truncated at +-2. Samples are divided by it to get the intended deviation.
_TRUNCATED_DEVIATION = 0.87962566103423978

RngAt = Callable[[str], np.random.Generator]


class Initial(Protocol):
    """How the initial values of a kernel are chosen."""

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Return float32 weights; the last two dims of `shape` are channels in and out, the first ones the window."""
        ...


@dataclass(frozen=True, kw_only=True)
class VarianceScaling:
    """Draw weights with variance scale / fan, from a truncated normal (two deviations) or a uniform distribution.

    They are drawn on the host: drawing 30 tensors eagerly on a device costs 5 s of small compilations.
    """

    scale: float = 1.0
    fan: Literal["in", "out", "average"] = "in"
    distribution: Literal["truncated_normal", "uniform"] = "truncated_normal"

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Return float32 weights; the last two dims of `shape` are channels in and out, the first ones the window."""
        window = math.prod(shape[:-2])
        fan_in, fan_out = window * shape[-2], window * shape[-1]
        fan = {"in": fan_in, "out": fan_out, "average": (fan_in + fan_out) / 2}[self.fan]
        deviation = math.sqrt(self.scale / fan)
        if self.distribution == "uniform":
            limit = math.sqrt(3) * deviation
            return rng.uniform(-limit, limit, shape).astype(np.float32)
        return (_truncated_normal(rng, shape) * (deviation / _TRUNCATED_DEVIATION)).astype(np.float32)


@dataclass(frozen=True)
class Normal:
    """Draw weights from a normal distribution of a given deviation, whatever the number of channels."""

    deviation: float

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Return float32 weights."""
        return (rng.standard_normal(shape) * self.deviation).astype(np.float32)


FAN_IN_NORMAL = VarianceScaling()
FAN_IN_HE = VarianceScaling(scale=2.0)
FAN_OUT_HE = VarianceScaling(scale=2.0, fan="out")
GLOROT_UNIFORM = VarianceScaling(fan="average", distribution="uniform")


def under(rng_at: RngAt, name: str) -> RngAt:
    """Return `rng_at` for names relative to `name`."""
    return lambda below: rng_at(f"{name}/{below}")


def _truncated_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    drawn = rng.standard_normal(math.prod(shape))
    outside = np.flatnonzero(np.abs(drawn) > 2)
    while outside.size:  # one in 22 is drawn again; only those are looked at again
        again = rng.standard_normal(outside.size)
        drawn[outside] = again
        outside = outside[np.abs(again) > 2]
    return drawn.reshape(shape)


Shape = tuple[int, ...]
Tree = dict[str, Any]


class Layer(Protocol):
    """What a network is made of."""

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape of one image's output."""
        ...

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Return initial parameters and running statistics, float32 on the host."""
        ...

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Return the output and, in training, the statistics of this batch in place of the running ones."""
        ...

    def cost(self, hwc: Shape) -> Cost:
        """Return the cost per image."""
        ...


@dataclass(frozen=True)
class FusibleNorm:
    """A batch norm as an operation, and how it turns (mean, biased variance) of a batch into its statistics."""

    operation: ops.BatchNorm
    batch_stats: Callable[..., Tree]  # (values per channel, mean, variance) -> statistics


@dataclass(frozen=True)
class Tail:
    """What follows the last layer of a chain: the addition of a residual, an activation by name, a pool."""

    residual: Array | None = None
    activation: str | None = None
    pool: "MaxPool | None" = None

    def apply(self, y: Array) -> Array:
        """Compute it without fusing."""
        y = y if self.residual is None else y + self.residual
        assert self.activation in (None, "relu")
        y = y if self.activation is None else ops.relu(y)
        return y if self.pool is None else ops.max_pool(y, self.pool.window, self.pool.stride, self.pool.padding)


class SameShape(Layer):
    """A layer that keeps the shape, unless it says otherwise."""

    def shape(self, hwc: Shape) -> Shape:
        return hwc


class WithoutParameters(SameShape):
    """A layer without parameters; unless it says otherwise, it keeps the shape and costs nothing.

    XLA fuses additions, padding and dropout with their neighbours, so that neither time nor memory is counted for them.
    """

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        return {}, {}

    def cost(self, hwc: Shape) -> Cost:
        return Cost()


@dataclass(frozen=True, kw_only=True)
class Conv(Layer):
    """Convolution; `groups` divides the channels, and `bias` is off because a norm usually follows."""

    channels: int
    kernel: int = 3
    stride: int = 1
    padding: Padding = "SAME"
    groups: int = 1
    bias: bool = False
    initial: Initial = FAN_IN_NORMAL

    def shape(self, hwc: Shape) -> Shape:
        if hwc[2] % self.groups or self.channels % self.groups:
            raise ConfigError(
                f"A convolution from {hwc[2]} to {self.channels} channels cannot have {self.groups} groups.",
                rule="The number of groups must divide both channel counts.",
            )
        return *_windows("convolution", hwc, self.kernel, self.stride, self.padding), self.channels

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        params = {"kernel": self.initial.sample(rng_at("kernel"), self._kernel_shape(hwc))}
        if self.bias:
            params["bias"] = np.zeros(self.channels, np.float32)
        return params, {}

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Convolve in the compute dtype."""
        w_HWIO = params["kernel"].astype(ctx.compute_dtype)
        y_NHWO = ops.conv2d(x, w_HWIO, self.stride, self.padding, self.groups, ctx.cpu_kernels)
        if self.bias:
            y_NHWO = y_NHWO + params["bias"].astype(ctx.compute_dtype)[None, None, None]
        return y_NHWO, {}

    def cost(self, hwc: Shape) -> Cost:
        weights = math.prod(self._kernel_shape(hwc))
        height, width, _ = self.shape(hwc)
        return Cost(
            params=weights + self.channels * self.bias,
            flops=2 * weights * height * width,
            activation_elements=height * width * self.channels,
            product_elements=height * width * self.channels,
        )

    def _kernel_shape(self, hwc: Shape) -> Shape:
        return self.kernel, self.kernel, hwc[2] // self.groups, self.channels


@dataclass(frozen=True, kw_only=True)
class Dense(Layer):
    """Fully connected layer with bias. With `logits` its output stays float32."""

    features: int
    logits: bool = False
    initial: Initial = GLOROT_UNIFORM

    def shape(self, hwc: Shape) -> Shape:
        assert len(hwc) == 1, f"flatten or pool before a dense layer: {hwc}"
        return (self.features,)

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        kernel = self.initial.sample(rng_at("kernel"), (hwc[0], self.features))
        return {"kernel": kernel, "bias": np.zeros(self.features, np.float32)}, {}

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Multiply in the compute dtype, sum in float32."""
        kernel, bias = params["kernel"].astype(ctx.compute_dtype), params["bias"]
        y_NO = ops.find_dense(x, kernel, bias, ctx.cpu_kernels)
        y_NO = ops.dense(x, kernel, bias, half_sums=ctx.half_partials) if y_NO is None else y_NO
        return y_NO if self.logits else y_NO.astype(ctx.compute_dtype), {}

    def cost(self, hwc: Shape) -> Cost:
        weights = hwc[0] * self.features
        return Cost(
            params=weights + self.features,
            flops=2 * weights,
            activation_elements=self.features,
            product_elements=self.features,
        )


@dataclass(frozen=True)
class Relu(WithoutParameters):
    """Rectified linear unit."""

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        return ops.relu(x), {}

    def fusible_activation(self) -> str | None:
        """Return the name of the activation: the CPU kernels may apply it with the convolution before it."""
        return "relu"

    def cost(self, hwc: Shape) -> Cost:
        return Cost(activation_elements=math.prod(hwc))


@dataclass(frozen=True, kw_only=True)
class _Pool(WithoutParameters):
    """What pools have in common."""

    window: int
    stride: int
    padding: Padding = "VALID"

    def shape(self, hwc: Shape) -> Shape:
        return *_windows("pool", hwc, self.window, self.stride, self.padding), hwc[2]

    def cost(self, hwc: Shape) -> Cost:
        return Cost(activation_elements=math.prod(self.shape(hwc)))


@dataclass(frozen=True, kw_only=True)
class MaxPool(_Pool):
    """Largest value of each window, ignoring padding."""

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        pooled = ops.find_max_pool(x, self.window, self.stride, self.padding, ctx.cpu_kernels)
        return ops.max_pool(x, self.window, self.stride, self.padding) if pooled is None else pooled, {}


@dataclass(frozen=True, kw_only=True)
class AveragePool(_Pool):
    """Mean of each window, ignoring padding."""

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        return ops.average_pool(x, self.window, self.stride, self.padding), {}


@dataclass(frozen=True)
class ResizeByAverage(WithoutParameters):
    """Means of `size` x `size` cells, whatever the size of the image; a small image's pixels are repeated."""

    size: int

    def shape(self, hwc: Shape) -> Shape:
        return self.size, self.size, hwc[2]

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        return ops.resize_by_average(x, self.size), {}


@dataclass(frozen=True)
class GlobalAveragePool(WithoutParameters):
    """Mean of each channel over the image."""

    def shape(self, hwc: Shape) -> Shape:
        return (hwc[2],)

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Average in float32."""
        return ops.global_average_pool(x), {}

    def cost(self, hwc: Shape) -> Cost:
        return Cost(activation_elements=hwc[2])


@dataclass(frozen=True)
class Flatten(WithoutParameters):
    """Image to vector, row by row."""

    def shape(self, hwc: Shape) -> Shape:
        return (math.prod(hwc),)

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        return x.reshape(x.shape[0], -1), {}


@dataclass(frozen=True, kw_only=True)
class ZeroPad(WithoutParameters):
    """Zeros around the image, `((top, bottom), (left, right))`."""

    pads: tuple[tuple[int, int], tuple[int, int]]

    def shape(self, hwc: Shape) -> Shape:
        return hwc[0] + sum(self.pads[0]), hwc[1] + sum(self.pads[1]), hwc[2]

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        return jnp.pad(x, ((0, 0), *self.pads, (0, 0))), {}


def _windows(what: str, hwc: Shape, window: int, stride: int, padding: Padding) -> tuple[int, int]:
    """Return the (height, width) of the output; an image smaller than the window raises ConfigError."""
    size = out_size(padding, (hwc[0], hwc[1]), (window, window), stride)
    if min(size) < 1:
        raise ConfigError(
            f"A {window}x{window} {what} gets only {hwc[0]}x{hwc[1]} pixels.",
            rule="The window must fit into the (padded) image.",
            remedy="Use larger images or a network with less downsampling.",
        )
    return size


# Layers made of layers: in sequence, around a shortcut, or side by side; and how to split them for a pipeline.


@dataclass(frozen=True, kw_only=True)
class OnBranch(Layer):
    """A layer on the body or the shortcut of a split residual unit; the first one `opens` the unit."""

    layer: Layer
    on_shortcut: bool = False
    opens: bool = False

    def shape(self, hwc: Any) -> Any:
        body, shortcut = (hwc, hwc) if self.opens else hwc
        return (body, self.layer.shape(shortcut)) if self.on_shortcut else (self.layer.shape(body), shortcut)

    def init(self, rng_at: RngAt, hwc: object) -> tuple[Tree, Tree]:
        return self.layer.init(rng_at, self._branch_shape(hwc))

    def apply(self, params: Tree, stats: Tree, x: PyTree, ctx: Ctx) -> tuple[Any, Tree]:
        """Apply the layer to its branch and pass the other on."""
        body, shortcut = (x, x) if self.opens else x
        y, batch_stats = self.layer.apply(params, stats, shortcut if self.on_shortcut else body, ctx)
        return ((body, y) if self.on_shortcut else (y, shortcut)), batch_stats

    def cost(self, hwc: object) -> Cost:
        return self.layer.cost(self._branch_shape(hwc))

    def _branch_shape(self, hwc: Any) -> Shape:
        return hwc if self.opens else hwc[self.on_shortcut]


@dataclass(frozen=True)
class Join(WithoutParameters):
    """The addition at the end of a residual unit."""

    def shape(self, hwc: Any) -> Any:
        assert hwc[0] == hwc[1], hwc
        return hwc[0]

    def apply(self, params: Tree, stats: Tree, x: PyTree, ctx: Ctx) -> tuple[Array, Tree]:
        return x[0] + x[1], {}


def split_layers(name: str, layer: Any) -> tuple[tuple[str, Layer], ...]:
    """Return the innermost layers of a named layer with their full names; a simple layer is returned as it is."""
    sublayers = getattr(layer, "sublayers", None)
    if sublayers is None:
        return ((name, layer),)
    return tuple(found for part, inner in sublayers() for found in split_layers(f"{name}/{part}", inner))


Named = tuple[str, Layer]


@dataclass(frozen=True)
class Chain(Layer):
    """Named layers, each applied to the output of the previous one."""

    layers: tuple[Named, ...] = ()

    def shape(self, hwc: Shape) -> Shape:
        for _, layer in self.layers:
            hwc = layer.shape(hwc)
        return hwc

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Initialise every layer with random numbers that depend on its name."""
        params, stats = {}, {}
        for name, layer in self.layers:
            layer_params, layer_stats = layer.init(under(rng_at, name), hwc)
            params |= {name: layer_params} if layer_params else {}
            stats |= {name: layer_stats} if layer_stats else {}
            hwc = layer.shape(hwc)
        return params, stats

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx, tail: Tail | None = None) -> tuple[Array, Tree]:
        """Apply the layers and the tail; a convolution, the batch norm after it and what follows are one operation."""
        batch_stats, i = {}, 0
        while i < len(self.layers):
            fused = _apply_unit(self.layers[i:], params, stats, x, ctx, tail)
            fused = fused or _apply_norm_pool(self.layers[i:], params, stats, x, ctx, tail)
            if fused is not None:
                x, layer_stats, used, tail = fused
                i += used
            else:
                name, layer = self.layers[i]
                x, found = layer.apply(params.get(name, {}), stats.get(name, {}), x, ctx.under(name))
                layer_stats, i = {name: found} if found else {}, i + 1
            batch_stats |= layer_stats
        return x if tail is None else tail.apply(x), batch_stats

    def cost(self, hwc: Shape) -> Cost:
        total = Cost()
        for _, layer in self.layers:
            total += layer.cost(hwc)
            hwc = layer.shape(hwc)
        return total

    def sublayers(self) -> tuple[Named, ...]:
        """Return the layers, to be split between stages."""
        return self.layers


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """A convolution, and what becomes one operation with it: batch norm, activation, the addition of a residual."""

    window: ops.Window
    kernel: Array
    bias: Array | None
    norm_name: str
    norm: FusibleNorm | None
    activation: str | None
    residual: Array | None
    used: int  # layers
    tail: Tail | None  # that is still to be applied

    def constant(self) -> ops.ConstantUnit:
        """Return it as kernels of inference take it, without the residual."""
        norm = None if self.norm is None else self.norm.operation
        return ops.ConstantUnit(
            window=self.window, kernel=self.kernel, norm=norm, bias=self.bias, activation=self.activation
        )


def _find_unit(
    layers: tuple[Named, ...], params: Tree, stats: Tree, x: ops.Shaped, ctx: Ctx, tail: Tail | None
) -> _Unit | None:
    """Return the unit that layers begin with, for images like `x`, if the kernels can compute it.

    Layers offer themselves by `fusible_norm`, `fusible_activation` and `fusible_gate`. These are not part of `Layer`:
    users' layers need not have them.
    """
    name, conv = layers[0] if layers else ("", None)
    if not isinstance(conv, Conv):
        return None
    kernel, dtype = params[name]["kernel"].astype(ctx.compute_dtype), x.dtype
    window = ops.find_window(x, kernel, conv.stride, conv.padding, conv.groups, ctx.cpu_kernels)
    if window is None and ops.weights_are_constant():
        # Of float16 values, or grouped: the unit is computed in float32 and rounded once.
        kernel, dtype = kernel.astype(jnp.float32), jnp.dtype(jnp.float32)
        wide = jax.ShapeDtypeStruct(x.shape, dtype)
        window = ops.find_window(wide, kernel, conv.stride, conv.padding, conv.groups, ctx.cpu_kernels)
    if window is None:
        return None
    norm_name, norm_layer = layers[1] if len(layers) > 1 and not conv.bias else ("", None)
    find_norm = getattr(norm_layer, "fusible_norm", lambda *_: None)
    norm = find_norm(params.get(norm_name, {}), stats.get(norm_name, {}), ctx.under(norm_name))
    # Only inference has units without a norm, and of 16-bit values with one that does not look at the batch.
    is_running = norm is not None and norm.operation.running is not None
    if not ops.weights_are_constant() and (norm is None or (is_running and dtype != jnp.float32)):
        return None
    used, activation, residual = 1 if norm is None else 2, None, None
    if len(layers) == used and tail is not None and _can_fuse(tail):
        activation, tail, residual = tail.activation, None, tail.residual
        residual = None if residual is None else residual.astype(dtype)
    elif len(layers) > used:
        named = getattr(layers[used][1], "fusible_activation", lambda: None)()
        if named is not None and ops.can_fuse(named, False):
            used, activation = used + 1, named
    return _Unit(
        window=window,
        kernel=kernel,
        bias=params[name].get("bias"),
        norm_name=norm_name,
        norm=norm,
        activation=activation,
        residual=residual,
        used=used,
        tail=tail,
    )


def _can_fuse(tail: Tail) -> bool:
    return tail.pool is None and ops.can_fuse(tail.activation, tail.residual is not None)


def _apply_unit(
    layers: tuple[Named, ...], params: Tree, stats: Tree, x: Array, ctx: Ctx, tail: Tail | None
) -> tuple[Array, Tree, int, Tail | None] | None:
    """Apply the unit that layers begin with, if there is one; in inference with the depthwise unit behind it.

    Returns (output, batch statistics, number of layers, tail that is still to be applied).
    """
    unit = _find_unit(layers, params, stats, x, ctx, tail)
    if unit is None:
        return None
    if ops.weights_are_constant() and x.dtype == jnp.float32:
        between = jax.ShapeDtypeStruct(unit.window.y, x.dtype)
        second = _find_unit(layers[unit.used :], params, stats, between, ctx, tail)
        if second is not None and second.residual is None:
            used = unit.used + second.used
            name, layer = layers[used] if len(layers) > used else ("", None)
            gate = getattr(layer, "fusible_gate", lambda *_: None)(params.get(name, {}))
            y = ops.find_bottleneck(x, unit.constant(), second.constant(), gate)
            if y is not None:
                return y, {}, used + (gate is not None), second.tail
    x = x.astype(unit.kernel.dtype)
    if unit.norm is None:
        y = ops.conv_bias(x, unit.kernel, unit.bias, unit.window, unit.residual, unit.activation)
        return y.astype(ctx.compute_dtype), {}, unit.used, unit.tail
    operation = unit.norm.operation
    y, mean_O, variance_O = ops.conv_unit(x, unit.kernel, unit.window, operation, unit.residual, unit.activation)
    batch_stats = unit.norm.batch_stats(y.size // y.shape[-1], mean_O, variance_O)
    return y.astype(ctx.compute_dtype), {unit.norm_name: batch_stats} if batch_stats else {}, unit.used, unit.tail


def _apply_norm_pool(
    layers: tuple[Named, ...], params: Tree, stats: Tree, x: Array, ctx: Ctx, tail: Tail | None
) -> tuple[Array, Tree, int, Tail | None] | None:
    """Apply the batch norm, relu and max pool that layers begin with, if they are one operation; as `_apply_unit`."""
    name, layer = layers[0]
    find_norm = getattr(layer, "fusible_norm", None)
    if find_norm is None or len(layers) < 2 or getattr(layers[1][1], "fusible_activation", lambda: None)() != "relu":
        return None
    last = layers[2][1] if len(layers) > 2 else None
    pool = tail.pool if len(layers) == 2 and tail is not None else last
    if not isinstance(pool, MaxPool):
        return None
    norm = find_norm(params.get(name, {}), stats.get(name, {}), ctx.under(name))
    if norm is None or norm.operation.running is not None:
        return None
    operation, size = norm.operation, (x.shape[1], x.shape[2])
    pads = pad_pixels(pool.padding, size, (pool.window, pool.window), pool.stride)
    windows = ops.Windows(pool.window, pool.stride, pads)
    with jax.named_scope("norm"):
        fused = ops.find_norm_pool(x, operation.gamma, operation.beta, operation.epsilon, operation.shared, windows)
    if fused is None:
        return None
    y, mean_C, variance_C = fused
    batch_stats = {name: norm.batch_stats(x.size // x.shape[-1], mean_C, variance_C)}
    return (y, batch_stats, 3, tail) if len(layers) > 2 else (y, batch_stats, 2, None)


@dataclass(frozen=True, kw_only=True)
class Residual(Layer):
    """body(x) + shortcut(x). Both chains share one namespace; an empty shortcut is the identity."""

    body: Chain
    shortcut: Chain = Chain()

    def __post_init__(self) -> None:
        """Check that no layer name occurs twice."""
        names = [name for name, _ in self.body.layers + self.shortcut.layers]
        assert len(names) == len(set(names)), names

    def shape(self, hwc: Shape) -> Shape:
        shape = self.body.shape(hwc)
        assert shape == self.shortcut.shape(hwc), (shape, self.shortcut.shape(hwc))
        return shape

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        body, shortcut = self.body.init(rng_at, hwc), self.shortcut.init(rng_at, hwc)
        return body[0] | shortcut[0], body[1] | shortcut[1]

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx, activation: str | None = None) -> tuple[Array, Tree]:
        """Add the two branches; the activation that follows may be part of the last operation."""
        short, shortcut_stats = self.shortcut.apply(params, stats, x, ctx)
        y, body_stats = self.body.apply(params, stats, x, ctx, Tail(short, activation))
        return y, body_stats | shortcut_stats

    def cost(self, hwc: Shape) -> Cost:
        return self.body.cost(hwc) + self.shortcut.cost(hwc)

    def sublayers(self) -> tuple[Named, ...]:
        """Return the shortcut's layers, the body's, and the addition."""
        layers = [(name, layer, True) for name, layer in self.shortcut.layers]
        layers += [(name, layer, False) for name, layer in self.body.layers]
        branches = (
            (name, OnBranch(layer=layer, on_shortcut=on_shortcut, opens=i == 0))
            for i, (name, layer, on_shortcut) in enumerate(layers)
        )
        return *branches, ("add", Join())


@dataclass(frozen=True, kw_only=True)
class Concat(Layer):
    """Named layers applied to the same input, with their output channels concatenated."""

    layers: tuple[Named, ...]

    def shape(self, hwc: Shape) -> Shape:
        shapes = [layer.shape(hwc) for _, layer in self.layers]
        assert len({shape[:-1] for shape in shapes}) == 1, shapes
        return *shapes[0][:-1], sum(shape[-1] for shape in shapes)

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        drawn = {name: layer.init(under(rng_at, name), hwc) for name, layer in self.layers}
        params, stats = ({name: both[i] for name, both in drawn.items() if both[i]} for i in (0, 1))
        return params, stats

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        outputs, batch_stats = [], {}
        for name, layer in self.layers:
            y, layer_stats = layer.apply(params.get(name, {}), stats.get(name, {}), x, ctx.under(name))
            outputs.append(y)
            batch_stats |= {name: layer_stats} if layer_stats else {}
        return jnp.concatenate(outputs, -1), batch_stats

    def cost(self, hwc: Shape) -> Cost:
        return sum((layer.cost(hwc) for _, layer in self.layers), Cost())


@dataclass(frozen=True, kw_only=True)
class SubsampleShortcut(WithoutParameters):
    """Every `stride`-th pixel, padded with zero channels up to `channels`: a shortcut without parameters.

    The zeros follow the channels, or half of them precede and half follow.
    """

    channels: int
    stride: int = 2
    both_sides: bool = False

    def shape(self, hwc: Shape) -> Shape:
        return math.ceil(hwc[0] / self.stride), math.ceil(hwc[1] / self.stride), self.channels

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        n, h, w, c = x.shape
        kept = lax.slice(x, (0, 0, 0, 0), (n, h, w, c), (1, self.stride, self.stride, 1))
        more = self.channels - c
        before = more // 2 if self.both_sides else 0
        return jnp.pad(kept, ((0, 0), (0, 0), (0, 0), (before, more - before))), {}
