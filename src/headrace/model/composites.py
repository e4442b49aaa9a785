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
from headrace.model.pieces import Join, OnBranch

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

    def pieces(self) -> tuple[Named, ...]:
        """Return the layers."""
        return self.layers


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

    def pieces(self) -> tuple[Named, ...]:
        """Return the shortcut's layers, the body's, and the addition."""
        layers = [(name, layer, True) for name, layer in self.shortcut.layers]
        layers += [(name, layer, False) for name, layer in self.body.layers]
        branches = (
            (name, OnBranch(layer=layer, on_shortcut=on_shortcut, opens=i == 0))
            for i, (name, layer, on_shortcut) in enumerate(layers)
        )
        return *branches, ("add", Join())


@dataclass(frozen=True, kw_only=True)
class Concat:
    """Named layers side by side on one input, their output channels one after the other."""

    layers: tuple[Named, ...]

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape of one image's output."""
        shapes = [layer.shape(hwc) for _, layer in self.layers]
        assert len({shape[:-1] for shape in shapes}) == 1, shapes
        return *shapes[0][:-1], sum(shape[-1] for shape in shapes)

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Initialise every layer."""
        drawn = {name: layer.init(under(rng_at, name), hwc) for name, layer in self.layers}
        params, stats = ({name: both[i] for name, both in drawn.items() if both[i]} for i in (0, 1))
        return params, stats

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Apply every layer to the input."""
        outputs, batch_stats = [], {}
        for name, layer in self.layers:
            y, layer_stats = layer.apply(params.get(name, {}), stats.get(name, {}), x, ctx.under(name))
            outputs.append(y)
            batch_stats |= {name: layer_stats} if layer_stats else {}
        return jnp.concatenate(outputs, -1), batch_stats

    def cost(self, hwc: Shape) -> Cost:
        """Return the cost per image."""
        return sum((layer.cost(hwc) for _, layer in self.layers), Cost())


@dataclass(frozen=True, kw_only=True)
class SubsampleShortcut(WithoutParameters):
    """Every `stride`-th pixel, with zero channels up to `channels`: a shortcut that learns nothing.

    The zeros come after the channels, or half of them before and half after.
    """

    channels: int
    stride: int = 2
    both_sides: bool = False

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape of one image's output."""
        return math.ceil(hwc[0] / self.stride), math.ceil(hwc[1] / self.stride), self.channels

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Slice and pad."""
        n, h, w, c = x.shape
        kept = lax.slice(x, (0, 0, 0, 0), (n, h, w, c), (1, self.stride, self.stride, 1))
        more = self.channels - c
        before = more // 2 if self.both_sides else 0
        return jnp.pad(kept, ((0, 0), (0, 0), (0, 0), (before, more - before))), {}

    def cost(self, hwc: Shape) -> Cost:
        """Return nothing: computed together with the addition."""
        return Cost()
