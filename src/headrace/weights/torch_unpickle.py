"""Read the pickle inside a torch file without torch, and without running anything that is in it.

A pickle is a program. This reader knows only the names that tensors and plain containers need, and each of them stands
for a recorder of our own: nothing outside this file is ever called. Any other name is refused.
"""

import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
}
_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}


class RefusedPickle(ValueError):
    """The pickle asks for something that no file of weights needs."""


@dataclass(frozen=True)
class DtypeName:
    """Stand for torch.float32 and its like, and for the storage classes."""

    name: str
    untyped: bool = False

    @property
    def dtype(self) -> np.dtype:
        """Return NumPy's dtype, little-endian."""
        return _DTYPES[self.name]


@dataclass(frozen=True)
class Storage:
    """Stand for a storage: where its bytes are (`key`), how many elements it has, of which type."""

    key: str
    num_elements: int
    kind: DtypeName

    @property
    def num_bytes(self) -> int:
        """Return the size of the storage."""
        return self.num_elements * self.kind.dtype.itemsize


@dataclass(frozen=True)
class Tensor:
    """Stand for a tensor: a window on a storage, in elements."""

    storage: Storage
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, data: bytes) -> np.ndarray:
        """Return the array, from the bytes of the storage."""
        flat = np.frombuffer(data, np.uint8)
        whole = flat[: len(data) // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        count = math.prod(self.shape)
        reach = self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        # A tensor larger than its storage repeats elements: no weight does, and a tiny file could ask for much memory.
        if count and (reach >= len(whole) or count > len(whole)):
            raise RefusedPickle(f"a tensor of shape {list(self.shape)} reaches beyond its {len(whole)} stored numbers")
        if not count:
            return np.zeros(self.shape, self.dtype)
        steps = tuple(stride * self.dtype.itemsize for stride in self.strides)
        window = np.lib.stride_tricks.as_strided(whole[self.offset :], self.shape, steps, writeable=False)
        return np.ascontiguousarray(window).reshape(self.shape)


class _Ordered(dict[Any, Any]):
    """Stand for OrderedDict. The attributes that torch hangs on it (`_metadata`) are dropped."""

    def __setstate__(self, state: Any) -> None:
        """Ignore the attributes."""


def _sizes(what: str, given: Any) -> tuple[int, ...]:
    if not isinstance(given, tuple) or not all(type(size) is int and size >= 0 for size in given):
        raise RefusedPickle(f"a tensor with {what} {given!r}")
    return given


def _rebuild(storage: Any, offset: Any, size: Any, stride: Any, *_rest: Any) -> Tensor:
    """Stand for torch._utils._rebuild_tensor and its second form."""
    if not isinstance(storage, Storage):
        raise RefusedPickle("a tensor without a storage")
    (offset,), shape, strides = _sizes("offset", (offset,)), _sizes("size", size), _sizes("stride", stride)
    if len(shape) != len(strides):
        raise RefusedPickle(f"a tensor with {len(shape)} sizes and {len(strides)} strides")
    return Tensor(storage, storage.kind.dtype, offset, shape, strides)


def _rebuild_typed(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Tensor:
    """Stand for the third form, which names the type of an untyped storage."""
    kind = next((each for each in rest if isinstance(each, DtypeName)), None)
    if not isinstance(storage, Storage) or kind is None:
        raise RefusedPickle("a tensor without a type")
    tensor = _rebuild(Storage(storage.key, storage.num_elements, kind), offset, size, stride)
    return Tensor(storage, kind.dtype, tensor.offset, tensor.shape, tensor.strides)


def _parameter(tensor: Any, *_rest: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise RefusedPickle("a parameter that is not a tensor")
    return tensor


def _size(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


_ALLOWED: dict[tuple[str, str], Callable[..., Any] | DtypeName | type] = {
    ("collections", "OrderedDict"): _Ordered,
    ("torch._utils", "_rebuild_tensor"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_typed,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch", "Size"): _size,
    ("torch.storage", "UntypedStorage"): DtypeName("uint8", untyped=True),
    **{("torch", name): DtypeName(dtype, untyped=name == "UntypedStorage") for name, dtype in _STORAGES.items()},
    **{("torch", name): DtypeName(name) for name in _DTYPES},
}


class _Reader(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="utf-8")
        self.storages: dict[str, Storage] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise RefusedPickle(f"it asks for {module_name}.{global_name}, which no weights need") from None

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ("storage", DtypeName() as kind, str() as key, str(), int() as num_elements, *rest):
                if num_elements < 0 or any(each is not None for each in rest):  # views on storages: files before 2018
                    raise RefusedPickle("a storage that is a view on another one")
                storage = Storage(key, num_elements, kind)
                return self.storages.setdefault(key, storage)
        raise RefusedPickle("it asks for an outside object that is not a storage")


def read_torch_pickle(data: bytes | BinaryIO) -> tuple[Any, dict[str, Storage]]:
    """Return the containers, texts and numbers of a pickle, with `Tensor` recorders in them, and the storages by key.

    From a stream one pickle is read. Whatever is wrong with it is a ValueError with the reason.
    """
    reader = _Reader(io.BytesIO(data) if isinstance(data, bytes) else data)
    try:
        return reader.load(), reader.storages
    except RefusedPickle:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"not a whole pickle ({type(error).__name__}: {error})") from error
