"""What a step minimises: softmax or binary cross entropy from logits, and the sums that become metrics.

The task (rows/tasks.py) says what labels are: the number of a class, or a number for each output. They are one per
sample, or several with shares (MixedLabels); smoothing and weights of classes change the target.
Another loss takes the place of the cross entropy; custom metrics are summed beside the others.

Sums and a count, never means: they add up over micro-batches, replicas and steps. All in float32. N samples, C classes.
One-hot masks instead of gathers: one fused pass over the logits, and a gradient without a scatter.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from headrace.data.augmentation.mix import MixedLabels
from headrace.rows.row import Scale, Task
from headrace.rows.tasks import CLASSIFICATION, MULTILABEL, TASKS

Labels = jax.Array | MixedLabels
Sums = dict[str, jax.Array]
TOP = 5
SUMS = CLASSIFICATION.sums
_METRIC = "metric/"  # before the names of custom metrics among the sums
_GIVEN = "given/"  # before the names of sums that code gave for a validation: given/METRIC/SUM
SCORES = "scores"  # among the sums of a validation: {"scores": logits [N, C], "labels": [N]}, where a metric needs them

# (logits float32 [N, C], targets float32 [N, C]) -> [N]; of classes, a row of the targets adds up to 1
LossFunction = Callable[[jax.Array, jax.Array], jax.Array]
# (logits float32 [N, C], labels int32 [N]) -> [N]
MetricFunction = Callable[[jax.Array, jax.Array], jax.Array]
# (logits float32 [N, C], labels int32 [N], weights float32 [N], 0 for images that do not count) -> {name: sum}
SumsFunction = Callable[[jax.Array, jax.Array, jax.Array], Mapping[str, jax.Array]]


@dataclass(frozen=True, kw_only=True)
class CustomObjective:
    """The task, another loss than the cross entropy, and metrics given by code."""

    task: str = CLASSIFICATION.name
    loss: LossFunction | None = None
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)  # means over images
    sums: Mapping[str, SumsFunction] = field(default_factory=dict)  # in validation alone
    keeps_scores: bool = False  # a validation keeps the logits of all images

    @property
    def sum_names(self) -> tuple[str, ...]:
        """The names of the sums over samples."""
        return (*self.row.sums, *(_METRIC + name for name in self.metrics))

    @property
    def row(self) -> Task:
        """The facts of the task."""
        return TASKS[self.task]


STANDARD = CustomObjective()


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a training step minimises and sums up."""

    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    custom: CustomObjective = STANDARD

    def __call__(self, logits: jax.Array, labels: Labels) -> tuple[jax.Array, Sums]:
        """Return the mean loss of a micro-batch and its sums."""
        return training_loss(logits, labels, self.label_smoothing, self.class_weights, self.custom)

    @property
    def sum_names(self) -> tuple[str, ...]:
        """The names of the sums."""
        return self.custom.sum_names


