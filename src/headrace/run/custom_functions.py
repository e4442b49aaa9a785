"""Losses, metrics and augmentations given by code: pure functions of JAX arrays.

They are traced once here, for the shape of what they return, without a device.
"""

import inspect
import linecache
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.config.schema import Run
from headrace.core.errors import ConfigError, did_you_mean
from headrace.engine.objective import SUMS, LossFunction, MetricFunction
from headrace.model.context import Ctx, Draws
from headrace.model.sample_keys import sample_key
from headrace.rows.metrics import METRICS
from headrace.rows.named_metrics import NAMED, OTHER_NAMES
from headrace.rows.optimizers.given import OptimizerFunction, given_rule
from headrace.rows.row import Metric, Task, no_value
from headrace.rows.tasks import CLASSIFICATION
from headrace.telemetry.records import TrainRecord, ValidationRecord
from headrace.telemetry.sinks import VALIDATION_COLUMNS

# (key, images float32 [N, H, W, C], labels int32 [N]) -> images
AugmentFunction = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

# {name: function with a value per image}, or a list of metrics and of names of ours
Metrics = Mapping[str, MetricFunction] | Sequence[Metric | str] | str

_TAKEN = {
    *(*SUMS, *METRICS, *VALIDATION_COLUMNS),
    *(*TrainRecord.__dataclass_fields__, *ValidationRecord.__dataclass_fields__),
}
_ONE_EACH = "It returns one number for each image: an array [N]; their mean over the images is taken later."


def read_metrics(given: Metrics) -> tuple[Metric, ...]:
    """Return the metrics that code gave as rows; refuse what is none."""
    if isinstance(given, Mapping):
        rows = [Metric(name=name, per_image=function) for name, function in given.items()]
    elif isinstance(given, list | tuple | str):
        rows = [metric(each) for each in ([given] if isinstance(given, str) else given)]
    else:
        raise ConfigError(
            f"metrics is a {type(given).__name__}.",
            rule='It is a dict of functions, {"name": function}, or a list of headrace.Metric and names of metrics.',
        )
    names = [row.name for row in rows]
    for row in rows:
        if METRICS.get(row.name) is row or NAMED.get(row.name) is row:
            continue
        if not isinstance(row.name, str) or not row.name.isidentifier() or row.name in _TAKEN:
            raise ConfigError(
                f"A metric is named {row.name!r}.",
                rule="Names consist of letters, digits and _, and differ from those of the records, such as loss.",
                remedy="Give it another name.",
            )
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"The metric {min(twice)} is given twice.", remedy="Give each another name.")
    return tuple(rows)


def metric(given: object) -> Metric:
    if isinstance(given, Metric):
        return given
    if isinstance(given, str):
        known = {**METRICS, **NAMED}
        plain = given.lower().replace("-", "_").replace(" ", "_")
        name = OTHER_NAMES.get(plain, plain)
        if name not in known:
            raise ConfigError(f"There is no metric {given!r}.", remedy=did_you_mean(name, known))
        return known[name]
    raise ConfigError(
        f"A metric is a {type(given).__name__}.",
        rule=f"A list has headrace.Metric and names: {', '.join((*METRICS, *NAMED))}.",
        remedy='A function with a value per image is given as {"name": function}.',
    )


def check_optimizer(function: OptimizerFunction | None) -> None:
    """Refuse an optimizer that cannot be traced, or whose updates are not shaped as the weights."""
    if function is None:
        return
    form = "It is a function of the learning rate: optimizer=lambda rate: optax.adam(rate)."
    if not callable(function):
        raise ConfigError(f"The optimizer is a {type(function).__name__}, which has a rate of its own.", rule=form)
    weights = {"kernel": _array(3, 3, 4, 5), "bias": _array(5)}

    def step(weights: Any, rate: jax.Array) -> Any:
        rule = given_rule(function)
        updates, slots = rule.update(weights, rule.init(weights), weights, rate)
        return updates, slots, rule.init(weights)

    try:
        updates, slots, first = jax.eval_shape(step, weights, _array())
    except Exception as error:
        said = "the optimizer failed while JAX traced it; it takes the rate and returns a transformation of optax"
        raise pointed(error, function, said) from None
    shapes = jax.tree.map(lambda leaf: leaf.shape, updates)
    if shapes != {"kernel": (3, 3, 4, 5), "bias": (5,)}:
        raise ConfigError(
            f"The optimizer's updates for kernel and bias are {shapes}.", rule="They are shaped as the weights."
        )
    form_of = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), each) for each in (first, slots)]
    if form_of[0] != form_of[1]:
        raise ConfigError(
            "The optimizer's state has another form after a step than at its start.",
            rule="Arrays keep their shapes and types, so that the loop can run on the device.",
        )


