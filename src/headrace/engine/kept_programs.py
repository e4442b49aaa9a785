"""Programs that a process keeps for its next run, which then neither traces nor compiles them again.

Tracing is Python, and no compilation cache saves it: a second `fit`, a resumed run or the next point of a sweep would
trace everything anew. JAX keeps what it has traced with the function that was jitted, so it is these functions that
are kept, by what they were made of. Specifications are compared by value, also through the functions in them: two of
these are equal if their code is, and all that they captured. That holds for functions of this package and of the
libraries below it; what a user wrote may depend on anything else, and is traced each time. `digest` turns such a value
into a name for files, by which other processes find the programs (`stored_programs.py`).
"""

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial, reduce
from threading import Lock
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from headrace.ops.tracing import is_portable

_Program = TypeVar("_Program")
_MOST = 32  # a pipeline has one for each stage; each holds compiled programs, which take memory of the devices
LIBRARIES = {"builtins", "functools", "headrace", "jax", "jaxlib", "ml_dtypes", "numpy", "optax"}
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
        _drop_oldest()
    return found


def keep_for(key: Hashable, found: Any) -> None:
    """Keep something for the next run of this process, among the last ones."""
    with _lock:
        _kept.pop(key, None)
        _kept[key] = found
        _drop_oldest()


def kept_for(key: Hashable) -> Any:
    """Return what was kept under a key; None if there is nothing."""
    with _lock:
        return _kept.get(key)


def _drop_oldest() -> None:
    if len(_kept) > _MOST:
        _kept.popitem(last=False)


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
    if isinstance(value, jax.ShapeDtypeStruct):
        return kind, value.shape, value.dtype, by_value(value.sharding), value.weak_type
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


def digest(key: Hashable) -> str:
    """Return a text for a key of `by_value` that is equal in all processes in which the key is."""
    found = hashlib.sha256()
    _feed(found.update, key)
    return found.hexdigest()


def _feed(write: Callable[[bytes], object], key: Any) -> None:
    """Write a key unambiguously: each part with its kind and its length."""
    if isinstance(key, tuple):
        write(b"(%d:" % len(key))
        for part in key:
            _feed(write, part)
        return
    data = key if isinstance(key, bytes) else _text(key).encode()
    write(f"{type(key).__qualname__} {len(data)}:".encode() + data)


def _text(key: Any) -> str:
    """Return a text for what is not made of parts, which names the same thing in another process."""
    if key is None or isinstance(key, str | bool | int):
        return str(key)
    if isinstance(key, CodeType):
        # Where it stands in its file. The file is in the digest too: as source of this package, or as a version.
        return f"{key.co_qualname} {key.co_firstlineno} {list(key.co_positions())}"
    if isinstance(key, np.dtype | jax.sharding.PartitionSpec | jax.tree_util.PyTreeDef):
        return repr(key)
    if isinstance(key, Enum):
        return f"{_text(type(key))}.{key.name}"
    if isinstance(key, Mesh):
        devices = [(device.id, device.device_kind) for device in key.devices.flat]
        return f"{key.axis_names} {key.axis_types} {key.devices.shape} {devices}"
    if isinstance(key, NamedSharding):
        return f"{_text(key.mesh)} {key.spec!r} {key.memory_kind}"
    if isinstance(key, SingleDeviceSharding):
        return f"{[(device.id, device.device_kind) for device in key.device_set]} {key.memory_kind}"
    if isinstance(key, _NAMED):
        module, name = key.__module__ or "", getattr(key, "__qualname__", "")
        # A class or function that another function makes is another one each time.
        found = reduce(lambda place, part: getattr(place, part, None), name.split("."), sys.modules.get(module))
        if found is key or (isinstance(key, type) and "<" not in name):
            return f"{module}.{name}"
    raise NoValueError(f"{type(key).__qualname__} has no name in another process")


def _is_known(thing: Any) -> bool:
    """Tell whether a class or function is one of this package or of a library below it."""
    return (thing.__module__ or "").partition(".")[0] in LIBRARIES
