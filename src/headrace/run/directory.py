"""The directory of a run: where its files are, how it is made, and how a run is read back from it."""

import json
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.checkpoint.best import BEST_FILE
from headrace.checkpoint.store import list_checkpoints, remove_leftovers
from headrace.config import load
from headrace.config.load import NAMED_OF_DATA, Resolved, network_options, to_saved
from headrace.config.schema import Config
from headrace.core.addresses import hide_addresses
from headrace.core.directory_lock import LOCK_FILE, DirectoryLock, lock_directory
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.files import sync_directory, write_atomic
from headrace.core.json_text import parse_json
from headrace.core.local_path import is_address
from headrace.run.stored_run import is_taken, refuse_unwritable, run_path
from headrace.telemetry.records import REPORTS
from headrace.weights.named import is_path, is_stored


@dataclass(frozen=True)
class RunDirectory:
    """The layout of one run's directory."""

    path: Path
    checkpoints: Path
    _locks: list[DirectoryLock] = field(default_factory=list[DirectoryLock], compare=False, repr=False)

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def reports(self) -> Path:
        return self.path / REPORTS

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing into the run, also where its checkpoints are stored elsewhere."""
        # Inside the run the run's lock covers them; elsewhere another run might use the same directory.
        apart = self.checkpoints.is_dir() and self.path.resolve() not in self.checkpoints.resolve().parents
        with ExitStack() as stack:
            places = (self.path, self.checkpoints) if apart else (self.path,)
            self._locks[:] = [stack.enter_context(lock_directory(place)) for place in places]
            stack.callback(self._locks.clear)
            yield

    def check(self) -> None:
        """Raise CheckpointError if a directory that this process holds is no longer where it was."""
        for lock in self._locks:
            lock.check()

    def stop_checking_checkpoints(self) -> None:
        """Stop expecting a separate directory of checkpoints: this process is about to delete it."""
        # The lock of the checkpoints' directory is a file in it, and is about to be deleted.
        del self._locks[1:]


def refuse_taken(config: Config) -> None:
    """Refuse a new run whose directory, or whose directory of checkpoints, belongs to another run."""
    name, checkpoints = config.logging.run_name, config.checkpoint.checkpoint_dir
    refuse_unwritable(config.logging.log_dir)
    path = run_path(config.logging.log_dir, name) if name is not None else None
    if name is not None and is_taken(config.logging.log_dir, name):
        raise _taken(f"{config.logging.log_dir}/{name}", is_run=True)
    if path is not None and is_address(config.logging.log_dir):
        shutil.rmtree(path, ignore_errors=True)  # what is here of a run that the store has not
    # Before anything is computed: opening a large dataset may take minutes.
    if path is not None and path.exists() and not _is_free(path):
        raise _taken(path, is_run=(path / "config.json").is_file())
    if checkpoints is not None and (found := list_checkpoints(checkpoints)):
        raise ConfigError(
            f"The directory {checkpoints} already holds checkpoints ({found[-1].name}).",
            rule="Checkpoints of two runs must not be mixed: old ones are deleted, and resuming takes the newest.",
            remedy="Choose another --checkpoint-dir, or resume their run: headrace resume RUN_DIR.",
        )


def _taken(path: Path | str, *, is_run: bool) -> ConfigError:
    return ConfigError(
        f"The run directory {path} already holds files.",
        rule="A new run needs a new directory.",
        remedy=(f"Resume it: headrace resume {path}; or choose" if is_run else "Choose")
        + " another --output or --run-name.",
    )


def _is_free(path: Path) -> bool:
    """Say whether a directory is empty, apart from the hidden files of a process that was killed right at its start."""
    return path.is_dir() and all(entry.name.startswith(".") for entry in path.iterdir())


def make_directory(config: Config, what: str) -> RunDirectory:
    """Make the directory of a new run: `runs/<what>-<time>`, `what` being network and dataset, or `--run-name`."""
    name, apart = config.logging.run_name, config.checkpoint.checkpoint_dir
    # Local time: it is for people who list a directory.
    stem = name or f"{what}-{time.strftime('%Y%m%d-%H%M%S')}"
    if apart is not None:
        _make(Path(apart), "--checkpoint-dir")
    number = 1
    while True:
        path = run_path(config.logging.log_dir, stem if number == 1 else f"{stem}-{number}")
        if _make(path, "--log-dir") or name is not None:
            return layout(path, config)
        number += 1  # another run was started in the same second


def _make(path: Path, option: str) -> bool:
    """Make a directory; return whether it was not there before."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without exist_ok: whoever makes the directory owns it, also if two runs start at the same moment.
        path.mkdir()
        sync_directory(path.parent)  # a power failure later on must not take the whole directory with it
    except FileExistsError as error:
        if path.is_dir():
            return False
        raise ConfigError(f"{error.filename} is not a directory.", remedy=f"Choose another {option}.") from None
    except OSError as error:
        raise ConfigError(f"Cannot make {path}: {error.strerror}.", remedy=f"Choose another {option}.") from error
    return True


