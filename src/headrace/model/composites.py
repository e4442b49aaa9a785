"""Layers made of layers: one after the other, and around a shortcut.

The parameters of a composite are {layer name: parameters of the layer}; layers without parameters have no entry.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.model.initial import RngAt, under
from headrace.model.layers import Layer, Shape, Tree, WithoutParameters

Named = tuple[str, Layer]


@dataclass(frozen=True)
class Chain:
    """Named layers, each applied to the output of the one before."""

    layers: tuple[Named, ...] = ()

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape of one image's output."""
        for _, layer in self.layers:
            hwc = layer.shape(hwc)
        return hwc

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Initialise every layer, each with its own address of randomness."""
        params, stats = {}, {}
        for name, layer in self.layers:
            layer_params, layer_stats = layer.init(under(rng_at, name), hwc)
            params |= {name: layer_params} if layer_params else {}
            stats |= {name: layer_stats} if layer_stats else {}
            hwc = layer.shape(hwc)
        return params, stats

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Apply every layer in turn."""
        batch_stats = {}
        for name, layer in self.layers:
            x, layer_stats = layer.apply(params.get(name, {}), stats.get(name, {}), x, ctx.under(name))
            batch_stats |= {name: layer_stats} if layer_stats else {}
        return x, batch_stats

    def cost(self, hwc: Shape) -> Cost:
        """Return the cost per image."""
        total = Cost()
        for _, layer in self.layers:
            total += layer.cost(hwc)
            hwc = layer.shape(hwc)
        return total


@dataclass(frozen=True, kw_only=True)
class Residual:
    """body(x) + shortcut(x). The names of both chains lie side by side; an empty shortcut is the identity."""

    body: Chain
    shortcut: Chain = Chain()

    def __post_init__(self) -> None:
        """Check that no name is used twice."""
        names = [name for name, _ in self.body.layers + self.shortcut.layers]
        assert len(names) == len(set(names)), names

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape of one image's output."""
        shape = self.body.shape(hwc)
        assert shape == self.shortcut.shape(hwc), (shape, self.shortcut.shape(hwc))
        return shape

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Initialise both branches."""
        body, shortcut = self.body.init(rng_at, hwc), self.shortcut.init(rng_at, hwc)
        return body[0] | shortcut[0], body[1] | shortcut[1]

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Add the two branches."""
        y, body_stats = self.body.apply(params, stats, x, ctx)
        short, shortcut_stats = self.shortcut.apply(params, stats, x, ctx)
        return y + short, body_stats | shortcut_stats

    def cost(self, hwc: Shape) -> Cost:
        """Return the cost per image."""
        return self.body.cost(hwc) + self.shortcut.cost(hwc)


@dataclass(frozen=True, kw_only=True)
class SubsampleShortcut(WithoutParameters):
    """Every `stride`-th pixel, with zero channels appended up to `channels`: a shortcut that learns nothing."""

    channels: int
    stride: int = 2

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape of one image's output."""
        return math.ceil(hwc[0] / self.stride), math.ceil(hwc[1] / self.stride), self.channels

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Slice and pad."""
        n, h, w, c = x.shape
        kept = lax.slice(x, (0, 0, 0, 0), (n, h, w, c), (1, self.stride, self.stride, 1))
        return jnp.pad(kept, ((0, 0), (0, 0), (0, 0), (0, self.channels - c))), {}

    def cost(self, hwc: Shape) -> Cost:
        """Return nothing: computed together with the addition."""
        return Cost()
