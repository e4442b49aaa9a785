"""What is at an address: which files of a place in a store are stand-ins, and which are brought at once."""

import fnmatch
from functools import lru_cache
from pathlib import Path

import numpy as np

from headrace.core.errors import DataError
from headrace.core.store import Entry, Store, StoreError, open_store
from headrace.core.units import format_bytes
from headrace.data.sets.mirror import Mirror, add_mirror, listed, mirror_of
from headrace.data.sets.stored_folders import FolderIndex, listed_images, read_index
from headrace.data.sets.tfrecords import SHARD, TFDS_SHARD

_RANGED = ("*.tar", "*.tar.gz", "*.tgz", "*.tar.bz2", "*.tar.xz", "*.tar.zst", "*.parquet", "*.hrp")
_MOST_WHOLE = 4 << 30  # of a set whose files are read as a whole


@lru_cache(maxsize=8)  # a run describes, checks and opens its set
def stand_in(address: str, most_bytes: int) -> Path:
    """Return a path of this machine at which the place of an address can be read as if it were there."""
    try:
        store = open_store(address)
        single = store.entry()
        if single is not None:
            return _mirrored(store.of_one_file(single), [single], most_bytes) / single.name
        folders, files = store.listing()
        if "data" in folders and not any(_is_ranged(entry) for entry in files):  # as the Hugging Face hub has tables
            files += [entry._replace(name=f"data/{entry.name}") for entry in store.below("data").listing()[1]]
        if not any(_is_ranged(entry) for entry in files):
            if folders:
                return _class_folders(store, folders, most_bytes)
            _refuse_large(store, files)
    except StoreError as error:
        raise DataError(error.problem, rule=error.rule, remedy=error.remedy) from None
    return _mirrored(store, files, most_bytes)


_opened: dict[str, FolderIndex] = {}  # by the folder of the stand-ins


def _class_folders(store: Store, folders: list[str], most_bytes: int) -> Path:
    index = read_index(store, folders)
    mirror = Mirror(store, listed_images(index), most_bytes)
    add_mirror(mirror)
    _opened[str(mirror.folder)] = index
    return mirror.folder


def stored_folders(path: Path) -> tuple[Mirror, FolderIndex] | None:
    """Return the index of class folders in a store whose stand-in is at a path."""
    mirror, index = mirror_of(path), _opened.get(str(path))
    return (mirror, index) if mirror and index else None


def _is_ranged(entry: Entry) -> bool:
    name = entry.name.rpartition("/")[2]
    return bool(
        any(fnmatch.fnmatch(name.lower(), pattern) for pattern in _RANGED)
        or SHARD.fullmatch(name)
        or TFDS_SHARD.fullmatch(name)
    )


def _mirrored(store: Store, entries: list[Entry], most_bytes: int) -> Path:
    mirror = Mirror(store, listed(entries), most_bytes)
    add_mirror(mirror)
    # Names of classes and the like, and sets that are read as a whole: needed, whatever the budget says.
    whole = [number for number, entry in enumerate(entries) if entry.size and not _is_ranged(entry)]
    sizes = np.array([entries[number].size for number in whole], np.int64)
    mirror.fetch(np.array(whole, np.int64), sizes * 0, sizes, needed=True)
    return mirror.folder


def _refuse_large(store: Store, files: list[Entry]) -> None:
    """Refuse what is neither shards nor a small set of files."""
    total = sum(entry.size for entry in files)
    if total > _MOST_WHOLE:
        raise DataError(
            f"{store.address} has {len(files):,} files of {format_bytes(total)}, none of them a shard.",
            rule="Read by ranges are tar shards, TFRecords, parquet and packed files.",
            remedy="Pack the set into one of these: headrace data pack.",
        )
