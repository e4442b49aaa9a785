"""Layers made of layers: in sequence, around a shortcut, or side by side; and how to split them for a pipeline."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from headrace import ops
from headrace.core.tree import PyTree
from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.model.initial import RngAt, under
from headrace.model.layers import (
    Conv,
    DeclaredLayer,
    FusibleNorm,
    Layer,
    MaxPool,
    Shape,
    Tail,
    Tree,
    WithoutParameters,
    weights_of,
)
from headrace.ops.pool import pad_pixels


@dataclass(frozen=True, kw_only=True)
class OnBranch(DeclaredLayer):
    """A layer on the body or the shortcut of a split residual unit; the first one `opens` the unit."""

    layer: Layer
    on_shortcut: bool = False
    opens: bool = False

    def shape(self, hwc: Any) -> Any:
        body, shortcut = (hwc, hwc) if self.opens else hwc
        return (body, self.layer.shape(shortcut)) if self.on_shortcut else (self.layer.shape(body), shortcut)

    def weights(self, hwc: object) -> tuple[Tree, Tree]:
        return weights_of(self.layer, self._branch_shape(hwc))

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


def by_name(parts: Iterable[tuple[str, tuple[Tree, Tree]]]) -> tuple[Tree, Tree]:
    """Return (params, stats) of layers as trees by their names, without those that have none."""
    params, stats = {}, {}
    for name, (layer_params, layer_stats) in parts:
        params |= {name: layer_params} if layer_params else {}
        stats |= {name: layer_stats} if layer_stats else {}
    return params, stats


@dataclass(frozen=True)
class Chain(DeclaredLayer):
    """Named layers, each applied to the output of the previous one."""

    layers: tuple[Named, ...] = ()

    def shape(self, hwc: Shape) -> Shape:
        for _, layer in self.layers:
            hwc = layer.shape(hwc)
        return hwc

    def weights(self, hwc: Shape) -> tuple[Tree, Tree]:
        return by_name((name, weights_of(layer, shape)) for (name, layer), shape in self._with_shapes(hwc))

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Initialise every layer with random numbers that depend on its name."""
        layers = self._with_shapes(hwc)
        return by_name((name, layer.init(under(rng_at, name), shape)) for (name, layer), shape in layers)

    def _with_shapes(self, hwc: Shape) -> Iterator[tuple[Named, Shape]]:
        """Yield each layer with the shape that it takes."""
        for name, layer in self.layers:
            yield (name, layer), hwc
            hwc = layer.shape(hwc)

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
class Residual(DeclaredLayer):
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

    def weights(self, hwc: Shape) -> tuple[Tree, Tree]:
        body, shortcut = self.body.weights(hwc), self.shortcut.weights(hwc)
        return body[0] | shortcut[0], body[1] | shortcut[1]

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
class Concat(DeclaredLayer):
    """Named layers applied to the same input, with their output channels concatenated."""

    layers: tuple[Named, ...]

    def shape(self, hwc: Shape) -> Shape:
        shapes = [layer.shape(hwc) for _, layer in self.layers]
        assert len({shape[:-1] for shape in shapes}) == 1, shapes
        return *shapes[0][:-1], sum(shape[-1] for shape in shapes)

    def weights(self, hwc: Shape) -> tuple[Tree, Tree]:
        return by_name((name, weights_of(layer, hwc)) for name, layer in self.layers)

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        return by_name((name, layer.init(under(rng_at, name), hwc)) for name, layer in self.layers)

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