def layout(path: Path, config: Config) -> RunDirectory:
    """Return where the files of the run at `path` are."""
    return RunDirectory(path, _place_of_checkpoints(path, config.checkpoint.checkpoint_dir))


def _place_of_checkpoints(run: Path, chosen: str | None) -> Path:
    return Path(chosen) if chosen else run / "checkpoints"


def sweep(directory: RunDirectory) -> None:
    """Remove the half-written files that killed processes of a run left behind."""
    for folder in (directory.path, directory.reports, directory.checkpoints):
        for left_over in folder.glob(".*.tmp-*"):  # the form of write_atomic
            left_over.unlink(missing_ok=True)
    # Not only at the next save: a run that was killed after its last step has none.
    if directory.checkpoints.is_dir():
        remove_leftovers(directory.checkpoints)


def delete_checkpoints(directory: RunDirectory) -> None:
    """Delete a run's checkpoints, and the directory that held them if nothing else is in it."""
    for path in list_checkpoints(directory.checkpoints):  # oldest first: if killed in here, one is left to resume from
        shutil.rmtree(path, ignore_errors=True)
    directory.stop_checking_checkpoints()
    for name in (BEST_FILE, LOCK_FILE):
        (directory.checkpoints / name).unlink(missing_ok=True)
    # Something else may be in the directory, which then stays.
    with suppress(OSError):
        directory.checkpoints.rmdir()


def with_absolute_paths(resolved: Resolved) -> Resolved:
    """Return the configuration with absolute paths, so that the run can be resumed from any directory."""
    config = resolved.config
    places, weights = config.checkpoint, config.weights
    if places.checkpoint_dir is not None:
        places = replace(places, checkpoint_dir=str(Path(places.checkpoint_dir).absolute()))
    if weights.weights is not None and is_path(weights.weights) and not is_stored(weights.weights):
        weights = replace(weights, weights=str(Path(weights.weights).expanduser().absolute()))
    data = config.data
    if data.labels is not None:
        data = replace(data, labels=str(Path(data.labels).expanduser().absolute()))
    return replace(resolved, config=replace(config, checkpoint=places, weights=weights, data=data))


