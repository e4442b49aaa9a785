"""Custom blocks: a pair of functions, traced once for shape and cost, used as a layer like any other."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.tree import PyTree, flatten_named
from headrace.model.context import Ctx, Draws
from headrace.model.cost import Cost, count_jaxpr
from headrace.model.initial import RngAt, Weight
from headrace.model.layers import DeclaredLayer, Shape, Tree
from headrace.model.sample_keys import sample_key, start_key

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

_BATCH = 3  # images in a trace: few, and rarely the number of channels, which would make dims ambiguous


@dataclass(frozen=True, kw_only=True)
class Functions:
    """What every custom block is reduced to, for one input shape.

    `begin(key) -> (params, stats)`; `call(params, stats, x, train, key or None) -> (y, stats of this batch)`.
    `momentums` are those of its batch norms, where known. `is_ready`: the weights exist already and `begin` only
    returns them.
    """

    begin: Callable[[Any], tuple[PyTree, PyTree]]
    call: Callable[[Any, Any, Any, bool, Any], tuple[PyTree, PyTree]]
    momentums: frozenset[float] = frozenset()
    is_ready: bool = False


@dataclass(frozen=True)
class Pack:
    """How a tree of any structure is stored as a dict: empty, the dict itself, or the tree under `value`."""

    like: PyTree

    def pack(self, tree: PyTree) -> Tree:
        if not jax.tree.leaves(tree):
            return {}
        return tree if isinstance(tree, dict) else {"value": tree}

    def unpack(self, packed: Tree) -> PyTree:
        """Return the tree in its original structure."""
        if not jax.tree.leaves(self.like):
            return self.like
        return packed if isinstance(self.like, dict) else packed["value"]


@dataclass(frozen=True, kw_only=True, eq=False)
class CustomBlock(DeclaredLayer):
    """Two functions as a layer, for one input shape. The output of the last block (`logits`) keeps its dtype."""

    functions: Functions
    input_shape: Shape
    output_shape: Shape
    traced_cost: Cost
    packs: tuple[Pack, Pack]  # of params, of stats
    start: Callable[[Any], tuple[PyTree, PyTree]]  # a number -> (params, stats)
    logits: bool

    @property
    def has_stats(self) -> bool:
        """Return whether the block keeps running statistics."""
        return bool(jax.tree.leaves(self.packs[1].like))

    def shape(self, hwc: Shape) -> Shape:
        """Return the shape of one image's output; only the input shape it was traced for is accepted."""
        if hwc != self.input_shape:
            raise ConfigError(
                f"It was built for inputs of shape {self.input_shape}, but receives {hwc}.",
                rule="A custom block is built for one image size.",
            )
        return self.output_shape

    def init(self, rng_at: RngAt, hwc: Shape) -> tuple[Tree, Tree]:
        """Run the user's init with a key that depends only on the seed and the block's name."""
        made = self.start(rng_at("init").integers(2**32, dtype=np.uint32))
        host = jax.tree.map(lambda a: np.asarray(a, np.float32), made)
        return self.packs[0].pack(host[0]), self.packs[1].pack(host[1])

    def apply(self, params: Tree, stats: Tree, x: Array, ctx: Ctx) -> tuple[Array, Tree]:
        """Apply the user's function to weights and images in the compute dtype."""
        weights = self.packs[0].unpack(params), self.packs[1].unpack(stats)
        if self.has_stats and params and ctx.is_frozen(*flatten_named(params)):
            ctx = replace(ctx, train=False)  # a block whose weights are all frozen works as in evaluation
        y, batch_stats = _call(self.functions, weights, x, ctx)
        y = y if self.logits else y.astype(ctx.compute_dtype)
        if not ctx.train:
            return y, stats
        # float32, whatever the block computes in, because they are summed over micro batches
        return y, self.packs[1].pack(jax.tree.map(lambda s: s.astype(jnp.float32), batch_stats))

    def cost(self, hwc: Shape) -> Cost:
        """Return the cost per image, counted when the block was traced."""
        return self.traced_cost

    def weights(self, hwc: Shape) -> tuple[Tree, Tree]:
        """Return the shapes of params and stats without touching a device; `init` makes them together."""
        params, stats = (pack.pack(jax.tree.map(lambda leaf: Weight(leaf.shape), pack.like)) for pack in self.packs)
        return params, stats


