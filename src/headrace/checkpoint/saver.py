"""Write checkpoints in a thread while training continues, and keep the last and the best of them."""

import json
import math
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from headrace.checkpoint.store import checkpoint_name, list_checkpoints, save, verify, write_error
from headrace.core.errors import CheckpointError
from headrace.core.files import parse_json, write_atomic
from headrace.core.process import SAVING

# Which checkpoints to keep: the best so far, listed in best.json, and the last ones; pruning the others.


BEST_FILE = "best.json"


@dataclass(frozen=True, kw_only=True)
class ScoredCheckpoint:
    """A checkpoint and its score (more is better), reached with its raw or its ema weights, and its loss.

    Lists of earlier versions have no losses.
    """

    score: float
    name: str
    weights: str = "raw"
    loss: float | None = None

    @property
    def rank(self) -> tuple[float, float]:
        """What checkpoints are compared by, more is better: of equal scores the lower loss."""
        return self.score, -math.inf if self.loss is None else -self.loss


def rank(entries: tuple[ScoredCheckpoint, ...], new: ScoredCheckpoint, keep_best: int) -> tuple[ScoredCheckpoint, ...]:
    """Return the `keep_best` best checkpoints, best first.

    A checkpoint counts once, with its better weights, or with those scored first where they are equal; of equal scores
    the one with the lower loss is ahead, then the earlier one; a score that is not a number is never among the best.
    """
    best: dict[str, ScoredCheckpoint] = {}
    for entry in (*entries, new):
        if not math.isnan(entry.score) and (entry.name not in best or entry.rank > best[entry.name].rank):
            best[entry.name] = entry
    # sorted() is stable, also in reverse: of equal ones the earlier checkpoint stays ahead.
    return tuple(sorted(best.values(), key=lambda entry: entry.rank, reverse=True)[:keep_best])


class BestCheckpoints:
    """The list in best.json. The file is the only state: when `add` returns, the entry is on disk."""

    def __init__(self, directory: Path | str, keep_best: int = 1) -> None:
        self.directory, self.keep_best = Path(directory), keep_best

    def entries(self) -> tuple[ScoredCheckpoint, ...]:
        """Return the best checkpoints, best first; none when nothing was scored yet."""
        path = self.directory / BEST_FILE
        try:
            return tuple(ScoredCheckpoint(**entry) for entry in parse_json(path.read_bytes())["best"])
        except FileNotFoundError:
            return ()
        except (ValueError, KeyError, TypeError) as error:
            remedy = "Delete it; the next validation writes a new one."
            raise CheckpointError(f"{path} is damaged ({error}).", remedy=remedy) from error
        except OSError as error:
            raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error

    def add(self, score: float, name: str, weights: str = "raw", loss: float | None = None) -> bool:
        """Add a score; return whether it is now the best one."""
        before = self.entries()
        after = rank(
            before, ScoredCheckpoint(score=float(score), name=name, weights=weights, loss=loss), self.keep_best
        )
        if after != before:
            self._write(after)
        return after[:1] != before[:1]

    def names(self) -> set[str]:
        """Return the names that pruning must keep."""
        return {entry.name for entry in self.entries()}

    def first_good(self) -> ScoredCheckpoint | None:
        """Return the best entry whose checkpoint exists and verifies."""
        return next((entry for entry in self.entries() if not verify(self.directory / entry.name)), None)

    def reset(self, scores: Iterable[ScoredCheckpoint]) -> None:
        """Rebuild the list from all scores of a run, in order, without checkpoints that no longer exist."""
        entries: tuple[ScoredCheckpoint, ...] = ()
        for scored in scores:
            if (self.directory / scored.name).is_dir():
                entries = rank(entries, scored, self.keep_best)
        self._write(entries)

    def _write(self, entries: tuple[ScoredCheckpoint, ...]) -> None:
        text = json.dumps({"best": [asdict(entry) for entry in entries]}, indent=1) + "\n"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomic(self.directory / BEST_FILE, text.encode())
        except OSError as error:
            raise write_error(self.directory / BEST_FILE, error) from error


