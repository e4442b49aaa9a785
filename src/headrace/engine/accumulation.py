"""How the gradients of several micro batches become one: the type they are summed in, the reduction, and the end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from headrace.core.errors import ConfigError
from headrace.core.tree import PyTree

# None: the weight's own type. A type: for all. A function of the weight: its type.
AccumulatorType = DTypeLike | Callable[[Any], DTypeLike] | None
Number = jax.Array | int

# reduction -> (gradient, its number, how many there will be) -> (factor on the total so far, what is added to it)
# Divided before it is added: a 16-bit total then holds a mean and cannot overflow with the count.
REDUCTIONS: dict[str, Callable[[jax.Array, Number, int], tuple[Number | float | None, jax.Array]]] = {
    "SUM": lambda gradient, number, count: (None, gradient),
    "MEAN": lambda gradient, number, count: (None, gradient / count),
    # Never larger than the largest gradient, and right at every moment; costs a multiplication more.
    "RUNNING_MEAN": lambda gradient, number, count: (number / (number + 1), gradient / (number + 1)),
}


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """How the gradients of the micro batches of a step become one."""

    count: int
    reduction: str = "MEAN"
    dtype: AccumulatorType = None

    @property
    def counts(self) -> bool:
        """Whether the reduction needs the number of the micro batch."""
        return self.reduction == "RUNNING_MEAN"


def _is_function(dtype: AccumulatorType) -> TypeGuard[Callable[[Any], DTypeLike]]:
    # jnp.float32 is callable as well: called, it would convert the weight instead of naming a type for it.
    return callable(dtype) and not isinstance(dtype, type)


def check_accumulator(dtype: AccumulatorType, name: str = "dtype") -> None:
    """Refuse what is no type at once; a function is asked when the weights are known."""
    if dtype is not None and not _is_function(dtype):
        accumulator_dtype(dtype, None, name)


def accumulator_dtype(dtype: AccumulatorType, weight: Any, name: str = "dtype") -> np.dtype:
    """Return the type in which the gradients of a weight are summed."""
    asked: Any = dtype(weight) if _is_function(dtype) else dtype
    if asked is None:
        return weight.dtype
    try:
        found = jnp.dtype(asked)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, np.inexact):
        raise ConfigError(
            f"{name} {'returned' if _is_function(dtype) else 'is'} {asked!r}.",
            rule="It is None, a floating-point type, or a function of the weight that returns one.",
            remedy="Write jnp.float32, for example.",
        )
    return found


def empty_sums(weights: PyTree, dtype: AccumulatorType, name: str = "dtype") -> PyTree:
    """Return zeros to sum the gradients of these weights in."""
    return jax.tree.map(lambda w: jnp.zeros(w.shape, accumulator_dtype(dtype, w, name)), weights)


def accumulate(rule: Accumulation, totals: PyTree, gradients: PyTree, number: Number) -> PyTree:
    """Return the totals with gradient `number` in; every total keeps its type."""

    def add(total: jax.Array, gradient: jax.Array) -> jax.Array:
        factor, added = REDUCTIONS[rule.reduction](gradient, number, rule.count)
        # A 16-bit total times a float32 factor is float32: without the cast the total would change its type on the
        # way.
        kept = total if factor is None else (total * factor).astype(total.dtype)
        return kept + added.astype(total.dtype)

    return jax.tree.map(add, totals, gradients)


def widened(tree: PyTree) -> PyTree:
    """Return 16-bit numbers as float32, others as they are.

    What an optimizer computes from gradients (squares, their roots) leaves the range of float16 at once, and the
    precision of bfloat16: AdamW with gradients in float16 diverged within five steps.
    """
    return jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype.itemsize == 2 else a, tree)
