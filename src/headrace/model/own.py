"""A user's own blocks, side by side in one network: plain functions, Flax modules, and the layers of Headrace.

An entry of the list that `own_network` takes is one of
  (name, init, apply)  plain functions, see `triple`
  (name, function)     a function of the images, without parameters
  (name, module)       a Flax Linen or NNX module, or a class or function of `rngs` that makes an NNX one (own_flax.py)
  (name, layer)        a layer or a block of Headrace
Names are split points, checkpoint keys and targets of regular expressions, as everywhere.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headrace.core.errors import ConfigError
from headrace.model.composites import Named
from headrace.model.layers import Layer, Shape
from headrace.model.network import Network
from headrace.model.own_block import Functions, make_own_block

OPTIONAL = ("stats", "train", "rng")  # what an `apply` may ask for beside params and x
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_ENTRY = "A block is (name, init, apply), (name, function of x), (name, Flax module) or (name, layer of Headrace)."
MakeFunctions = Callable[[Shape], Functions]  # for one image's input shape


def own_network(
    blocks: Sequence[Any], *, input_shape: Sequence[int], num_classes: int, name: str = "own_network"
) -> Network:
    """Return the network of these blocks for images of one shape (height, width, channels).

    Every block is traced, not run: no device is touched. A block that cannot take what the one before it gives is
    refused, and so is a network whose output is not one number for each class.
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
                f"Block {entry[0]} cannot take {_told(shape)}: {error or 'its shape does not fit'}."
            ) from error
        named.append((entry[0], layer))
    if shape != (num_classes,):
        raise ConfigError(
            f"{name} gives {_told(shape)} for an image, not one number for each of {num_classes} classes.",
            rule="The last block gives logits: [N, num_classes].",
            remedy="Pool or flatten, and end with a dense layer of num_classes features."
            if len(shape) != 1
            else f"Give the last block {num_classes} features, or num_classes={shape[0]}.",
        )
    return Network(name=name, blocks=tuple(named), input_hwc=hwc, num_classes=num_classes)


def triple(init: Callable[..., Any], apply: Callable[..., Any]) -> MakeFunctions:
    """Return the functions of a block from `init(rng, shape) -> params` and `apply(params, x) -> y`.

    `rng` is a JAX key, `shape` one image's. `apply` may also ask, by these names, for `train` (a bool), `rng` (a key
    while training, else None; addressed by sample, see sample_key.py) and `stats`. With `stats`, `init` returns
    (params, stats) and `apply` (y, stats): in training the statistics of this batch alone. Headrace averages those of
    a step and moves the running ones towards them with bn_momentum; outside training `apply` gets the running ones.
    """
    asked = _asked(apply)

    def make(shape: Shape) -> Functions:
        def begin(key: Any) -> tuple[Any, Any]:
            made = init(key, shape)
            if "stats" not in asked:
                return made, {}
            if not (isinstance(made, tuple) and len(made) == 2):
                raise ValueError("apply takes stats, so init must return (params, stats)")
            return made

        def call(params: Any, stats: Any, x: Any, train: bool, rng: Any) -> tuple[Any, Any]:
            given = {"stats": stats, "train": train, "rng": rng}
            y = apply(params, x, **{word: given[word] for word in asked})
            if "stats" not in asked:
                return y, {}
            if not (isinstance(y, tuple) and len(y) == 2):
                raise ValueError("apply takes stats, so it must return (y, stats)")
            return y

        return Functions(begin=begin, call=call)

    return make


def _asked(apply: Callable[..., Any]) -> tuple[str, ...]:
    """Return the optional words that a function takes; a parameter that nobody would fill is refused."""
    try:
        parameters = list(inspect.signature(apply).parameters.values())
    except (TypeError, ValueError):  # some compiled functions do not say
        return ()
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    rest = [each for each in parameters[2:] if each.kind not in open_ended]
    for each in rest:
        if each.name not in OPTIONAL and each.default is inspect.Parameter.empty:
            raise ConfigError(
                f"apply takes {each.name!r}, which nobody gives it.",
                rule=f"apply is (params, x), and by name any of {', '.join(OPTIONAL)}.",
                remedy="Give it a default, or bind it with functools.partial.",
            )
    return tuple(each.name for each in rest if each.name in OPTIONAL)


def _block(entry: Any, shape: Shape, *, is_last: bool) -> Layer:
    """Return the layer of one entry of the list."""
    name, *parts = entry
    if (
        len(parts) == 1
        and not isinstance(parts[0], type)
        and all(hasattr(parts[0], method) for method in ("shape", "init", "apply", "cost"))
    ):
        return parts[0]
    try:
        return make_own_block(name, _functions(parts), shape, logits=is_last)
    except ConfigError as error:
        problem = error.problem if name in error.problem else f"Block {name}: {error.problem}"
        raise ConfigError(problem, rule=error.rule, remedy=error.remedy) from error


def _functions(parts: list[Any]) -> MakeFunctions:
    if len(parts) == 2 and all(map(callable, parts)):
        return triple(*parts)
    if len(parts) == 1 and _is_flax(parts[0]):
        from headrace.model.own_flax import flax_functions

        return flax_functions(parts[0])
    if len(parts) == 1 and callable(parts[0]) and "rngs" in _parameter_names(parts[0]):
        from headrace.model.own_flax import nnx_functions

        return nnx_functions(parts[0])
    if len(parts) == 1 and callable(parts[0]) and not isinstance(parts[0], type):
        function = parts[0]
        return triple(lambda rng, shape: {}, lambda params, x: function(x))
    found = parts[0] if len(parts) == 1 else parts
    told = f"the class {found.__name__}" if isinstance(found, type) else f"{type(found).__name__}"
    raise ConfigError(f"It is {told}.", rule=_ENTRY, remedy="Make it: write its brackets." * isinstance(found, type))


def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    while isinstance(function, partial):
        function = function.func
    function = function.__init__ if isinstance(function, type) else function  # NNX classes hide their parameters
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _is_flax(part: Any) -> bool:
    """Say whether something is a Flax module, without importing Flax for it."""
    homes = [cls.__module__.partition(".")[0] for cls in type(part).__mro__]
    return "flax" in homes and callable(part) and not isinstance(part, type)


def _check_names(blocks: Sequence[Any], network: str) -> None:
    if not _NAME.fullmatch(network):
        raise ConfigError(f"A network cannot be named {network!r}.", rule="Names are letters, digits, _, - and dots.")
    if isinstance(blocks, str | bytes) or not isinstance(blocks, Sequence) or not blocks:
        raise ConfigError(f"A network is a list of blocks, not {blocks!r:.60}.", rule=_ENTRY)
    seen: set[str] = set()
    for number, entry in enumerate(blocks):
        if not isinstance(entry, tuple | list) or len(entry) not in (2, 3) or not isinstance(entry[0], str):
            raise ConfigError(f"Block {number} is {entry!r:.80}.", rule=_ENTRY)
        if not _NAME.fullmatch(entry[0]):
            raise ConfigError(
                f"A block cannot be named {entry[0]!r}.",
                rule="Names are letters, digits, _, - and dots: they are keys.",
            )
        if entry[0] in seen:
            raise ConfigError(f"Two blocks are named {entry[0]}.", rule="A block's name is its own.")
        seen.add(entry[0])


def _image_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    numbers = tuple(shape) if isinstance(shape, Sequence) else ()
    if len(numbers) != 3 or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in numbers):
        raise ConfigError(
            f"input_shape is {shape!r}.", rule="It is one image's height, width and channels, such as (32, 32, 3)."
        )
    return numbers[0], numbers[1], numbers[2]


def _told(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "a single number"