def check_objective(
    loss: LossFunction | None,
    rows: Sequence[Metric],
    num_classes: int,
    class_weights: Sequence[object],
    task: Task = CLASSIFICATION,
) -> None:
    """Refuse a loss or metrics that cannot be traced, or that return anything but what they have to."""
    count = num_classes + 1  # so that [N] and [C] cannot be confused
    logits, labels = _array(count, num_classes), _label_shapes(count, num_classes, task)
    if loss is not None:
        # By shapes alone: no device is touched, and a wrong function is refused before anything is compiled.
        made = _traced("loss", loss, logits, logits)
        if made.shape != (count,) or not jnp.issubdtype(made.dtype, jnp.floating):
            raise _wrong("loss", made, {count: "N", num_classes: "C"}, _ONE_EACH)
        if class_weights:
            raise ConfigError(
                "class_weights is given beside a custom loss.",
                rule="They are part of the cross entropy.",
                remedy="Multiply by the weights in the loss function, or leave one of the two out.",
            )
    for row in rows:
        if task.per_output and row in (*METRICS.values(), *NAMED.values()):
            raise ConfigError(
                f"The metric {row.name} is asked for, and the task is {task.name}.",
                rule="It is one of classes; the metrics of the task are measured anyhow.",
                remedy="Leave it out, or give a headrace.Metric.",
            )
        if METRICS.get(row.name) is row:
            continue
        _check_parts(row)
        if row.per_image is not None:
            made = _traced(f"metric {row.name}", row.per_image, logits, labels)
            if made.shape != (count,):
                raise _wrong(f"metric {row.name}", made, {count: "N", num_classes: "C"}, _ONE_EACH)
        else:
            _try_value(row, num_classes, task)


def _check_parts(row: Metric) -> None:
    """Refuse a metric whose value is stated twice, or not at all."""
    given = {
        "per_image": row.per_image is not None,
        "value": row.value is not no_value,
        "sums": row.sums is not None,
        "of_scores": row.of_scores,
    }
    parts = [name for name, is_given in given.items() if is_given]
    if parts not in (["per_image"], ["value"], ["value", "sums"], ["value", "of_scores"]):
        raise ConfigError(
            f"The metric {row.name} has {' and '.join(parts) or 'neither per_image nor value'}.",
            rule="It has per_image, or value: of the usual sums, of those of `sums`, or of all scores (of_scores).",
        )
    if row.better not in ("more", "less"):
        raise ConfigError(f"The metric {row.name} has better={row.better!r}.", rule="It is more or less.")


def _label_shapes(count: int, num_classes: int, task: Task) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count, num_classes) if task.per_output else (count,), task.label_dtype)


def _made_up(num_classes: int, task: Task) -> tuple[np.ndarray, dict[str, Any]]:
    """Return labels of every class, or of every output, and the sums of a validation with them but the loss."""
    rng = np.random.default_rng(0)
    numbers = np.arange(4 * num_classes, dtype=np.int32) % num_classes
    if task.per_output:
        labels = (rng.random((len(numbers), num_classes)) < 0.5).astype(task.label_dtype)
        return labels, {"loss": float(len(labels)), "count": len(labels)}
    best = rng.normal(0, 1, (len(numbers), num_classes)).argmax(1)
    confusion = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(confusion, (numbers, best), 1)
    hits = {"top1": int((best == numbers).sum()), "top5": len(numbers), "confusion": confusion}
    return numbers, {"loss": float(len(numbers)), "count": len(numbers)} | hits


