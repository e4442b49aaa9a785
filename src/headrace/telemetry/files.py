"""The record files of a run directory: their names, and how they are read and appended to."""

from pathlib import Path
from typing import TextIO

from headrace.core.errors import CheckpointError
from headrace.core.files import write_atomic
from headrace.telemetry.record import Record, records_of

METRICS_FILE = "metrics.jsonl"
TRAINING_FILE = "training.csv"
VALIDATION_FILE = "validation.csv"
LOG_FILE = "log.txt"


def read_records(run_dir: Path | str) -> list[Record]:
    """Return all records of a run, oldest first; none when nothing was recorded yet."""
    path = Path(run_dir) / METRICS_FILE
    try:
        return records_of(path.read_bytes(), str(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error


def replace_file(path: Path, data: bytes) -> None:
    """Write a whole file in one move, its directory made when it is not there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: Path, error: OSError) -> CheckpointError:
    """Say for people why a file of the run could not be written."""
    return CheckpointError(
        f"Cannot write {path}: {error.strerror or error}.",
        remedy="Check that the run directory may be written to and that the disk has room.",
    )


class LineFile:
    """A text file that only grows, line by line; every line is handed to the operating system at once.

    So a killed process loses nothing that it wrote, and leaves at most one line without its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("a", encoding="utf-8", newline="")
        except OSError as error:
            raise write_error(path, error) from error

    def write(self, line: str) -> None:
        """Append one line."""
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise write_error(self.path, error) from error

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        try:
            self._file.close()
        except OSError as error:
            raise write_error(self.path, error) from error
