"""The tasks, by name: what a label is, what is minimised and measured, and what the outputs mean to people."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.rows.metrics import METRICS
from headrace.rows.output_metrics import label_metrics, number_metrics
from headrace.rows.row import Scale, Task

if TYPE_CHECKING:
    import numpy as np


def _softmax(logits: "np.ndarray", scale: Scale) -> "np.ndarray":
    """Return the probabilities [N, classes] in float64."""
    import numpy as np

    del scale
    # Less the largest: the exponential of a logit above 709 would be infinite.
    shares = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def _sigmoid(logits: "np.ndarray", scale: Scale) -> "np.ndarray":
    """Return the probability of each label on its own."""
    import numpy as np

    del scale
    # By the hyperbolic tangent, which cannot overflow.
    return 0.5 + 0.5 * np.tanh(0.5 * logits.astype(np.float64))


def _numbers(outputs: "np.ndarray", scale: Scale) -> "np.ndarray":
    """Return the targets in their own units."""
    import numpy as np

    return np.array(scale.mean) + np.array(scale.std) * outputs.astype(np.float64)


TASKS: Mapping[str, Task] = {
    row.name: row
    for row in (
        Task(
            name="classification",
            says="one class of several",
            output="class",
            outputs="classes",
            label_dtype="int32",
            per_output=False,
            sums=("loss", "top1", "top5", "count"),
            losses=("cross_entropy", "bce"),
            monitor="top1",
            metrics=lambda scale: tuple(METRICS.values()),
            answer=_softmax,
        ),
        Task(
            name="multilabel",
            says="any number of labels, each present or not",
            output="label",
            outputs="labels",
            label_dtype="uint8",
            per_output=True,
            sums=("loss", "count"),
            losses=("bce",),
            monitor="map",
            metrics=label_metrics,
            answer=_sigmoid,
        ),
        Task(
            name="regression",
            says="one or several numbers",
            output="target",
            outputs="targets",
            label_dtype="float32",
            per_output=True,
            sums=("loss", "count"),
            losses=("mse", "mae", "huber"),
            monitor="r2",
            metrics=number_metrics,
            answer=_numbers,
            answers="values",
            are_shares=False,
        ),
    )
}
CLASSIFICATION, MULTILABEL, REGRESSION = TASKS.values()
LOSSES = tuple(loss for row in TASKS.values() for loss in row.losses)
# The metrics by which validations can be compared, of all tasks.
MONITORS = tuple(dict.fromkeys(metric.name for row in TASKS.values() for metric in row.metrics(Scale())))
