"""The saver: writes checkpoints in a thread while training goes on."""

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
class Saved:
    """A checkpoint that was written: `seconds` by the thread, of which training waited `blocked_seconds`."""

    path: Path
    step: int
    num_bytes: int
    seconds: float
    blocked_seconds: float


def _nothing() -> set[str]:
    return set()


class Saver:
    """Write checkpoints one at a time in a thread; at most one is under way, a second save waits for it.

    `save` takes NumPy arrays or JAX arrays. JAX arrays are fetched to the host *before* `save` returns, so training may
    donate their buffers afterwards (on the CPU the fetched array is a view; XLA leaves memory that a view holds alone).
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
        self._saved: deque[Saved] = deque()

    def save(self, arrays: Mapping[str, Any], manifest: Mapping[str, Any]) -> Path:
        """Begin to write the checkpoint of `manifest["step"]`; return the path it will have."""
        start = time.perf_counter()
        self.wait()
        host = fetch(arrays)
        blocked = time.perf_counter() - start
        # A thread per checkpoint, not a daemon: the interpreter waits for it at exit, so no save is ever cut off.
        self._thread = threading.Thread(target=self._write, args=(host, dict(manifest), blocked), name="checkpoint")
        self._thread.start()
        return self.directory / checkpoint_name(manifest["step"])

    def wait(self) -> None:
        """Wait until nothing is under way; raise the error of the last save, if there was one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"Saving a checkpoint into {self.directory} failed: {error!r}.") from error

    def finished(self) -> list[Saved]:
        """Return what was written since the last time this was asked; does not wait."""
        # Taken out one by one: the thread may append at any moment, and nothing it appends may get lost.
        return [self._saved.popleft() for _ in range(len(self._saved))]

    def close(self) -> None:
        """Wait for the last save and surface its error. The saver may be used again."""
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
            error.add_note(f"Besides: {failure}")  # the first trouble is the one to report

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
            Saved(path=path, step=manifest["step"], num_bytes=size, seconds=seconds, blocked_seconds=blocked)
        )


def fetch(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays on the host; all transfers are started before the first is waited for."""
    for value in arrays.values():
        if hasattr(value, "copy_to_host_async"):
            value.copy_to_host_async()
    return {name: np.asarray(value) for name, value in arrays.items()}
