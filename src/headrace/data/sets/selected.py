"""Files that a pattern names, or that lie elsewhere under other names, as a folder of links: all that readers need.

`train-{0000..0099}.tar` and `*.parquet` mean what they do in a shell, but a member of a range that is not there is an
error.
"""

import glob
import hashlib
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path

from headrace.core.errors import DataError
from headrace.core.files import cache_directory, write_atomic
from headrace.core.units import format_list

_BRACES = re.compile(r"\{([^{}]*(?:,|\.\.)[^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST = 1_000_000  # files of a pattern
_SAID = ".selected"  # in the folder of links: what was asked for
_BESIDE = ("classes.txt",)  # files beside shards that say what they hold


def selected_files(pattern: str) -> Path:
    """Return a folder with links to the files that a pattern names."""
    found: dict[str, Path] = {}
    expanded = [Path(each) for each in _expanded(str(Path(pattern).expanduser().absolute()))]
    for each in expanded:
        for path in sorted(Path("/").glob(str(each)[1:])) if glob.has_magic(str(each)) else (each,):
            _add(found, pattern, path)
    missing = [each for each in expanded if not glob.has_magic(str(each)) and not each.exists()]
    if missing:
        raise DataError(
            f"{len(missing):,} of the {len(expanded):,} files of {pattern} are not there: {format_list(missing, 3)}.",
            rule="Each member of {0000..0099} and {a,b} is a file.",
            remedy="Fetch them, correct the range, or give a pattern with *, which takes those that are there.",
        )
    if not found:
        raise DataError(f"No file has a name like {pattern}.", remedy="Quote the pattern, and look at it with ls.")
    folders = {path.parent for path in found.values()}
    beside = {name: folder / name for folder in folders for name in _BESIDE if (folder / name).is_file()}
    return link_folder(pattern, {**beside, **found})


def _add(found: dict[str, Path], pattern: str, path: Path) -> None:
    if not path.is_file():
        return
    if path.name in found:
        raise DataError(
            f"{pattern} names two files of one name: {found[path.name]} and {path}.",
            rule="Shards are told apart by their names.",
        )
    found[path.name] = path


def link_folder(said: str, files: Mapping[str, Path]) -> Path:
    """Return a folder of the cache with these links {name: file}, the same for the same files."""
    key = hashlib.sha256("\0".join(f"{name}\0{path}" for name, path in sorted(files.items())).encode()).hexdigest()[:24]
    folder = cache_directory() / "selected" / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in files.items():
            link = folder / name
            if not link.is_symlink():
                temporary = folder / f".{name}.{os.getpid()}"
                temporary.symlink_to(path)
                temporary.replace(link)  # in one step: another process may be doing the same
        write_atomic(folder / _SAID, said.encode())
    except OSError as error:
        raise DataError(
            f"Links to the files of {said} cannot be made in {folder}: {error.strerror or error}.",
            remedy="Name another cache directory: XDG_CACHE_HOME.",
        ) from None
    return folder


def said_of(path: Path) -> str:
    """Return the pattern or the name that a folder of links stands for, or nothing for other paths."""
    try:
        return (path / _SAID).read_text() if path.parent.name == "selected" else ""
    except OSError:
        return ""


def _expanded(pattern: str) -> list[str]:
    """Return the patterns without braces that one with braces stands for."""
    parts = _BRACES.split(pattern)  # text, braces, text, braces, ..., text
    choices = [_members(part) if place % 2 else [part] for place, part in enumerate(parts)]
    count = 1
    for each in choices:
        count *= len(each)
    if count > _MOST:
        raise DataError(f"{pattern} names {count:,} files.", rule=f"At most {_MOST:,} are taken.")
    return ["".join(each) for each in itertools.product(*choices)]


def _members(inside: str) -> list[str]:
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        return inside.split(",")
    first, last = numbers.groups()
    if int(last) < int(first) or int(last) - int(first) >= _MOST:
        raise DataError(f"{{{inside}}} is no range of files.", rule="It counts up, as in {0000..0099}.")
    width = max(len(first), len(last)) if first.startswith("0") or len(first) == len(last) else 0
    return [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
