"""Trackers: the records of a run for TensorBoard, Weights & Biases and MLflow, if they are installed.

A failure of a tracker (no login, no network, a full disk) is reported once and never stops the run.
"""

import base64
import importlib
import importlib.util
import inspect
import io
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.config.schema import Logging
from headrace.core.errors import ConfigError
from headrace.core.files import write_atomic
from headrace.core.json_text import parse_json
from headrace.engine.histograms import Histogram, filled_bins
from headrace.telemetry.line_file import Sink
from headrace.telemetry.records import (
    CheckpointRecord,
    CurvePoint,
    Record,
    RunEnd,
    TrainRecord,
    ValidationRecord,
    number_fields,
)
from headrace.telemetry.sinks import Notify
from headrace.telemetry.validation_report import report_file

TENSORBOARD_DIR = "tensorboard"
WANDB_DIR, WANDB_ID_FILE = "wandb", "wandb_run.json"
_RESULTS = ("best_top1", "images_per_second", "time_to_train")
_MOST_BYTES = 64 << 20  # of a validation report
_MOST_CLASSES, _LEGIBLE, _NAME = 360, 12, 24  # in a confusion matrix; pixels of a cell with a name; letters of a name
_RIGHT, _WRONG = np.array((0, 114, 178)), np.array((213, 94, 0))  # safe for color-blind eyes
_WAIT_SECONDS = 30  # for a server that does not answer
MLFLOW_DIR, MLFLOW_ID_FILE = "mlflow", "mlflow_run.json"
# Of MLflow: parameters in a call, letters of one, as older servers take them; numbers in a call.
_BATCH, _PARAMETER, _MOST_METRICS = 100, 500, 1000


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What a tracker needs to know about the run as a whole."""

    directory: Path
    name: str
    options: Mapping[str, Any]
    plan: Mapping[str, Any]
    step: int  # from which this process starts or resumes


Row = tuple[int, Mapping[str, float]]  # a step, and its numbers by name
# Those that the points of curves have: a record's mean over an epoch is no point of the same curve.
_OF_POINTS = tuple(f"train/{name}" for name in number_fields(CurvePoint))


class Tracker(Protocol):
    """Takes numbers by name."""

    def scalars(self, *rows: Row) -> None:
        """Take numbers of one step or several, in their order."""
        ...

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Take an image [H, W, 3] of a step, 0..255."""
        ...

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Take the histograms of a step by name."""
        ...

    def summary(self, values: Mapping[str, object]) -> None:
        """Take what is known at the end."""
        ...

    def close(self) -> None: ...


def refuse_missing(logging: Logging) -> None:
    """Raise ConfigError if a requested tracker is not installed, before anything starts."""
    for row in TRACKERS:
        if getattr(logging, row.option) and importlib.util.find_spec(row.module) is None:
            raise ConfigError(
                f"--{row.option} is given, but the package {row.module} is not installed.",
                remedy=f"pip install 'headrace[{row.option}]', or remove --{row.option}.",
            )


class TrackerSink(Sink):
    """Sends the numbers of records to a tracker, opened at the first one; a failure ends the tracker, not the run."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker], notify: Notify, run_dir: Path) -> None:
        self._name, self._open, self._notify, self._run_dir = name, open_tracker, notify, run_dir
        self._tracker: Tracker | None = None
        self._failed = False

    def write(self, record: Record) -> None:
        """Send the record."""
        self._guarded(lambda tracker: self._send(tracker, record))

    def points(self, points: Sequence[CurvePoint]) -> None:
        """Send the points of the curves."""
        rows = [(point.step, _numbers(point, "train")) for point in points]
        self._guarded(lambda tracker: tracker.scalars(*rows))

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Send the histograms of a step, but for blocks without a single finite number."""
        filled = {name: each for name, each in found.items() if each["counts"].any()}
        if filled:
            self._guarded(lambda tracker: tracker.histograms(step, filled))

    def close(self) -> None:
        """Finish; a second call does nothing."""
        if self._tracker is not None:
            self._guarded(lambda tracker: tracker.close())
        # Closed for good: a record that comes later would open another run there.
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

    def _send(self, tracker: Tracker, record: Record) -> None:
        if isinstance(record, TrainRecord):
            numbers = _numbers(record, "train")
            tracker.scalars((record.step, {name: numbers[name] for name in numbers if name not in _OF_POINTS}))
        elif isinstance(record, ValidationRecord):
            group = f"validation/{record.weights}"
            tracker.scalars((record.step, _numbers(record, group)))
            file = report_file(self._run_dir, record.step)  # written before the record
            report = parse_json(file.read_bytes(), _MOST_BYTES).get(record.weights) if file.is_file() else None
            if report and len(report["classes"]) <= _MOST_CLASSES:
                tracker.image(record.step, f"{group}/confusion_matrix", draw_confusion(report))
        elif isinstance(record, CheckpointRecord):
            tracker.scalars((record.step, _numbers(record, "checkpoint")))
        elif isinstance(record, RunEnd):
            ended = {f"seconds/{name}": value for name, value in record.seconds.items()}
            ended |= {f"best/{name}": value for name, value in record.best.items()}
            ended |= {"outcome": record.outcome, "verdict": record.verdict, "model_verdict": record.model_verdict}
            tracker.summary(ended | _numbers(record, "run"))


def draw_confusion(report: Mapping[str, Any]) -> np.ndarray:
    """Return the confusion matrix as an image: true classes down, predicted ones across, mistakes in orange."""
    from PIL import Image, ImageDraw  # here: most runs draw nothing, and it is 18 ms of every start

    matrix = np.array(report["confusion_matrix"], np.float64)
    # The root of the share, as in the report: few mistakes, which one looks for, would be invisible otherwise.
    shares = np.sqrt(matrix / np.maximum(matrix.sum(1, keepdims=True), 1))[..., None]
    colors = np.where(np.eye(len(matrix), dtype=bool)[..., None], _RIGHT, _WRONG)
    side = max(2, 360 // len(matrix))
    cells = (255 + shares * (colors - 255)).repeat(side, 0).repeat(side, 1)
    names = [row["name"][:_NAME] for row in report["classes"]]
    margin = 8 + 6 * max(map(len, names)) if side >= _LEGIBLE else 0
    sheet = Image.new("RGB", (cells.shape[1] + margin, cells.shape[0] + margin), "white")
    sheet.paste(Image.fromarray(np.rint(cells).astype(np.uint8)), (margin, margin))
    if margin:
        across = Image.new("RGB", (margin, cells.shape[1]), "white")  # drawn down, then turned
        for image, first in ((sheet, margin), (across, 0)):
            draw = ImageDraw.Draw(image)
            for k, name in enumerate(names):
                draw.text((4, first + (k + 0.5) * side), name, fill="black", anchor="lm")
        sheet.paste(across.transpose(Image.Transpose.ROTATE_90), (margin, 0))
    return np.asarray(sheet)


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
        known = _known_run(about.directory / MLFLOW_ID_FILE)  # a resumed run continues its MLflow run
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


@dataclass(frozen=True, kw_only=True)
class TrackerRow:
    """One tracker: the option that asks for it, which is also the name of its extra, and the module that it needs."""

    option: str
    module: str
    open: Callable[[RunDescription, Logging, Notify], Tracker]


TRACKERS = (
    TrackerRow(option="tensorboard", module="tensorboardX", open=lambda about, logging, notify: TensorBoard(about)),
    TrackerRow(option="wandb", module="wandb", open=WeightsAndBiases),
    TrackerRow(option="mlflow", module="mlflow", open=lambda about, logging, notify: MLflow(about, notify)),
)


def make_trackers(logging: Logging, about: RunDescription, notify: Notify) -> list[TrackerSink]:
    """Return the sinks of the trackers that are asked for; `notify` hears of their troubles."""
    asked = [row for row in TRACKERS if getattr(logging, row.option)]
    return [
        TrackerSink(row.option, partial(row.open, about, logging, notify), notify, about.directory) for row in asked
    ]