def prune(directory: Path | str, keep_last: int, keep: Collection[str] = (), written: str = "") -> list[Path]:
    """Delete all checkpoints but the last `keep_last` and those named in `keep`; return the deleted paths.

    Before anything is deleted, one that stays must be good: one that this process has just `written` is, any other must
    verify. If none is, the newest good one among those to be deleted stays as well, so that the only good one is never
    lost. A checkpoint that is being written has a hidden name and is never touched.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, not {keep_last}")
    everything = list_checkpoints(directory)
    # `.old-` is what a crash left of a replaced checkpoint; it counts under its real name.
    stay = [path for path in everything if path in everything[-keep_last:] or path.name.removeprefix(".old-") in keep]
    go = [path for path in everything if path not in stay]
    # To read what was written and synced a moment ago would find it in memory, and take as long as writing it. Of
    # others the newest first: usually it verifies, and nothing else is read.
    if go and not any(path.name == written or not verify(path) for path in reversed(stay)):
        last_good = next((path for path in reversed(go) if not verify(path)), None)
        go = [path for path in go if path != last_good]
    for path in go:
        _delete(path)
    return go


def _delete(path: Path) -> None:
    """Delete a checkpoint: renamed to a hidden name first, so that a crash half-way leaves no damaged one behind."""
    # Hidden names are swept by the next save, whoever left them.
    hidden = path.with_name(f".tmp-deleted-{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that was written: `seconds` by the thread, of which training waited `blocked_seconds`."""

    path: Path
    step: int
    num_bytes: int
    seconds: float
    blocked_seconds: float


class Saver:
    """Writes checkpoints in a thread, one at a time: a second save waits for the first.

    `save` takes NumPy arrays or JAX arrays. JAX arrays are fetched to the host *before* `save` returns, so training may
    donate their buffers afterwards (on the CPU the fetched array is a view, and XLA does not reuse its memory).
    NumPy arrays are taken by reference: do not write into them until `wait` has returned.

    An error in the thread comes out of the next `save` or `wait` as CheckpointError, once. After each save the
    directory is pruned to the last `keep_last` (None: all) and the names that `keep()` returns. `prepare` is called in
    the thread before a checkpoint is written; if it raises an error, nothing is written.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        keep_last: int | None = None,
        keep: Callable[[], set[str]] = set,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = Path(directory)
        self._keep_last, self._keep, self._prepare = keep_last, keep, prepare
        self._thread: threading.Thread | None = None
        self._has_saved = False  # once it has, the directory is there, or was taken away
        self._error: Exception | None = None
        self._saved: deque[SavedCheckpoint] = deque()

    def save(self, arrays: Mapping[str, Any], manifest: Mapping[str, Any]) -> Path:
        """Start writing the checkpoint of `manifest["step"]`; return the path it will have."""
        start = time.perf_counter()
        self.wait()
        # Here, in the caller's thread: the next call may take over the memory of these arrays.
        host = copy_to_host(arrays)
        blocked = time.perf_counter() - start
        # Not a daemon thread: the interpreter waits for it at exit, so that no save is cut short.
        self._thread = threading.Thread(target=self._write, args=(host, dict(manifest), blocked), name=SAVING)
        self._thread.start()
        return self.directory / checkpoint_name(manifest["step"])

    def wait(self) -> None:
        """Wait until no save is in progress; raise the error of the last save, if there was one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        # Raised once: the next save may work again, on a disk that somebody has cleared.
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"Saving a checkpoint into {self.directory} failed: {error!r}.") from error

    def finished(self) -> list[SavedCheckpoint]:
        """Return the checkpoints written since the last call; does not wait."""
        # Taken out one by one: the thread may append at any moment, and nothing it appends may get lost.
        return [self._saved.popleft() for _ in range(len(self._saved))]

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(f"Besides: {failure}")  # the first error is the one to report

    def _write(self, arrays: dict[str, np.ndarray], manifest: dict[str, Any], blocked: float) -> None:
        start = time.perf_counter()
        try:
            self._prepare()
            name = checkpoint_name(manifest["step"])
            path = save(self.directory, name, arrays, manifest, make_directory=not self._has_saved)
            self._has_saved = True
            if self._keep_last is not None:
                # After the new one is complete, never before: a full disk then costs the newest checkpoint, not the
                # one to resume from.
                prune(self.directory, self._keep_last, self._keep(), written=name)
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
