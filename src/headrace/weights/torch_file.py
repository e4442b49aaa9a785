"""Read `.pth` and `.pt` files: the zip format of torch 1.6 and later, and the one before. Torch is not needed.

Zip: `NAME/data.pkl` holds the containers, `NAME/data/KEY` the bytes of each storage.
Before: five pickles in a row (magic number, version, system, containers, list of storage keys), then for each key the
number of elements (8 bytes) and the bytes.

Its pickle is put together from opcodes: an OrderedDict of names to `_rebuild_tensor_v2(storage, 0, size, stride)`.
"""

import io
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import CheckpointError
from headrace.weights.torch_unpickle import RefusedPickle, Storage, Tensor, read_torch_pickle

MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_PLACES = ("state_dict", "model", "model_state_dict", "net")  # where training programs put the weights
_EMA_PLACES = ("state_dict_ema", "model_ema")
_SAVE_AGAIN = "Save the weights alone: torch.save(model.state_dict(), FILE), or as .safetensors."


def is_torch_zip(head: bytes) -> bool:
    """Say whether a file starts as a zip archive does."""
    return head.startswith(b"PK\x03\x04")


def is_torch_legacy(head: bytes) -> bool:
    """Say whether a file starts with the pickled magic number of the older format."""
    return head[2:14] == b"\x8a\x0a" + MAGIC.to_bytes(10, "little")


def read_torch_file(path: Path, ema: bool = False) -> dict[str, np.ndarray]:
    """Return the state dict of a torch file as NumPy arrays; with `ema` the averaged one that lies beside it."""
    try:
        with path.open("rb") as file:
            head = file.read(16)
            if is_torch_zip(head):
                return _read_zip(path, ema)
            if not is_torch_legacy(head):
                raise ValueError("it is neither a zip archive nor a pickle with torch's magic number")
            return _read_legacy(path.read_bytes(), ema)
    except RefusedPickle as error:
        raise CheckpointError(
            f"{path} is refused: {error}.",
            rule="A file of weights holds tensors and plain containers; nothing else in it is run or read.",
            remedy=_SAVE_AGAIN,
        ) from error
    except (ValueError, KeyError, zipfile.BadZipFile, EOFError, OSError, NotImplementedError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a torch file: {error}.",
            remedy="Fetch it again: it may be cut off. " + _SAVE_AGAIN,
        ) from error


def _read_zip(path: Path, ema: bool) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        main = next((name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1), None)
        if main is None:
            raise ValueError("the archive has no data.pkl")
        folder = main.removesuffix("data.pkl")
        if f"{folder}constants.pkl" in entries:
            raise RefusedPickle("it is a TorchScript program, not a file of weights")
        if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
            raise ValueError("the archive is compressed, which torch's files are not")
        order = archive.read(f"{folder}byteorder") if f"{folder}byteorder" in entries else b"little"
        if order.strip() != b"little":
            raise ValueError("its numbers are big-endian")

        def storage_bytes(storage: Storage) -> bytes:
            info = entries.get(f"{folder}data/{storage.key}")
            if info is None or info.file_size != storage.num_bytes:
                found = "is missing" if info is None else f"has {info.file_size} bytes, not {storage.num_bytes}"
                raise ValueError(f"storage {storage.key} {found}")
            return archive.read(info)

        tensors = _state_dict(read_torch_pickle(archive.read(main))[0], ema)
        return {name: tensor.read(storage_bytes(tensor.storage)) for name, tensor in tensors.items()}


def _read_legacy(data: bytes, ema: bool) -> dict[str, np.ndarray]:
    stream = io.BytesIO(data)
    if read_torch_pickle(stream)[0] != MAGIC or read_torch_pickle(stream)[0] != _VERSION:
        raise ValueError(f"its version is not {_VERSION}")
    system = read_torch_pickle(stream)[0]
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise ValueError("its numbers are big-endian")
    value, storages = read_torch_pickle(stream)
    keys = read_torch_pickle(stream)[0]
    if not isinstance(keys, list) or set(keys) != set(storages):
        raise ValueError("its list of storages is not that of its tensors")
    found: dict[str, bytes] = {}
    for key in keys:
        count = int.from_bytes(stream.read(8), "little", signed=True)
        found[key] = stream.read(storages[key].num_bytes)
        if count != storages[key].num_elements or len(found[key]) != storages[key].num_bytes:
            raise ValueError(f"storage {key} is cut off")
    return {name: tensor.read(found[tensor.storage.key]) for name, tensor in _state_dict(value, ema).items()}


def _state_dict(value: Any, ema: bool) -> dict[str, Tensor]:
    """Return the mapping of names to tensors: the whole file, or what lies under one of the usual names in it."""
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not a mapping of names to tensors")
    places = [value.get(key) for key in (_EMA_PLACES if ema else _PLACES)]
    for found in [*places, *([] if ema else [value])]:
        pairs = found.items() if isinstance(found, dict) else ()
        tensors = {str(name): each for name, each in pairs if isinstance(each, Tensor)}
        if tensors:
            return tensors
    wanted = f"averaged weights ({' or '.join(_EMA_PLACES)})" if ema else "tensors"
    top = ", ".join(str(key) for key in list(value)[:8])
    raise ValueError(f"it holds no {wanted}; at its top are: {top or 'nothing'}")


# Write a state dict as a `.pth` file in torch's zip format, without torch.


_STORAGES = {"float32": "FloatStorage", "float64": "DoubleStorage", "float16": "HalfStorage", "int64": "LongStorage"}


def write_torch_file(arrays: dict[str, np.ndarray]) -> bytes:
    """Return the bytes of a file that `torch.load(..., weights_only=True)` reads as an OrderedDict of tensors."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:

        def add(name: str, data: bytes) -> None:
            # A fixed date: the same weights are the same bytes.
            archive.writestr(zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0)), data)

        add("data.pkl", _pickle(arrays))
        add("byteorder", b"little")
        for number, array in enumerate(arrays.values()):
            add(f"data/{number}", array.astype(array.dtype.newbyteorder("<")).tobytes())
        add("version", b"3\n")
    return file.getvalue()


def _pickle(arrays: dict[str, np.ndarray]) -> bytes:
    new_dict = _global("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    items = b"".join(
        _text(name) + _tensor(number, array, new_dict) for number, (name, array) in enumerate(arrays.items())
    )
    return pickle.PROTO + b"\x02" + new_dict + pickle.MARK + items + pickle.SETITEMS + pickle.STOP


def _tensor(number: int, array: np.ndarray, new_dict: bytes) -> bytes:
    kind = _global("torch", _STORAGES[array.dtype.name])
    storage = _tuple(_text("storage"), kind, _text(str(number)), _text("cpu"), _int(array.size)) + pickle.BINPERSID
    shape = array.shape
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    sizes, steps = _tuple(*map(_int, shape)), _tuple(*map(_int, strides))
    arguments = _tuple(storage, _int(0), sizes, steps, pickle.NEWFALSE, new_dict)
    return _global("torch._utils", "_rebuild_tensor_v2") + arguments + pickle.REDUCE


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    data = text.encode()
    return pickle.BINUNICODE + len(data).to_bytes(4, "little") + data


def _int(value: int) -> bytes:
    if value < 1 << 31:
        return pickle.BININT + value.to_bytes(4, "little", signed=True)
    return pickle.LONG1 + b"\x08" + value.to_bytes(8, "little", signed=True)


def _tuple(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE
