"""Activations by name, squeeze-and-excite, layer scale, dropout and stochastic depth.

Shapes in names: N images, C channels, R channels after the squeeze.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace import ops
from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.model.layers import FAN_OUT_HE, Layer, RngAt, Shape, Tree, VarianceScaling, WithoutParameters, under

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "relu": ops.relu,
    "relu6": ops.relu6,
    "swish": ops.swish,
    "gelu": ops.gelu,
    "hard_swish": ops.hard_swish,
    "sigmoid": ops.sigmoid,
    "hard_sigmoid": ops.hard_sigmoid,
}


@dataclass(frozen=True)
class Activation(WithoutParameters):
    """An activation function, by its name in ACTIVATIONS."""

    kind: str = "relu"

    def __post_init__(self) -> None:
        assert self.kind in ACTIVATIONS, self.kind

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        return ACTIVATIONS[self.kind](x), {}

    def fusible_activation(self) -> str | None:
        """Return the name of the activation: the CPU kernels may apply it with the convolution before it."""
        return self.kind

    def cost(self, hwc: Shape) -> Cost:
        return Cost(activation_elements=math.prod(hwc))


@dataclass(frozen=True, kw_only=True)
class SqueezeExcite(Layer):
    """Scale each channel by a gate computed from the means of all channels: C to R, activation, and back to C."""

    width: int
    activation: str = "swish"
    gate: str = "sigmoid"
    initial: VarianceScaling = FAN_OUT_HE

    def shape(self, hwc: Shape) -> Shape:
        return hwc

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Draw both kernels; the biases start at zero."""
        params = {}
        for name, channels in (("reduce", (hwc[2], self.width)), ("expand", (self.width, hwc[2]))):
            kernel = self.initial.sample(under(rng_at, name)("kernel"), channels)
            params[name] = {"kernel": kernel, "bias": np.zeros(channels[1], np.float32)}
        return params, {}

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Scale; means and sums in float32."""
        y_NC = ops.global_average_pool(x)
        for name, function in (("reduce", self.activation), ("expand", self.gate)):
            kernel, bias = params[name]["kernel"].astype(ctx.compute_dtype), params[name]["bias"]
            y_NC = ACTIVATIONS[function](ops.dense(y_NC, kernel, bias, half_sums=ctx.half_partials)).astype(
                ctx.compute_dtype
            )
        return x * y_NC[:, None, None], {}

    def cost(self, hwc: Shape) -> Cost:
        channels = hwc[2]
        return Cost(
            params=2 * channels * self.width + self.width + channels,
            flops=4 * channels * self.width,
            activation_elements=math.prod(hwc) + 2 * (channels + self.width),
            product_elements=channels + self.width,
        )


@dataclass(frozen=True)
class LayerScale(Layer):
    """A learnt factor for each channel, starting at `initial`: small at the end of a residual unit's body."""

    initial: float

    def shape(self, hwc: Shape) -> Shape:
        return hwc

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        return {"gamma": np.full(hwc[-1], self.initial, np.float32)}, {}

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        return x * params["gamma"].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,)), {}

    def cost(self, hwc: Shape) -> Cost:
        return Cost(params=hwc[-1])


@dataclass(frozen=True)
class Dropout(WithoutParameters):
    """In training, set each element to zero with probability `rate` and scale the others up."""

    rate: float

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Drop and scale in training; otherwise do nothing."""
        if not ctx.train or self.rate == 0:
            return x, {}
        kept = (ctx.uniform(*x.shape[1:]) >= np.float32(self.rate)).astype(jnp.float32)
        return x * (kept * np.float32(1 / (1 - self.rate))).astype(x.dtype), {}


@dataclass(frozen=True)
class DropPath(WithoutParameters):
    """In training, drop the whole branch of an image, or keep it with probability `survival` and scale it up.

    At the end of a residual unit's body, a dropped branch leaves only the shortcut. Also called stochastic depth.
    """

    survival: float

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Drop and scale in training; otherwise do nothing."""
        if not ctx.train or self.survival == 1:
            return x, {}
        kept = (ctx.uniform() < np.float32(self.survival)).astype(jnp.float32) * np.float32(1 / self.survival)
        return x * kept.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1)), {}
