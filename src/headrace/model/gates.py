"""What scales or drops values in a block: squeeze-and-excite, layer scale, dropout and stochastic depth.

Shapes in names: N images, C channels, R channels after the squeeze.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace import ops
from headrace.model.activations import ACTIVATIONS
from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.model.initial import FAN_OUT_HE, VarianceScaling, Weight
from headrace.model.layers import SameShape, Shape, Tree, WithoutParameters


@dataclass(frozen=True, kw_only=True)
class SqueezeExcite(SameShape):
    """Scale each channel by a gate computed from the means of all channels: C to R, activation, and back to C."""

    width: int
    activation: str = "swish"
    gate: str = "sigmoid"
    initial: VarianceScaling = FAN_OUT_HE

    def weights(self, hwc: Shape) -> tuple[Tree, Tree]:
        return {
            name: {"kernel": Weight(channels, self.initial), "bias": Weight(channels[1:])}
            for name, channels in (("reduce", (hwc[2], self.width)), ("expand", (self.width, hwc[2])))
        }, {}

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Scale; means and sums in float32."""
        fused = ops.find_gate(x, self._operation(params), ctx.cpu_kernels)
        if fused is not None:
            return fused, {}
        x = ops.materialised(x)  # once, for the mean and the product
        y_NC = ops.global_average_pool(x)
        for name, function in (("reduce", self.activation), ("expand", self.gate)):
            kernel, bias = params[name]["kernel"].astype(ctx.compute_dtype), params[name]["bias"]
            y_NC = ACTIVATIONS[function](ops.dense(y_NC, kernel, bias, half_sums=ctx.half_partials)).astype(
                ctx.compute_dtype
            )
        return x * y_NC[:, None, None], {}

    def fusible_gate(self, params: Tree) -> ops.Gate | None:
        """Return the gate: the CPU kernels may apply it with the convolutions before it."""
        gate = self._operation(params)
        return gate if gate.is_known() else None

    def _operation(self, params: Tree) -> ops.Gate:
        reduce, expand = ((params[name]["kernel"], params[name]["bias"]) for name in ("reduce", "expand"))
        return ops.Gate(reduce, expand, self.activation, self.gate)

    def cost(self, hwc: Shape) -> Cost:
        channels = hwc[2]
        return Cost(
            params=2 * channels * self.width + self.width + channels,
            flops=4 * channels * self.width,
            activation_elements=math.prod(hwc) + 2 * (channels + self.width),
            product_elements=channels + self.width,
        )


@dataclass(frozen=True)
class LayerScale(SameShape):
    """A learnt factor for each channel, starting at `initial`: small at the end of a residual unit's body."""

    initial: float

    def weights(self, hwc: Shape) -> tuple[Tree, Tree]:
        return {"gamma": Weight((hwc[-1],), self.initial)}, {}

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
