"""Layers made of layers: one after the other, and around a shortcut.

The parameters of a composite are {layer name: parameters of the layer}; layers without parameters have no entry.

Inside a residual unit two values are on their way, the body's and the shortcut's: a piece there takes and returns a
pair, and so do the shapes. A piece is named after its layer, so parameters have the same full names cut or whole.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.model.layers import Layer, RngAt, Shape, Tree, WithoutParameters, under

# The pieces of a composite: layers that, one after the other, compute what it computes, so that a cut may lie inside.


@dataclass(frozen=True, kw_only=True)
class OnBranch:
    """A layer on the body or on the shortcut of a residual unit; the first of all `opens` the unit."""

    layer: Layer
    on_shortcut: bool = False
    opens: bool = False

    def shape(self, hwc: Any) -> Any:
        """Return the shapes of the pair."""
        body, shortcut = (hwc, hwc) if self.opens else hwc
        return (body, self.layer.shape(shortcut)) if self.on_shortcut else (self.layer.shape(body), shortcut)

    def init(self, rng_at: RngAt, hwc: Any) -> tuple[Tree, Tree]:
        """Initialise the layer."""
        return self.layer.init(rng_at, self._mine(hwc))

    def apply(self, params: Tree, stats: Tree, x: Any, ctx: Ctx) -> tuple[Any, Tree]:
        """Apply the layer to its branch, pass the other on."""
        body, shortcut = (x, x) if self.opens else x
        y, batch_stats = self.layer.apply(params, stats, shortcut if self.on_shortcut else body, ctx)
        return ((body, y) if self.on_shortcut else (y, shortcut)), batch_stats

    def cost(self, hwc: Any) -> Cost:
        """Return the cost of the layer per image."""
        return self.layer.cost(self._mine(hwc))

    def _mine(self, hwc: Any) -> Shape:
        return hwc if self.opens else hwc[self.on_shortcut]


@dataclass(frozen=True)
class Join(WithoutParameters):
    """The addition at the end of a residual unit."""

    def shape(self, hwc: Any) -> Any:
        """Return the shape of the sum."""
        assert hwc[0] == hwc[1], hwc
        return hwc[0]

    def apply(self, params: Tree, stats: Tree, x: Any, ctx: Ctx) -> tuple[Array, Tree]:
        """Add the branches."""
        return x[0] + x[1], {}

    def cost(self, hwc: Any) -> Cost:
        """Return nothing: computed together with its neighbours."""
        return Cost()


def split_layers(name: str, layer: Any) -> tuple[tuple[str, Layer], ...]:
    """Return the pieces of a named layer, named in full; a layer without pieces is its only one."""
    divide = getattr(layer, "sublayers", None)
    if divide is None:
        return ((name, layer),)
    return tuple(piece for part, inner in divide() for piece in split_layers(f"{name}/{part}", inner))


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

    def sublayers(self) -> tuple[Named, ...]:
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