def metric_sums(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums of custom metrics under the names that code gave them."""
    return {key.removeprefix(_METRIC): value for key, value in sums.items() if key.startswith(_METRIC)}


def given_sums(sums: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return the sums that code gave for a metric, under its names."""
    start = f"{_GIVEN}{metric}/"
    return {key.removeprefix(start): value for key, value in sums.items() if key.startswith(start)}


def sums_of_validation(
    logits_NC: jax.Array, labels_N: jax.Array, weights_N: jax.Array, custom: CustomObjective
) -> Sums:
    """Return the sums that code gave for a validation."""
    logits_NC, weights_N = logits_NC.astype(jnp.float32), weights_N.astype(jnp.float32)
    return {
        f"{_GIVEN}{metric}/{name}": jnp.asarray(total)
        for metric, function in custom.sums.items()
        for name, total in function(logits_NC, labels_N, weights_N).items()
    }


def cross_entropy(
    logits_NC: jax.Array, labels: Labels, label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None
) -> jax.Array:
    """Return each sample's cross entropy against t = target x (1 - s) + s / C; with weights of classes against w x t.

    The target is the label's one-hot, or the sum of share x one-hot over mixed labels. From logits, log softmax is
    exact at any size, so that the clip of probabilities to [1e-7, 1 - 1e-7] is not needed.
    """
    logits_NC = logits_NC.astype(jnp.float32)
    # So that exp cannot overflow. The maximum cancels out of the loss, hence it needs no gradient.
    logits_NC = logits_NC - lax.stop_gradient(jnp.max(logits_NC, axis=-1, keepdims=True))
    log_sum_N = jnp.log(jnp.sum(jnp.exp(logits_NC), axis=-1))
    if class_weights is not None:
        target_NC = (1.0 - label_smoothing) * _target(labels, logits_NC) + label_smoothing / logits_NC.shape[1]
        # The smoothed target is weighted, class by class, as in PyTorch: not the sample by its label.
        target_NC = target_NC * jnp.asarray(class_weights, jnp.float32)[None, :]
        # `where` and not the product alone: 0 x infinity, at a class with a logit of -inf, would be NaN.
        return jnp.sum(jnp.where(target_NC > 0, target_NC * (log_sum_N[:, None] - logits_NC), 0.0), axis=-1)
    true_N = jnp.sum(_target(labels, logits_NC, logits_NC), axis=-1)
    # The sum over classes, worked out: it needs no array of targets, only the label's logit and the mean.
    loss_N = log_sum_N - (1.0 - label_smoothing) * true_N
    return loss_N - label_smoothing * jnp.mean(logits_NC, axis=-1) if label_smoothing else loss_N


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """The loss that takes every class for a question of its own: the mean over classes, from logits.

    With a threshold, targets above it count as 1 and others as 0: both images of a mix are then fully present.
    """

    threshold: float | None = None

    def __call__(self, logits_NC: jax.Array, target_NC: jax.Array) -> jax.Array:
        """Return the loss of each image."""
        if self.threshold is not None:
            target_NC = (target_NC > self.threshold).astype(jnp.float32)
        # log(1 + e^x) - t x, in a form that cannot overflow
        loss_NC = jnp.maximum(logits_NC, 0.0) - logits_NC * target_NC + jnp.log1p(jnp.exp(-jnp.abs(logits_NC)))
        return jnp.mean(loss_NC, axis=-1)


@dataclass(frozen=True)
class SquaredError:
    """The mean over the outputs of (output - target)^2."""

    def __call__(self, outputs_NC: jax.Array, target_NC: jax.Array) -> jax.Array:
        """Return the loss of each image."""
        return jnp.mean(jnp.square(outputs_NC - target_NC), axis=-1)


@dataclass(frozen=True)
class AbsoluteError:
    """The mean over the outputs of |output - target|."""

    def __call__(self, outputs_NC: jax.Array, target_NC: jax.Array) -> jax.Array:
        """Return the loss of each image."""
        return jnp.mean(jnp.abs(outputs_NC - target_NC), axis=-1)


@dataclass(frozen=True)
class Huber:
    """Half the square of an error up to 1, beyond it the error less one half; the mean over the outputs."""

    def __call__(self, outputs_NC: jax.Array, target_NC: jax.Array) -> jax.Array:
        """Return the loss of each image."""
        error_NC = jnp.abs(outputs_NC - target_NC)
        near_NC = jnp.minimum(error_NC, 1.0)
        return jnp.mean(near_NC * (error_NC - 0.5 * near_NC), axis=-1)


def answers(logits_NC: jax.Array, task: Task, scale: Scale) -> jax.Array:
    """Return what outputs say, as `task.answer` does on the host: probabilities, or numbers in their units."""
    if task is MULTILABEL:
        return jax.nn.sigmoid(logits_NC)
    if task is CLASSIFICATION:
        return jax.nn.softmax(logits_NC)
    mean, std = (jnp.asarray(each, jnp.float32)[None, :] for each in (scale.mean, scale.std))
    return mean + std * logits_NC.astype(jnp.float32)


def loss_named(name: str, bce_target_threshold: float | None = None) -> LossFunction | None:
    """Return the loss of --loss; None is the softmax cross entropy, which needs no targets of all classes."""
    made: dict[str, LossFunction | None] = {
        "cross_entropy": None,
        "bce": BinaryCrossEntropy(bce_target_threshold),
        "mse": SquaredError(),
        "mae": AbsoluteError(),
        "huber": Huber(),
    }
    return made[name]


def targets(labels: Labels, like_NC: jax.Array, task: Task) -> jax.Array:
    """Return what the outputs [N, C] should be: the share of each class in the label, or the label itself."""
    if not task.per_output:
        return _target(labels, like_NC)
    if not isinstance(labels, MixedLabels):
        return labels.astype(jnp.float32)
    return jnp.sum(labels.weights[:, :, None] * labels.labels.astype(jnp.float32), axis=1)


def _target(labels: Labels, like_NC: jax.Array, values_NC: jax.Array | float = 1.0) -> jax.Array:
    """Return values x the share of each class in the label; where the share is 0 the value does not count."""
    if not isinstance(labels, MixedLabels):
        return jnp.where(_is_label(labels, like_NC), values_NC, 0.0)
    parts = zip(jnp.moveaxis(labels.labels, 1, 0), jnp.moveaxis(labels.weights, 1, 0), strict=True)
    shares = [jnp.where(_is_label(label_N, like_NC), share_N[:, None], 0.0) for label_N, share_N in parts]
    share_NC = functools.reduce(jnp.add, shares)
    return jnp.where(share_NC > 0, share_NC * values_NC, 0.0)


def _is_label(labels_N: jax.Array, like_NC: jax.Array) -> jax.Array:
    return labels_N[:, None] == lax.broadcasted_iota(labels_N.dtype, like_NC.shape, 1)


def own_labels(labels: Labels) -> jax.Array:
    """Return each sample's own label: what hits are counted against, however little of it is left in the mix."""
    return labels.labels[:, 0] if isinstance(labels, MixedLabels) else labels


def label_rank(logits_NC: jax.Array, labels_N: jax.Array) -> jax.Array:
    """Return how many classes rank above the label: the greater logits and, of equal ones, those of lower index.

    So `rank < k` is membership of a sort-based top k. In a row with a NaN all C classes do: it is in no top k.
    """
    class_NC = lax.broadcasted_iota(labels_N.dtype, logits_NC.shape, 1)
    label_N1 = labels_N[:, None]
    # The label's logit; NaN where any of its row is.
    named_NC = (class_NC == label_N1) | jnp.isnan(logits_NC)
    true_N1 = jnp.sum(jnp.where(named_NC, logits_NC, 0.0), axis=-1, keepdims=True)
    # Comparisons in one fused pass instead of a sort or a top_k; the index decides between equal logits, as a stable
    # sort would.
    above_NC = (logits_NC > true_N1) | ((logits_NC == true_N1) & (class_NC < label_N1))
    rank_N = jnp.sum(above_NC, axis=-1, dtype=jnp.int32)
    return jnp.where(jnp.isnan(true_N1[:, 0]), logits_NC.shape[1], rank_N)


def _weighted_sums(
    loss_N: jax.Array, logits_NC: jax.Array, labels_N: jax.Array, weights_N: jax.Array | None, custom: CustomObjective
) -> Sums:
    weights_N = jnp.ones(labels_N.shape[:1], jnp.float32) if weights_N is None else weights_N.astype(jnp.float32)
    logits_NC = logits_NC.astype(jnp.float32)
    rank_N = None if custom.row.per_output else label_rank(logits_NC, labels_N)
    in_top_N = None if rank_N is None else (rank_N < min(TOP, logits_NC.shape[1])).astype(jnp.float32)

    def total(values_N: jax.Array) -> jax.Array:
        # a sample that does not count must not spread a NaN
        return jnp.sum(jnp.where(weights_N > 0, values_N * weights_N, 0.0))

    sums = {"loss": total(loss_N)}
    if in_top_N is not None:
        sums |= {"top1": jnp.sum((rank_N == 0) * weights_N), "top5": jnp.sum(in_top_N * weights_N)}
    sums["count"] = jnp.sum(weights_N)
    custom_sums = {
        _METRIC + name: total(fn(logits_NC, labels_N).astype(jnp.float32)) for name, fn in custom.metrics.items()
    }
    return sums | custom_sums


def _losses(
    logits_NC: jax.Array,
    labels: Labels,
    label_smoothing: float,
    custom: CustomObjective,
    class_weights: Sequence[float] | None = None,
) -> jax.Array:
    if custom.loss is None:
        return cross_entropy(logits_NC, labels, label_smoothing, class_weights)
    assert class_weights is None, "weights of classes belong to the cross entropy"
    logits_NC = logits_NC.astype(jnp.float32)
    target_NC = targets(labels, logits_NC, custom.row)
    if label_smoothing:
        # Towards what a network without any knowledge answers: each class alike; of labels on their own, one half.
        even = 0.5 * label_smoothing if custom.row.per_output else label_smoothing / logits_NC.shape[1]
        target_NC = (1.0 - label_smoothing) * target_NC + even
    return custom.loss(logits_NC, target_NC).astype(jnp.float32)


def sums_of_samples(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None = None,
    label_smoothing: float = 0.0,
    custom: CustomObjective = STANDARD,
) -> Sums:
    """Return the sums over samples: loss, top-1 and top-5 hits, and weights (1 each when None; 0 = not counted)."""
    return _weighted_sums(_losses(logits, labels, label_smoothing, custom), logits, labels, weights, custom)


def training_loss(
    logits: jax.Array,
    labels: Labels,
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
    custom: CustomObjective = STANDARD,
) -> tuple[jax.Array, Sums]:
    """Return what a micro-batch differentiates, the sum of its losses / its size, and the sums for the record."""
    loss_N = _losses(logits, labels, label_smoothing, custom, class_weights)
    # They are for the record: without stop_gradient their derivatives would be traced as well, and dropped.
    sums = _weighted_sums(lax.stop_gradient(loss_N), lax.stop_gradient(logits), own_labels(labels), None, custom)
    # Divided by the size, not by the sum of class weights: micro-batches then weigh the same, and every plan has the
    # same gradient.
    return jnp.sum(loss_N) / loss_N.shape[0], sums
