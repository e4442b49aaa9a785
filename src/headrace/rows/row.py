"""The types of rows: what an optimizer and a learning-rate curve say about themselves."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headrace.rows.values import Keys

if TYPE_CHECKING:
    import jax

Options = Mapping[str, Any]
PyTree = Any  # as in core/tree.py, which imports JAX


@dataclass(frozen=True)
class Rule:
    """One optimizer with its settings: init(params) -> slots; update(grads, slots, params, rate) -> updates, slots."""

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree, PyTree, "jax.Array"], tuple[PyTree, PyTree]]


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    """One optimizer.

    `scope` says what the update of an element depends on: that element alone, so that weights may be joined and cut, or
    its whole tensor. None depends on other tensors: stages update theirs apart.
    """

    name: str
    says: str  # what it is, for people
    keys: Keys
    rule: Callable[[Options], Rule]
    slots: Callable[[Options], int]  # float32 arrays with the shapes of the weights
    usual_rate: float  # for 1,024 images a step
    scope: Literal["element", "tensor"]
    decay: Literal["after", "inside", "none"] = "after"  # where --weight-decay acts; none: it is refused


Curve = Callable[["jax.Array"], "jax.Array"]  # of int32 steps


@dataclass(frozen=True, kw_only=True)
class Span:
    """Converts parameters given per sample and in epochs to absolute rates and steps."""

    global_batch_size: int
    updates_per_epoch: int
    num_epochs: int = 1

    def steps(self, epochs: float) -> int:
        """Return the whole steps in that many epochs, rounded down (0.29 x 100 is 29, although its float is less)."""
        return math.floor(round(epochs * self.updates_per_epoch, 6))

    def initial(self, params: Options) -> float:
        """Return the absolute initial rate."""
        absolute = params.get("absolute_learning_rate")
        return params["initial_learning_rate"] * self.global_batch_size if absolute is None else absolute


@dataclass(frozen=True, kw_only=True)
class CurveRow:
    """One learning-rate curve: its keys, and the float32 rates at int32 steps."""

    name: str
    says: str
    keys: Keys
    curve: Callable[[Options, Span], Curve]
    check: Callable[[Options], None] = lambda params: None  # raises ConfigError
