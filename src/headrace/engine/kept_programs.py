"""Programs that a process keeps for its next run, which then neither traces nor compiles them again.

Tracing is Python, and no compilation cache saves it: a second `fit`, a resumed run or the next point of a sweep would
trace everything anew. JAX keeps what it has traced with the function that was jitted, so it is these functions that
are kept, by what they were made of: a specification, which is a value. `key` turns such a value into a text, which is
equal in all processes in which the value is; other processes find stored programs by it (`stored_programs.py`). What a
user wrote may depend on anything, has no key, and is traced each time.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import FunctionType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from headrace.core.session import session
from headrace.ops.tracing import target

_Program = TypeVar("_Program")


class NoKeyError(Exception):
    """Something is no value of this package."""


def kept(make: Callable[..., _Program], spec: Any, mesh: Mesh, *more: Any) -> _Program:
    """Return `make(spec, mesh, *more)`, or what an earlier call with equal values returned."""
    try:
        # With the devices themselves: a process may close its devices, and open others with the same numbers.
        known = key((make, spec, mesh, more, target())), tuple(mesh.devices.flat)
    except NoKeyError:
        return make(spec, mesh, *more)
    return session().programs.take_or_make(known, lambda: make(spec, mesh, *more))


def key(value: Any) -> str:
    """Return a text that two values share only if a program made from one also serves for the other.

    Functions are those of this package's files, by their names: the source is part of a program's name, too.
    """
    kind = type(value)
    if value is None or kind in (str, bytes, bool, int, float) or isinstance(value, np.generic):
        return f"{kind.__name__}:{value!r}"  # unlike ==, this tells 0.0 from -0.0, and NaN is itself
    if kind in (tuple, list):
        return f"{kind.__name__}({','.join(map(key, value))})"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key(name)}={key(item)}" for name, item in value.items()) + "}"
    if isinstance(value, Enum) and _is_ours(kind):
        return f"{_name(kind)}.{value.name}"
    if is_dataclass(value) and _is_ours(kind):
        return f"{_name(kind)}({','.join(key(getattr(value, field.name)) for field in fields(value))})"
    if isinstance(value, FunctionType) and _is_ours(value):
        if getattr(sys.modules.get(value.__module__), value.__name__, None) is not value:
            raise NoKeyError(f"{_name(value)} is not the function of this name in its file")
        return _name(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"array:{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return f"dtype:{np.dtype(value)}"
    return _jax_key(value)


def _jax_key(value: Any) -> str:
    """Return the key of one of JAX's values."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"shape:{value.shape}{value.dtype}{value.weak_type}{key(value.sharding)}"
    if isinstance(value, PartitionSpec | jax.tree_util.PyTreeDef):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, Mesh):
        devices = [(device.id, device.device_kind) for device in value.devices.flat]
        return f"mesh:{value.axis_names}{value.axis_types}{value.devices.shape}{devices}"
    if isinstance(value, NamedSharding):
        return f"sharding:{key(value.mesh)}{value.spec!r}{value.memory_kind}"
    if isinstance(value, SingleDeviceSharding):
        return f"sharding:{[(device.id, device.device_kind) for device in value.device_set]}{value.memory_kind}"
    raise NoKeyError(f"{type(value).__module__}.{type(value).__qualname__}: {value!r:.80}")


def _is_ours(thing: Any) -> bool:
    return (thing.__module__ or "").partition(".")[0] == "headrace" and "<" not in thing.__qualname__


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
