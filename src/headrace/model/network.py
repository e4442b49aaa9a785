"""A network is a tuple of named blocks. Names are split points, checkpoint keys and targets of regular expressions."""

import math
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from headrace import ops
from headrace.core.errors import ConfigError
from headrace.core.process import num_processors
from headrace.core.rng import generator
from headrace.core.tree import PyTree, map_named
from headrace.model.composite import Chain, Named, Residual, by_name, split_layers
from headrace.model.context import Ctx
from headrace.model.cost import Cost
from headrace.model.initial import under
from headrace.model.layers import MaxPool, Relu, Shape, Tail, Tree, weights_of


@dataclass(frozen=True, kw_only=True)
class Network:
    """Named blocks for images of one shape; the output is logits.

    `aliases` are (other name, name) of split points: see `split_points`.
    """

    name: str
    blocks: tuple[Named, ...]
    input_hwc: tuple[int, int, int]
    num_classes: int
    aliases: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Check that every block fits the shape that reaches it."""
        assert len(set(self.block_names)) == len(self.blocks), self.block_names
        shapes = self.shapes()
        assert shapes[-1] == (self.num_classes,), shapes

    @property
    def block_names(self) -> tuple[str, ...]:
        """The names of the blocks, in order."""
        return tuple(name for name, _ in self.blocks)

    def head(self, weights: Iterable[str]) -> str:
        """Return the full name of the last layer that has any of these weights: the one that scores the classes."""
        names = tuple(weights)
        layers = [layer for name, block in self.blocks for layer, _ in split_layers(name, block)]
        return next(layer for layer in reversed(layers) if any(name.startswith(f"{layer}/") for name in names))

    def split_points(self) -> dict[str, tuple[int, int]]:
        """Return {name: (block, layer in it)} of all places for a cut: before a block, or before a layer inside one.

        A layer is named `block/layer`, or `block_layer` as in Keras; aliases are included.
        """
        found: dict[str, tuple[int, int]] = {}
        for i, (name, block) in enumerate(self.blocks):
            found[name] = i, 0
            for k, (layer, _) in enumerate(split_layers(name, block)):
                # A block's own name wins over that of a layer inside another block.
                found.setdefault(layer, (i, k))
                found.setdefault(layer.replace("/", "_"), (i, k))
                found.setdefault(layer.split("/")[0], (i, k))  # a block that `refined` has split
        for alias, name in self.aliases:
            if name in found:
                found.setdefault(alias, found[name])
        return found

    def refined(self, names: Iterable[str]) -> "Network":
        """Return the network with every block split that has one of the named split points inside.

        It computes the same, and its parameters have the same full names. Unknown names are ignored here.
        """
        points = self.split_points()
        inside = {i for i, layer in (points[name] for name in names if name in points) if layer > 0}
        blocks = (
            split_layers(name, block) if i in inside else ((name, block),)
            for i, (name, block) in enumerate(self.blocks)
        )
        return replace(self, blocks=tuple(chain.from_iterable(blocks))) if inside else self

    def shapes(self) -> tuple[Shape, ...]:
        """Return the shape of one image before each block and after the last; inside a residual unit, two shapes."""
        shapes: list[Shape] = [self.input_hwc]
        for name, block in self.blocks:
            try:
                shapes.append(block.shape(shapes[-1]))
            except ConfigError as error:
                image = "x".join(map(str, self.input_hwc))
                problem = f"{self.name} with {image} images fails at block {name}: {error.problem}"
                raise error.reworded(problem) from error
        return tuple(shapes)

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Return (params, stats), float32 on the host. A tensor depends only on the seed and its name."""
        blocks = [(*named, shape) for named, shape in zip(self.blocks, self.shapes(), strict=False)]
        # In threads: the 25 million numbers of a ResNet-50 take one of them a second, at the start of every run.
        with ThreadPoolExecutor(num_processors(), thread_name_prefix="init") as threads:
            drawn = threads.map(lambda each: each[1].init(under(partial(generator, seed), each[0]), each[2]), blocks)
            return by_name((name, trees) for (name, _, _), trees in zip(blocks, drawn, strict=True))

    def apply(
        self, params: Mapping[str, object], stats: Mapping[str, object], x: Array, ctx: Ctx
    ) -> tuple[Array, Tree]:
        """Return (logits in float32, batch statistics)."""
        return self.apply_range(0, len(self.blocks), params, stats, x, ctx)

    def apply_range(
        self, i: int, j: int, params: Mapping[str, Any], stats: Mapping[str, Any], x: PyTree, ctx: Ctx
    ) -> tuple[Any, Tree]:
        """Apply the blocks i..j-1; `params` and `stats` need contain only theirs."""
        with ops.multiplying(ctx.matmul_precision):
            return self._apply_range(i, j, params, stats, x, ctx)

    def _apply_range(
        self, i: int, j: int, params: Mapping[str, Any], stats: Mapping[str, Any], x: PyTree, ctx: Ctx
    ) -> tuple[Any, Tree]:
        x, batch_stats = jax.tree.map(lambda part: part.astype(ctx.compute_dtype), x), {}
        if ctx.train and ctx.frozen is not None:
            # Saves the gradients of frozen weights, and all gradients of blocks before the first trained weight.
            frozen = ctx.frozen
            params = map_named(lambda name, w: lax.stop_gradient(w) if frozen(name) else w, dict(params))
        blocks, fused = self.blocks[i:j], False
        for (name, block), following in zip(blocks, [*(block for _, block in blocks[1:]), None], strict=True):
            if fused:  # the relu or pool that the block before it has applied
                fused = False
                continue
            arguments = params.get(name, {}), stats.get(name, {}), x, ctx.under(name)
            with jax.named_scope(name):  # profiles attribute kernels to blocks by this name
                # The CPU kernels apply the activation while they add, GPUs pool before a norm; a probe wants to see the
                # output in between.
                if isinstance(block, Residual) and isinstance(following, Relu) and ctx.probe is None:
                    x, block_stats = block.apply(*arguments, activation="relu")
                    fused = True
                elif isinstance(block, Chain) and ctx.train and ctx.probe is None and (pool := _pool(following)):
                    x, block_stats = block.apply(*arguments, tail=Tail(pool=pool))
                    fused = True
                else:
                    x, block_stats = block.apply(*arguments)
            batch_stats |= {name: block_stats} if block_stats else {}
            if ctx.probe is not None:
                ctx.probe(name, x)
        return x.astype(jnp.float32) if j == len(self.blocks) else x, batch_stats

    def costs(self) -> dict[str, Cost]:
        """Return the cost per image of each block."""
        return {name: block.cost(shape) for (name, block), shape in zip(self.blocks, self.shapes(), strict=False)}

    def total_cost(self) -> Cost:
        """Return the cost per image of the whole network."""
        return sum(self.costs().values(), Cost())


def weights_like(network: Network, names: Container[str] | None = None) -> tuple[Tree, Tree]:
    """Return the shapes of the params and stats of a network, or of the blocks named; nothing is drawn."""
    blocks = zip(network.blocks, network.shapes(), strict=False)
    chosen = [(name, weights_of(block, hwc)) for (name, block), hwc in blocks if names is None or name in names]
    return jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, jnp.float32), by_name(chosen))


def _pool(block: Any) -> MaxPool | None:
    """Return the max pool that a block consists of, if it may be applied with the norm before it."""
    layers = block.layers if isinstance(block, Chain) and ops.fuses_norm_pools() else ()
    pools = [layer for _, layer in layers if isinstance(layer, MaxPool)]
    return pools[0] if len(layers) == len(pools) == 1 else None


def num_elements(shape: Any) -> int:
    """Return the number of elements per image; inside a residual unit there are two shapes."""
    if shape and isinstance(shape[0], tuple):
        return sum(num_elements(part) for part in shape)
    return math.prod(shape)
