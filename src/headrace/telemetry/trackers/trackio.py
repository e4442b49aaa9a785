"""Trackio."""

import contextlib
import importlib
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config.schema import Logging
from headrace.core.files import write_atomic
from headrace.engine.histograms import Histogram, filled_bins
from headrace.telemetry.sinks import Notify
from headrace.telemetry.trackers.tracker import Row, RunDescription

TRACKIO_NAME_FILE = "trackio_run.txt"


class Trackio:
    """A run of Trackio: in its files in the user's cache, or on the server or Space that its variables name.

    What it prints, which would break into the progress line, is left out.
    """

    def __init__(self, about: RunDescription, notify: Notify) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT") or "headrace"
        known = about.directory / TRACKIO_NAME_FILE  # a resumed run continues its run there
        resumed = known.is_file()
        with _silent():
            self._run = self._trackio.init(
                project=project,
                name=known.read_text().strip() if resumed else about.name,
                config={"options": dict(about.options), "plan": dict(about.plan)},
                resume="allow" if resumed else "never",
                embed=False,
                # Loads of processors and GPUs are not what was asked for; the clock of the run says what waited.
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        write_atomic(known, f"{self._run.name}\n".encode())
        self._step = about.step
        if not any(os.environ.get(name) for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")):
            place = Path(self._trackio.utils.TRACKIO_DIR)
            notify(f"trackio: the run is kept in {place}; trackio show --project {project} shows it", "info")

    def scalars(self, *rows: Row) -> None:
        for step, values in rows:
            self._step = step
            self._run.log(dict(values), step=step)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._run.log({name: self._trackio.Image(pixels)}, step=step)

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        logged = {name: self._trackio.Histogram(np_histogram=filled_bins(each)) for name, each in found.items()}
        self._run.log(logged, step=step)

    def summary(self, values: Mapping[str, object]) -> None:
        """Log what is known at the end with the last step."""
        self._run.log({name: value for name, value in values.items() if value != ""}, step=self._step)

    def close(self) -> None:
        with _silent():
            self._run.finish()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def open_tracker(about: RunDescription, logging: Logging, notify: Notify) -> Trackio:
    """Open a run there, or the one that this one continues."""
    del logging
    return Trackio(about, notify)
