"""Trackers: the records of a run for TensorBoard and for Weights & Biases, where these are installed.

A tracker is a guest: what goes wrong in it (no login, no network, a full disk) is told once and never stops the run.
"""

import importlib
import importlib.util
import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.config.schema import Logging
from headrace.core.errors import ConfigError
from headrace.core.files import write_atomic
from headrace.telemetry.records import CheckpointRecord, Record, RunEnd, TrainRecord, ValidationRecord
from headrace.telemetry.sinks import Tell

TENSORBOARD_DIR = "tensorboard"
WANDB_DIR, WANDB_ID_FILE = "wandb", "wandb_run.json"
_WAIT_SECONDS = 30  # for a server that does not answer
_PACKAGES = {"wandb": ("wandb", "wandb"), "tensorboard": ("tensorboardX", "tensorboard")}  # option: (module, extra)


@dataclass(frozen=True, kw_only=True)
class About:
    """What a tracker is told of the run as a whole."""

    directory: Path
    name: str
    options: Mapping[str, Any]
    plan: Mapping[str, Any]
    step: int  # that the process goes on from


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
    """Refuse a tracker that is asked for and not installed, before anything starts."""
    for option, (module, extra) in _PACKAGES.items():
        if getattr(logging, option) and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"--{option} is given, but the package {module} is not installed.",
                remedy=f"pip install 'headrace[{extra}]', or leave --{option} out.",
            )


class TrackerSink:
    """Hands the numbers of records to a tracker that is opened with the first of them; failures end it, not the run."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], tell: Tell) -> None:
        self._name, self._open, self._tell = name, open_tracker, tell
        self._tracker: Tracker | None = None
        self._failed = False

    def write(self, record: Record) -> None:
        """Hand the record on."""
        self._shielded(lambda tracker: _hand_over(tracker, record))

    def close(self) -> None:
        """Finish; the second time there is nothing to do."""
        if self._tracker is not None:
            self._shielded(lambda tracker: tracker.close())
        self._tracker, self._failed = None, True

    def _shielded(self, use: Callable[[Tracker], None]) -> None:
        if self._failed:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of libraries that are not ours
                self._tracker = self._tracker or self._open()
                use(self._tracker)
        except Exception as error:  # a guest's failure of any kind
            self._failed = True
            self._tell(f"{self._name} gave up ({type(error).__name__}: {error}); the run goes on without it", "warning")


def _hand_over(tracker: Tracker, record: Record) -> None:
    if isinstance(record, TrainRecord):
        tracker.scalars(record.step, _numbers(record, "train"))
    elif isinstance(record, ValidationRecord):
        tracker.scalars(record.step, _numbers(record, f"validation/{record.weights}"))
    elif isinstance(record, CheckpointRecord):
        tracker.scalars(record.step, _numbers(record, "checkpoint"))
    elif isinstance(record, RunEnd):
        ended = {f"seconds/{name}": value for name, value in record.seconds.items()}
        # in minutes, as the reference logged it
        ended |= {"time_to_train": record.time_to_train / 60, "outcome": record.outcome, "verdict": record.verdict}
        tracker.summary(ended | _numbers(record, "run"))


def _numbers(record: Record, group: str) -> dict[str, float]:
    """Return the numbers of a record as `group/field`; the step is their place, not one of them."""
    values = record.to_dict()
    return {
        f"{group}/{name}": float(value)
        for name, value in values.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


class TensorBoard:
    """Event files in the run's directory; what a resumed run does again replaces what was there."""

    def __init__(self, about: About) -> None:
        writer: Any = importlib.import_module("tensorboardX").SummaryWriter
        self._writer = writer(logdir=str(about.directory / TENSORBOARD_DIR), purge_step=about.step or None)
        for title, content in (("options", about.options), ("plan", about.plan)):
            self._writer.add_text(title, f"```\n{json.dumps(content, indent=1, default=str)}\n```", about.step)
        self._step = about.step

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values and hand them to the operating system."""
        self._step = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write the numbers as scalars of the last step, words as text."""
        self.scalars(self._step, {name: value for name, value in values.items() if isinstance(value, float)})
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, self._step)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases: online where one is logged in, else written for `wandb sync`."""

    def __init__(self, about: About, logging: Logging, tell: Tell) -> None:
        wandb: Any = importlib.import_module("wandb")
        place = about.directory / WANDB_ID_FILE
        known = json.loads(place.read_text()) if place.exists() else {}  # a resumed run goes on with its own
        mode = os.environ.get("WANDB_MODE") or ("online" if _logged_in(wandb) else "offline")
        if mode == "offline" and "WANDB_MODE" not in os.environ:
            kept = about.directory / WANDB_DIR / "offline-run-*"
            tell(f"wandb: nobody is logged in; the run is kept: `wandb sync {kept}`", "info")

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
            tell(f"wandb: the server cannot be used ({error}); the run is kept for `wandb sync`", "warning")
            self._run = start("offline")
        write_atomic(place, json.dumps({"id": self._run.id}).encode())
        # Validations and checkpoints are told after later steps of training; W&B's own step would refuse them.
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline:
            tell(f"wandb: {self._run.url}", "info")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        self._run.log({"step": step, **values})

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set the run's summary."""
        self._run.summary.update(dict(values))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _logged_in(wandb: Any) -> bool:
    try:
        return bool(os.environ.get("WANDB_API_KEY") or wandb.api.api_key)
    except Exception:
        return False


def make_trackers(logging: Logging, about: About, tell: Tell) -> list[TrackerSink]:
    """Return the sinks of the trackers that are asked for; `tell` hears of their troubles."""
    sinks = []
    if logging.tensorboard:
        sinks.append(TrackerSink("tensorboard", lambda: TensorBoard(about), tell))
    if logging.wandb:
        sinks.append(TrackerSink("wandb", lambda: WeightsAndBiases(about, logging, tell), tell))
    return sinks
