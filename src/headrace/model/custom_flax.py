"""Flax modules as blocks."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from headrace.core.errors import ConfigError
from headrace.core.rng import name_id
from headrace.core.tree import PyTree
from headrace.model.custom_block import INSTALL, Functions, MakeFunctions, call_arguments, other_state
from headrace.model.layers import Shape
from headrace.model.sample_keys import start_key

# arguments of a module's __call__ that select training -> their value in training
FLAGS = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}
Momentums = Mapping[tuple[Any, ...], float]  # by path of the batch norm in the block


def flax_functions(module: object) -> MakeFunctions:
    """Return the functions of a Linen or NNX module."""
    linen, nnx = _flax()
    if isinstance(module, linen.Module):
        return _linen_functions(module)
    if isinstance(module, nnx.Module):
        return nnx_functions(module)
    raise ConfigError(
        f"{type(module).__name__} comes from Flax but is not a module.",
        rule="A block is a flax.linen.Module or a flax.nnx.Module.",
    )


def nnx_functions(made: Any) -> MakeFunctions:
    """Return the functions of an NNX module, with its existing weights, or of `made(rngs)`, with new ones."""
    _, nnx = _flax()
    is_module = isinstance(made, nnx.Module)
    module = made if is_module else nnx.eval_shape(lambda: made(rngs=nnx.Rngs(start_key(0))))
    if not isinstance(module, nnx.Module):
        raise ConfigError("The function of rngs does not return an NNX module.")
    kinds = (nnx.Param, nnx.BatchStat, nnx.RngState)
    graph, *likes, rest = nnx.split(module, *kinds, ...)
    if jax.tree.leaves(rest):
        raise other_state(sorted({type(leaf).__name__ for _, leaf in nnx.iter_graph(rest)} & _variable_names(nnx)))
    batch_norms = ((path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.BatchNorm))
    momentums = {path: float(node.momentum) for path, node in batch_norms}
    _check_stats_owner(nnx.to_pure_dict(likes[1]), momentums)
    forms = [jax.tree.structure(like) for like in likes]
    rng_shapes = [(path, leaf.shape, leaf.dtype) for path, leaf in jax.tree_util.tree_flatten_with_path(likes[2])[0]]
    asked = call_arguments(type(module).__call__)

    def begin(key: jax.Array) -> tuple[PyTree, PyTree]:
        fresh = module if is_module else made(rngs=nnx.Rngs(key))
        _, params, stats, _ = nnx.split(fresh, nnx.Param, nnx.BatchStat, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(stats)

    def call(params: PyTree, stats: PyTree, x: PyTree, train: bool, rng: jax.Array) -> tuple[PyTree, PyTree]:
        assert not (train and rng_shapes and rng is None), "training draws random numbers: Ctx(draws=...)"
        base = start_key(0) if rng is None else rng
        keys = [_rng_leaf(base, *leaf) for leaf in rng_shapes]
        # JAX arrays: given NumPy arrays, a module would overwrite the statistics in place
        leaves = (*(list(map(jnp.asarray, jax.tree.leaves(tree))) for tree in (params, stats)), keys)
        local = nnx.merge(graph, *(jax.tree.unflatten(form, leaf) for form, leaf in zip(forms, leaves, strict=True)))
        local.train() if train else local.eval()
        kwargs = _flags(asked, train)
        if "rngs" in asked and train and rng is not None:
            kwargs["rngs"] = nnx.Rngs(jax.random.fold_in(rng, name_id("rngs")))
        y = local(x, **kwargs)
        return y, _of_batch(nnx.to_pure_dict(nnx.state(local, nnx.BatchStat)), stats, momentums)

    values = frozenset(momentums.values())
    return lambda shape: Functions(begin=begin, call=call, momentums=values, is_ready=is_module)


def _linen_functions(module: Any) -> MakeFunctions:
    linen, _ = _flax()
    asked = call_arguments(type(module).__call__)

    def make(shape: Shape) -> Functions:
        momentums: dict[tuple[Any, ...], float] = {}

        def note_momentum(next_call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            if isinstance(context.module, linen.BatchNorm) and context.method_name == "__call__":
                momentums[tuple(context.module.path)] = float(context.module.momentum)
            return next_call(*args, **kwargs)

        def variables(key: jax.Array) -> dict[str, Any]:
            return dict(module.init({"params": key}, jnp.zeros((1, *shape)), **_flags(asked, False)))

        with linen.intercept_methods(note_momentum):
            like = jax.eval_shape(lambda number: variables(start_key(number)), np.uint32(0))
        if others := [name for name in like if name not in ("params", "batch_stats")]:
            raise other_state(others)
        _check_stats_owner(like.get("batch_stats", {}), momentums)

        def begin(key: jax.Array) -> tuple[PyTree, PyTree]:
            made = variables(key)
            return made.get("params", {}), made.get("batch_stats", {})

        def call(params: PyTree, stats: PyTree, x: PyTree, train: bool, rng: jax.Array) -> tuple[PyTree, PyTree]:
            rngs = None if rng is None else {"dropout": rng, "params": jax.random.fold_in(rng, name_id("params"))}
            given = {"params": params} | ({"batch_stats": stats} if stats else {})
            y, changed = module.apply(given, x, **_flags(asked, train), rngs=rngs, mutable=["batch_stats"])
            return y, _of_batch(changed.get("batch_stats", {}), stats, momentums)

        return Functions(begin=begin, call=call, momentums=frozenset(momentums.values()))

    return make


def _flax() -> tuple[Any, Any]:
    """Import Flax, or explain how to install it."""
    try:
        from flax import linen, nnx
    except ImportError as error:
        raise ConfigError(
            "A block is a Flax module, but Flax is not installed.", remedy=INSTALL.format("flax")
        ) from error
    return linen, nnx


def _of_batch(moved: PyTree, running: PyTree, momentums: Momentums) -> PyTree:
    """Recover the statistics of the batch from updated ones: moved = m * running + (1 - m) * batch."""

    def recover(path: KeyPath, new: jax.Array, old: jax.Array) -> jax.Array:
        m = momentums[_keys(path)[:-1]]
        return old if m == 1 else (new.astype(jnp.float32) - m * old) / (1 - m)

    return jax.tree_util.tree_map_with_path(recover, moved, running)


def _check_stats_owner(stats: PyTree, momentums: Momentums) -> None:
    """Raise ConfigError for statistics that do not belong to a Flax BatchNorm: their update rule is unknown."""
    for path, _ in jax.tree_util.tree_flatten_with_path(stats)[0]:
        if _keys(path)[:-1] not in momentums:
            raise ConfigError(
                f"batch_stats {'/'.join(map(str, _keys(path)))} does not belong to a Flax BatchNorm.",
                rule="Headrace must know how statistics are updated, to average them over micro batches and replicas.",
                remedy="Use Flax's BatchNorm, or write the block as (name, init, apply) with stats.",
            )


def _variable_names(nnx: Any) -> set[str]:
    return {
        name
        for name in dir(nnx)
        if isinstance(getattr(nnx, name), type) and issubclass(getattr(nnx, name), nnx.Variable)
    }


def _rng_leaf(base: jax.Array, path: KeyPath, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Return the value of one leaf of NNX's random state: a distinct key, or a count that starts at 0."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape, dtype)
    key = jax.random.fold_in(base, name_id(jax.tree_util.keystr(path)))
    return jax.random.split(key, shape) if shape else key


def _flags(asked: tuple[str, ...], train: bool) -> dict[str, Any]:
    return {name: value if train else not value for name, value in FLAGS.items() if name in asked}


def _keys(path: Iterable[Any]) -> tuple[Any, ...]:
    """Return the plain keys of a path through dicts."""
    return tuple(key.key for key in path)
