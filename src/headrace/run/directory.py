"""The directory of a run: where its files are, how it is made, and how a run is read back from it."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.checkpoint.saver import BEST_FILE
from headrace.checkpoint.store import list_checkpoints
from headrace.config.load import Resolved, named_options, to_saved
from headrace.config.schema import Config
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.files import LOCK_FILE, lock_directory, parse_json, write_atomic
from headrace.reference import entrance


@dataclass(frozen=True)
class RunDirectory:
    """The layout of one run's directory."""

    path: Path
    checkpoints: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def reports(self) -> Path:
        return self.path / "reports"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from writing into the run, also where its checkpoints are stored elsewhere."""
        apart = self.checkpoints.is_dir() and self.path.resolve() not in self.checkpoints.resolve().parents
        with lock_directory(self.path), lock_directory(self.checkpoints) if apart else nullcontext():
            yield


def refuse_taken(config: Config) -> None:
    """Refuse a new run whose directory, or whose directory of checkpoints, belongs to another run."""
    name, checkpoints = config.logging.run_name, config.checkpoint.checkpoint_dir
    path = Path(config.logging.log_dir) / name if name is not None else None
    if path is not None and path.exists() and not _is_free(path):
        run = (path / "config.json").is_file()
        raise ConfigError(
            f"The run directory {path} already holds files.",
            rule="A new run needs a new directory.",
            remedy=(f"Resume it: headrace resume {path}; or choose" if run else "Choose") + " another --run-name.",
        )
    if checkpoints is not None and (found := list_checkpoints(checkpoints)):
        raise ConfigError(
            f"The directory {checkpoints} already holds checkpoints ({found[-1].name}).",
            rule="Checkpoints of two runs must not be mixed: old ones are deleted, and resuming takes the newest.",
            remedy="Choose another --checkpoint-dir, or resume their run: headrace resume RUN_DIR.",
        )


def _is_free(path: Path) -> bool:
    """Say whether a directory is empty, apart from the hidden files of a process that was killed right at its start."""
    return path.is_dir() and all(entry.name.startswith(".") for entry in path.iterdir())


def make_directory(config: Config, what: str) -> RunDirectory:
    """Make the directory of a new run: `runs/<what>-<time>`, `what` being network and dataset, or `--run-name`."""
    name, apart = config.logging.run_name, config.checkpoint.checkpoint_dir
    stem = name or f"{what}-{time.strftime('%Y%m%d-%H%M%S')}"
    if apart is not None:
        _make(Path(apart), "--checkpoint-dir")
    number = 1
    while True:
        path = Path(config.logging.log_dir) / (stem if number == 1 else f"{stem}-{number}")
        if _make(path, "--log-dir") or name is not None:
            return layout(path, config)
        number += 1  # another run was started in the same second


def _make(path: Path, option: str) -> bool:
    """Make a directory; return whether it was not there before."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
    except FileExistsError as error:
        if path.is_dir():
            return False
        raise ConfigError(f"{error.filename} is not a directory.", remedy=f"Choose another {option}.") from None
    except OSError as error:
        raise ConfigError(f"Cannot make {path}: {error.strerror}.", remedy=f"Choose another {option}.") from error
    return True


def layout(path: Path, config: Config) -> RunDirectory:
    """Return where the files of the run at `path` are."""
    chosen = config.checkpoint.checkpoint_dir
    return RunDirectory(path, Path(chosen) if chosen else path / "checkpoints")


def sweep(directory: RunDirectory) -> None:
    """Remove the half-written files that killed processes of a run left behind."""
    for folder in (directory.path, directory.reports, directory.checkpoints):
        for left_over in folder.glob(".*.tmp-*"):
            left_over.unlink(missing_ok=True)


def delete_checkpoints(directory: RunDirectory) -> None:
    """Delete a run's checkpoints, and the directory that held them if nothing else is in it."""
    for path in list_checkpoints(directory.checkpoints):  # oldest first: if killed in here, one is left to resume from
        shutil.rmtree(path, ignore_errors=True)
    for name in (BEST_FILE, LOCK_FILE):
        (directory.checkpoints / name).unlink(missing_ok=True)
    with suppress(OSError):
        directory.checkpoints.rmdir()


def with_absolute_paths(resolved: Resolved) -> Resolved:
    """Return the configuration with absolute paths, so that the run can be resumed from any directory."""
    config = resolved.config
    places, weights = config.checkpoint, config.weights
    if places.checkpoint_dir is not None:
        places = replace(places, checkpoint_dir=str(Path(places.checkpoint_dir).absolute()))
    if weights.init_from is not None:
        weights = replace(weights, init_from=str(Path(weights.init_from).absolute()))
    return replace(resolved, config=replace(config, checkpoint=places, weights=weights))


def saved_form(resolved: Resolved, custom: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a configuration and its origins as plain values, for config.json and for a checkpoint's manifest.

    `custom` describes a network and data given by code; the options that would name them are then left out.
    """
    saved = to_saved(resolved)
    if custom is None:
        return saved
    named = named_options()
    values = {name: value for name, value in saved["values"].items() if name not in named}
    return saved | {"values": values, "custom": dict(custom)}


def from_saved(saved: Mapping[str, Any], *, custom: bool = False) -> Resolved:
    """Return the configuration that `saved_form` was given; `custom`: code gives its network and data."""
    parts = custom_parts(saved)
    if custom != (parts is not None):
        _refuse_parts(parts)
    return entrance.from_saved(saved)


def custom_parts(saved: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the description of a network and data given by code, None where options name them."""
    return saved.get("custom", saved.get("own"))  # "own" until version 0.1


def _refuse_parts(custom: Mapping[str, Any] | None) -> None:
    if custom is None:
        raise CheckpointError(
            "This run named its network and dataset in options, and code gives others.",
            remedy="Resume it with headrace resume.",
        )
    raise CheckpointError(
        f"The network {custom['network']} and its data were given by code, which a command does not have.",
        rule="A run of a custom network is resumed by the program that made it.",
        remedy="Use headrace.PipelineModel there: fit(..., resume=RUN), load(RUN), evaluate, predict, export.",
    )


def write_run(directory: RunDirectory, saved: dict[str, Any], plan: dict[str, Any], command: list[str]) -> None:
    """Store the configuration, where each value came from, and the plan."""
    saved = {"command": command} | saved
    # config.json first: as soon as it is there, the run can be resumed.
    for file, content in ((directory.config_file, saved), (directory.plan_file, plan)):
        write_atomic(file, (json.dumps(content, indent=1) + "\n").encode())
    directory.reports.mkdir(exist_ok=True)


def read_run(path: Path, *, custom: bool = False) -> tuple[RunDirectory, Resolved]:
    """Return the layout and the configuration of a run that was started before (`custom`: with parts given by code)."""
    return parse_run(path, read_saved(path), custom=custom)


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


def parse_run(path: Path, saved: Mapping[str, Any], *, custom: bool = False) -> tuple[RunDirectory, Resolved]:
    """Return the layout and the configuration of the run at `path` from what its config.json holds."""
    try:
        resolved = from_saved(saved, custom=custom)
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
