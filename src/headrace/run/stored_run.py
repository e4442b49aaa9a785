"""Runs whose directory is in a store: where they are written on this machine, and how they are brought here."""

import hashlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.checkpoint.store import list_checkpoints, step_of, verify
from headrace.checkpoint.upload import CHECKPOINTS, WRITER_FILE, Uploader, whole_checkpoints
from headrace.core.directory_lock import lock_directory
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.files import cache_directory
from headrace.core.json_text import parse_json
from headrace.core.local_path import is_address
from headrace.core.store import Store, StoreError, StoreMissing, open_store
from headrace.core.stored_copy import Files, copy_folder, walk
from headrace.telemetry.records import CheckpointRecord, RunEnd

_NEEDS_CHECKPOINT = (CheckpointRecord.kind, RunEnd.kind)  # records that a resume believes
_PROBE = ".headrace-may-write"


def run_path(log_dir: str, name: str) -> Path:
    """Return the directory of a run on this machine."""
    return working_place(f"{log_dir.rstrip('/')}/{name}") if is_address(log_dir) else Path(log_dir) / name


def working_place(address: str) -> Path:
    """Return where the run of an address is written on this machine; copies that are read are elsewhere."""
    address = address.rstrip("/")
    return cache_directory() / "runs" / hashlib.sha256(address.encode()).hexdigest()[:12] / address.rpartition("/")[2]


def store_of(log_dir: str, path: Path) -> Store | None:
    """Return the store that a run is uploaded to; None for one that stays where it is."""
    if not is_address(log_dir) or path != run_path(log_dir, path.name):
        return None
    return open_store(f"{log_dir.rstrip('/')}/{path.name}", writes=True)


def refuse_unwritable(log_dir: str) -> None:
    """Refuse a store into which nothing can be written, before anything is computed for it."""
    if not is_address(log_dir):
        return
    store = open_store(log_dir, writes=True)
    try:
        store.put(_PROBE, b"\n", patience=10.0)
        store.delete(_PROBE)
    except StoreError as error:
        problem = error.problem.replace(f"/{_PROBE}", "")
        raise ConfigError(problem, rule=error.rule, remedy=error.remedy) from None


@contextmanager
def uploading(log_dir: str, path: Path) -> Iterator[Uploader | None]:
    """Keep the store's copy of a run like its directory, where it has one in a store."""
    store = store_of(log_dir, path)
    if store is None:
        yield None
        return
    uploader = Uploader(path, store, lambda text: print(f"warning: {text}", file=sys.stderr), without_newer)
    uploader.start()
    try:
        yield uploader
    except BaseException:
        uploader.close(failed=True)
        raise
    uploader.close()


def without_newer(records: bytes, step: int) -> bytes:
    """Return records without those of checkpoints, and of the run's end, after a step."""

    def is_newer(line: bytes) -> bool:
        if b'"checkpoint"' not in line and b'"run_end"' not in line:
            return False
        record = parse_json(line)
        return isinstance(record, dict) and record.get("kind") in _NEEDS_CHECKPOINT and record.get("step", 0) > step

    return b"".join(line for line in records.splitlines(keepends=True) if not is_newer(line))


def upload_rest(log_dir: str, path: Path) -> None:
    """Bring what the store lacks of a run that nobody writes."""
    with uploading(log_dir, path):
        pass


def is_taken(log_dir: str, name: str) -> bool:
    """Say whether the store has a run of that name."""
    return is_address(log_dir) and open_store(f"{log_dir.rstrip('/')}/{name}").entry("config.json") is not None


def bring_run(place: Path | str) -> Path:
    """Return the directory of a run on this machine; the copy of one in a store is made as new as that.

    What this machine has and the store has not, because it was cut off while uploading, stays.
    """
    if not is_address(place):
        return Path(place)
    address = str(place).rstrip("/")
    store, path = open_store(address), working_place(address)
    files = walk(store)
    if "config.json" not in files:
        if (path / "config.json").is_file():
            return path  # not even its beginning was uploaded
        raise CheckpointError(
            f"{address} is no run: it has no config.json.", remedy=_runs_near(address) or "Check the address."
        )
    newest = max((step_of(Path(name)) or 0 for name in whole_checkpoints(files)), default=0)
    ours = (step_of(one) or 0 for one in reversed(list_checkpoints(path / CHECKPOINTS)) if not verify(one))
    if next(ours, 0) > newest and _same(store, path):
        return path
    path.mkdir(parents=True, exist_ok=True)
    with lock_directory(path):  # no process of this machine writes it
        copy_folder(store, only_whole(files), path)
    return path


def only_whole(files: Files) -> Files:
    """Return the files of a run without those of checkpoints that are not whole."""
    whole = whole_checkpoints(files)
    return {
        name: entry
        for name, entry in files.items()
        if name != WRITER_FILE
        and (not name.startswith(f"{CHECKPOINTS}/") or name.count("/") < 2 or name.split("/")[1] in whole)
    }


def _same(store: Store, path: Path) -> bool:
    """Say whether a copy is of the same run, and not of another one that had its address before."""
    try:
        return store.read("config.json") == (path / "config.json").read_bytes()
    except OSError:
        return False


def _runs_near(address: str) -> str:
    """Say which runs are at an address, or above it."""
    for place in (address, address.rpartition("/")[0]):
        if is_address(place) and (names := stored_runs(open_store(place))):
            return f"Runs in {place}: {', '.join(names[-5:])}."
    return ""


def stored_runs(store: Store) -> list[str]:
    """Return the names of the runs that are directly at a place."""
    try:
        return [name for name in store.listing()[0] if store.entry(f"{name}/config.json") is not None]
    except StoreMissing:
        return []


def bring_records(place: str) -> Path:
    """Return a folder with the runs at an address, without their checkpoints, to be listed and compared."""
    store, digits = open_store(place), hashlib.sha256(place.encode()).hexdigest()[:12]
    root = cache_directory() / "copies" / f"runs-{digits}"
    names = stored_runs(store)
    if not names:
        store.listing()  # says what is wrong with the address, if anything is
    for old in root.iterdir() if root.is_dir() else ():
        if old.name not in names:
            shutil.rmtree(old, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        files = walk(store.below(name))
        kept = {one: entry for one, entry in files.items() if not one.startswith(f"{CHECKPOINTS}/step_")}
        copy_folder(store.below(name), kept, root / name)
    return root
