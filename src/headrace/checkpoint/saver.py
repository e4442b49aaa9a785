"""Write checkpoints in a thread while training continues, and keep the last and the best of them."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from headrace.checkpoint.best import BestCheckpoints, ScoredCheckpoint, prune, rank
from headrace.checkpoint.store import checkpoint_name, save
from headrace.core.device_access import SAVING
from headrace.core.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that was written: `seconds` by the thread, of which training waited `blocked_seconds`."""

    path: Path
    step: int
    num_bytes: int
    seconds: float
    blocked_seconds: float


@dataclass(kw_only=True, eq=False)  # each is itself only: arrays cannot be compared as a whole
class _Handed:
    """A state that was handed over: it is written at once if it is due, for certain if it must be."""

    arrays: dict[str, np.ndarray]
    manifest: dict[str, Any]
    blocked: float
    must: bool
    due: bool
    scores: list[ScoredCheckpoint] = field(default_factory=list)

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def name(self) -> str:
        return checkpoint_name(self.step)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


# How much of a run's time the thread may write, if it chooses the moments: a share, and seconds that are free, so that
# short runs have all of their checkpoints.
_SHARE, _FREE_SECONDS = 0.01, 2.0
# How many states may wait to be written, and, while they are small, which memory they may take together.
_MOST_WAITING, _MOST_SMALL, _SMALL_BYTES = 2, 8, 64 << 20


class Saver:
    """Writes checkpoints in a thread, one at a time, while others wait for it and training continues.

    `save` takes NumPy arrays or JAX arrays. JAX arrays are fetched to the host *before* `save` returns, so training may
    donate their buffers afterwards (on the CPU the fetched array is a view, and XLA does not reuse its memory).
    NumPy arrays are taken by reference: do not write into them until `wait` has returned.

    What must be written waits for its turn; a second one that must waits in `save` until there is room. Anything else
    is written where writing has taken less than its share of the time, or `every_seconds` have passed; until then it
    waits, and a newer one replaces it: it is passed over, unless it is among the best by the scores given to
    `add_score`. Those are written before anything newer is: whoever resumes from the newest checkpoint on the disk
    finds all of the best before it there as well.

    An error in the thread comes out of the next `save` or `wait` as CheckpointError, once, and what waited is not
    written. After each save the directory is pruned to the last `keep_last` (None: all) and the best. `prepare` is
    called in the thread before a checkpoint is written; if it raises an error, nothing is written. `written` is called
    there after one was written and others were deleted.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        keep_last: int | None = None,
        best: BestCheckpoints | None = None,
        every_seconds: float = math.inf,
        prepare: Callable[[], None] = lambda: None,
        written: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.directory = Path(directory)
        self.best = best or BestCheckpoints(directory, 0)
        self._keep_last, self._every_seconds, self._prepare, self._now = keep_last, every_seconds, prepare, now
        self._written = written
        self._has_saved = False  # once it has, the directory is there, or was taken away
        self._saved: deque[SavedCheckpoint] = deque()
        self.num_written = self.num_passed_over = 0
        self.write_seconds = 0.0
        # What follows is shared with the thread. It lives while something is due.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting: deque[_Handed] = deque()  # the oldest first, in which order they are written
        self._writing: _Handed | None = None
        self._error: Exception | None = None
        self._newest = ""  # the name of the one written last
        self._made = self._last_due = self._began = now()

    def save(self, arrays: Mapping[str, Any], manifest: Mapping[str, Any], *, must: bool = True) -> Path:
        """Take over the checkpoint of `manifest["step"]`; return the path it will have, if it is not passed over."""
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: not (must and any(handed.must for handed in self._waiting)))
        self._raise_error()
        # Here, in the caller's thread: the next call may take over the memory of these arrays.
        host = copy_to_host(arrays)
        blocked = time.perf_counter() - start
        with self._changed:
            due = must or self._may_write()
            handed = _Handed(arrays=host, manifest=dict(manifest), blocked=blocked, must=must, due=due)
            self._make_room_for(handed)
            self._waiting.append(handed)
            self._start()
        return self.directory / handed.name

    def _may_write(self) -> bool:
        """Say whether writing has taken less than its share of the time, or enough time has passed."""
        now = self._now()
        spent = self.write_seconds + (now - self._began if self._thread else 0.0)
        return spent <= _FREE_SECONDS + _SHARE * (now - self._made) or self.is_overdue

    @property
    def is_overdue(self) -> bool:
        """Whether the state that was written last, or is to be, is older than it should get, and nothing is written."""
        return self._thread is None and self._now() - self._last_due >= self._every_seconds

    def _make_room_for(self, new: _Handed) -> None:
        """Pass over what waits and need not be written, and of the rest the least, where too much would wait."""
        ranked = self._ranked() if self._waiting else []
        stay = [handed for handed in self._waiting if handed.due or handed.name in ranked]
        most = max(_MOST_WAITING, min(_MOST_SMALL, _SMALL_BYTES // max(1, new.num_bytes)))
        while len(stay) >= most:
            worst = max(
                (handed for handed in stay if not handed.must),
                key=lambda handed: ranked.index(handed.name) if handed.name in ranked else len(ranked),
                default=None,
            )
            if worst is None:
                break
            stay.remove(worst)
            new.due |= worst.due
        self.num_passed_over += len(self._waiting) - len(stay)
        self._waiting = deque(stay)

    def _ranked(self) -> list[str]:
        """Return the names of the best, those that wait among them, best first."""
        entries = self.best.entries()
        for handed in self._waiting:
            for scored in handed.scores:
                entries = rank(entries, scored, self.best.keep_best)
        return [entry.name for entry in entries]

    def add_score(self, scored: ScoredCheckpoint) -> None:
        """Score a checkpoint. The list of the best has it as soon as the disk has the checkpoint, and never before."""
        with self._changed:
            for handed in (*self._waiting, self._writing):
                if handed and handed.name == scored.name:
                    handed.scores.append(scored)
                    return
            if (self.directory / scored.name).is_dir():
                self._list(scored)

    def _list(self, scored: ScoredCheckpoint) -> None:
        self.best.add(scored.score, scored.name, scored.weights, scored.loss)

    def must_write(self, step: int) -> None:
        """Write the checkpoint of a step for certain if it waits."""
        with self._changed:
            for handed in self._waiting:
                if handed.step == step:
                    handed.must = handed.due = True
            self._start()

    def wait(self) -> None:
        """Write what waits, and return when it is on the disk; raise the error of the last save, if there was one."""
        with self._changed:
            for handed in self._waiting:
                handed.due = True
            self._start()
            self._changed.wait_for(lambda: self._thread is None)
        self._raise_error()

    def _raise_error(self) -> None:
        # Raised once: the next save may work again, on a disk that somebody has cleared.
        with self._changed:
            error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"Saving a checkpoint into {self.directory} failed: {error!r}.") from error

    def finished(self) -> list[SavedCheckpoint]:
        """Return the checkpoints written since the last call; does not wait."""
        # Taken out one by one: the thread may append at any moment, and nothing it appends may get lost.
        return [self._saved.popleft() for _ in range(len(self._saved))]

    def prune(self) -> None:
        """Delete what is neither one of the last nor of the best; the last validation may have changed which are."""
        if self._keep_last is not None:
            prune(self.directory, self._keep_last, self.best.names(), written=self._newest)

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

    def _start(self) -> None:
        """Start the thread where something is due and none works."""
        if self._thread is None and any(handed.due for handed in self._waiting):
            self._last_due = self._began = self._now()
            # Not a daemon thread: the interpreter waits for it at exit, so that no save is cut short.
            self._thread = threading.Thread(target=self._write_all, name=SAVING)
            self._thread.start()

    def _next(self) -> _Handed | None:
        """Return the oldest that waits, while something is due; the thread ends where nothing is."""
        with self._changed:
            is_due = any(handed.due for handed in self._waiting)
            self._writing = self._waiting.popleft() if is_due else None
            self._thread = self._thread if is_due else None
            self._began = self._now()
            self._changed.notify_all()
            return self._writing

    def _write_all(self) -> None:
        while handed := self._next():
            try:
                self._write(handed)
            except Exception as error:
                with self._changed:
                    # A checkpoint behind one that failed would hide the failure.
                    self._error = error
                    self._waiting.clear()

    def _write(self, handed: _Handed) -> None:
        start = self._now()
        self._prepare()
        path = save(self.directory, handed.name, handed.arrays, handed.manifest, make_directory=not self._has_saved)
        self._has_saved, self._newest = True, handed.name
        with self._changed:
            for scored in handed.scores:
                self._list(scored)
            self._writing = None  # a score that comes now goes to the list by itself
        # After the new one is complete, never before: a full disk then costs the newest checkpoint, not the one to
        # resume from.
        self.prune()
        self._written()
        seconds = self._now() - start
        self.num_written += 1
        self.write_seconds += seconds
        self._saved.append(
            SavedCheckpoint(
                path=path,
                step=handed.step,
                num_bytes=handed.num_bytes,
                seconds=seconds,
                blocked_seconds=handed.blocked,
            )
        )


def copy_to_host(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return host copies of the arrays; all transfers start before the first is awaited."""
    for value in arrays.values():
        if hasattr(value, "copy_to_host_async"):
            value.copy_to_host_async()
    return {name: np.asarray(value) for name, value in arrays.items()}
