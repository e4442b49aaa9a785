"""Write a state dict as a `.pth` file in torch's zip format, without torch.

Its pickle is put together from opcodes: an OrderedDict of names to `_rebuild_tensor_v2(storage, 0, size, stride)`.
"""

import io
import math
import pickle
import zipfile

import numpy as np

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
