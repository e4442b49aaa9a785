"""Headrace trains convolutional networks on accelerators so that the accelerator never waits.

The public names are imported when they are first used, so that `import headrace` and `headrace --help` load no JAX.
What is public, and how long a deprecated name stays, is in docs/reference/versions.md.
"""

import importlib

from headrace.core import __version__

TYPE_CHECKING = False  # for type checkers, as in typing, whose import takes as long as the rest of this file

# Each public name and the module that defines it, with its name there where that is another one.
_HOME = {
    "restore_tree": "headrace.checkpoint.store",
    "load_checkpoint": "headrace.checkpoint.store:load",
    "newest_checkpoint": "headrace.checkpoint.store:newest_good",
    "verify_checkpoint": "headrace.checkpoint.store:verify",
    "config_from": "headrace.config.load",
    "Config": "headrace.config.schema",
    "CheckpointError": "headrace.core.errors",
    "ConfigError": "headrace.core.errors",
    "DataError": "headrace.core.errors",
    "HeadraceError": "headrace.core.errors",
    "RunStopped": "headrace.core.errors",
    "describe_dataset": "headrace.data.dataset",
    "open_dataset": "headrace.data.dataset",
    "read_digits": "headrace.data.sets.digits",
    "Stream": "headrace.data.sets.stream",
    "Workers": "headrace.data.sets.workers",
    "join_job": "headrace.job",
    "custom_network": "headrace.model.custom",
    "build_network": "headrace.model.zoo",
    "model_names": "headrace.model.zoo",
    "make_plan": "headrace.plan.plan",
    "dataset_benchmark": "headrace.program.feed_speed",
    "infeed_benchmark": "headrace.program.feed_speed",
    "accumulate_gradients": "headrace.program.gradients",
    "cross_replica": "headrace.program.gradients",
    "Infeed": "headrace.program.infeed",
    "Outfeed": "headrace.program.outfeed",
    "OutfeedMode": "headrace.program.outfeed",
    "Pipeline": "headrace.program.pipeline",
    "PipelineState": "headrace.program.pipeline",
    "pipeline": "headrace.program.pipeline",
    "OptimizerOutput": "headrace.program.stage",
    "Stage": "headrace.program.stage",
    "recomputation_checkpoint": "headrace.program.stage",
    "Callback": "headrace.run.callbacks",
    "EarlyStopping": "headrace.run.callbacks",
    "TargetAccuracy": "headrace.run.callbacks",
    "Metric": "headrace.rows.row",
    "RunEvent": "headrace.run.callbacks",
    "TrainingEvent": "headrace.run.callbacks",
    "ValidationEvent": "headrace.run.callbacks",
    "resume": "headrace.run.fit",
    "Model": "headrace.run.model",
    "Predictions": "headrace.run.prediction",
    "RunResult": "headrace.run.run_result",
    "validate": "headrace.run.validation",
    "draw_run": "headrace.report.curve_svg",
    "read_records": "headrace.telemetry.records",
}
_MODULES = {
    "loops": "headrace.program.loops",
    "nn": "headrace.nn",
    "ray": "headrace.ray",
    "schedules": "headrace.schedules",
}

__all__ = [
    "Callback",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "EarlyStopping",
    "HeadraceError",
    "Infeed",
    "Metric",
    "Model",
    "OptimizerOutput",
    "Outfeed",
    "OutfeedMode",
    "Pipeline",
    "PipelineState",
    "Predictions",
    "RunEvent",
    "RunResult",
    "RunStopped",
    "Stage",
    "Stream",
    "TargetAccuracy",
    "TrainingEvent",
    "ValidationEvent",
    "Workers",
    "__version__",
    "accumulate_gradients",
    "build_network",
    "config_from",
    "cross_replica",
    "custom_network",
    "dataset_benchmark",
    "describe_dataset",
    "draw_run",
    "infeed_benchmark",
    "join_job",
    "load_checkpoint",
    "loops",
    "make_plan",
    "model_names",
    "newest_checkpoint",
    "nn",
    "open_dataset",
    "pipeline",
    "ray",
    "read_digits",
    "read_records",
    "recomputation_checkpoint",
    "restore_tree",
    "resume",
    "schedules",
    "validate",
    "verify_checkpoint",
]

if TYPE_CHECKING:
    from typing import Any

    from headrace import nn, ray, schedules
    from headrace.checkpoint.store import load as load_checkpoint
    from headrace.checkpoint.store import newest_good as newest_checkpoint
    from headrace.checkpoint.store import restore_tree
    from headrace.checkpoint.store import verify as verify_checkpoint
    from headrace.config.load import config_from
    from headrace.config.schema import Config
    from headrace.core.errors import CheckpointError, ConfigError, DataError, HeadraceError, RunStopped
    from headrace.data.dataset import describe_dataset, open_dataset
    from headrace.data.sets.digits import read_digits
    from headrace.data.sets.stream import Stream
    from headrace.data.sets.workers import Workers
    from headrace.job import join_job
    from headrace.model.custom import custom_network
    from headrace.model.zoo import build_network, model_names
    from headrace.plan.plan import make_plan
    from headrace.program import loops
    from headrace.program.feed_speed import dataset_benchmark, infeed_benchmark
    from headrace.program.gradients import accumulate_gradients, cross_replica
    from headrace.program.infeed import Infeed
    from headrace.program.outfeed import Outfeed, OutfeedMode
    from headrace.program.pipeline import Pipeline, PipelineState, pipeline
    from headrace.program.stage import OptimizerOutput, Stage, recomputation_checkpoint
    from headrace.report.curve_svg import draw_run
    from headrace.rows.row import Metric
    from headrace.run.callbacks import Callback, EarlyStopping, RunEvent, TargetAccuracy, TrainingEvent, ValidationEvent
    from headrace.run.fit import resume
    from headrace.run.model import Model
    from headrace.run.prediction import Predictions
    from headrace.run.run_result import RunResult
    from headrace.run.validation import validate
    from headrace.telemetry.records import read_records


def __getattr__(name: str) -> "Any":
    """Import a public name from the module that defines it."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"headrace has no name {name}; its names are {', '.join(__all__)}")
    module, _, name_there = _HOME[name].partition(":")
    return getattr(importlib.import_module(module), name_there or name)


def __dir__() -> list[str]:
    return sorted(__all__)
