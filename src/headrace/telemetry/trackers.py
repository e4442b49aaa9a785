"""Trackers: the records of a run for TensorBoard and Weights & Biases, if they are installed.

A failure of a tracker (no login, no network, a full disk) is reported once and never stops the run.
"""

import importlib
import importlib.util
import inspect
import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.config.schema import Logging
from headrace.core.errors import ConfigError
from headrace.core.files import parse_json, write_atomic
from headrace.telemetry.records import CheckpointRecord, Record, RunEnd, TrainRecord, ValidationRecord
from headrace.telemetry.sinks import Notify

TENSORBOARD_DIR = "tensorboard"
WANDB_DIR, WANDB_ID_FILE = "wandb", "wandb_run.json"
_WAIT_SECONDS = 30  # for a server that does not answer
_PACKAGES = {"wandb": ("wandb", "wandb"), "tensorboard": ("tensorboardX", "tensorboard")}  # option: (module, extra)


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What a tracker needs to know about the run as a whole."""

    directory: Path
    name: str
    options: Mapping[str, Any]
    plan: Mapping[str, Any]
    step: int  # from which this process starts or resumes


class Tracker(Protocol):
    """Takes numbers by name."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step."""
        ...

    def summary(self, values: Mapping[str, Any]) -> None:
        """Take what is known at the end."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


def refuse_missing(logging: Logging) -> None:
    """Raise ConfigError if a requested tracker is not installed, before anything starts."""
    for option, (module, extra) in _PACKAGES.items():
        if getattr(logging, option) and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"--{option} is given, but the package {module} is not installed.",
                remedy=f"pip install 'headrace[{extra}]', or remove --{option}.",
            )


class TrackerSink:
    """Sends the numbers of records to a tracker, opened at the first one; a failure ends the tracker, not the run."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], notify: Notify) -> None:
        self._name, self._open, self._notify = name, open_tracker, notify
        self._tracker: Tracker | None = None
        self._failed = False

    def write(self, record: Record) -> None:
        """Send the record."""
        self._guarded(lambda tracker: _send(tracker, record))

    def close(self) -> None:
        """Finish; a second call does nothing."""
        if self._tracker is not None:
            self._guarded(lambda tracker: tracker.close())
        self._tracker, self._failed = None, True

    def _guarded(self, use: Callable[[Tracker], None]) -> None:
        if self._failed:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # from third-party libraries
                self._tracker = self._tracker or self._open()
                use(self._tracker)
        except Exception as error:  # whatever fails in a tracker
            self._failed = True
            self._notify(
                f"{self._name} failed ({type(error).__name__}: {error}); the run continues without it", "warning"
            )


def _send(tracker: Tracker, record: Record) -> None:
    if isinstance(record, TrainRecord):
        tracker.scalars(record.step, _numbers(record, "train"))
    elif isinstance(record, ValidationRecord):
        tracker.scalars(record.step, _numbers(record, f"validation/{record.weights}"))
    elif isinstance(record, CheckpointRecord):
        tracker.scalars(record.step, _numbers(record, "checkpoint"))
    elif isinstance(record, RunEnd):
        ended = {f"seconds/{name}": value for name, value in record.seconds.items()}
        ended |= {"outcome": record.outcome, "verdict": record.verdict}
        tracker.summary(ended | _numbers(record, "run"))


def _numbers(record: Record, group: str) -> dict[str, float]:
    """Return the numbers of a record as `group/field`; except the step."""
    values = record.to_dict()
    values |= values.pop("metrics", {})
    return {
        f"{group}/{name}": float(value)
        for name, value in values.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


class TensorBoard:
    """Event files in the run's directory; what a resumed run repeats replaces what was there."""

    def __init__(self, about: RunDescription) -> None:
        writer: Any = importlib.import_module("tensorboardX").SummaryWriter
        self._writer = writer(logdir=str(about.directory / TENSORBOARD_DIR), purge_step=about.step or None)
        for title, content in (("options", about.options), ("plan", about.plan)):
            self._writer.add_text(title, f"```\n{json.dumps(content, indent=1, default=str)}\n```", about.step)
        self._step = about.step

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write and flush the values."""
        self._step = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write the numbers as scalars of the last step, strings as text."""
        self.scalars(self._step, {name: value for name, value in values.items() if isinstance(value, float)})
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, self._step)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases: online if someone is logged in, else offline for `wandb sync`."""

    def __init__(self, about: RunDescription, logging: Logging, notify: Notify) -> None:
        wandb: Any = importlib.import_module("wandb")
        place = about.directory / WANDB_ID_FILE
        known = _known_run(place)  # a resumed run continues its W&B run
        mode = os.environ.get("WANDB_MODE") or ("online" if _logged_in(wandb) else "offline")
        if mode == "offline":
            kept = about.directory / WANDB_DIR
            why = "WANDB_MODE is offline" if "WANDB_MODE" in os.environ else "nobody is logged in"
            notify(
                f"wandb: {why}; the run is kept offline in {kept}. After `wandb login`, upload it with "
                f"`wandb sync {kept}/offline-run-*`",
                "info",
            )

        def start(mode: str) -> Any:
            return wandb.init(
                project=logging.wandb_project,
                name=logging.wandb_run_name or about.name,
                tags=list(logging.wandb_tags) or None,
                id=known.get("id"),
                resume="allow" if known else None,
                dir=str(about.directory),
                config={"options": dict(about.options), "plan": dict(about.plan)},
                mode=mode,
                settings=wandb.Settings(init_timeout=_WAIT_SECONDS, console="off", silent=True),
            )

        try:
            self._run = start(mode)
        except Exception as error:
            if mode == "offline":
                raise
            notify(f"wandb: the server cannot be used ({error}); the run is kept for `wandb sync`", "warning")
            self._run = start("offline")
        write_atomic(place, json.dumps({"id": self._run.id}).encode())
        # Validations and checkpoints are reported after later training steps; W&B's own step counter would reject them.
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline:
            notify(f"wandb: {self._run.url}", "info")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        self._run.log({"step": step, **values})

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set the run's summary."""
        self._run.summary.update(dict(values))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _known_run(place: Path) -> dict[str, str]:
    """Return the id that an earlier process of the run wrote; nothing if there is none that can be read."""
    try:
        found = parse_json(place.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("id"), str) else {}


def _logged_in(wandb: Any) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        if "prompt" in inspect.signature(wandb.login).parameters:  # newer versions warn about `wandb.api`
            return bool(wandb.login(prompt=False))
        return bool(wandb.api.api_key)
    except Exception:
        return False


def make_trackers(logging: Logging, about: RunDescription, notify: Notify) -> list[TrackerSink]:
    """Return the sinks of the trackers that are asked for; `notify` hears of their troubles."""
    sinks = []
    if logging.tensorboard:
        sinks.append(TrackerSink("tensorboard", lambda: TensorBoard(about), notify))
    if logging.wandb:
        sinks.append(TrackerSink("wandb", lambda: WeightsAndBiases(about, logging, notify), notify))
    return sinks
