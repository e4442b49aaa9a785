"""Weights & Biases."""

import importlib
import inspect
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.config.schema import Logging
from headrace.core.files import write_atomic
from headrace.engine.histograms import Histogram, filled_bins
from headrace.telemetry.sinks import Notify
from headrace.telemetry.trackers.tracker import Row, RunDescription, known_run

WANDB_DIR, WANDB_ID_FILE = "wandb", "wandb_run.json"
_WAIT_SECONDS = 30  # for a server that does not answer


class WeightsAndBiases:
    """A run of Weights & Biases: online if someone is logged in, else offline for `wandb sync`."""

    def __init__(self, about: RunDescription, logging: Logging, notify: Notify) -> None:
        wandb: Any = importlib.import_module("wandb")
        place = about.directory / WANDB_ID_FILE
        known = known_run(place)  # a resumed run continues its W&B run
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
                # Quiet, since it would print into the progress line; and a server that is down must not hold up a run.
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

    def scalars(self, *rows: Row) -> None:
        for step, values in rows:
            self._run.log({"step": step, **values})

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run.log({"step": step, name: wandb.Image(pixels)})

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        wandb: Any = importlib.import_module("wandb")
        logged = {name: wandb.Histogram(np_histogram=filled_bins(each)) for name, each in found.items()}
        self._run.log({"step": step, **logged})

    def summary(self, values: Mapping[str, object]) -> None:
        """Set the run's summary."""
        self._run.summary.update(dict(values))

    def close(self) -> None:
        self._run.finish()


def _logged_in(wandb: Any) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        if "prompt" in inspect.signature(wandb.login).parameters:  # newer versions warn about `wandb.api`
            return bool(wandb.login(prompt=False))
        return bool(wandb.api.api_key)
    except Exception:
        return False


def open_tracker(about: RunDescription, logging: Logging, notify: Notify) -> WeightsAndBiases:
    """Open a run there, or the one that this one continues."""
    return WeightsAndBiases(about, logging, notify)
