"""Files that are either whole or absent: written under a hidden name, synced to the disk, then renamed."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.core.errors import CheckpointError


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable: a rename survives a power failure only after this."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file in one move; whoever reads it, and whenever we are killed, it is the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        write_synced(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


# A lock on a directory, so that two processes never write into one run. The kernel frees it when its holder dies.


LOCK_FILE = ".lock"


@contextmanager
def hold(directory: Path | str) -> Iterator[None]:
    """Keep other Headrace processes from writing into a directory; CheckpointError when one already does."""
    path = Path(directory) / LOCK_FILE
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(f"Cannot write into {directory}: {error.strerror}.") from error
    try:
        _lock(handle, Path(directory))
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(handle)  # also frees the lock; the file stays, because removing it would race with the next holder


def _lock(handle: int, directory: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "?"
        raise CheckpointError(
            f"Another process (number {holder}) is writing into {directory}.",
            rule="A run is written by one process at a time.",
            remedy="Wait for it or stop it, then try again.",
        ) from error
    except OSError:
        return  # a file system without locks: go on without one
