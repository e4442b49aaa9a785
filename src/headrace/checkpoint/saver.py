"""Writes checkpoints in a thread while training continues."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from headrace.checkpoint.best import prune
from headrace.checkpoint.store import checkpoint_name, save
from headrace.core.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that was written: `seconds` by the thread, of which training waited `blocked_seconds`."""

    path: Path
    step: int
    num_bytes: int
    seconds: float
    blocked_seconds: float


def _nothing() -> set[str]:
    return set()


class Saver:
    """Writes checkpoints in a thread, one at a time: a second save waits for the first.

    `save` takes NumPy arrays or JAX arrays. JAX arrays are fetched to the host *before* `save` returns, so training may
    donate their buffers afterwards (on the CPU the fetched array is a view, and XLA does not reuse its memory).
    NumPy arrays are taken by reference: do not write into them until `wait` has returned.

    An error in the thread comes out of the next `save`, `wait` or `close` as CheckpointError, once. After each save the
    directory is pruned to the last `keep_last` (None: all) and the names that `keep()` returns.
    """

    def __init__(
        self, directory: Path | str, *, keep_last: int | None = None, keep: Callable[[], set[str]] = _nothing
    ) -> None:
        self.directory = Path(directory)
        self._keep_last, self._keep = keep_last, keep
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._saved: deque[SavedCheckpoint] = deque()

    def save(self, arrays: Mapping[str, Any], manifest: Mapping[str, Any]) -> Path:
        """Start writing the checkpoint of `manifest["step"]`; return the path it will have."""
        start = time.perf_counter()
        self.wait()
        host = copy_to_host(arrays)
        blocked = time.perf_counter() - start
        # Not a daemon thread: the interpreter waits for it at exit, so that no save is cut short.
        self._thread = threading.Thread(target=self._write, args=(host, dict(manifest), blocked), name="checkpoint")
        self._thread.start()
        return self.directory / checkpoint_name(manifest["step"])

    def wait(self) -> None:
        """Wait until no save is in progress; raise the error of the last save, if there was one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"Saving a checkpoint into {self.directory} failed: {error!r}.") from error

    def finished(self) -> list[SavedCheckpoint]:
        """Return the checkpoints written since the last call; does not wait."""
        # Taken out one by one: the thread may append at any moment, and nothing it appends may get lost.
        return [self._saved.popleft() for _ in range(len(self._saved))]

    def close(self) -> None:
        """Wait for the last save and raise its error. The saver may be used again."""
        self.wait()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(f"Besides: {failure}")  # the first error is the one to report

    def _write(self, arrays: dict[str, np.ndarray], manifest: dict[str, Any], blocked: float) -> None:
        start = time.perf_counter()
        try:
            path = save(self.directory, checkpoint_name(manifest["step"]), arrays, manifest)
            if self._keep_last is not None:
                prune(self.directory, self._keep_last, self._keep())
        except Exception as error:
            self._error = error
            return
        size = sum(array.nbytes for array in arrays.values())
        seconds = time.perf_counter() - start
        self._saved.append(
            SavedCheckpoint(path=path, step=manifest["step"], num_bytes=size, seconds=seconds, blocked_seconds=blocked)
        )


def copy_to_host(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return host copies of the arrays; all transfers start before the first is awaited."""
    for value in arrays.values():
        if hasattr(value, "copy_to_host_async"):
            value.copy_to_host_async()
    return {name: np.asarray(value) for name, value in arrays.items()}
