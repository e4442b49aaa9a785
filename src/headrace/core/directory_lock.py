"""One process at a time in a directory."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.core.errors import CheckpointError

LOCK_FILE = ".lock"


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
