"""Layers made of layers: in sequence, around a shortcut, or side by side; and how to split them for a pipeline.

The parameters of a composite are {layer name: parameters of the layer}; layers without parameters have no entry.

`split_layers` turns a composite into a sequence of layers that computes the same, so that a pipeline can be cut inside
it. Within a residual unit two values are passed on, the body's and the shortcut's: the layers there take and return
pairs, and their shapes are pairs too. Parameters keep their full names whether or not a composite is split.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.model.layers import Layer, RngAt, Shape, Tree, WithoutParameters, under


@dataclass(frozen=True, kw_only=True)
class OnBranch:
    """A layer on the body or the shortcut of a split residual unit; the first one `opens` the unit."""

    layer: Layer
    on_shortcut: bool = False
    opens: bool = False

    def shape(self, hwc: Any) -> Any:
        """Return the shapes of the pair."""
        body, shortcut = (hwc, hwc) if self.opens else hwc
        return (body, self.layer.shape(shortcut)) if self.on_shortcut else (self.layer.shape(body), shortcut)

    def init(self, rng_at: RngAt, hwc: Any) -> tuple[Tree, Tree]:
        """Initialise the layer."""
        return self.layer.init(rng_at, self._branch_shape(hwc))

    def apply(self, params: Tree, stats: Tree, x: Any, ctx: Ctx) -> tuple[Any, Tree]:
        """Apply the layer to its branch and pass the other on."""
        body, shortcut = (x, x) if self.opens else x
        y, batch_stats = self.layer.apply(params, stats, shortcut if self.on_shortcut else body, ctx)
        return ((body, y) if self.on_shortcut else (y, shortcut)), batch_stats

    def cost(self, hwc: Any) -> Cost:
        """Return the cost of the layer per image."""
        return self.layer.cost(self._branch_shape(hwc))

    def _branch_shape(self, hwc: Any) -> Shape:
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
        """Return no cost: XLA fuses the addition with its neighbours."""
        return Cost()


def split_layers(name: str, layer: Any) -> tuple[tuple[str, Layer], ...]:
    """Return the innermost layers of a named layer with their full names; a simple layer is returned as it is."""
    sublayers = getattr(layer, "sublayers", None)
    if sublayers is None:
        return ((name, layer),)
    return tuple(found for part, inner in sublayers() for found in split_layers(f"{name}/{part}", inner))


Named = tuple[str, Layer]


@dataclass(frozen=True)
class Chain:
    """Named layers, each applied to the output of the previous one."""

    layers: tuple[Named, ...] = ()

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape of one image's output."""
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
    """body(x) + shortcut(x). Both chains share one namespace; an empty shortcut is the identity."""

    body: Chain
    shortcut: Chain = Chain()

    def __post_init__(self) -> None:
        """Check that no layer name occurs twice."""
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
    """Named layers applied to the same input, with their output channels concatenated."""

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
    """Every `stride`-th pixel, padded with zero channels up to `channels`: a shortcut without parameters.

    The zeros follow the channels, or half of them precede and half follow.
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
        """Return no cost: XLA fuses it with the addition."""
        return Cost()
