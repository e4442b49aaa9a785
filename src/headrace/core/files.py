"""Files: atomic writing, durable renames, entries and locks of directories, and reading untrusted JSON and archives."""

import fcntl
import json
import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headrace.core.errors import CheckpointError

LOCK_FILE = ".lock"


def cache_directory(program: str = "headrace") -> Path:
    """Return a program's directory among the user's caches; it need not exist."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / program  # the standard ignores relative paths


def is_directory(entry: os.DirEntry[str]) -> bool:
    """Say whether an entry of `os.scandir` is a directory. For a link to itself, `entry.is_dir()` would raise."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def entries_of(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the entries of a zip archive; raise ValueError if two of them are the same bytes."""
    infos = archive.infolist()
    # Python 3.13 warns of such an entry and reads it all the same; before, it did not even warn.
    if len({info.header_offset for info in infos}) < len(infos):
        raise ValueError("entries of the archive overlap")
    return infos


# The longest name of a file that Linux, macOS and Windows all take.
_LONGEST_NAME = 255


def path_inside(folder: Path, name: str) -> Path:
    """Return the path that a name from elsewhere has in a folder; ValueError if it could lead out of it.

    A name of several parts has slashes between them; no part is empty, `.`, `..` or too long for a file.
    """
    for part in name.split("/"):
        if part in ("", ".", "..") or "\\" in part or not part.isprintable():
            raise ValueError(f"{name[:80]!r} is no name of a file")
        if len(part.encode(errors="surrogatepass")) > _LONGEST_NAME:
            raise ValueError(f"{name[:40]!r}... is too long for the name of a file: {len(part):,} letters")
    return folder / name


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable: a rename survives a power failure only after this."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    write_parts_synced(path, [data])


def write_parts_synced(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file from its parts, each asked for when those before it are written; wait until the disk has it."""
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, data: bytes, *, durable: bool = True, mode: int | None = None) -> None:
    """Replace a file atomically: readers, and whoever comes after a crash, find the old content or the new one.

    One that is not durable may be damaged after a power failure, which its readers have to notice.
    """
    # Beside the file, since a rename is atomic within one file system only; with the process, since two may write at
    # once.
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        if mode is not None:
            temporary.touch(mode)
        if durable:
            write_synced(temporary, data)
        else:
            temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


class DirectoryLock:
    """A lock on a directory: an open, locked file in it, which can be compared with what the path leads to now."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_FILE
        try:
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(f"Cannot write into {directory}: {error.strerror}.") from error
        try:
            _lock(self._handle, directory)
            # Only now: until the lock is held, the file has the pid of whoever holds it.
            os.truncate(self._handle, 0)
            os.write(self._handle, f"{os.getpid()}\n".encode())
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raise CheckpointError if the directory, or the lock in it, was removed, moved or replaced.

        Files that are open when their directory is removed can be written to without an error, and everything is lost.
        """
        with suppress(OSError):
            if os.path.samestat(self._path.stat(), os.fstat(self._handle)):
                return
        raise CheckpointError(
            f"{self._path.parent}, or {LOCK_FILE} in it, was removed, moved or replaced while it was in use.",
            rule="What is written now would be lost, or would end up among the files of another run.",
            remedy="Move it back and resume from its last checkpoint, or start a new run.",
        )

    def release(self) -> None:
        """Release the lock. The file stays, because removing it would race with the next holder."""
        os.close(self._handle)


@contextmanager
def lock_directory(directory: Path | str) -> Iterator[DirectoryLock]:
    """Keep other Headrace processes from writing into a directory; CheckpointError if one already does.

    The kernel releases the lock when its holder dies, so that a killed run leaves nothing to clean up.
    """
    lock = DirectoryLock(Path(directory))
    try:
        yield lock
    finally:
        lock.release()


def _lock(handle: int, directory: Path) -> None:
    try:
        # Without waiting: a second process should say so at once, not hang until the first one ends.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "?"
        raise CheckpointError(
            f"Another process (pid {holder}) is writing into {directory}.",
            rule="A run is written by one process at a time.",
            remedy="Wait for it or stop it, then try again.",
        ) from error
    except OSError:
        return  # this file system has no locks: continue without one


# JSON from files and other processes, with bounds: the standard reader recurses as deep as the text says.


MAX_BYTES = 64 << 20
MAX_DEPTH = 64


def parse_json(text: str | bytes, max_bytes: int = MAX_BYTES) -> Any:
    """Return the value; whatever is wrong with the text is a ValueError.

    Refused beside what is not JSON: more than `max_bytes`, nesting deeper than MAX_DEPTH, and halves of surrogate
    pairs, which no file can hold again. Memory: at most about 40 times the text (a text of empty lists).
    """
    if len(text) > max_bytes:
        raise ValueError(f"{len(text):,} bytes of JSON, more than {max_bytes:,}")
    try:
        value = json.loads(text)
        _refuse_deep(value)
        if "\\u" in (text if isinstance(text, str) else text.decode("latin1")):  # only an escape can write half a pair
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"JSON nested deeper than {MAX_DEPTH} levels") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"JSON with a text that is not Unicode ({error.reason})") from None
    return value


def _refuse_deep(value: object) -> None:
    """Refuse nesting that code which walks the value could not bear."""
    # Level by level: recursion is what this protects other code from.
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"JSON nested deeper than {MAX_DEPTH} levels")
