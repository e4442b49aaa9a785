"""Flax modules as blocks: Linen modules, and NNX modules (made already, or by a function of `rngs`).

Flax is needed only here, and imported only when a block is a Flax module.
- `batch_stats` become the block's running statistics. A Flax BatchNorm moves its own at every application; Headrace
  moves them once per step, for all micro batches and replicas, and so needs the batch's: they are taken out again.
- Dropout and everything else that asks for a key gets one that is addressed by sample.
- Whether it trains, a module hears by the argument of its __call__ for that (FLAGS), or by NNX's train() and eval().
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.rng import name_id
from headrace.model.layers import Shape
from headrace.model.own_block import Functions
from headrace.model.sample_key import start_key

# arguments of a module's __call__ that say whether it trains -> their value while it does
FLAGS = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}
_INSTALL = "Install it: pip install 'headrace[flax]'."
Momentums = Mapping[tuple[Any, ...], float]  # of each batch norm, by its path in the block


def flax_functions(module: Any) -> Callable[[Shape], Functions]:
    """Return the functions of a Linen or NNX module."""
    linen, nnx = _flax()
    if isinstance(module, linen.Module):
        return _linen_functions(module)
    if isinstance(module, nnx.Module):
        return nnx_functions(module)
    raise ConfigError(
        f"{type(module).__name__} is of Flax, but no module.",
        rule="A block is a flax.linen.Module or a flax.nnx.Module.",
    )


def nnx_functions(made: Any) -> Callable[[Shape], Functions]:
    """Return the functions of an NNX module, which keeps its weights; or of `made(rngs)`, with fresh ones."""
    _, nnx = _flax()
    is_module = isinstance(made, nnx.Module)
    module = made if is_module else nnx.eval_shape(lambda: made(rngs=nnx.Rngs(start_key(0))))
    if not isinstance(module, nnx.Module):
        raise ConfigError("The function of rngs does not make an NNX module.")
    kinds = (nnx.Param, nnx.BatchStat, nnx.RngState)
    graph, *likes, rest = nnx.split(module, *kinds, ...)
    if jax.tree.leaves(rest):
        raise _other_state(sorted({type(leaf).__name__ for _, leaf in nnx.iter_graph(rest)} & _variable_names(nnx)))
    momentums = _nnx_momentums(module)
    _check_owners(nnx.to_pure_dict(likes[1]), momentums)
    forms = [jax.tree.structure(like) for like in likes]
    rng_shapes = [(path, leaf.shape, leaf.dtype) for path, leaf in jax.tree_util.tree_flatten_with_path(likes[2])[0]]
    asked = _parameters(type(module).__call__)

    def begin(key: Any) -> tuple[Any, Any]:
        fresh = module if is_module else made(rngs=nnx.Rngs(key))
        _, params, stats, _ = nnx.split(fresh, nnx.Param, nnx.BatchStat, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(stats)

    def call(params: Any, stats: Any, x: Any, train: bool, rng: Any) -> tuple[Any, Any]:
        assert not (train and rng_shapes and rng is None), "training draws random numbers: Ctx(draws=...)"
        base = start_key(0) if rng is None else rng
        keys = [_rng_leaf(base, *leaf) for leaf in rng_shapes]
        # as JAX arrays: a module would write its new statistics into NumPy's in place
        leaves = (*(list(map(jnp.asarray, jax.tree.leaves(tree))) for tree in (params, stats)), keys)
        here = nnx.merge(graph, *(jax.tree.unflatten(form, leaf) for form, leaf in zip(forms, leaves, strict=True)))
        here.train() if train else here.eval()
        words = _flags(asked, train)
        if "rngs" in asked and train and rng is not None:
            words["rngs"] = nnx.Rngs(jax.random.fold_in(rng, name_id("rngs")))
        y = here(x, **words)
        return y, _of_batch(nnx.to_pure_dict(nnx.state(here, nnx.BatchStat)), stats, momentums)

    values = frozenset(momentums.values())
    return lambda shape: Functions(begin=begin, call=call, momentums=values, is_ready=is_module)


def _linen_functions(module: Any) -> Callable[[Shape], Functions]:
    linen, _ = _flax()
    asked = _parameters(type(module).__call__)

    def make(shape: Shape) -> Functions:
        momentums: dict[tuple[Any, ...], float] = {}

        def look(next_call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            if isinstance(context.module, linen.BatchNorm) and context.method_name == "__call__":
                momentums[tuple(context.module.path)] = float(context.module.momentum)
            return next_call(*args, **kwargs)

        def variables(key: Any) -> dict[str, Any]:
            return dict(module.init({"params": key}, jnp.zeros((1, *shape)), **_flags(asked, False)))

        with linen.intercept_methods(look):
            like = jax.eval_shape(lambda number: variables(start_key(number)), np.uint32(0))
        if others := [name for name in like if name not in ("params", "batch_stats")]:
            raise _other_state(others)
        _check_owners(like.get("batch_stats", {}), momentums)

        def begin(key: Any) -> tuple[Any, Any]:
            made = variables(key)
            return made.get("params", {}), made.get("batch_stats", {})

        def call(params: Any, stats: Any, x: Any, train: bool, rng: Any) -> tuple[Any, Any]:
            rngs = None if rng is None else {"dropout": rng, "params": jax.random.fold_in(rng, name_id("params"))}
            given = {"params": params} | ({"batch_stats": stats} if stats else {})
            y, changed = module.apply(given, x, **_flags(asked, train), rngs=rngs, mutable=["batch_stats"])
            return y, _of_batch(changed.get("batch_stats", {}), stats, momentums)

        return Functions(begin=begin, call=call, momentums=frozenset(momentums.values()))

    return make


def _flax() -> tuple[Any, Any]:
    """Import Flax; where it is missing, say what to install."""
    try:
        from flax import linen, nnx
    except ImportError as error:
        raise ConfigError("A block is a Flax module, but Flax is not installed.", remedy=_INSTALL) from error
    return linen, nnx


def _of_batch(moved: Any, running: Any, momentums: Momentums) -> Any:
    """Return the batch's statistics from what batch norms moved theirs to: moved = m * running + (1 - m) * batch."""

    def take_out(path: Any, new: Any, old: Any) -> Any:
        m = momentums[_keys(path)[:-1]]
        return old if m == 1 else (new.astype(jnp.float32) - m * old) / (1 - m)

    return jax.tree_util.tree_map_with_path(take_out, moved, running)


