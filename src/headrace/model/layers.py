"""The layers as frozen values with pure methods."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array

from headrace import ops
from headrace.core.errors import ConfigError
from headrace.core.rng import generator
from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.model.initial import FAN_IN_NORMAL, GLOROT_UNIFORM, Initial, RngAt, Weight, draw
from headrace.ops.pool import Padding, out_size

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


class DeclaredLayer(Layer):
    """A layer that declares its tensors: their initial values follow, and their shapes are known without drawing."""

    def weights(self, hwc: Shape) -> tuple[Tree, Tree]:
        """Return the tensors of the parameters and of the running statistics, as trees of `Weight`."""
        ...

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Return initial parameters and running statistics, float32 on the host."""
        params, stats = self.weights(hwc)
        return draw(params, rng_at), draw(stats, rng_at)


def weights_of(layer: Layer, hwc: Shape) -> tuple[Tree, Tree]:
    """Return a layer's tensors, as trees of anything with a shape; a user's layer, which has only `init`, draws."""
    return layer.weights(hwc) if isinstance(layer, DeclaredLayer) else layer.init(partial(generator, 0), hwc)


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


class SameShape(DeclaredLayer):
    """A layer that keeps the shape, unless it says otherwise."""

    def shape(self, hwc: Shape) -> Shape:
        return hwc


class WithoutParameters(SameShape):
    """A layer without parameters; unless it says otherwise, it keeps the shape and costs nothing.

    XLA fuses additions, padding and dropout with their neighbours, so that neither time nor memory is counted for them.
    """

    def weights(self, hwc: Shape) -> tuple[Tree, Tree]:
        return {}, {}

    def cost(self, hwc: Shape) -> Cost:
        return Cost()


@dataclass(frozen=True, kw_only=True)
class Conv(DeclaredLayer):
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

    def weights(self, hwc: Shape) -> tuple[Tree, Tree]:
        bias = {"bias": Weight((self.channels,))} if self.bias else {}
        return {"kernel": Weight(self._kernel_shape(hwc), self.initial)} | bias, {}

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
class Dense(DeclaredLayer):
    """Fully connected layer with bias. With `logits` its output stays float32."""

    features: int
    logits: bool = False
    initial: Initial = GLOROT_UNIFORM

    def shape(self, hwc: Shape) -> Shape:
        assert len(hwc) == 1, f"flatten or pool before a dense layer: {hwc}"
        return (self.features,)

    def weights(self, hwc: Shape) -> tuple[Tree, Tree]:
        return {"kernel": Weight((hwc[0], self.features), self.initial), "bias": Weight((self.features,))}, {}

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


@dataclass(frozen=True, kw_only=True)
class BlurPool(WithoutParameters):
    """Every `stride`-th pixel of the image filtered with weights 1 2 1 / 4 down and across, mirrored at the edge."""

    stride: int = 2

    def shape(self, hwc: Shape) -> Shape:
        return -(-hwc[0] // self.stride), -(-hwc[1] // self.stride), hwc[2]

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        return ops.blur_pool(x, self.stride), {}

    def cost(self, hwc: Shape) -> Cost:
        return Cost(activation_elements=math.prod(self.shape(hwc)))


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
