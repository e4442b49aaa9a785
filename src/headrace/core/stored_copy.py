"""Copies of places in stores on this machine: of a file, or of a folder such as a run's."""

import hashlib
import json
import math
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from headrace.core.files import cache_directory, path_inside, write_atomic
from headrace.core.json_text import parse_json
from headrace.core.local_path import is_address
from headrace.core.store import Entry, Store, StoreMissing, open_store

_MARKS = ".marks.json"  # what the copied files were like in the store
_AT_ONCE = 8
_FRESH_SECONDS = 10.0  # a command asks several times for its weights
_made: dict[str, tuple[Path, float]] = {}

Files = dict[str, Entry]  # by their names below a place


def place_of_copy(address: str) -> Path:
    """Return where the copy of an address is, if there is one."""
    address = address.rstrip("/")
    return cache_directory() / "copies" / hashlib.sha256(address.encode()).hexdigest()[:12] / address.rpartition("/")[2]


def walk(store: Store, name: str = "") -> Files:
    """Return the files below a place; none where there is no such place."""
    try:
        folders, files = store.listing(name)
    except StoreMissing:
        return {}
    start = f"{name}/" if name else ""
    found = {f"{start}{entry.name}": entry for entry in files}
    for folder in folders:
        found |= walk(store, f"{start}{folder}")
    return found


def copy_folder(store: Store, files: Files, target: Path, *, stay: Collection[str] = ()) -> None:
    """Make a folder hold these files of a store, and no others but those that begin with a dot or are to `stay`."""
    known = _marks(target)
    for path in sorted(target.rglob("*"), reverse=True) if target.is_dir() else ():
        inner = path.relative_to(target).as_posix()
        if inner not in files and inner not in stay and not path.name.startswith("."):
            with suppress(OSError):  # a folder with something in it
                path.rmdir() if path.is_dir() else path.unlink()
    changed = [
        name
        for name, entry in files.items()
        if not (path_inside(target, name).is_file() and known.get(name) == [entry.size, entry.mark])
    ]
    target.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="copy") as pool:
        list(pool.map(lambda name: store.fetch(name, path_inside(target, name), files[name].size), changed))
    marks = {name: [entry.size, entry.mark] for name, entry in files.items()}
    write_atomic(target / _MARKS, json.dumps(marks).encode(), durable=False)


def _marks(target: Path) -> dict[str, list[object]]:
    try:
        found = parse_json((target / _MARKS).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def copy_of(address: str) -> Path:
    """Return a copy of the file or folder at an address, made again where it has changed there."""
    address = address.rstrip("/")
    path, made = _made.get(address, (Path(), -math.inf))
    if time.monotonic() - made > _FRESH_SECONDS:
        path = _copied(open_store(address), place_of_copy(address))
        _made[address] = path, time.monotonic()
    return path


def _copied(store: Store, target: Path) -> Path:
    single = store.entry()
    if single is None:
        files = walk(store)
        if not files:
            store.listing()  # says what is wrong with the address, if anything is
            raise StoreMissing(f"{store.address} is empty.", remedy="Check the address.")
        copy_folder(store, files, target)
        return target
    copy_folder(store.of_one_file(single), {single.name: single}, target.parent)
    return target.parent / single.name


def here(place: str) -> Path:
    """Return a path as it is, and the copy of what is at an address."""
    return copy_of(place) if is_address(place) else Path(place)
