"""A run's directory: where each of its files lies, how it is made, and how a run is read back from it."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config.load import Resolved, from_flat, origins_from_json, origins_to_json, to_flat
from headrace.config.schema import Config
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.files import write_atomic


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


def choose_directory(config: Config) -> RunDirectory:
    """Return the directory for a new run (not made yet): `runs/<model>-<dataset>-<time>`, or `--run-name`."""
    name = config.logging.run_name
    root = Path(config.logging.log_dir)
    if name is None:
        stem = f"{config.model.model_name}-{config.data.dataset}-{time.strftime('%Y%m%d-%H%M%S')}"
        name = next(n for n in (stem, *(f"{stem}-{i}" for i in range(2, 1000))) if not (root / n).exists())
    path = root / name
    if path.exists() and any(path.iterdir()):
        raise ConfigError(
            f"The run directory {path} already holds files.",
            rule="A new run needs a directory of its own.",
            remedy=f"Go on with it: headrace resume {path}; or choose another --run-name.",
        )
    return _layout(path, config)


def _layout(path: Path, config: Config) -> RunDirectory:
    chosen = config.checkpoint.checkpoint_dir
    return RunDirectory(path, Path(chosen) if chosen else path / "checkpoints")


def saved_form(resolved: Resolved) -> dict[str, Any]:
    """Return a configuration and its origins as plain values, for config.json and for a checkpoint's manifest."""
    origins = origins_to_json(resolved.origins)
    return {"name": resolved.name, "values": to_flat(resolved.config), "origins": origins}


def from_saved(saved: Mapping[str, Any]) -> Resolved:
    """Return the configuration that `saved_form` was given."""
    origins = origins_from_json(saved["origins"])
    return Resolved(config=from_flat(saved["values"], origins), origins=origins, name=saved["name"])


def write_run(directory: RunDirectory, resolved: Resolved, plan: dict[str, Any], command: list[str]) -> None:
    """Make the directory and store the configuration, where each value came from, and the plan."""
    for folder in (directory.path, directory.checkpoints, directory.reports):
        folder.mkdir(parents=True, exist_ok=True)
    saved = {"command": command} | saved_form(resolved)
    for file, content in ((directory.config_file, saved), (directory.plan_file, plan)):
        write_atomic(file, (json.dumps(content, indent=1) + "\n").encode())


def read_run(path: Path) -> tuple[RunDirectory, Resolved]:
    """Return the layout and the configuration of a run that was started before."""
    file = path / "config.json"
    if not file.is_file():
        runs = sorted(str(found.parent) for found in path.glob("*/config.json"))
        remedy = f"Runs in it: {', '.join(runs[-5:])}." if runs else "Runs are made by headrace train."
        raise CheckpointError(f"{path} is not a run directory: it has no config.json.", remedy=remedy)
    try:
        resolved = from_saved(json.loads(file.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error!r}.", remedy="A checkpoint's manifest.json holds the same configuration."
        ) from error
    return _layout(path, resolved.config), resolved
