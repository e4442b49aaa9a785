"""The metrics of tasks whose labels have a number for each output: of several labels, and of numbers.

Outputs are logits [N, C], above 0 where a label is answered; or targets on the scale of their training (row.Scale).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.rows.metrics import METRICS
from headrace.rows.row import Metric, Scale

if TYPE_CHECKING:
    import jax
    import numpy as np


@dataclass(frozen=True)
class LabelAccuracy:
    """The share of an image's labels, those that it has and those that it has not, that are answered right."""

    def __call__(self, logits_NC: "jax.Array", labels_NC: "jax.Array") -> "jax.Array":
        """Return it for each image."""
        import jax.numpy as jnp

        return jnp.mean(((logits_NC > 0) == (labels_NC > 0)).astype(jnp.float32), axis=-1)


@dataclass(frozen=True)
class AbsoluteErrorOfTargets:
    """The mean over the targets of |answer - target|, in the units of the targets."""

    std: tuple[float, ...]

    def __call__(self, outputs_NC: "jax.Array", labels_NC: "jax.Array") -> "jax.Array":
        """Return it for each image."""
        import jax.numpy as jnp

        error_NC = jnp.abs(outputs_NC - labels_NC) * jnp.asarray(self.std, jnp.float32)[None, :]
        return jnp.mean(error_NC, axis=-1)


def average_precision(scores_N: "np.ndarray", is_positive_N: "np.ndarray") -> float | None:
    """Return the sum over thresholds of precision x the recall gained there; None without a positive image.

    Images of equal scores are answered together: the order in which they come does not matter.
    """
    import numpy as np

    positives = int(is_positive_N.sum())
    if not positives:
        return None
    order = np.argsort(-scores_N, kind="stable")
    last_of_score = np.append(np.diff(scores_N[order]) != 0, True)
    found = np.cumsum(is_positive_N[order])[last_of_score]
    answered = np.flatnonzero(last_of_score) + 1
    return float((np.diff(found, prepend=0) / positives * found / answered).sum())


def f1_of(right: int, positives: int, answered: int) -> float | None:
    """Return F1, 2 x right / (images with the label + images answered with it); None where there is none of either."""
    return 2 * right / (positives + answered) if positives + answered else None


def best_threshold(scores_N: "np.ndarray", is_positive_N: "np.ndarray") -> tuple[float, float] | None:
    """Return the score from which on to answer so that F1 is the highest, and that F1; None without a positive image.

    The threshold lies in the middle between two scores.
    """
    import numpy as np

    positives = int(is_positive_N.sum())
    if not positives:
        return None
    order = np.argsort(-scores_N, kind="stable")
    ranked = scores_N[order].astype(np.float64)
    last_of_score = np.append(np.diff(ranked) != 0, True)
    f1 = np.where(last_of_score, 2 * np.cumsum(is_positive_N[order]) / (positives + np.arange(1, len(ranked) + 1)), -1)
    best = int(f1.argmax())
    below = ranked[best + 1] if best + 1 < len(ranked) else ranked[best]
    return float((ranked[best] + below) / 2), float(f1[best])


def r2_of(answers_N: "np.ndarray", targets_N: "np.ndarray") -> float | None:
    """Return 1 - sum of squared errors / sum of squared distances from the mean; None where all targets are equal."""
    import numpy as np

    answers_N, targets_N = answers_N.astype(np.float64), targets_N.astype(np.float64)
    spread = float(np.square(targets_N - targets_N.mean()).sum()) if len(targets_N) else 0.0
    return 1 - float(np.square(answers_N - targets_N).sum()) / spread if spread else None


def mean_of(values: list[float | None]) -> float | None:
    """Return the mean of the values that there are."""
    some = [value for value in values if value is not None]
    return sum(some) / len(some) if some else None


def _by_output(function: Callable[["np.ndarray", "np.ndarray"], float | None]) -> Callable[[Any], float | None]:
    """Return the value of a metric: the mean of a function of scores and labels over the outputs that have one."""

    def value(found: Mapping[str, Any]) -> float | None:
        scores, labels = found["scores"], found["labels"]
        return mean_of([function(scores[:, k], labels[:, k]) for k in range(scores.shape[1])])

    return value


def _f1_of_scores(scores_N: "np.ndarray", labels_N: "np.ndarray") -> float | None:
    answered, positive = scores_N > 0, labels_N > 0
    return f1_of(int((answered & positive).sum()), int(positive.sum()), int(answered.sum()))


def label_metrics(scale: Scale) -> tuple[Metric, ...]:
    """Return the metrics of several labels; they have no scale."""
    del scale
    return (
        Metric(
            name="map",
            title="mAP",
            says="the mean over the labels of the average precision: how well images with a label rank before others",
            unit="%",
            of_scores=True,
            value=_by_output(lambda scores, labels: average_precision(scores, labels > 0)),
        ),
        Metric(
            name="macro_f1",
            title=METRICS["macro_f1"].title,
            says="the mean over the labels of F1, where labels of a probability above one half are answered",
            unit="%",
            of_scores=True,
            value=_by_output(_f1_of_scores),
        ),
        Metric(
            name="label_accuracy",
            says="the share of all labels of all images, had or not, that are right at one half",
            unit="%",
            per_image=LabelAccuracy(),
        ),
        METRICS["loss"],
    )


def number_metrics(scale: Scale) -> tuple[Metric, ...]:
    """Return the metrics of numbers, in the units of the targets; with several targets, means over them."""

    def rmse(found: Mapping[str, Any]) -> float | None:
        import numpy as np

        error = (found["scores"].astype(np.float64) - found["labels"]) * np.array(scale.std)
        return float(np.sqrt(np.square(error).mean(0)).mean()) if len(error) else None

    return (
        Metric(
            name="r2",
            title="R2",
            says="1 - squared errors / squared distances from the mean: 1 is exact, 0 what a constant answer has",
            of_scores=True,
            value=_by_output(r2_of),
        ),
        Metric(
            name="mae",
            title="MAE",
            says="the mean of |answer - target|, in the target's units",
            better="less",
            per_image=AbsoluteErrorOfTargets(scale.std),
        ),
        Metric(
            name="rmse",
            title="RMSE",
            says="the root of the mean squared error, in the target's units",
            better="less",
            of_scores=True,
            value=rmse,
        ),
        METRICS["loss"],
    )
