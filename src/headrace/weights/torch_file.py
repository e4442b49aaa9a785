"""Read and write `.pth` files without torch: zip files of torch 1.6 and later, and (reading alone) those before.

Zip: `NAME/data.pkl` holds the containers, `NAME/data/KEY` the bytes of each storage. Before: five pickles in a row
(magic number, version, system, containers, list of storage keys), then for each key the number of elements (8 bytes)
and the bytes.
"""

import io
import math
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np

from headrace.core.errors import CheckpointError
from headrace.core.files import entries_of
from headrace.core.unpickle import RefusedPickle
from headrace.weights.torch_pickle import Tensor, read_torch_pickle

# Of the older format: PyTorch's magic number and protocol version.
MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
# A bit in the flags of a zip entry.
_ENCRYPTED = 0x1
_MAX_REUSE = 4  # times that tied weights may use the stored bytes: each use later becomes a separate array
# What zipfile raises for damaged archives, beside ValueError and OSError.
_ZIP_ERRORS = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, struct.error, OverflowError)
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
    """Return the state dict of a torch file as NumPy arrays; with `ema` the averaged weights stored beside it.

    The file is read once; tensors that share a storage share its memory.
    """
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
    except (*_ZIP_ERRORS, ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a torch file: {error}.",
            remedy="Download it again: it may be truncated. " + _SAVE_AGAIN,
        ) from error


def _read_zip(path: Path, ema: bool) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        entries = _entries(archive, path.stat().st_size)
        main = next((name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1), None)
        if main is None:
            raise ValueError("the archive has no data.pkl")
        folder = main.removesuffix("data.pkl")
        if f"{folder}constants.pkl" in entries:
            raise RefusedPickle("it is a TorchScript program, not a file of weights")
        order = archive.read(f"{folder}byteorder") if f"{folder}byteorder" in entries else b"little"
        if order.strip() != b"little":
            raise ValueError("its numbers are big-endian")
        value, storages, _ = read_torch_pickle(archive.read(main))
        tensors = _state_dict(value, ema)
        contents: dict[str, bytes] = {}
        for key in {tensor.storage.key for tensor in tensors.values()}:
            info = entries.get(f"{folder}data/{key}")
            if info is None or info.file_size != storages[key].num_bytes:
                found = "is missing" if info is None else f"has {info.file_size} bytes, not {storages[key].num_bytes}"
                raise ValueError(f"storage {key[:40]} {found}")
            contents[key] = archive.read(info)
        return _arrays(tensors, contents)


def _entries(archive: zipfile.ZipFile, file_size: int) -> dict[str, zipfile.ZipInfo]:
    """Return the archive's entries by name, if they are stored as torch stores them."""
    infos = entries_of(archive)
    if any(info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size for info in infos):
        raise ValueError("the archive is compressed, which torch's files are not")
    if any(info.flag_bits & _ENCRYPTED for info in infos):
        raise ValueError("the archive is encrypted")
    if sum(info.file_size for info in infos) > file_size:  # entries that overlap would be read many times over
        raise ValueError("the archive's entries are larger than the file")
    return {info.filename: info for info in infos}


def _read_legacy(data: bytes, ema: bool) -> dict[str, np.ndarray]:
    magic, _, end = read_torch_pickle(data)
    version, _, end = read_torch_pickle(data, end)
    if magic != MAGIC or version != _VERSION:
        raise ValueError(f"its version is not {_VERSION}")
    system, _, end = read_torch_pickle(data, end)
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise ValueError("its numbers are big-endian")
    value, storages, end = read_torch_pickle(data, end)
    keys, _, end = read_torch_pickle(data, end)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or set(keys) != set(storages):
        raise ValueError("its list of storages does not match its tensors")
    contents: dict[str, bytes] = {}
    for key in keys:
        count, start = int.from_bytes(data[end : end + 8], "little", signed=True), end + 8
        end = start + storages[key].num_bytes
        if count != storages[key].num_elements or end > len(data):
            raise ValueError(f"storage {key[:40]} is truncated (byte {start:,})")
        contents[key] = data[start:end]
    return _arrays(_state_dict(value, ema), contents)


def _arrays(tensors: dict[str, Tensor], contents: dict[str, bytes]) -> dict[str, np.ndarray]:
    arrays = {name: tensor.read(contents[tensor.storage.key]) for name, tensor in tensors.items()}
    stored, wanted = sum(map(len, contents.values())), sum(array.nbytes for array in arrays.values())
    if wanted > _MAX_REUSE * stored:
        raise RefusedPickle(f"its tensors are {wanted:,} bytes, made of {stored:,} stored ones")
    return arrays


def _state_dict(value: object, ema: bool) -> dict[str, Tensor]:
    """Return the mapping of names to tensors: the whole file, or the part under one of the usual names."""
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not a mapping of names to tensors")
    places = [value.get(key) for key in (_EMA_PLACES if ema else _PLACES)]
    for found in [*places, *([] if ema else [value])]:
        pairs = found.items() if isinstance(found, dict) else ()
        tensors = {str(name): each for name, each in pairs if isinstance(each, Tensor)}
        if tensors:
            return tensors
    wanted = f"averaged weights ({' or '.join(_EMA_PLACES)})" if ema else "tensors"
    top = ", ".join(str(key)[:40] for key in list(value)[:8])
    raise ValueError(f"it holds no {wanted}; its top level has: {top or 'nothing'}")


_STORAGES_BY_DTYPE = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "int64": "LongStorage",
}


def write_torch_file(arrays: dict[str, np.ndarray]) -> bytes:
    """Return the bytes of a file that `torch.load(..., weights_only=True)` reads as an OrderedDict of tensors."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:

        def add(name: str, data: bytes) -> None:
            # A fixed date, so that the same weights give the same bytes.
            archive.writestr(zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0)), data)

        add("data.pkl", _pickle(arrays))
        # As torch 2.1 and later write it; earlier ones ignore it.
        add("byteorder", b"little")
        for number, array in enumerate(arrays.values()):
            add(f"data/{number}", array.astype(array.dtype.newbyteorder("<")).tobytes())
        add("version", b"3\n")
    return file.getvalue()


def _pickle(arrays: dict[str, np.ndarray]) -> bytes:
    """Return an OrderedDict of names to `_rebuild_tensor_v2(storage, 0, size, stride)`, as opcodes.

    The pickle module would have to import torch to write these names.
    """
    new_dict = _global("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    items = b"".join(
        _text(name) + _tensor(number, array, new_dict) for number, (name, array) in enumerate(arrays.items())
    )
    return pickle.PROTO + b"\x02" + new_dict + pickle.MARK + items + pickle.SETITEMS + pickle.STOP


def _tensor(number: int, array: np.ndarray, new_dict: bytes) -> bytes:
    kind = _global("torch", _STORAGES_BY_DTYPE[array.dtype.name])
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