def _try_value(row: Metric, num_classes: int, task: Task) -> None:
    """Refuse a metric that makes no number of a small validation: in a run, hours might be lost."""
    labels, sums = _made_up(num_classes, task)
    logits = np.random.default_rng(0).normal(0, 1, (len(labels), num_classes)).astype(np.float32)
    if row.sums is not None:
        shapes = [
            _traced_sums(row, _array(n, num_classes), _label_shapes(n, num_classes, task), _array(n))
            for n in (num_classes + 1, num_classes + 2)
        ]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"The sums of the metric {row.name} have shapes that depend on the number of images.",
                rule="They are added up over the batches of a validation.",
                remedy="Sum over the images, multiplied by the weights.",
            )
        sums |= {name: np.ones(shape, dtype) for name, (shape, dtype) in shapes[0].items()}
    try:
        value = row.value({"scores": logits, "labels": labels} if row.of_scores else sums)
        number = None if value is None else float(value)
    except Exception as error:
        raise pointed(error, row.value, f"the value of the metric {row.name} failed on a made-up validation") from None
    if number is not None and row.is_share and not -1e-6 <= number <= 1 + 1e-6:
        raise ConfigError(
            f"The metric {row.name} is {number:g} of a made-up validation, and its unit is %.",
            rule="Of the unit % are shares from 0 to 1; they are shown in percent.",
            remedy="Divide by 100, or leave the unit out.",
        )


def _traced_sums(row: Metric, *given: jax.ShapeDtypeStruct) -> dict[str, tuple[tuple[int, ...], Any]]:
    assert row.sums is not None
    try:
        made = jax.eval_shape(row.sums, *given)
    except Exception as error:
        raise pointed(error, row.sums, f"the sums of the metric {row.name} failed while JAX traced them") from None
    if not isinstance(made, Mapping) or not all(isinstance(each, jax.ShapeDtypeStruct) for each in made.values()):
        raise ConfigError(
            f"The sums of the metric {row.name} are a {type(made).__name__}.",
            rule="The function returns a dict of arrays, {name: sum}.",
        )
    return {name: (each.shape, each.dtype) for name, each in made.items()}


def refuse_scores(rows: Sequence[Metric]) -> None:
    """Refuse metrics that need all scores where a validation runs through the stages of a pipeline."""
    if names := [row.name for row in rows if row.of_scores]:
        raise ConfigError(
            f"The metric {names[0]} needs the scores of all images, and validation runs through pipeline stages.",
            rule="Stages hand on sums, not scores.",
            remedy="Validate with the whole network on each device (pipeline_validation_model=False), or leave it out.",
        )


def refuse_monitor(run: Run, metrics: Mapping[str, Metric]) -> None:
    """Refuse to monitor what nobody measures, and a target for what is no share."""
    if run.monitor not in metrics:
        raise ConfigError(
            f"monitor is {run.monitor!r}, and there is no such metric.",
            rule="It names one of ours, or one that is given with `metrics`.",
            remedy=did_you_mean(run.monitor, metrics),
        )
    if run.target_accuracy is not None and not metrics[run.monitor].is_share:
        raise ConfigError(
            f"target_accuracy is given, and monitor is {run.monitor}.",
            rule="A target accuracy is a share, from 0 to 1.",
            remedy=f'Give the metric {run.monitor} unit="%", if it is one, or leave target_accuracy out.',
        )


