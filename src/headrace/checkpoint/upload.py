"""A run in a store: its directory is written here first, and a thread keeps the store's copy like it.

A checkpoint is uploaded in an order that makes it whole or nothing: its tensors, then the records up to its step, and
its manifest last. Who deletes one deletes the manifest first. So a process that is killed at any moment leaves a run
that resumes from its newest whole checkpoint, and readers never meet half of one.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.checkpoint.store import MANIFEST_FILE, TENSOR_FILE, step_of
from headrace.core.errors import CheckpointError
from headrace.core.store import Store, StoreError, StoreMissing
from headrace.core.stored_copy import Files, walk

WRITER_FILE = "writer.json"  # who writes: the process that began or resumed the run last
CHECKPOINTS = "checkpoints"
_EVERY_SECONDS = 60.0  # between two uploads of records without a checkpoint
_SHARE = 20  # at least so many times what the last upload took
_TRIES_AT_END = 5


# (the records, the step of the newest checkpoint that is whole there) -> the records without those of newer ones
Without = Callable[[bytes, int], bytes]


class Uploader:
    """Keeps the copy of a run's directory in a store, in a thread, until it is closed.

    `without` takes out of the records what says that a checkpoint was saved which the store has not yet: who resumes
    from the store would take it for lost.
    """

    def __init__(
        self, directory: Path, store: Store, note: Callable[[str], None] = print, without: Without | None = None
    ) -> None:
        self.directory, self.store, self.note, self._without = directory, store, note, without
        self.num_tried = self.num_failed = self.num_checkpoints = 0
        self.seconds, self.num_bytes = 0.0, 0
        self._token = uuid.uuid4().hex
        self._sent: dict[str, tuple[int, int]] = {}  # of plain files: size and time
        self._whole: dict[str, bytes] = {}  # of checkpoints there: their manifests
        self._problem: StoreError | None = None
        self._wanted = threading.Condition()
        self._due = self._ending = False
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)

    def start(self) -> None:
        """Take the run over from whoever wrote it before, and begin."""
        who = {"token": self._token, "host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        self.store.put(WRITER_FILE, json.dumps(who).encode())
        files = walk(self.store)
        for name in whole_checkpoints(files):
            self._whole[name] = self.store.read(f"{CHECKPOINTS}/{name}/{MANIFEST_FILE}")
        for name in files:  # what a process that was killed had begun to upload, or to delete
            parts = name.split("/")
            if len(parts) == 3 and parts[0] == CHECKPOINTS and parts[1] not in self._whole:
                self.store.delete(name)
        self._thread.start()

    def changed(self) -> None:
        """Say that there is a new checkpoint."""
        with self._wanted:
            self._due = True
            self._wanted.notify_all()

    def close(self, *, failed: bool = False) -> None:
        """Upload what is not there yet, and stop; CheckpointError if that is not possible."""
        with self._wanted:
            self._ending = True
            self._wanted.notify_all()
        self._thread.join()
        for attempt in range(_TRIES_AT_END):
            time.sleep(min(30, 2**attempt) if attempt and self._problem and self._problem.may_pass else 0)
            if self._sync(rest=True):
                return
            assert self._problem is not None
            if not self._problem.may_pass:
                break
        problem = self._problem
        if failed or problem is None:
            return  # the run's own error is the one to report; it was noted that the store lacks something
        raise CheckpointError(
            f"The run is whole in {self.directory}, but not in {self.store.address}: {problem.problem}",
            rule=problem.rule,
            remedy=f"{problem.remedy} Then, on this machine: headrace resume {self.store.address}",
        )

    def _work(self) -> None:
        every = _EVERY_SECONDS
        while True:
            with self._wanted:
                self._wanted.wait_for(lambda: self._due or self._ending, every)
                if self._ending:
                    return
                self._due = False
            began = time.monotonic()
            self._sync()
            every = max(_EVERY_SECONDS, _SHARE * (time.monotonic() - began))

    def _sync(self, *, rest: bool = False) -> bool:
        """Make the store's copy like the directory, and say whether it is; without `rest`, stop when asked to end."""
        began = time.perf_counter()
        self.num_tried += 1
        try:
            self._refuse_other_writer()
            for number, act in enumerate(self._acts()):
                if number and self._ending and not rest:
                    return False
                act()
        except (StoreError, OSError) as failure:
            error = failure if isinstance(failure, StoreError) else StoreError(f"{failure}.", may_pass=True)
            if self._problem is None or self._problem.problem != error.problem:
                self.note(f"not uploaded to {self.store.address}, which is tried again: {error}")
            self._problem, self.num_failed = error, self.num_failed + 1
            return False
        finally:
            self.seconds += time.perf_counter() - began
        if self._problem is not None:
            self.note(f"uploading to {self.store.address} works again")
            self._problem = None
        return True

    def _refuse_other_writer(self) -> None:
        try:
            who = json.loads(self.store.read(WRITER_FILE))
        except StoreMissing:
            raise StoreMissing(
                f"{self.store.address} was deleted while the run wrote into it.",
                remedy="Restore it, or start a new run elsewhere.",
            ) from None
        except ValueError:
            who = {}
        if who.get("token") != self._token:
            raise StoreError(
                f"Another process (pid {who.get('pid')} on {who.get('host')}) has taken over {self.store.address}.",
                rule="A run is written by one process at a time, the one that resumed it last.",
                remedy="End this one.",
            )

    def _acts(self) -> Iterator[Callable[[], None]]:
        """Yield what is to be done, in this order."""
        here = self._checkpoints_here()
        new = [name for name, text in here.items() if self._whole.get(name) != text]
        yield from (lambda name=name: self._put_file(name) for name in ("config.json", "plan.json"))
        for name in new:
            yield lambda name=name: self._put_tensors(name)
        for name in self._plain_files():
            yield lambda name=name: self._put_file(name)
        for name in new:
            yield lambda name=name: self._put_manifest(name, here[name])
        for name in (one for one in self._plain_files() if one.endswith(".jsonl")):
            yield lambda name=name: self._put_file(name)
        # After the new ones are whole, never before.
        for name in sorted(self._whole.keys() - here.keys()):
            yield lambda name=name: self._delete(name)

    def _checkpoints_here(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        folder = self.directory / CHECKPOINTS
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if step_of(path) is not None and not path.name.startswith("."):
                try:
                    found[path.name] = (path / MANIFEST_FILE).read_bytes()
                except OSError:  # deleted at this moment
                    continue
        return found

    def _are_whole(self) -> bool:
        return self._checkpoints_here().items() <= self._whole.items()

    def _plain_files(self) -> Iterator[str]:
        """Yield the files that are no part of a checkpoint."""
        for path in sorted(self.directory.rglob("*")):
            inner = path.relative_to(self.directory)
            in_checkpoint = inner.parts[0] == CHECKPOINTS and len(inner.parts) > 2
            if not in_checkpoint and not any(part.startswith(".") for part in inner.parts) and path.is_file():
                yield inner.as_posix()

    def _put_file(self, name: str) -> None:
        path = self.directory / name
        try:
            facts = path.stat()
            if self._sent.get(name) == (facts.st_size, facts.st_mtime_ns):
                return
            data = path.read_bytes()
        except FileNotFoundError:
            return
        if name.endswith(".jsonl"):
            data = data[: data.rfind(b"\n") + 1]  # a line may be half written at this moment
            newest = max((step_of(Path(one)) or 0 for one in self._whole), default=-1)
            told = self._without(data, newest) if self._without and not self._are_whole() else data
            self._put(name, told)
            if len(told) < len(data):
                return  # put again when the manifest is there
        else:
            self._put(name, data)
        self._sent[name] = facts.st_size, facts.st_mtime_ns

    def _put(self, name: str, content: bytes | Path) -> None:
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        # Short patience: what waits here is tried again as a whole, with what is newest then.
        self.store.put(name, content, patience=15.0)
        self.num_bytes += size

    def _put_tensors(self, name: str) -> None:
        place = f"{CHECKPOINTS}/{name}"
        if self._whole.pop(name, None) is not None:  # another one of that name: no manifest may stand for new tensors
            self.store.delete(f"{place}/{MANIFEST_FILE}")
        try:
            self._put(f"{place}/{TENSOR_FILE}", self.directory / CHECKPOINTS / name / TENSOR_FILE)
        except (StoreMissing, FileNotFoundError):
            if (self.directory / CHECKPOINTS / name).is_dir():  # else it was deleted meanwhile
                raise

    def _put_manifest(self, name: str, text: bytes) -> None:
        if not (self.directory / CHECKPOINTS / name).is_dir():
            return  # deleted meanwhile, and perhaps before its tensors were read
        self._put(f"{CHECKPOINTS}/{name}/{MANIFEST_FILE}", text)
        self._whole[name] = text
        self.num_checkpoints += 1

    def _delete(self, name: str) -> None:
        for file in (MANIFEST_FILE, TENSOR_FILE):
            self.store.delete(f"{CHECKPOINTS}/{name}/{file}")
        del self._whole[name]


def whole_checkpoints(files: Files) -> list[str]:
    """Return the names of the checkpoints that are whole, oldest first."""
    names = {name.split("/")[1] for name in files if name.startswith(f"{CHECKPOINTS}/") and name.count("/") == 2}
    return sorted(
        (
            name
            for name in names
            if step_of(Path(name)) is not None
            and all(f"{CHECKPOINTS}/{name}/{file}" in files for file in (MANIFEST_FILE, TENSOR_FILE))
        ),
        key=lambda name: step_of(Path(name)) or 0,
    )
