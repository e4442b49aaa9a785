"""Headrace trains convolutional networks on accelerators so that the accelerator never waits.

The public names are imported when they are first used, so that `import headrace` and `headrace --help` load no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from headrace.core.version import __version__

_HOME = {
    "Config": "headrace.config.schema",
    "config_from": "headrace.config.load",
    "resolve": "headrace.config.load",
    "HeadraceError": "headrace.core.errors",
    "build_network": "headrace.model.families",
    "custom_network": "headrace.model.custom",
    "open_dataset": "headrace.data.dataset",
    "make_plan": "headrace.plan.plan",
    "Infeed": "headrace.program.infeed",
    "Outfeed": "headrace.program.outfeed",
    "OutfeedMode": "headrace.program.outfeed",
    "accumulate_gradients": "headrace.program.gradients",
    "cross_replica": "headrace.program.gradients",
    "dataset_benchmark": "headrace.program.benchmark",
    "infeed_benchmark": "headrace.program.benchmark",
    "PipelineModel": "headrace.run.pipeline_model",
    "OptimizerOutput": "headrace.program.stage",
    "Pipeline": "headrace.program.pipeline",
    "PipelineState": "headrace.program.pipeline",
    "Stage": "headrace.program.stage",
    "pipeline": "headrace.program.pipeline",
    "recomputation_checkpoint": "headrace.program.stage",
    "train": "headrace.run.fit",
    "resume": "headrace.run.fit",
    "validate": "headrace.run.validation",
}

_ROOM_FILES = {"loops": "headrace.program.loops"}  # public names that are whole files
_RENAMED = {"own_network": "custom_network"}  # old name -> name; old names stay importable

__all__ = [
    "Config",
    "HeadraceError",
    "Infeed",
    "OptimizerOutput",
    "Outfeed",
    "OutfeedMode",
    "Pipeline",
    "PipelineModel",
    "PipelineState",
    "Stage",
    "__version__",
    "accumulate_gradients",
    "build_network",
    "config_from",
    "cross_replica",
    "custom_network",
    "dataset_benchmark",
    "infeed_benchmark",
    "loops",
    "make_plan",
    "open_dataset",
    "pipeline",
    "recomputation_checkpoint",
    "resolve",
    "resume",
    "train",
    "validate",
]

if TYPE_CHECKING:
    from headrace.config.load import config_from, resolve
    from headrace.config.schema import Config
    from headrace.core.errors import HeadraceError
    from headrace.data.dataset import open_dataset
    from headrace.model.custom import custom_network
    from headrace.model.families import build_network
    from headrace.plan.plan import make_plan
    from headrace.program import loops
    from headrace.program.benchmark import dataset_benchmark, infeed_benchmark
    from headrace.program.gradients import accumulate_gradients, cross_replica
    from headrace.program.infeed import Infeed
    from headrace.program.outfeed import Outfeed, OutfeedMode
    from headrace.program.pipeline import Pipeline, PipelineState, pipeline
    from headrace.program.stage import OptimizerOutput, Stage, recomputation_checkpoint
    from headrace.run.fit import resume, train
    from headrace.run.pipeline_model import PipelineModel
    from headrace.run.validation import validate


def __getattr__(name: str) -> Any:
    """Import a public name from the room it lives in."""
    name = _RENAMED.get(name, name)
    if name in _ROOM_FILES:
        return importlib.import_module(_ROOM_FILES[name])
    if name not in _HOME:
        raise AttributeError(f"headrace has no name {name}; its names are {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
