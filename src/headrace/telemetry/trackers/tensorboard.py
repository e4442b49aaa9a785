"""Event files for TensorBoard."""

import base64
import importlib
import importlib.util
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config.schema import Logging
from headrace.engine.histograms import Histogram, filled_bins
from headrace.telemetry.sinks import Notify
from headrace.telemetry.trackers.tracker import Row, RunDescription

TENSORBOARD_DIR = "tensorboard"
_RESULTS = ("best_top1", "images_per_second", "time_to_train")


class TensorBoard:
    """Event files in the run's directory; what a resumed run repeats replaces what was there."""

    def __init__(self, about: RunDescription) -> None:
        writer: Any = importlib.import_module("tensorboardX").SummaryWriter
        # TensorBoard hides earlier events of this step and later ones: those of the restored step itself stay.
        # Files are named by the second: a run that is resumed in the same one must not overwrite its first part.
        place, suffix = about.directory / TENSORBOARD_DIR, f".{about.step}"
        self._writer = writer(logdir=str(place), purge_step=about.step + 1, filename_suffix=suffix)
        for title, content in (("options", about.options), ("plan", about.plan)):
            self._writer.add_text(title, f"```\n{json.dumps(content, indent=1, default=str)}\n```", about.step)
        self._step, self._options = about.step, about.options

    def scalars(self, *rows: Row) -> None:
        """Write and flush the values."""
        for step, values in rows:
            self._step = step
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Write histograms, of filled bins: readers take the least and greatest value for the outer edges."""
        for name, each in found.items():
            counts, edges = filled_bins(each)
            least, greatest, total, squares = (float(each[key]) for key in ("least", "greatest", "total", "squares"))
            self._writer.add_histogram_raw(name, least, greatest, counts.sum(), total, squares, edges[1:], counts, step)

    def summary(self, values: Mapping[str, object]) -> None:
        """Write the numbers as scalars of the last step, strings as text, and the options beside the results."""
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        self.scalars((self._step, numbers))
        # The tab HPARAMS compares runs: options that are numbers or words, and how good and fast the run was.
        options = {name: value for name, value in self._options.items() if isinstance(value, bool | int | float | str)}
        results = {f"result/{name}": numbers[f"run/{name}"] for name in _RESULTS if f"run/{name}" in numbers}
        self._writer.add_hparams(options, results, name="options", global_step=self._step)
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, self._step)

    def close(self) -> None:
        self._writer.close()


def open_tracker(about: RunDescription, logging: Logging, notify: Notify) -> TensorBoard:
    """Open the files of a run."""
    del logging, notify
    return TensorBoard(about)


def write_mistakes(directory: Path, images: Mapping[str, Any]) -> int:
    """Add the most confident mistakes of a run to its TensorBoard files, if it has any; return how many."""
    place = directory / TENSORBOARD_DIR
    if not place.is_dir() or importlib.util.find_spec("tensorboardX") is None:
        return 0
    from PIL import Image

    writer: Any = importlib.import_module("tensorboardX").SummaryWriter(logdir=str(place))
    for number, row in enumerate(images["mistakes"]):
        with Image.open(io.BytesIO(base64.b64decode(row["image"].partition(",")[2]))) as image:
            pixels = np.asarray(image.convert("RGB"))
        name = f"mistakes/{number:02d} {row['predicted']} {row['probability']:.2f}, is {row['true']}: {row['file']}"
        writer.add_image(name, pixels, images["step"], dataformats="HWC")
    writer.close()
    return len(images["mistakes"])
