"""The types of rows: what an optimizer, a learning-rate curve, a metric and a task say about themselves."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headrace.rows.values import Keys

if TYPE_CHECKING:
    import jax
    import numpy as np

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
    its whole tensor; of ours none depends on other tensors, so that stages update theirs apart. `all`: perhaps it does.
    """

    name: str
    says: str  # what it is, for people
    keys: Keys
    rule: Callable[[Options], Rule]
    slots: Callable[[Options], int]  # float32 arrays with the shapes of the weights
    usual_rate: float  # for 1,024 images a step
    scope: Literal["element", "tensor", "all"]
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


def no_value(sums: Any) -> None:
    """Stand for the value of a metric that has none from sums."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric: where its value comes from, and how it is shown.

    One that code gives has `per_image`(logits [N, C], labels [N]), an array [N] whose mean is taken, in training, too;
    or `value` of the sums over a validation, None where there is none. These are loss, top1, top5, count, confusion
    [true class, predicted class], and what `sums`(logits, labels, weights) returns by name, where a weight of 0 marks
    images that do not count. With `of_scores`, `value` takes {"scores": logits [N, C], "labels": [N]} of all images.
    """

    name: str  # in records, and for --monitor
    title: str = ""  # for people; by default the name
    says: str = ""
    unit: str = ""  # %: the value is a share from 0 to 1, and is shown in percent
    better: Literal["more", "less"] = "more"
    value: Callable[[Any], float | None] = no_value
    per_image: Callable[..., "jax.Array"] | None = None
    sums: Callable[..., Mapping[str, "jax.Array"]] | None = None
    of_scores: bool = False
    has_field: bool = False  # of a ValidationRecord; others are kept among its `metrics`
    column: str = ""  # of validation.csv, after those of the reference; by default the name

    def __post_init__(self) -> None:
        """Fill in the defaults that the name gives."""
        object.__setattr__(self, "title", self.title or str(self.name).replace("_", " "))
        object.__setattr__(self, "column", self.column or self.name)

    @property
    def is_share(self) -> bool:
        """Whether values are from 0 to 1, shown in percent."""
        return self.unit == "%"

    def merit(self, value: float) -> float:
        """Return the value as a number of which more is better."""
        return value if self.better == "more" else -value

    def text(self, value: float | None) -> str:
        """Return a value for people."""
        if value is None:
            return "-"
        if self.is_share:
            return f"{100 * value:.2f} %"
        return f"{value:.4f}" if self.has_field else f"{value:.4g} {self.unit}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How targets of a regression are normalised, (target - mean) / std, a number for each; without arguments, none."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


NO_SCALE = Scale()


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a network is trained to say of an image.

    A label is one number, or one for each output (`per_output`). `answer` makes of outputs [N, C] what people are told,
    in float64, on the host: shares from 0 to 1 (`are_shares`), or numbers.
    """

    name: str
    says: str
    output: str  # what one output of the network stands for, for people
    outputs: str  # of several
    label_dtype: str
    per_output: bool
    sums: tuple[str, ...]  # over the samples of a step and of a validation
    losses: tuple[str, ...]  # of --loss; the first is the usual one
    monitor: str  # the metric that decides which of two validations is better
    metrics: Callable[[Scale], tuple[Metric, ...]]
    answer: "Callable[[np.ndarray, Scale], np.ndarray]"
    answers: str = "probabilities"  # the name of the answers in an export
    are_shares: bool = True

    def text(self, value: float) -> str:
        """Return one answer for people."""
        return f"{100 * value:.2f} %" if self.are_shares else f"{value:.6g}"