def saved_form(resolved: Resolved, custom: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a configuration and its origins as plain values, for config.json and for a checkpoint's manifest.

    `custom` describes what was given by code; options that would name a network or dataset given so are left out.
    """
    saved = to_saved(resolved)
    if custom is None:
        return saved
    by_code = parts_of(custom)
    left_out = {
        name
        for part, named in (("network", network_options()), ("dataset", NAMED_OF_DATA))
        if part in by_code
        for name in named
    }
    # Pictures given by code are shaped by options, as those of folders are.
    if saved["values"].get("dataset") == "folder" and "dataset" in by_code:
        left_out -= {"dataset", "image_size", "num_channels"}
    kept = {
        part: {name: value for name, value in saved[part].items() if name not in left_out}
        for part in ("values", "source")
        if part in saved
    }
    return {**saved, **kept, "custom": dict(custom)}


REPLACED = ("network", "dataset")  # what code can give instead of options
# and what it can give beside them; all of it is needed to resume
PARTS = (*REPLACED, "loss", "metrics", "augment", "optimizer")


def from_saved(
    saved: Mapping[str, object], *, given: Collection[str] = (), needed: Collection[str] = REPLACED
) -> Resolved:
    """Return the configuration that `saved_form` was given.

    `given` are the parts that code gives now; those that it gave to the run, and that are needed, must be among them.
    """
    custom = custom_parts(saved) or {}
    parts = parts_of(custom)
    if missing := [part for part in PARTS if part in parts and part in needed and part not in given]:
        plural = len(missing) > 1 or missing[0].endswith("s")
        raise CheckpointError(
            f"This run's {' and '.join(missing)} {'were' if plural else 'was'} given by code, "
            "which a command does not have.",
            rule="Such a run is continued by the program that made it.",
            remedy="Use headrace.Model there: fit(..., resume=RUN), load(RUN, network), evaluate, predict, export.",
        )
    if unknown := [part for part in given if part not in parts]:
        raise CheckpointError(
            f"This run's {' and '.join(unknown)} did not come from code, which now gives another.",
            remedy="Leave it out, or resume the run with headrace resume.",
        )
    return load.from_saved(saved)


def custom_parts(saved: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the description of what was given by code, None where options say everything."""
    return saved.get("custom", saved.get("own"))  # "own" until version 0.1


def parts_of(custom: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of what was given by code; once it was always network and dataset together."""
    return tuple(custom.get("parts", ("network", "dataset") if custom else ()))


def command_line(argv: Sequence[str]) -> list[str]:
    """Return the words of a command with its program's name, without the folder that the program is in."""
    program = Path(argv[0]).name if argv and argv[0] else "python"
    words = map(hide_addresses, argv[1:])  # a signed address is nothing to keep
    return ["headrace" if program == "__main__.py" else program, *words]  # python -m headrace


def write_run(
    directory: RunDirectory, saved: dict[str, Any], plan: dict[str, Any], command: list[str], *, is_new: bool
) -> None:
    """Store the configuration, where each value came from, and the plan; the command that started a run stays."""
    before = {} if is_new else read_saved(directory.path)
    saved = {"command": before.get("command", command)} | saved
    directory.reports.mkdir(exist_ok=True)  # before the files, whose writing syncs the run's directory
    # config.json first: as soon as it is there, the run can be resumed. Of two processes that begin one run, where the
    # file system has no locks to keep them apart, one makes this file.
    try:
        write_atomic(directory.config_file, (json.dumps(saved, indent=1) + "\n").encode(), replace=not is_new)
    except FileExistsError:
        raise _taken(directory.path, is_run=True) from None
    write_atomic(directory.plan_file, (json.dumps(plan, indent=1) + "\n").encode())


def read_run(path: Path, *, needed: Collection[str] = REPLACED) -> tuple[RunDirectory, Resolved]:
    """Return the layout and the configuration of a run started before; see `from_saved` for the parts."""
    return parse_run(path, read_saved(path), needed=needed)


def checkpoints_of(run: Path) -> Path:
    """Return the directory of a run's checkpoints, also of a run whose network was given by code."""
    try:
        return _place_of_checkpoints(run, read_saved(run)["values"].get("checkpoint_dir"))
    except (KeyError, TypeError, AttributeError) as error:
        raise _unreadable(run, error) from error


def read_saved(path: Path) -> dict[str, Any]:
    """Return what config.json of a run directory holds."""
    file = path / "config.json"
    if not file.is_file():
        problem, remedy = _not_a_run(path)
        raise CheckpointError(problem, remedy=remedy)
    try:
        saved = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(saved, dict):
        raise _unreadable(path, ValueError("it is not a mapping"))
    return saved


def parse_run(
    path: Path, saved: Mapping[str, object], *, given: Collection[str] = (), needed: Collection[str] = REPLACED
) -> tuple[RunDirectory, Resolved]:
    """Return the layout and the configuration of the run at `path` from what its config.json holds."""
    try:
        resolved = from_saved(saved, given=given, needed=needed)
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error
    return layout(path, resolved.config), resolved


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path / 'config.json'} cannot be read: {error!r}.",
        remedy="The manifest.json of a checkpoint holds the same configuration.",
    )


def _not_a_run(path: Path) -> tuple[str, str]:
    """Say why a path is not a run directory, and where runs are."""
    if (path / "manifest.json").is_file():
        return f"{path} is a checkpoint, not a run directory.", f"Give its run: {path.absolute().parent.parent}."
    problem = f"{path} is not a run directory: it has no config.json." if path.exists() else f"There is no {path}."
    place = next((place for place in (path, path.parent) if any(place.glob("*/config.json"))), None)
    if place is None:
        return problem, "Runs are made by headrace train; it prints their directory."
    runs = sorted(place.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    return problem, f"Runs in {place}, newest last: {', '.join(file.parent.name for file in runs[-5:])}."
