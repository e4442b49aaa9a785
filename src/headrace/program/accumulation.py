"""How gradients of several micro batches become one: the type they are summed in, and the reduction."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.core.errors import ConfigError
from headrace.program.structure import one_of

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
