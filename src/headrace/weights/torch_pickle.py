"""What the pickle inside a torch file may contain: tensors on storages, and plain containers.

Each name of torch is replaced by a value or a function below; `core/unpickle.py` refuses all others.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from headrace.core.unpickle import PickleKind, RefusedPickle, dict_key, read_pickle, shorten

_MAX_DIMS = 32  # NumPy had no more before 2.0
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


@dataclass(frozen=True, slots=True)
class DtypeName:
    """Stands for torch.float32 and its like, and for the storage classes."""

    name: str

    @property
    def dtype(self) -> np.dtype:
        """Return NumPy's dtype, little-endian."""
        return _DTYPES[self.name]


@dataclass(frozen=True, slots=True)
class Storage:
    """Stands for a storage: where its bytes are (`key`), how many elements it has, of which type."""

    key: str
    num_elements: int
    kind: DtypeName

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.kind.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Tensor:
    """Stands for a tensor: a window on a storage, in elements."""

    storage: Storage
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, data: bytes) -> np.ndarray:
        """Return the tensor as a read-only view of its storage's bytes.

        All that `as_strided` trusts is checked here, whatever was checked when the tensor was made: a wrong number
        would read memory outside `data`.
        """
        offset, shape, strides = _checked(self.offset, self.shape, self.strides)
        whole = np.frombuffer(data, self.dtype, len(data) // self.dtype.itemsize)
        count = math.prod(shape)
        if not count:
            return np.zeros(shape, self.dtype)
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        # A tensor larger than its storage repeats elements: no weight does, and a tiny file could ask for much memory.
        if last >= len(whole) or count > len(whole):
            raise RefusedPickle(f"a tensor of shape {shorten(shape)} reaches beyond its {len(whole)} stored numbers")
        steps = tuple(stride * self.dtype.itemsize for stride in strides)
        return np.lib.stride_tricks.as_strided(whole[offset:], shape, steps, writeable=False)


def _checked(offset: Any, shape: Any, strides: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return (offset, shape, strides) if they are whole numbers from 0, as many strides as sizes."""
    for what, given in (("offset", (offset,)), ("size", shape), ("stride", strides)):
        if not isinstance(given, tuple) or not all(type(size) is int and 0 <= size < 2**48 for size in given):
            raise RefusedPickle(f"a tensor with {what} {shorten(given)}")
    if len(shape) != len(strides) or len(shape) > _MAX_DIMS:
        raise RefusedPickle(f"a tensor with {len(shape)} sizes and {len(strides)} strides")
    return offset, shape, strides


def _rebuild(storage: object, offset: object, size: object, stride: object, *_rest: object) -> Tensor:
    """Stands for torch._utils._rebuild_tensor and its second form."""
    if not isinstance(storage, Storage):
        raise RefusedPickle("a tensor without a storage")
    return Tensor(storage, storage.kind.dtype, *_checked(offset, size, stride))


def _rebuild_typed(storage: object, offset: object, size: object, stride: object, *rest: object) -> Tensor:
    """Stands for the third form, which names the type of an untyped storage."""
    kind = next((each for each in rest if isinstance(each, DtypeName)), None)
    if not isinstance(storage, Storage) or kind is None:
        raise RefusedPickle("a tensor without a type")
    return Tensor(storage, kind.dtype, *_checked(offset, size, stride))


def _parameter(tensor: object, *_rest: object) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise RefusedPickle("a parameter that is not a tensor")
    return tensor


def _size(values: object = ()) -> tuple[Any, ...]:
    if not isinstance(values, tuple | list) or len(values) > _MAX_DIMS:
        raise RefusedPickle("a size that is not a short tuple")
    return tuple(values)


def _ordered_dict(pairs: object = ()) -> dict[Any, Any]:
    """Stands for OrderedDict, empty or with pairs."""
    if not isinstance(pairs, list | tuple) or any(
        not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs
    ):
        raise RefusedPickle("an OrderedDict that is not made of pairs")
    return {dict_key(key): value for key, value in pairs}


def _ignore_attributes(_dict: object, _state: object) -> None:
    """Drop the attributes (`_metadata`) that torch sets on an OrderedDict."""


_TORCH = PickleKind(
    content="weights",
    names={
        ("collections", "OrderedDict"): _ordered_dict,
        ("torch._utils", "_rebuild_tensor"): _rebuild,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
        ("torch._utils", "_rebuild_tensor_v3"): _rebuild_typed,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch", "Size"): _size,
        ("torch.storage", "UntypedStorage"): DtypeName("uint8"),
        **{("torch", name): DtypeName(dtype) for name, dtype in _STORAGES.items()},
        **{("torch", name): DtypeName(name) for name in _DTYPES},
    },
    objects=(DtypeName, Storage, Tensor),
    build={dict: _ignore_attributes},
    encoding="utf-8",
)


def read_torch_pickle(data: bytes, start: int = 0) -> tuple[Any, dict[str, Storage], int]:
    """Return (value, its storages by key, first byte after it) of the pickle at `start`.

    The value is made of containers, texts, numbers and `Tensor`s. Whatever is wrong is a ValueError with the reason.
    """
    storages: dict[str, Storage] = {}

    def load_storage(reference: object) -> Storage:
        match reference:
            case ("storage", DtypeName() as kind, str() as key, str(), int() as num_elements, *rest):
                if num_elements < 0 or any(each is not None for each in rest):  # views on storages: files before 2018
                    raise RefusedPickle("a storage that is a view on another one")
                storage = Storage(key, num_elements, kind)
                if storages.setdefault(key, storage) != storage:
                    raise RefusedPickle(f"storage {key[:40]} is described twice, differently")
                return storage
        raise RefusedPickle("it asks for an outside object that is not a storage")

    value, end = read_pickle(data, replace(_TORCH, load_persistent=load_storage), start)
    return value, storages, end
