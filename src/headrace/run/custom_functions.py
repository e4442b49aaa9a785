"""Functions given by code that are traced into the step: a loss, metrics, an augmentation. What is wrong is refused.

They are pure functions of JAX arrays. They are traced once here, for the shape of what they return, without a device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from headrace.core.errors import ConfigError
from headrace.engine.objective import SUMS, CustomObjective
from headrace.model.context import Ctx, Draws, sample_key
from headrace.telemetry.records import TrainRecord, ValidationRecord

# (key, images float32 [N, H, W, C], labels int32 [N]) -> images
AugmentFunction = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

_TAKEN = {*SUMS, *TrainRecord.__dataclass_fields__, *ValidationRecord.__dataclass_fields__}
_ONE_EACH = "It returns one number for each image: an array [N]; their mean over the images is taken later."


def check_objective(custom: CustomObjective, num_classes: int, class_weights: Sequence[Any]) -> None:
    """Refuse a loss or metrics that cannot be traced, or that return something else than a number for each image."""
    count = num_classes + 1  # so that [N] and [C] cannot be confused
    logits, labels = _array(count, num_classes), jax.ShapeDtypeStruct((count,), jnp.int32)
    if custom.loss is not None:
        # By shapes alone: no device is touched, and a wrong function is refused before anything is compiled.
        made = _traced("loss", custom.loss, logits, logits)
        if made.shape != (count,) or not jnp.issubdtype(made.dtype, jnp.floating):
            raise _wrong("loss", made, {count: "N", num_classes: "C"}, _ONE_EACH)
        if class_weights:
            raise ConfigError(
                "class_weights is given beside a custom loss.",
                rule="They are part of the cross entropy.",
                remedy="Multiply by the weights in the loss function, or leave one of the two out.",
            )
    if not isinstance(custom.metrics, Mapping):
        raise ConfigError(
            f"metrics is a {type(custom.metrics).__name__}.", rule='It is a dict of functions: {"name": function}.'
        )
    for name, function in custom.metrics.items():
        if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
            raise ConfigError(
                f"A metric is named {name!r}.",
                rule="Names consist of letters, digits and _, and differ from those of the records, such as loss.",
                remedy="Give it another name.",
            )
        made = _traced(f"metric {name}", function, logits, labels)
        if made.shape != (count,):
            raise _wrong(f"metric {name}", made, {count: "N", num_classes: "C"}, _ONE_EACH)


def check_augment(function: AugmentFunction | None, image_hwc: tuple[int, int, int]) -> None:
    """Refuse an augmentation that cannot be traced, or that returns something else than such images."""
    if function is None:
        return
    count = 3
    images, labels = _array(count, *image_hwc), jax.ShapeDtypeStruct((count,), jnp.int32)
    numbers = jax.ShapeDtypeStruct((count,), jnp.int32)

    def call(images: jax.Array, labels: jax.Array, numbers: jax.Array) -> jax.Array:
        return function(_key(0, 0, numbers), images, labels)

    made = _traced("augment", call, images, labels, numbers) if callable(function) else _traced("augment", function)
    if made.shape != images.shape or not jnp.issubdtype(made.dtype, jnp.floating):
        rule = f"It returns the images, floating-point numbers [N, {', '.join(map(str, image_hwc))}]."
        raise _wrong("augment", made, {}, rule)


def by_sample(function: AugmentFunction, seed: int) -> Callable[[Any, Any, Any, Any], Any]:
    """Return an augmentation as `fetch` calls it, with a key that depends on seed, epoch and sample alone."""

    def augment(images: jax.Array, labels: jax.Array, samples: jax.Array, epoch: Any) -> jax.Array:
        return function(_key(seed, epoch, samples), images, labels).astype(images.dtype)

    return augment


def _key(seed: int, epoch: Any, samples: jax.Array) -> jax.Array:
    return sample_key(Ctx(train=True, draws=Draws(seed, epoch, samples), path="augment"))


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _traced(what: str, function: Any, *given: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of what a function returns; an error inside it is raised as it is, with a note."""
    if not callable(function):
        raise ConfigError(f"The {what} is a {type(function).__name__}.", rule="It is a function.")
    try:
        made = jax.eval_shape(function, *given)
    # The user's own error, with its own traceback: replacing it would hide the line that is wrong.
    except Exception as error:
        error.add_note(f"headrace: the {what} failed while JAX traced it; it is a pure function of JAX arrays.")
        raise
    if not isinstance(made, jax.ShapeDtypeStruct):
        raise ConfigError(f"The {what} returned a {type(made).__name__}.", rule="It returns one array.")
    return made


def _wrong(what: str, made: jax.ShapeDtypeStruct, names: Mapping[int, str], rule: str) -> ConfigError:
    shape = ", ".join(names.get(size, str(size)) for size in made.shape)
    return ConfigError(f"The {what} returned {made.dtype} [{shape}].", rule=rule)
