"""How gradients of several micro batches become one: the type they are summed in, and the reduction."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from headrace.core.errors import ConfigError
from headrace.engine.devices import REPLICA
from headrace.program.structure import one_of, whole_number

# None: the weight's own type. A type: for all. A function of the weight: its type.
AccumulatorType = Any

# reduction -> (total so far, gradient, its number, how many there will be) -> total with it
REDUCTIONS: dict[str, Callable[[Any, Any, Any, int], Any]] = {
    "SUM": lambda total, gradient, number, count: total + gradient,
    "MEAN": lambda total, gradient, number, count: total + gradient / count,
    # Never larger than the largest gradient, and right at every moment; costs a multiplication more.
    "RUNNING_MEAN": lambda total, gradient, number, count: total * (number / (number + 1)) + gradient / (number + 1),
}


def check_reduction(reduction: Any) -> str:
    """Return the name of a reduction, in any case."""
    return one_of(reduction, "The reduction of gradients", list(REDUCTIONS))


def accumulator_dtype(dtype: AccumulatorType, weight: Any, name: str = "dtype") -> Any:
    """Return the type in which the gradients of a weight are summed."""
    asked: Any = dtype(weight) if callable(dtype) and not isinstance(dtype, type) else dtype
    if asked is None:
        return weight.dtype
    try:
        found = jnp.dtype(asked)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, np.inexact):
        raise ConfigError(
            f"{name} {'returned' if callable(dtype) and not isinstance(dtype, type) else 'is'} {asked!r}.",
            rule="It is None, a floating-point type, or a function of the weight that returns one.",
            remedy="Write jnp.float32, for example.",
        )
    return found


def empty_sums(weights: Any, dtype: AccumulatorType, name: str = "dtype") -> Any:
    """Return zeros to sum the gradients of these weights in."""
    return jax.tree.map(lambda w: jnp.zeros(w.shape, accumulator_dtype(dtype, w, name)), weights)


def accumulate(reduction: str, totals: Any, gradients: Any, number: Any, count: int) -> Any:
    """Return the totals with gradient `number` of `count` in; every total keeps its type."""
    rule = REDUCTIONS[reduction]

    def add(total: jax.Array, gradient: jax.Array) -> jax.Array:
        at = jnp.asarray(number, total.dtype)
        return rule(total, gradient.astype(total.dtype), at, count).astype(total.dtype)

    return jax.tree.map(add, totals, gradients)


# Optax transforms for own training loops: gradient accumulation, and the mean over replicas.


class AccumulationState(NamedTuple):
    """What accumulate_gradients keeps: how many gradients are in, their total, and the optimizer's own state."""

    number: jax.Array
    totals: Any
    inner: Any


def accumulate_gradients(
    optimizer: optax.GradientTransformation,
    num_mini_batches: int,
    *,
    dtype: AccumulatorType = None,
    reduction: str = "SUM",
) -> optax.GradientTransformationExtraArgs:
    """Let the optimizer act at every `num_mini_batches`-th call, on the gradients since; other calls change nothing.

    Gradients are summed in the type of their weight, or in `dtype` (a type, or a function of the weight), and reach the
    optimizer in it. `reduction` is SUM, MEAN or RUNNING_MEAN. Around cross_replica(...), replicas exchange only when
    the optimizer acts.
    """
    count = whole_number(num_mini_batches, "num_mini_batches", 1)
    reduction = check_reduction(reduction)
    inner = optax.with_extra_args_support(_checked(optimizer))
    if dtype is not None and (isinstance(dtype, type) or not callable(dtype)):
        accumulator_dtype(dtype, None)

    def init(params: Any) -> AccumulationState:
        return AccumulationState(jnp.int32(0), empty_sums(params, dtype), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        totals = accumulate(reduction, state.totals, updates, state.number, count)

        def act() -> tuple[Any, AccumulationState]:
            acted, inner_state = inner.update(totals, state.inner, params, **extra)
            return acted, AccumulationState(jnp.int32(0), jax.tree.map(jnp.zeros_like, totals), inner_state)

        def wait() -> tuple[Any, AccumulationState]:
            nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(act)[0])
            return nothing, AccumulationState(state.number + 1, totals, state.inner)

        return lax.cond(state.number + 1 == count, act, wait)

    return optax.GradientTransformationExtraArgs(init, update)


def cross_replica(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Give the optimizer the mean of the gradients over all replicas, so that their weights stay equal."""
    inner = optax.with_extra_args_support(_checked(optimizer))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        try:
            mean = lax.pmean(updates, REPLICA)
        except NameError as error:
            raise ConfigError(
                "cross_replica() found no replicas to take the mean over.",
                rule="It acts inside a program over replicas.",
                remedy="Train inside loops.repeat(..., replicas=R); leave it out in a plain jit.",
            ) from error
        return inner.update(mean, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def accumulates(optimizer_state: Any) -> bool:
    """Tell whether an optimizer's state is that of one that accumulates by itself."""
    kinds = (AccumulationState, optax.MultiStepsState)
    found = jax.tree.leaves(optimizer_state, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(node, kinds) for node in found)


def _checked(optimizer: Any) -> optax.GradientTransformation:
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ConfigError(
            f"The optimizer is of type {type(optimizer).__name__}.",
            rule="It is an optax transformation.",
            remedy="Write optax.sgd(0.1), for example.",
        )
    return optimizer
