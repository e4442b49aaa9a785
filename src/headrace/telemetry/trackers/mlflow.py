"""MLflow."""

import importlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.config.schema import Logging
from headrace.core.files import write_atomic
from headrace.engine.histograms import Histogram
from headrace.telemetry.sinks import Notify
from headrace.telemetry.trackers.tracker import Row, RunDescription, known_run

MLFLOW_DIR, MLFLOW_ID_FILE = "mlflow", "mlflow_run.json"
# Parameters in a call, letters of one, as older servers take them; numbers in a call.
_BATCH, _PARAMETER, _MOST_METRICS = 100, 500, 1000


class MLflow:
    """A run of MLflow: on the server that MLFLOW_TRACKING_URI names, else in files in the run's directory."""

    def __init__(self, about: RunDescription, notify: Notify) -> None:
        place = about.directory / MLFLOW_DIR
        address = os.environ.get("MLFLOW_TRACKING_URI") or place.resolve().as_uri()
        if address.startswith("file:"):
            # MLflow reads these when it is imported or opens a store: newer versions refuse files unless told so, since
            # they would rather have a database; and nothing is to be sent anywhere.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = self._mlflow.MlflowClient(tracking_uri=address)
        self._step = about.step
        known = known_run(about.directory / MLFLOW_ID_FILE)  # a resumed run continues its MLflow run
        if known:
            self._id = known["id"]
            self._client.set_terminated(self._id, "RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "headrace"
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = self._client.create_run(number, run_name=about.name).info.run_id
        write_atomic(about.directory / MLFLOW_ID_FILE, json.dumps({"id": self._id}).encode())
        parameter = self._entities.Param
        options = [parameter(key, str(value)[:_PARAMETER]) for key, value in about.options.items() if value is not None]
        for first in range(0, len(options), _BATCH):
            self._client.log_batch(self._id, params=options[first : first + _BATCH])
        self._client.log_dict(self._id, dict(about.plan), "plan.json")
        if address.startswith("file:"):
            notify(f"mlflow: the run is kept in {place}", "info")

    def scalars(self, *rows: Row) -> None:
        now = round(1000 * time.time())
        numbers = [
            self._entities.Metric(name, value, now, step) for step, values in rows for name, value in values.items()
        ]
        for first in range(0, len(numbers), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=numbers[first : first + _MOST_METRICS])
        self._step = rows[-1][0]

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._client.log_image(self._id, pixels, artifact_file=f"{name}/step_{step:08d}.png")

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Take none: MLflow has no histograms."""

    def summary(self, values: Mapping[str, object]) -> None:
        """Write numbers as metrics, and words as tags."""
        self.scalars((self._step, {name: value for name, value in values.items() if isinstance(value, float)}))
        for name, value in values.items():
            if isinstance(value, str) and value:
                self._client.set_tag(self._id, name, value)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def open_tracker(about: RunDescription, logging: Logging, notify: Notify) -> MLflow:
    """Open a run there, or the one that this one continues."""
    del logging
    return MLflow(about, notify)
