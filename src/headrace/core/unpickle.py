"""Read the pickles of the Python CIFAR batches without running anything that is in them.

A pickle is a program. This reader knows only the few names that uint8 arrays need, and even those stand for plain
recorders of our own: neither NumPy's unpickling code nor anything else is ever called. Any other name is refused.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np


class RefusedPickle(ValueError):
    """The pickle asks for something that no data set needs."""


class _Dtype:
    """Recorder of a dtype's letters."""

    def __init__(self, code: Any = b"", *_flags: Any) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else str(code)

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and alignment: one-byte numbers have none."""


class _Array:
    """Recorder of an array's state: (version, shape, dtype, is Fortran order, bytes)."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.state = tuple(state)

    def to_numpy(self) -> np.ndarray:
        """Return the array; only whole uint8 arrays are known."""
        if len(self.state) != 5:
            raise RefusedPickle("an array without its five values")
        _, shape, dtype, fortran, data = self.state
        if not isinstance(dtype, _Dtype) or dtype.code not in ("u1", "|u1") or not isinstance(data, bytes):
            raise RefusedPickle("an array that does not hold bytes (uint8)")
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise RefusedPickle(f"an array of shape {shape!r}")
        return np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


def _reconstruct(_kind: Any, _shape: Any, _typecode: Any) -> _Array:
    return _Array()


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any = "C") -> _Array:
    """Stand for the function through which protocol 5 hands over an array."""
    array = _Array()
    array.state = (1, shape, dtype, order == "F", bytes(data) if isinstance(data, bytes | bytearray) else None)
    return array


def _latin1(text: Any, encoding: Any = "latin1") -> bytes:
    """Stand for `_codecs.encode`, with which Python 3 writes bytes in protocol 2."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise RefusedPickle("an encoding other than latin1")
    return text.encode("latin1")


# Both spellings of NumPy's module: before 2.0 and since.
_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _latin1,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise RefusedPickle(f"it asks for {module_name}.{global_name}, which no data set needs") from None

    def persistent_load(self, pid: Any) -> Any:
        raise RefusedPickle("it asks for an outside object")


def read_pickle(data: bytes) -> Any:
    """Return the dicts, lists, tuples, bytes, texts, numbers and uint8 arrays of a pickle.

    Keys that were bytes become text. Whatever is wrong with the pickle is a ValueError with the reason.
    """
    try:
        value = _Reader(io.BytesIO(data), encoding="bytes").load()
        return _plain(value)
    except RefusedPickle:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"not a whole pickle ({type(error).__name__}: {error})") from error


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        return value.to_numpy()
    if isinstance(value, dict):
        return {_text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    if value is None or isinstance(value, bytes | str | int | float):
        return value
    raise RefusedPickle(f"a value of type {type(value).__name__}")


def _text(key: Any) -> Any:
    return key.decode("latin1") if isinstance(key, bytes) else key
