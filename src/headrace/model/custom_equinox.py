"""Equinox modules as blocks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.tree import PyTree, flatten_named, unflatten_named
from headrace.model.custom_block import INSTALL, Functions, MakeFunctions, call_arguments, other_state
from headrace.model.sample_keys import start_key


def equinox_functions(made: Any) -> MakeFunctions:
    """Return the functions of an Equinox module, with its existing weights, or of `made(key=...)`, with new ones.

    An Equinox module computes one image, so it is mapped over the batch. `key` of its __call__ is the image's own.
    """
    eqx = _equinox()
    is_module = isinstance(made, eqx.Module)
    module = made if is_module else eqx.filter_eval_shape(lambda: made(key=start_key(0)))
    if not isinstance(module, eqx.Module):
        raise ConfigError("The function of key does not return an Equinox module.")
    is_state = lambda node: isinstance(node, eqx.nn.StateIndex)  # noqa: E731
    if any(map(is_state, jax.tree.leaves(module, is_leaf=is_state))):
        raise ConfigError(
            f"{type(module).__name__} holds a layer with state, such as eqx.nn.BatchNorm.",
            rule="Headrace must know how statistics are updated, to average them over micro batches and replicas.",
            remedy="Use eqx.nn.GroupNorm, or write the block as (name, init, apply) with stats.",
        )
    like, rest = eqx.partition(module, _is_weight)
    if others := [name for name, leaf in flatten_named(rest).items() if _is_array(leaf)]:
        raise other_state(others)
    takes_key = "key" in call_arguments(type(module).__call__)

    def begin(key: jax.Array) -> tuple[PyTree, PyTree]:
        fresh = module if is_module else made(key=key)
        return flatten_named(eqx.filter(fresh, _is_weight)), {}

    def call(params: PyTree, stats: PyTree, x: PyTree, train: bool, rng: jax.Array) -> tuple[PyTree, PyTree]:
        local: Any = eqx.nn.inference_mode(eqx.combine(unflatten_named(like, params), rest), value=not train)
        if not takes_key:
            return jax.vmap(local)(x), stats
        if rng is None:
            return jax.vmap(lambda image: local(image, key=None))(x), stats
        keys = jax.vmap(start_key)(jax.random.bits(rng, (len(x),), jnp.uint32))  # drawn by sample; a split would not be
        return jax.vmap(lambda image, key: local(image, key=key))(x, keys), stats

    return lambda shape: Functions(begin=begin, call=call, is_ready=is_module)


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _is_weight(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _equinox() -> Any:
    """Import Equinox, or explain how to install it."""
    try:
        import equinox
    except ImportError as error:
        raise ConfigError(
            "A block is a function of key, so an Equinox module, but Equinox is not installed.",
            remedy=INSTALL.format("equinox"),
        ) from error
    return equinox