def check_augment(function: AugmentFunction | None, image_hwc: tuple[int, int, int]) -> None:
    """Refuse an augmentation that cannot be traced, or that returns anything but such images."""
    if function is None:
        return
    count = 3
    images, labels = _array(count, *image_hwc), jax.ShapeDtypeStruct((count,), jnp.int32)
    numbers = jax.ShapeDtypeStruct((count,), jnp.int32)

    def call(images: jax.Array, labels: jax.Array, numbers: jax.Array) -> jax.Array:
        return function(_key(0, 0, numbers), images, labels)

    if not callable(function):
        raise ConfigError(f"The augment is a {type(function).__name__}.", rule="It is a function.")
    made = _traced("augment", call, images, labels, numbers, given_function=function)
    if made.shape != images.shape or not jnp.issubdtype(made.dtype, jnp.floating):
        rule = f"It returns the images, floating-point numbers [N, {', '.join(map(str, image_hwc))}]."
        raise _wrong("augment", made, {}, rule)


def by_sample(function: AugmentFunction, seed: int) -> Callable[[Any, Any, Any, Any], Any]:
    """Return an augmentation as `fetch` calls it, with a key that depends on seed, epoch and sample alone."""

    def augment(images: jax.Array, labels: jax.Array, samples: jax.Array, epoch: object) -> jax.Array:
        return function(_key(seed, epoch, samples), images, labels).astype(images.dtype)

    return augment


def _key(seed: int, epoch: Any, samples: jax.Array) -> jax.Array:
    return sample_key(Ctx(train=True, draws=Draws(seed, epoch, samples), path="augment"))


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _traced(
    what: str, function: object, *given: jax.ShapeDtypeStruct, given_function: object = None
) -> jax.ShapeDtypeStruct:
    """Return the shape of what a function returns; an error inside it is raised as it is, pointed at its line."""
    if not callable(function):
        raise ConfigError(f"The {what} is a {type(function).__name__}.", rule="It is a function.")
    try:
        made = jax.eval_shape(function, *given)
    except Exception as error:
        said = f"the {what} failed while JAX traced it; it is a pure function of JAX arrays"
        raise pointed(error, given_function or function, said) from None
    if not isinstance(made, jax.ShapeDtypeStruct):
        raise ConfigError(f"The {what} returned a {type(made).__name__}.", rule="It returns one array.")
    return made


# What the errors of JAX's tracing mean for somebody who knows NumPy.
_INSTEAD = {
    "TracerArrayConversionError": "A function of NumPy was given an array of JAX: use jax.numpy.",
    "TracerBoolConversionError": "Python's if, and, or, not cannot look at an array while it is traced: use jnp.where.",
    "TracerIntegerConversionError": "A number that is being traced cannot be an index or a shape of Python.",
    "ConcretizationTypeError": "float(), int(), if and shapes cannot look at an array while it is traced.",
    "NonConcreteBooleanIndexError": "x[mask] has no fixed shape: use jnp.where(mask, x, 0).",
}


def pointed(error: Exception, function: object, said: str) -> Exception:
    """Return a user's own error with a traceback that begins in their file, and a note that says the line."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    frames = list(traceback.walk_tb(error.__traceback__))
    mine = [number for number, (frame, _) in enumerate(frames) if _is_users(frame.f_code, code)]
    note = f"headrace: {said}."
    if mine:
        frame, line = frames[mine[-1]]
        place = frame.f_code.co_filename
        source = linecache.getline(place, line, frame.f_globals).strip()
        note = f"headrace: {said}: {place}, line {line}, in {frame.f_code.co_name}{': ' * bool(source)}{source}"
        begin = error.__traceback__
        for _ in range(mine[0]):
            begin = begin.tb_next if begin else None
        error = error.with_traceback(begin)
    error.add_note(note)
    if instead := _INSTEAD.get(type(error).__name__):
        error.add_note(f"headrace: {instead}")
    return error


def _is_users(code: types.CodeType, function: types.CodeType | None) -> bool:
    """Say whether a frame is of the file that a function is in: not of JAX, and not of ours."""
    return code is function or (function is not None and code.co_filename == function.co_filename)


def _wrong(what: str, made: jax.ShapeDtypeStruct, names: Mapping[int, str], rule: str) -> ConfigError:
    shape = ", ".join(names.get(size, str(size)) for size in made.shape)
    return ConfigError(f"The {what} returned {made.dtype} [{shape}].", rule=rule)
