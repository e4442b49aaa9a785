"""The basic layers as frozen values with pure methods, and the initial values of weights.

A layer has `shape(hwc)`, `init(rng_at, hwc) -> (params, stats)`, `apply(params, stats, x, ctx) -> (y, batch_stats)` and
`cost(hwc)`. A shape is one image's: (height, width, channels), or (features,) after pooling or flattening.
Shapes in names: N images, H height, W width, C channels in, I channels in per group, O channels out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace import ops
from headrace.core.errors import ConfigError
from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.ops.pool import Padding, out_size

# The standard deviation of a unit normal truncated at +-2. Samples are divided by it to get the intended deviation.
_TRUNCATED_DEVIATION = 0.87962566103423978

RngAt = Callable[[str], np.random.Generator]


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


FAN_IN_NORMAL = VarianceScaling()
FAN_IN_HE = VarianceScaling(scale=2.0)
FAN_OUT_HE = VarianceScaling(scale=2.0, fan="out")
GLOROT_UNIFORM = VarianceScaling(fan="average", distribution="uniform")


def under(rng_at: RngAt, name: str) -> RngAt:
    """Return `rng_at` for names relative to `name`."""
    return lambda below: rng_at(f"{name}/{below}")


def _truncated_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    drawn = rng.standard_normal(shape)
    while (outside := np.abs(drawn) > 2).any():
        drawn[outside] = rng.standard_normal(int(outside.sum()))
    return drawn


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


class WithoutParameters:
    """The `init` of a layer without parameters."""

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Return no parameters and no statistics."""
        return {}, {}


@dataclass(frozen=True, kw_only=True)
class Conv:
    """Convolution; `groups` divides the channels, and `bias` is off because a norm usually follows."""

    channels: int
    kernel: int = 3
    stride: int = 1
    padding: Padding = "SAME"
    groups: int = 1
    bias: bool = False
    initial: VarianceScaling = FAN_IN_NORMAL

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape of one image's output."""
        if hwc[2] % self.groups or self.channels % self.groups:
            raise ConfigError(
                f"A convolution from {hwc[2]} to {self.channels} channels cannot have {self.groups} groups.",
                rule="The number of groups must divide both channel counts.",
            )
        return *_windows("convolution", hwc, self.kernel, self.stride, self.padding), self.channels

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Draw the kernel; the bias starts at zero."""
        params = {"kernel": self.initial.sample(rng_at("kernel"), self._kernel_shape(hwc))}
        if self.bias:
            params["bias"] = np.zeros(self.channels, np.float32)
        return params, {}

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Convolve in the compute dtype."""
        w_HWIO = params["kernel"].astype(ctx.compute_dtype)
        y_NHWO = ops.conv2d(x, w_HWIO, self.stride, self.padding, self.groups)
        if self.bias:
            y_NHWO = y_NHWO + params["bias"].astype(ctx.compute_dtype)[None, None, None]
        return y_NHWO, {}

    def cost(self, hwc: Shape) -> Cost:
        """Return the cost per image."""
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
class Dense:
    """Fully connected layer with bias. With `logits` its output stays float32."""

    features: int
    logits: bool = False
    initial: VarianceScaling = GLOROT_UNIFORM

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape of one image's output."""
        assert len(hwc) == 1, f"flatten or pool before a dense layer: {hwc}"
        return (self.features,)

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Draw the kernel; the bias starts at zero."""
        kernel = self.initial.sample(rng_at("kernel"), (hwc[0], self.features))
        return {"kernel": kernel, "bias": np.zeros(self.features, np.float32)}, {}

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Multiply in the compute dtype, sum in float32."""
        y_NO = ops.dense(x, params["kernel"].astype(ctx.compute_dtype), params["bias"], half_sums=ctx.half_partials)
        return y_NO if self.logits else y_NO.astype(ctx.compute_dtype), {}

    def cost(self, hwc: Shape) -> Cost:
        """Return the cost per image."""
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

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape unchanged."""
        return hwc

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Return max(x, 0)."""
        return ops.relu(x), {}

    def cost(self, hwc: Shape) -> Cost:
        """Return the cost per image."""
        return Cost(activation_elements=math.prod(hwc))


@dataclass(frozen=True, kw_only=True)
class MaxPool(WithoutParameters):
    """Largest value of each window, ignoring padding."""

    window: int
    stride: int
    padding: Padding = "VALID"

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape of one image's output."""
        return *_windows("max pool", hwc, self.window, self.stride, self.padding), hwc[2]

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Pool."""
        return ops.max_pool(x, self.window, self.stride, self.padding), {}

    def cost(self, hwc: Shape) -> Cost:
        """Return the cost per image."""
        return Cost(activation_elements=math.prod(self.shape(hwc)))


@dataclass(frozen=True)
class GlobalAveragePool(WithoutParameters):
    """Mean of each channel over the image."""

    def shape(self, hwc: Shape) -> Shape:
        """Return only the channels."""
        return (hwc[2],)

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Average in float32."""
        return ops.global_average_pool(x), {}

    def cost(self, hwc: Shape) -> Cost:
        """Return the cost per image."""
        return Cost(activation_elements=hwc[2])


@dataclass(frozen=True)
class Flatten(WithoutParameters):
    """Image to vector, row by row."""

    def shape(self, hwc: Shape) -> Shape:
        """Return the number of elements."""
        return (math.prod(hwc),)

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Reshape."""
        return x.reshape(x.shape[0], -1), {}

    def cost(self, hwc: Shape) -> Cost:
        """Return no cost: no element is copied."""
        return Cost()


@dataclass(frozen=True, kw_only=True)
class ZeroPad(WithoutParameters):
    """Zeros around the image, `((top, bottom), (left, right))`."""

    pads: tuple[tuple[int, int], tuple[int, int]]

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape of one image's output."""
        return hwc[0] + sum(self.pads[0]), hwc[1] + sum(self.pads[1]), hwc[2]

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Pad."""
        return jnp.pad(x, ((0, 0), *self.pads, (0, 0))), {}

    def cost(self, hwc: Shape) -> Cost:
        """Return no cost: XLA fuses padding with the next layer."""
        return Cost()


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