def make_custom_block(name: str, make: Callable[[Shape], Functions], shape: Shape, *, logits: bool) -> CustomBlock:
    """Trace a block's functions for one input shape; anything that does not work raises ConfigError."""
    size = "x".join(map(str, shape))
    try:
        functions = make(shape)
        params, stats = jax.eval_shape(lambda n: functions.begin(start_key(n)), np.uint32(0))
        _check_leaves(name, "params", params)
        _check_leaves(name, "stats", stats)
        traced, y, batch_stats = _trace(functions, params, stats, shape)
        _, evaluated, _ = _trace(functions, params, stats, shape, train=False)
    except HeadraceError:
        raise
    except Exception as error:  # whatever a user's function may raise
        problem = f"Block {name} does not accept inputs of {size}: {_first_line(error)}"
        raise ConfigError(problem, rule="Every block must accept the output of the previous one.") from error
    _check_output(name, y, evaluated)
    _check_stats(name, stats, batch_stats)
    counted = count_jaxpr(traced, _BATCH)
    return CustomBlock(
        functions=functions,
        input_shape=shape,
        output_shape=tuple(y.shape[1:]),
        traced_cost=Cost(
            params=sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params)),
            flops=counted.flops // _BATCH,
            activation_elements=(counted.products + counted.activations) // _BATCH,
            product_elements=counted.products // _BATCH,
        ),
        packs=(Pack(params), Pack(stats)),
        start=functions.begin if functions.is_ready else jax.jit(lambda n: functions.begin(start_key(n))),
        logits=logits,
    )


def _call(functions: Functions, weights: tuple[PyTree, PyTree], x: Array, ctx: Ctx) -> tuple[PyTree, PyTree]:
    params = jax.tree.map(lambda w: w.astype(ctx.compute_dtype), weights[0])
    rng = sample_key(ctx) if ctx.train and ctx.draws is not None else None
    return functions.call(params, weights[1], x.astype(ctx.compute_dtype), ctx.train, rng)


def _trace(
    functions: Functions, params: PyTree, stats: PyTree, shape: Shape, train: bool = True
) -> "tuple[ClosedJaxpr, Any, PyTree]":
    """Return (jaxpr, shape of the output, shapes of the statistics)."""

    def apply(params: PyTree, stats: PyTree, x: Array, samples: Array) -> tuple[PyTree, PyTree]:
        draws = Draws(0, 0, samples) if train else None
        return _call(functions, (params, stats), x, Ctx(train=train, draws=draws))

    x = jax.ShapeDtypeStruct((_BATCH, *shape), jnp.float32)
    samples = jax.ShapeDtypeStruct((_BATCH,), jnp.int32)
    jaxpr, (y, batch_stats) = jax.make_jaxpr(apply, return_shape=True)(params, stats, x, samples)
    return jaxpr, y, batch_stats


def _check_leaves(name: str, what: str, tree: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigError(
                f"Block {name}: {what}{jax.tree_util.keystr(path)} is {leaf.dtype}.",
                rule=f"All {what} must be floating-point: they are learnt, or averaged over micro batches.",
                remedy="Keep constants inside the function instead of returning them from init.",
            )


def _check_output(name: str, y: Any, evaluated: Any) -> None:
    if not hasattr(y, "shape") or not jnp.issubdtype(y.dtype, jnp.floating) or y.shape[:1] != (_BATCH,):
        found = f"{y.dtype}{list(y.shape)}" if hasattr(y, "shape") else type(y).__name__
        raise ConfigError(
            f"Block {name} returns {found} for {_BATCH} images.",
            rule="A block returns one floating-point array whose first dim is the number of images.",
        )
    if tuple(evaluated.shape) != tuple(y.shape):
        raise ConfigError(
            f"Block {name} returns {list(y.shape[1:])} in training and {list(evaluated.shape[1:])} in evaluation.",
            rule="Both shapes must be equal.",
        )


def _check_stats(name: str, stats: PyTree, batch_stats: PyTree) -> None:
    before, after = (
        {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_flatten_with_path(t)[0]}
        for t in (stats, batch_stats)
    )
    if before != after:
        raise ConfigError(
            f"Block {name} returns statistics {after or 'none'}, but started with {before or 'none'}.",
            rule="In training a block returns the statistics of this batch in place of the running ones.",
        )


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    return line if len(line) < 300 else line[:297] + "..."


MakeFunctions = Callable[[Shape], Functions]  # from the shape of one input image


INSTALL = "Install it: pip install 'headrace[{}]'."


def other_state(names: list[str]) -> ConfigError:
    return ConfigError(
        f"A module keeps variables that are neither weights nor batch statistics: {', '.join(names) or 'unnamed'}.",
        rule="The state of a block consists of its params and the running statistics of its batch norms.",
        remedy="Keep such values out of the network, or make them parameters.",
    )


def call_arguments(call: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(call).parameters)
