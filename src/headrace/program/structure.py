"""The structure of values (tree, shapes, types): compare and describe it, and check arguments against functions."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from headrace.core.errors import ConfigError
from headrace.core.tree import PyTree, flatten_named

# Of iterations and micro batches, which programs count in int32.
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class Leaf:
    """The shape and type of one array."""

    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        name = getattr(self.dtype, "name", str(self.dtype))
        return f"{name}[{', '.join(map(str, self.shape))}]"

    @property
    def nbytes(self) -> int:
        """The bytes of the array; of a random key, those of its four integers."""
        return int(np.prod(self.shape, dtype=np.int64)) * getattr(self.dtype, "itemsize", 16)


@dataclass(frozen=True)
class Structure:
    """A tree of leaves; hashable, so that programs can be cached by it."""

    treedef: Any
    leaves: tuple[Leaf, ...]

    def __str__(self) -> str:
        named = flatten_named(jax.tree.unflatten(self.treedef, self.leaves))
        return ", ".join(f"{name}: {leaf}" if name else str(leaf) for name, leaf in named.items()) or "nothing"

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def shapes(self, *lead: int) -> PyTree:
        """Return the tree as shapes for tracing, with these leading dims."""
        return jax.tree.unflatten(
            self.treedef, [jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype) for leaf in self.leaves]
        )


def structure_of(tree: PyTree) -> Structure:
    """Return the structure of a tree of arrays (or of tracers, or of shapes)."""
    leaves, treedef = jax.tree.flatten(tree)
    return Structure(treedef, tuple(Leaf(tuple(np.shape(leaf)), leaf.dtype) for leaf in leaves))


def difference(wanted: Structure, found: Structure) -> str:
    """Describe the first difference between two structures, '' if there is none."""
    if wanted.treedef != found.treedef:
        return f"is ({found}) instead of ({wanted})"
    names = flatten_named(jax.tree.unflatten(wanted.treedef, wanted.leaves))
    for (name, leaf), other in zip(names.items(), found.leaves, strict=True):
        if leaf != other:
            return f"{name + ' ' if name else ''}is {other} instead of {leaf}"
    return ""


def host_arrays(tree: PyTree) -> PyTree:
    """Return the tree with NumPy arrays, in the types that the device will have (float64 becomes float32)."""
    return jax.tree.map(_host_array, tree)


def _host_array(value: object) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind in "OSUMm":  # objects, text, dates; bfloat16 is of kind V
        raise ConfigError(
            f"A value of type {type(value).__name__} is not an array of numbers.",
            remedy="Give NumPy arrays, numbers, or trees of them.",
        )
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def element_arguments(element: PyTree) -> tuple[tuple[PyTree, ...], dict[str, Any]]:
    """Return the arguments for an infeed's element: a dict by keyword, a sequence in order, else one argument."""
    if isinstance(element, Mapping) and all(isinstance(key, str) for key in element):
        return (), dict(element)
    if isinstance(element, Sequence):
        return tuple(element), {}
    return (element,), {}


def can_take(function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether the function accepts these arguments; True if its signature is not available."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def describe_call(args: tuple[object, ...], kwargs: dict[str, Any]) -> str:
    """Describe the number and names of arguments."""
    count = f"{len(args)} argument{'s' * (len(args) != 1)}"
    return f"{count} and the names {', '.join(kwargs)}" if kwargs else count


def name_of(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def as_list(given: object, what: str, rule: str) -> tuple[PyTree, ...]:
    """Return a list of values as a tuple, nothing for None; refuse a single value, which would be taken apart."""
    if given is None:
        return ()
    # A named tuple is one value: a network's parameters, say, or an optimizer's state.
    if not isinstance(given, list | tuple) or hasattr(given, "_fields"):
        raise ConfigError(
            f"{what} are of type {type(given).__name__}.", rule=rule, remedy="Write [inputs] for a single one."
        )
    return tuple(given)


def whole_number(value: object, name: str, lowest: int, highest: int | None = None) -> int:
    """Return the value as an int, refuse anything but a whole number in the range."""
    limits = f"{lowest} to {highest:,}" if highest is not None else f"{lowest} or more"
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigError(f"{name} is {value!r}.", rule=f"It is a whole number, {limits}.")
    if value < lowest or (highest is not None and value > highest):
        raise ConfigError(f"{name} is {value}.", rule=f"It is {limits}.")
    return int(value)


def read_replicas(value: object) -> int:
    """Return a number of replicas, 0 for "auto"; refuse anything else."""
    if value == "auto":
        return 0
    try:
        return whole_number(value, "replicas", 1)
    except ConfigError as error:
        raise ConfigError(error.problem, rule=error.rule, remedy='"auto" takes all devices.') from None


def one_of(value: object, name: str, choices: Sequence[str]) -> str:
    """Return the choice that `value` names, ignoring case; refuse others."""
    known = {choice.lower(): choice for choice in choices}
    if not isinstance(value, str) or value.lower() not in known:
        raise ConfigError(f"{name} is {value!r}.", rule=f"It is one of {', '.join(choices)}.")
    return known[value.lower()]