def _check_owners(stats: Any, momentums: Momentums) -> None:
    """Refuse statistics that no Flax BatchNorm keeps: how they move is not known."""
    for path, _ in jax.tree_util.tree_flatten_with_path(stats)[0]:
        if _keys(path)[:-1] not in momentums:
            raise ConfigError(
                f"batch_stats {'/'.join(map(str, _keys(path)))} is not of a Flax BatchNorm.",
                rule="Headrace must know how statistics move, to average them over micro batches and replicas.",
                remedy="Use Flax's BatchNorm, or write the block as (name, init, apply) with stats.",
            )


def _nnx_momentums(module: Any) -> dict[tuple[Any, ...], float]:
    from flax import nnx

    return {path: float(node.momentum) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.BatchNorm)}


def _variable_names(nnx: Any) -> set[str]:
    return {
        name
        for name in dir(nnx)
        if isinstance(getattr(nnx, name), type) and issubclass(getattr(nnx, name), nnx.Variable)
    }


def _other_state(names: list[str]) -> ConfigError:
    return ConfigError(
        f"A module keeps variables that are neither weights nor batch statistics: {', '.join(names) or 'its own'}.",
        rule="A block's state are its params and the running statistics of its batch norms.",
        remedy="Keep such values out of the network, or make them parameters.",
    )


def _rng_leaf(base: Any, path: Any, shape: Shape, dtype: Any) -> Any:
    """Return the value of one leaf of NNX's random state: a key of its own, or a count that starts at 0."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape, dtype)
    own = jax.random.fold_in(base, name_id(jax.tree_util.keystr(path)))
    return jax.random.split(own, shape) if shape else own


def _parameters(call: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(call).parameters)


def _flags(asked: tuple[str, ...], train: bool) -> dict[str, Any]:
    return {name: value if train else not value for name, value in FLAGS.items() if name in asked}


def _keys(path: Any) -> tuple[Any, ...]:
    """Return a key path of dicts as plain keys."""
    return tuple(key.key for key in path)
