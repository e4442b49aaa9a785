"""The types of rows: what an optimizer, a learning-rate curve and a metric say about themselves."""

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


Sums = Mapping[str, Any]  # over the images of a validation


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """One metric: `value` of the sums, None where there is none; `better` says whether more or less of it is."""

    name: str  # in reports, for --monitor and, without a field of its own, among the `metrics` of a record
    title: str
    says: str
    value: Callable[[Sums], float | None]
    better: Literal["more", "less"] = "more"
    is_share: bool = True  # from 0 to 1, shown in percent
    has_field: bool = False  # of a ValidationRecord
    column: str = ""  # of validation.csv, after those of the reference

    def merit(self, value: float) -> float:
        """Return the value as a number of which more is better."""
        return value if self.better == "more" else -value

    def text(self, value: float | None) -> str:
        """Return a value for people."""
        if value is None:
            return "-"
        return f"{100 * value:.2f} %" if self.is_share else f"{value:.4f}"
