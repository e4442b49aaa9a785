"""Bytecode of this package where Python does not write it beside the source: in a folder of the user's cache.

With `PYTHONDONTWRITEBYTECODE=1` (usual in containers), or where the source is read-only, Python compiles a clone or an
editable installation again at each start, for 0.3 to 0.5 s. What pip has installed brings its bytecode along.
"""

import importlib.util
import marshal
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

from headrace.core.files import cache_directory, write_atomic

_HEAD = 16  # bytes of a bytecode file: number of the format, kind, time and size of the source
_LONGEST_NAME = 255  # of a file


def keep_bytecode(*packages: str) -> None:
    """Read and write bytecode of packages with such names in the user's cache, if Python does not write it itself.

    The names are beginnings: what extends a package may have its name and more.
    """
    source = Path(__file__).parent
    if sys.dont_write_bytecode or not os.access(source, os.W_OK):
        with suppress(OSError, RuntimeError):  # nobody's home
            place = cache_directory() / f"bytecode-{sys.implementation.cache_tag}"
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = place.stat()
            # Each user's own: whoever may write there runs code as the one who reads it.
            if found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                sys.meta_path.insert(0, cast("Any", _Finder(packages, place)))


class _Finder:
    """Finds modules of some packages where Python does, and lets them be read by `_Loader`."""

    def __init__(self, packages: tuple[str, ...], place: Path) -> None:
        self._packages, self._place = packages, place

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is; None of other packages."""
        if not name.startswith(self._packages):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(name, spec.origin, self._place)
        return spec


class _Loader(SourceFileLoader):
    """Python's own, but for where bytecode is."""

    def __init__(self, name: str, path: str, place: Path) -> None:
        super().__init__(name, path)
        self._place = place

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of a module: beside its source, else in the user's cache, else compiled and kept there."""
        source = Path(self.path).stat()
        numbers = (0, int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
        head = importlib.util.MAGIC_NUMBER + b"".join(number.to_bytes(4, "little") for number in numbers)
        mine = self._place / str(self.path).replace(os.sep, "%")
        for place in (Path(importlib.util.cache_from_source(self.path)), mine):
            with suppress(OSError, ValueError, EOFError, TypeError):
                found = place.read_bytes()
                if found[:_HEAD] == head and isinstance(code := marshal.loads(found[_HEAD:]), CodeType):
                    return code
        code = super().get_code(fullname)
        if code is not None and len(mine.name) <= _LONGEST_NAME:
            with suppress(OSError):  # a full disk
                write_atomic(mine, head + marshal.dumps(code), durable=False, mode=0o600)
        return code
