"""The trackers, a row each. What sends numbers to one is in the module that its row names."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrackerRow:
    """One tracker.

    `module` has `open_tracker`(what is known of the run, options, notify), a Tracker.
    """

    option: str  # asks for it, and is the name of its extra
    says: str  # what the option does
    package: str  # that has to be installed
    module: str
    histograms: bool  # whether it takes those of --histograms


TRACKERS: Mapping[str, TrackerRow] = {
    row.option: row
    for row in (
        TrackerRow(
            option="tensorboard",
            says="Write event files for TensorBoard into the run's directory",
            package="tensorboardX",
            module="headrace.telemetry.trackers.tensorboard",
            histograms=True,
        ),
        TrackerRow(
            option="wandb",
            says="Track the run with Weights & Biases, offline if nobody is logged in",
            package="wandb",
            module="headrace.telemetry.trackers.weights_and_biases",
            histograms=True,
        ),
        TrackerRow(
            option="mlflow",
            says="Track the run with MLflow, in the run's directory or at MLFLOW_TRACKING_URI",
            package="mlflow",
            module="headrace.telemetry.trackers.mlflow",
            histograms=False,
        ),
        TrackerRow(
            option="trackio",
            says="Track the run with Trackio, in the user's cache or where TRACKIO_SERVER_URL says",
            package="trackio",
            module="headrace.telemetry.trackers.trackio",
            histograms=True,
        ),
    )
}
