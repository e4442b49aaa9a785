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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from headrace.core.errors import ConfigError
from headrace.core.rng import name_id
from headrace.core.tree import PyTree, flatten_named, unflatten_named
from headrace.model.context import start_key
from headrace.model.custom_block import Functions, make_custom_block
from headrace.model.layers import Layer, Named, Shape
from headrace.model.network import Network

OPTIONAL = ("stats", "train", "rng")  # arguments that an `apply` may request in addition to params and x
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_ENTRY = (
    "A block is (name, init, apply), (name, function of x), (name, module of Flax or Equinox) or (name, layer of "
    "Headrace)."
)
MakeFunctions = Callable[[Shape], Functions]  # from the shape of one input image


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


# Flax modules as blocks

# arguments of a module's __call__ that select training -> their value in training
FLAGS = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}
_INSTALL = "Install it: pip install 'headrace[{}]'."
Momentums = Mapping[tuple[Any, ...], float]  # by path of the batch norm in the block


def flax_functions(module: object) -> MakeFunctions:
    """Return the functions of a Linen or NNX module."""
    linen, nnx = _flax()
    if isinstance(module, linen.Module):
        return _linen_functions(module)
    if isinstance(module, nnx.Module):
        return nnx_functions(module)
    raise ConfigError(
        f"{type(module).__name__} comes from Flax but is not a module.",
        rule="A block is a flax.linen.Module or a flax.nnx.Module.",
    )


