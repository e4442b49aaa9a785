"""The files that records are written to, line by line."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from headrace.core.errors import CheckpointError
from headrace.core.files import sync_directory, write_atomic
from headrace.telemetry.records import CurvePoint, Record


def replace_file(path: Path, data: bytes) -> None:
    """Write a file atomically; its directory is created if needed."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say which file of the run it is that cannot be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {path}: {error.strerror or error}.",
            remedy="Check that the run directory may be written to and that the disk has room.",
        ) from error


class LineFile:
    """A text file that only grows, line by line; every line is flushed to the operating system at once.

    So a killed process loses nothing that it wrote, and leaves at most one incomplete line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("a", encoding="utf-8", newline="")
            # A new file's name is in its directory: a power failure would take the file, however well it is synced.
            sync_directory(path.parent)

    def write(self, *lines: str) -> None:
        with _writing(self.path):
            self._file.write("".join(line + "\n" for line in lines))
            self._file.flush()

    def sync(self) -> None:
        """Wait until the disk has all lines: a power failure takes what only the operating system has."""
        with _writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; may be called twice."""
        with _writing(self.path):
            self._file.close()


class Sink:
    """Where records go, one by one. This one drops all that it is given; others override what they make use of."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def points(self, points: Sequence[CurvePoint]) -> None:
        """Take the points of the curves that a call completed."""

    def advance(self, step: int, loss: float | None = None, images_per_second: float | None = None) -> None:
        """Show that `step` weight updates are done, with the mean loss and the rate of the last call."""

    def histograms(self, step: int, found: Mapping[str, Any]) -> None:
        """Take the histograms of a step by name, too large for records; engine/histograms.py says what one is."""

    def sync(self) -> None:
        """Wait until the disk has everything that was written."""

    def close(self) -> None:
        """Finish; may be called more than once."""
