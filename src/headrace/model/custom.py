"""Custom networks from plain functions, modules of Flax or Equinox, and Headrace's layers.

`custom_network` takes a list whose entries are
  (name, init, apply)  plain functions, see `triple`
  (name, function)     a function of the images, without parameters
  (name, module)       a Flax Linen or NNX module, or a class or function of `rngs` that creates an NNX module;
                       an Equinox module, or a class or function of `key` that creates one
  (name, layer)        a layer or block of Headrace
Names are split points, checkpoint keys and targets of regular expressions, as everywhere.

Flax and Equinox are imported only if a block needs them. `batch_stats` become the block's running statistics: a Flax
BatchNorm updates its own at every application, but Headrace updates them once per step, for all micro batches and
replicas, and therefore recovers the statistics of the batch (`_of_batch`). Dropout and everything else that requests a
key gets one addressed by sample. A module learns whether it is training through an argument of its __call__ (FLAGS),
through NNX's train() and eval(), or through Equinox's inference_mode.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.tree import PyTree
from headrace.model.composite import Named
from headrace.model.custom_block import Functions, MakeFunctions, make_custom_block
from headrace.model.custom_equinox import equinox_functions
from headrace.model.custom_flax import flax_functions, nnx_functions
from headrace.model.layers import Layer, Shape
from headrace.model.network import Network

OPTIONAL = ("stats", "train", "rng")  # arguments that an `apply` may request in addition to params and x
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_ENTRY = (
    "A block is (name, init, apply), (name, function of x), (name, module of Flax or Equinox) or (name, layer of "
    "Headrace)."
)


def custom_network(
    blocks: Sequence[Any], *, input_shape: Sequence[int], num_classes: int, name: str = "custom_network"
) -> Network:
    """Return a network of these blocks for images of one shape (height, width, channels).

    Every block is traced, not run, so no device is touched. A block that does not accept the output of the previous
    one raises ConfigError, as does a network whose output is not one number per class.
    """
    hwc = _image_shape(input_shape)
    _check_names(blocks, name)
    shape: Shape = hwc
    named: list[Named] = []
    for number, entry in enumerate(blocks):
        is_last = number == len(blocks) - 1
        layer = _block(entry, shape, is_last=is_last)
        try:
            shape = layer.shape(shape)
        except (AssertionError, IndexError, ValueError) as error:
            raise ConfigError(
                f"Block {entry[0]} does not accept {_describe(shape)}: {error or 'its shape does not fit'}."
            ) from error
        named.append((entry[0], layer))
    if shape != (num_classes,):
        raise ConfigError(
            f"{name} returns {_describe(shape)} for an image, not one number for each of {num_classes} classes.",
            rule="The last block returns logits: [N, num_classes].",
            remedy="Pool or flatten, and end with a dense layer of num_classes features."
            if len(shape) != 1
            else f"Give the last block {num_classes} features, or num_classes={shape[0]}.",
        )
    return Network(name=name, blocks=tuple(named), input_hwc=hwc, num_classes=num_classes)


def triple(init: Callable[..., Any], apply: Callable[..., Any]) -> MakeFunctions:
    """Return the functions of a block from `init(rng, shape) -> params` and `apply(params, x) -> y`.

    `rng` is a JAX key, `shape` that of one image. `apply` may also have parameters named `train` (a bool), `rng` (in
    training a key addressed by sample, see context.py; otherwise None) and `stats`. With `stats`, `init` returns
    (params, stats) and `apply` returns (y, stats): in training, the statistics of this batch only. Headrace averages
    them over a step and moves the running statistics towards them with bn_momentum; in evaluation `apply` gets the
    running ones.
    """
    asked = _asked(apply)

    def make(shape: Shape) -> Functions:
        def begin(key: object) -> tuple[PyTree, PyTree]:
            made = init(key, shape)
            if "stats" not in asked:
                return made, {}
            if not (isinstance(made, tuple) and len(made) == 2):
                raise ValueError("apply takes stats, so init must return (params, stats)")
            return made

        def call(params: PyTree, stats: PyTree, x: object, train: bool, rng: object) -> tuple[PyTree, PyTree]:
            given = {"stats": stats, "train": train, "rng": rng}
            y = apply(params, x, **{name: given[name] for name in asked})
            if "stats" not in asked:
                return y, {}
            if not (isinstance(y, tuple) and len(y) == 2):
                raise ValueError("apply takes stats, so it must return (y, stats)")
            return y

        return Functions(begin=begin, call=call)

    return make


def _asked(apply: Callable[..., Any]) -> tuple[str, ...]:
    """Return the optional arguments that a function takes; any other required parameter raises ConfigError."""
    try:
        parameters = list(inspect.signature(apply).parameters.values())
    except (TypeError, ValueError):  # some compiled functions have no signature
        return ()
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    rest = [each for each in parameters[2:] if each.kind not in open_ended]
    for each in rest:
        if each.name not in OPTIONAL and each.default is inspect.Parameter.empty:
            raise ConfigError(
                f"apply has a parameter {each.name!r}, for which there is no value.",
                rule=f"apply takes (params, x), and by name any of {', '.join(OPTIONAL)}.",
                remedy="Give it a default, or bind it with functools.partial.",
            )
    return tuple(each.name for each in rest if each.name in OPTIONAL)


def _block(entry: Any, shape: Shape, *, is_last: bool) -> Layer:
    """Return the layer for one entry of the list."""
    name, *parts = entry
    if (
        len(parts) == 1
        and not isinstance(parts[0], type)
        and all(hasattr(parts[0], method) for method in ("shape", "init", "apply", "cost"))
    ):
        return parts[0]
    try:
        return make_custom_block(name, _functions(parts), shape, logits=is_last)
    except ConfigError as error:
        problem = error.problem if name in error.problem else f"Block {name}: {error.problem}"
        raise error.reworded(problem) from error


def _functions(parts: list[Any]) -> MakeFunctions:
    if len(parts) == 2 and all(map(callable, parts)):
        return triple(*parts)
    if len(parts) == 1 and _is_from("flax", parts[0]):
        return flax_functions(parts[0])
    if len(parts) == 1 and _is_from("equinox", parts[0]):
        return equinox_functions(parts[0])
    if len(parts) == 1 and callable(parts[0]) and "rngs" in _parameter_names(parts[0]):
        return nnx_functions(parts[0])
    if len(parts) == 1 and callable(parts[0]) and "key" in _parameter_names(parts[0]):
        return equinox_functions(parts[0])
    if len(parts) == 1 and callable(parts[0]) and not isinstance(parts[0], type):
        function = parts[0]
        return triple(lambda rng, shape: {}, lambda params, x: function(x))
    found = parts[0] if len(parts) == 1 else parts
    kind = f"the class {found.__name__}" if isinstance(found, type) else f"{type(found).__name__}"
    raise ConfigError(
        f"It is {kind}.", rule=_ENTRY, remedy="Create an instance: add parentheses." * isinstance(found, type)
    )


def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    while isinstance(function, partial):
        function = function.func
    # The signature of an NNX class itself hides its parameters.
    function = function.__init__ if isinstance(function, type) else function
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _is_from(package: str, part: object) -> bool:
    """Return whether an object is a module of that package, without importing the package."""
    packages = [cls.__module__.partition(".")[0] for cls in type(part).__mro__]
    return package in packages and callable(part) and not isinstance(part, type)


def _check_names(blocks: Sequence[object], network: str) -> None:
    if not _NAME.fullmatch(network):
        raise ConfigError(
            f"A network cannot be named {network!r}.", rule="Names consist of letters, digits, _, - and dots."
        )
    if isinstance(blocks, str | bytes) or not isinstance(blocks, Sequence) or not blocks:
        raise ConfigError(f"A network is a list of blocks, not {blocks!r:.60}.", rule=_ENTRY)
    seen: set[str] = set()
    for number, entry in enumerate(blocks):
        if not isinstance(entry, tuple | list) or len(entry) not in (2, 3) or not isinstance(entry[0], str):
            raise ConfigError(f"Block {number} is {entry!r:.80}.", rule=_ENTRY)
        if not _NAME.fullmatch(entry[0]):
            raise ConfigError(
                f"A block cannot be named {entry[0]!r}.",
                rule="Names are checkpoint keys: letters, digits, _, - and dots.",
            )
        if entry[0] in seen:
            raise ConfigError(f"Two blocks are named {entry[0]}.", rule="Block names must be unique.")
        seen.add(entry[0])


def _image_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    numbers = tuple(shape) if isinstance(shape, Sequence) else ()
    if len(numbers) != 3 or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in numbers):
        raise ConfigError(
            f"input_shape is {shape!r}.", rule="It is the height, width and channels of one image, such as (32, 32, 3)."
        )
    return numbers[0], numbers[1], numbers[2]


def _describe(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "a single number"