def nnx_functions(made: Any) -> MakeFunctions:
    """Return the functions of an NNX module, with its existing weights, or of `made(rngs)`, with new ones."""
    _, nnx = _flax()
    is_module = isinstance(made, nnx.Module)
    module = made if is_module else nnx.eval_shape(lambda: made(rngs=nnx.Rngs(start_key(0))))
    if not isinstance(module, nnx.Module):
        raise ConfigError("The function of rngs does not return an NNX module.")
    kinds = (nnx.Param, nnx.BatchStat, nnx.RngState)
    graph, *likes, rest = nnx.split(module, *kinds, ...)
    if jax.tree.leaves(rest):
        raise _other_state(sorted({type(leaf).__name__ for _, leaf in nnx.iter_graph(rest)} & _variable_names(nnx)))
    batch_norms = ((path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.BatchNorm))
    momentums = {path: float(node.momentum) for path, node in batch_norms}
    _check_stats_owner(nnx.to_pure_dict(likes[1]), momentums)
    forms = [jax.tree.structure(like) for like in likes]
    rng_shapes = [(path, leaf.shape, leaf.dtype) for path, leaf in jax.tree_util.tree_flatten_with_path(likes[2])[0]]
    asked = _parameters(type(module).__call__)

    def begin(key: jax.Array) -> tuple[PyTree, PyTree]:
        fresh = module if is_module else made(rngs=nnx.Rngs(key))
        _, params, stats, _ = nnx.split(fresh, nnx.Param, nnx.BatchStat, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(stats)

    def call(params: PyTree, stats: PyTree, x: PyTree, train: bool, rng: jax.Array) -> tuple[PyTree, PyTree]:
        assert not (train and rng_shapes and rng is None), "training draws random numbers: Ctx(draws=...)"
        base = start_key(0) if rng is None else rng
        keys = [_rng_leaf(base, *leaf) for leaf in rng_shapes]
        # JAX arrays: given NumPy arrays, a module would overwrite the statistics in place
        leaves = (*(list(map(jnp.asarray, jax.tree.leaves(tree))) for tree in (params, stats)), keys)
        local = nnx.merge(graph, *(jax.tree.unflatten(form, leaf) for form, leaf in zip(forms, leaves, strict=True)))
        local.train() if train else local.eval()
        kwargs = _flags(asked, train)
        if "rngs" in asked and train and rng is not None:
            kwargs["rngs"] = nnx.Rngs(jax.random.fold_in(rng, name_id("rngs")))
        y = local(x, **kwargs)
        return y, _of_batch(nnx.to_pure_dict(nnx.state(local, nnx.BatchStat)), stats, momentums)

    values = frozenset(momentums.values())
    return lambda shape: Functions(begin=begin, call=call, momentums=values, is_ready=is_module)


def _linen_functions(module: Any) -> MakeFunctions:
    linen, _ = _flax()
    asked = _parameters(type(module).__call__)

    def make(shape: Shape) -> Functions:
        momentums: dict[tuple[Any, ...], float] = {}

        def note_momentum(next_call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            if isinstance(context.module, linen.BatchNorm) and context.method_name == "__call__":
                momentums[tuple(context.module.path)] = float(context.module.momentum)
            return next_call(*args, **kwargs)

        def variables(key: jax.Array) -> dict[str, Any]:
            return dict(module.init({"params": key}, jnp.zeros((1, *shape)), **_flags(asked, False)))

        with linen.intercept_methods(note_momentum):
            like = jax.eval_shape(lambda number: variables(start_key(number)), np.uint32(0))
        if others := [name for name in like if name not in ("params", "batch_stats")]:
            raise _other_state(others)
        _check_stats_owner(like.get("batch_stats", {}), momentums)

        def begin(key: jax.Array) -> tuple[PyTree, PyTree]:
            made = variables(key)
            return made.get("params", {}), made.get("batch_stats", {})

        def call(params: PyTree, stats: PyTree, x: PyTree, train: bool, rng: jax.Array) -> tuple[PyTree, PyTree]:
            rngs = None if rng is None else {"dropout": rng, "params": jax.random.fold_in(rng, name_id("params"))}
            given = {"params": params} | ({"batch_stats": stats} if stats else {})
            y, changed = module.apply(given, x, **_flags(asked, train), rngs=rngs, mutable=["batch_stats"])
            return y, _of_batch(changed.get("batch_stats", {}), stats, momentums)

        return Functions(begin=begin, call=call, momentums=frozenset(momentums.values()))

    return make


def _flax() -> tuple[Any, Any]:
    """Import Flax, or explain how to install it."""
    try:
        from flax import linen, nnx
    except ImportError as error:
        raise ConfigError(
            "A block is a Flax module, but Flax is not installed.", remedy=_INSTALL.format("flax")
        ) from error
    return linen, nnx


def _of_batch(moved: PyTree, running: PyTree, momentums: Momentums) -> PyTree:
    """Recover the statistics of the batch from updated ones: moved = m * running + (1 - m) * batch."""

    def recover(path: KeyPath, new: jax.Array, old: jax.Array) -> jax.Array:
        m = momentums[_keys(path)[:-1]]
        return old if m == 1 else (new.astype(jnp.float32) - m * old) / (1 - m)

    return jax.tree_util.tree_map_with_path(recover, moved, running)


def _check_stats_owner(stats: PyTree, momentums: Momentums) -> None:
    """Raise ConfigError for statistics that do not belong to a Flax BatchNorm: their update rule is unknown."""
    for path, _ in jax.tree_util.tree_flatten_with_path(stats)[0]:
        if _keys(path)[:-1] not in momentums:
            raise ConfigError(
                f"batch_stats {'/'.join(map(str, _keys(path)))} does not belong to a Flax BatchNorm.",
                rule="Headrace must know how statistics are updated, to average them over micro batches and replicas.",
                remedy="Use Flax's BatchNorm, or write the block as (name, init, apply) with stats.",
            )


def _variable_names(nnx: Any) -> set[str]:
    return {
        name
        for name in dir(nnx)
        if isinstance(getattr(nnx, name), type) and issubclass(getattr(nnx, name), nnx.Variable)
    }


def _other_state(names: list[str]) -> ConfigError:
    return ConfigError(
        f"A module keeps variables that are neither weights nor batch statistics: {', '.join(names) or 'unnamed'}.",
        rule="The state of a block consists of its params and the running statistics of its batch norms.",
        remedy="Keep such values out of the network, or make them parameters.",
    )


def _rng_leaf(base: jax.Array, path: KeyPath, shape: Shape, dtype: np.dtype) -> jax.Array:
    """Return the value of one leaf of NNX's random state: a distinct key, or a count that starts at 0."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape, dtype)
    key = jax.random.fold_in(base, name_id(jax.tree_util.keystr(path)))
    return jax.random.split(key, shape) if shape else key


def _parameters(call: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(call).parameters)


def _flags(asked: tuple[str, ...], train: bool) -> dict[str, Any]:
    return {name: value if train else not value for name, value in FLAGS.items() if name in asked}


def _keys(path: Iterable[Any]) -> tuple[Any, ...]:
    """Return the plain keys of a path through dicts."""
    return tuple(key.key for key in path)


# Equinox modules as blocks


def equinox_functions(made: Any) -> MakeFunctions:
    """Return the functions of an Equinox module, with its existing weights, or of `made(key=...)`, with new ones.

    An Equinox module computes one image, so it is mapped over the batch. `key` of its __call__ is the image's own.
    """
    eqx = _equinox()
    is_module = isinstance(made, eqx.Module)
    module = made if is_module else eqx.filter_eval_shape(lambda: made(key=start_key(0)))
    if not isinstance(module, eqx.Module):
        raise ConfigError("The function of key does not return an Equinox module.")
    is_state = lambda node: isinstance(node, eqx.nn.StateIndex)  # noqa: E731
    if any(map(is_state, jax.tree.leaves(module, is_leaf=is_state))):
        raise ConfigError(
            f"{type(module).__name__} holds a layer with state, such as eqx.nn.BatchNorm.",
            rule="Headrace must know how statistics are updated, to average them over micro batches and replicas.",
            remedy="Use eqx.nn.GroupNorm, or write the block as (name, init, apply) with stats.",
        )
    like, rest = eqx.partition(module, _is_weight)
    if others := [name for name, leaf in flatten_named(rest).items() if _is_array(leaf)]:
        raise _other_state(others)
    takes_key = "key" in _parameters(type(module).__call__)

    def begin(key: jax.Array) -> tuple[PyTree, PyTree]:
        fresh = module if is_module else made(key=key)
        return flatten_named(eqx.filter(fresh, _is_weight)), {}

    def call(params: PyTree, stats: PyTree, x: PyTree, train: bool, rng: jax.Array) -> tuple[PyTree, PyTree]:
        local: Any = eqx.nn.inference_mode(eqx.combine(unflatten_named(like, params), rest), value=not train)
        if not takes_key:
            return jax.vmap(local)(x), stats
        if rng is None:
            return jax.vmap(lambda image: local(image, key=None))(x), stats
        keys = jax.vmap(start_key)(jax.random.bits(rng, (len(x),), jnp.uint32))  # drawn by sample; a split would not be
        return jax.vmap(lambda image, key: local(image, key=key))(x, keys), stats

    return lambda shape: Functions(begin=begin, call=call, is_ready=is_module)


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _is_weight(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _equinox() -> Any:
    """Import Equinox, or explain how to install it."""
    try:
        import equinox
    except ImportError as error:
        raise ConfigError(
            "A block is a function of key, so an Equinox module, but Equinox is not installed.",
            remedy=_INSTALL.format("equinox"),
        ) from error
    return equinox
