"""Columns of numbers in one file, read as memory maps: an index of a hundred million samples takes no memory by itself.

magic | length of the head | CRC-32 of all that follows | head (JSON) | columns, each from a multiple of 64 bytes on
"""

import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.json_text import parse_json

_MAGIC = b"headrace columns 1\n"
_FIXED = struct.Struct("<QI")
_ALIGNED, _MAX_HEAD, _PIECE = 64, 1 << 26, 1 << 24


def write_columns(path: Path, columns: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
    """Write columns and facts (JSON) as a file, which gets its name when it is whole."""
    rows, place = {}, 0
    for name, column in columns.items():
        rows[name] = [column.dtype.str, list(column.shape), place]
        place += -(-column.nbytes // _ALIGNED) * _ALIGNED
    head = json.dumps({"columns": rows, "facts": facts}).encode()
    head += b" " * (-(len(_MAGIC) + _FIXED.size + len(head)) % _ALIGNED)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(_MAGIC + _FIXED.pack(len(head), 0) + head)
            crc = zlib.crc32(head)
            for column in columns.values():
                data = np.ascontiguousarray(column).reshape(-1).view(np.uint8)
                for part in (data, np.zeros(-len(data) % _ALIGNED, np.uint8)):
                    file.write(part.data)
                    crc = zlib.crc32(part.data, crc)
            file.seek(len(_MAGIC))
            file.write(_FIXED.pack(len(head), crc))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_columns(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the columns, as memory maps, and the facts of a file; anything damaged is a ValueError."""
    with path.open("rb") as file:
        begin = file.read(len(_MAGIC) + _FIXED.size)
        if len(begin) < len(_MAGIC) + _FIXED.size or begin[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it is no file of columns")
        length, crc = _FIXED.unpack(begin[len(_MAGIC) :])
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[len(begin) :]
    if length > min(len(view), _MAX_HEAD):
        raise ValueError("its head is cut short")
    found = 0
    for first in range(0, len(view), _PIECE):
        found = zlib.crc32(view[first : first + _PIECE], found)
    if found != crc:
        raise ValueError("its checksum is wrong")
    head, body = parse_json(bytes(view[:length])), view[length:]
    columns = {}
    for name, (kind, shape, place) in head["columns"].items():
        dtype = np.dtype(kind)
        end = place + math.prod(shape) * dtype.itemsize
        if dtype.hasobject or min([place, *shape]) < 0 or end > len(body):
            raise ValueError(f"its column {name} is cut short")
        columns[name] = np.frombuffer(body[place:end], dtype).reshape(shape)
    return columns, head["facts"]
