"""Programs that a process keeps for its next run, which then neither traces nor compiles them again.

Tracing is Python, and no compilation cache saves it: a second `fit`, a resumed run or the next point of a sweep would
trace everything anew. JAX keeps what it has traced with the function that was jitted, so it is these functions that
are kept, by what they were made of. Specifications are compared by value, also through the functions in them: two of
these are equal if their code is, and all that they captured. That holds for functions of this package and of the
libraries below it; what a user wrote may depend on anything else, and is traced each time.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from threading import Lock
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

import jax
import numpy as np

from headrace.ops.tracing import is_portable

_Program = TypeVar("_Program")
_MOST = 32  # a pipeline has one for each stage; each holds compiled programs, which take memory of the devices
_LIBRARIES = {"builtins", "functools", "headrace", "jax", "jaxlib", "ml_dtypes", "numpy", "optax"}
_BY_THEMSELVES = (np.dtype, Enum, jax.sharding.Mesh, jax.sharding.Sharding, jax.sharding.PartitionSpec)
_BY_THEMSELVES += (jax.tree_util.PyTreeDef,)
_NAMED = (type, BuiltinFunctionType, jax.stages.Wrapped)

_kept: OrderedDict[Hashable, Any] = OrderedDict()
_lock = Lock()


class NoValueError(Exception):
    """Something cannot be compared by value."""


def kept(make: Callable[..., _Program], *given: Any) -> _Program:
    """Return `make(*given)`, or what an earlier call with equal values returned."""
    try:
        key = by_value((make, given, is_portable()))
    except (NoValueError, ValueError, RecursionError):  # the latter two: a function that captured itself
        return make(*given)
    with _lock:
        _kept[key] = found = _kept.pop(key, None) or make(*given)
        if len(_kept) > _MOST:
            _kept.popitem(last=False)
    return found


def by_value(value: Any) -> Hashable:
    """Return a key that two values share only if a program made from one also serves for the other."""
    kind = type(value)
    if value is None or kind in (str, bytes, bool, int):
        return kind, value
    if isinstance(value, float | np.generic):
        return kind, repr(value)  # unlike ==, it tells 0.0 from -0.0, and NaN is itself
    if kind in (tuple, list) or (isinstance(value, tuple) and _is_known(kind)):
        return kind, tuple(map(by_value, value))
    if isinstance(value, Mapping):
        return kind, tuple((by_value(name), by_value(item)) for name, item in value.items())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, partial):
        return kind, by_value(value.func), by_value(value.args), by_value(value.keywords)
    if isinstance(value, MethodType):
        return kind, by_value(value.__func__), by_value(value.__self__)
    if isinstance(value, _BY_THEMSELVES) or (isinstance(value, _NAMED) and _is_known(value)):
        return kind, value
    if isinstance(value, FunctionType) and _is_known(value):
        # The code alone is not enough: two lambdas in the same line of two files have equal code.
        names = value.__module__, value.__qualname__, value.__code__
        captured = tuple(cell.cell_contents for cell in value.__closure__ or ())
        return kind, names, by_value((captured, value.__defaults__, value.__kwdefaults__))
    if is_dataclass(value) and _is_known(kind):
        return kind, tuple(by_value(getattr(value, field.name)) for field in fields(value))
    raise NoValueError(f"{kind.__module__}.{kind.__qualname__}")


def _is_known(thing: Any) -> bool:
    """Tell whether a class or function is one of this package or of a library below it."""
    return (thing.__module__ or "").partition(".")[0] in _LIBRARIES
