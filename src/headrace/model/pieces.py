"""The pieces of a composite: layers that, one after the other, compute what it computes, so that a cut may lie inside.

Inside a residual unit two values are on their way, the body's and the shortcut's: a piece there takes and returns a
pair, and so do the shapes. A piece is named after its layer, so parameters have the same full names cut or whole.
"""

from dataclasses import dataclass
from typing import Any

from jax import Array

from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.model.initial import RngAt
from headrace.model.layers import Layer, Shape, Tree, WithoutParameters


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


def pieces_of(name: str, layer: Any) -> tuple[tuple[str, Layer], ...]:
    """Return the pieces of a named layer, named in full; a layer without pieces is its only one."""
    divide = getattr(layer, "pieces", None)
    if divide is None:
        return ((name, layer),)
    return tuple(piece for part, inner in divide() for piece in pieces_of(f"{name}/{part}", inner))
