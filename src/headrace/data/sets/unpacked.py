"""Compressed tar shards, unpacked once into the user's cache: images are read by their place in a file."""

import bz2
import gzip
import hashlib
import importlib
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.core.errors import DataError
from headrace.core.files import cache_directory
from headrace.core.units import format_bytes
from headrace.data.sets.mirror import whole_file

_MOST_EXPANSION = 200  # images are compressed already; what grows more was made to fill the disk
_PIECE = 1 << 20


def _zstd(path: Path) -> Any:
    try:
        return importlib.import_module("compression.zstd").open(path)
    except ModuleNotFoundError:
        raise DataError(
            f"{path} is compressed by zstd, which Python reads from 3.14 on.",
            remedy="Unpack the shards: zstd -d *.zst.",
        ) from None


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".tar.gz": gzip.open,
    ".tgz": gzip.open,
    ".tar.bz2": bz2.open,
    ".tar.xz": lzma.open,
    ".tar.zst": _zstd,
}
COMPRESSED = tuple(_OPENERS)


def unpacked(path: Path) -> Path:
    """Return a tar file that holds what a compressed one does, made the first time; others are returned as they are."""
    ending = next((ending for ending in COMPRESSED if path.name.lower().endswith(ending)), None)
    if ending is None:
        return path
    facts = path.stat()
    key = hashlib.sha256(f"{path.absolute()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:24]
    target = cache_directory() / "unpacked" / key / f"{path.name[: -len(ending)]}.tar"
    if target.is_file():
        return target
    print(f"unpacking {path} to {target.parent}", file=sys.stderr)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as there, _OPENERS[ending](there) as packed, partial.open("wb") as file:
            _copy(path, packed, file, facts.st_size * _MOST_EXPANSION)
        partial.replace(target)
    except DataError:
        raise
    except Exception as error:  # each library has errors of its own
        raise DataError(
            f"{path} cannot be unpacked: {getattr(error, 'strerror', None) or error}.",
            remedy="Fetch or make it again; where the disk of the cache is full, give another one: XDG_CACHE_HOME.",
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return target


def _copy(path: Path, packed: Any, file: Any, most: int) -> None:
    total = 0
    while piece := packed.read(_PIECE):
        total += len(piece)
        if total > most:
            raise DataError(
                f"{path} unpacks to more than {format_bytes(most)}.",
                rule=f"At most {_MOST_EXPANSION} times its size is unpacked: images hardly shrink.",
            )
        file.write(piece)
