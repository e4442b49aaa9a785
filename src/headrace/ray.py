"""Train in a Ray cluster: Ray's JaxTrainer starts and connects the workers, keeps checkpoints, and restarts them.

def train(**given):  # in every worker
    headrace.Model("resnet50").fit("photos/", epochs=5, **given)

ray_trainer(train, scaling_config=ScalingConfig(num_workers=4, use_gpu=True), run_config=RunConfig(...)).fit()
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.checkpoint.store import newest_good
from headrace.core.errors import ConfigError
from headrace.run.callbacks import Callback, TrainingEvent, ValidationEvent
from headrace.run.directory import checkpoints_of

__all__ = ["RayReports", "ray_trainer"]


def ray_trainer(train: Callable[..., Any], *, scaling_config: Any, run_config: Any = None) -> Any:
    """Return Ray's JaxTrainer for a function that calls `Model.fit(..., **given)` in every worker.

    `given` are the directory of the run (or the run to resume) and the callbacks that report to Ray. After a loss
    (`FailureConfig`), or in a new trainer of the same name and storage, the run continues where it was saved last.
    Ray's checkpoints are run directories: `Model.load`, `headrace predict` and all other commands read them.
    """
    try:
        ray_train, jax_way = import_module("ray.train"), import_module("ray.train.v2.jax.config")
    except ImportError as error:
        raise ConfigError(
            f"Ray cannot be imported: {error}.", rule="It comes with an extra.", remedy="pip install 'headrace[ray]'"
        ) from error
    run_config = run_config or ray_train.RunConfig()
    if not (scaling_config.use_gpu or scaling_config.use_tpu):
        # Ray connects workers with accelerators only; its way for GPUs connects CPUs where JAX is told to take those.
        environ = dict(run_config.worker_runtime_env or {})
        environ["env_vars"] = {**environ.get("env_vars", {}), "JAX_PLATFORMS": "cpu"}
        run_config = replace(run_config, worker_runtime_env=environ)
    way = jax_way.JaxConfig(use_tpu=scaling_config.use_tpu, use_gpu=not scaling_config.use_tpu)
    return import_module("ray.train.v2.jax").JaxTrainer(
        partial(_work, train), jax_config=way, scaling_config=scaling_config, run_config=run_config
    )


class RayReports(Callback):
    """Reports the numbers of each epoch and validation to Ray, with the newest checkpoint that Ray does not have."""

    every_process = True  # Ray waits for the report of each worker

    def __init__(self) -> None:
        """Begin with nothing reported."""
        self._values: dict[str, float] = {}
        self._step = ""  # name of the newest checkpoint that Ray has

    def on_epoch_end(self, event: TrainingEvent) -> None:
        """Report the means of the epoch."""
        means = {"loss": event.loss, "accuracy": event.accuracy, **event.metrics}
        self._report(event.directory, {"step": event.step, "epoch": event.epoch, **means})

    def on_validation_end(self, event: ValidationEvent) -> None:
        """Report the validation of the better weights."""
        best = max(event.results.values(), key=lambda record: -record.loss if record.top1 is None else record.top1)
        means = {"loss": best.loss, "accuracy": best.top1, **best.metrics}
        values = {f"val_{name}": value for name, value in means.items() if value is not None}
        self._report(event.directory, {"step": event.step, "epoch": event.epoch, **values})

    def ended(self, directory: Path) -> None:
        """Report the last numbers again, with the whole run."""
        ray_train = import_module("ray.train")
        whole = ray_train.Checkpoint.from_directory(str(directory)) if _is_first() else None
        ray_train.report(self._values, checkpoint=whole)

    def _report(self, directory: Path, values: dict[str, float]) -> None:
        ray_train = import_module("ray.train")
        self._values = {**self._values, **values}
        with tempfile.TemporaryDirectory(prefix="headrace-") as place:
            name = _copy_run(directory, Path(place, "run"), self._step) if _is_first() else None
            copied = ray_train.Checkpoint.from_directory(str(Path(place, "run"))) if name else None
            ray_train.report(self._values, checkpoint=copied)
        self._step = name or self._step


def _work(train: Callable[..., Any]) -> None:
    """Train in one worker: go on with the run of an attempt before this one, or begin it."""
    ray_train, reports = import_module("ray.train"), RayReports()
    found = _find_run(ray_train) if _is_first() else None
    place, exists = import_module("ray.train.collective").broadcast_from_rank_zero(found)
    train(**{"resume" if exists else "output": place, "callbacks": [reports]})
    reports.ended(Path(place))


def _find_run(ray_train: Any) -> tuple[str, bool]:
    """Return the directory of the run, and whether there is something in it to go on with.

    Where Ray keeps its files in a file system, it is beside them, and a loss costs what was not saved yet. From another
    kind of storage comes the last checkpoint that was reported.
    """
    storage, saved = ray_train.get_context().get_storage(), ray_train.get_checkpoint()
    is_local = storage.storage_filesystem.type_name == "local"
    place = Path(storage.experiment_fs_path if is_local else tempfile.mkdtemp(prefix="headrace-"), "run")
    if saved is not None and not (place / "config.json").is_file():
        saved.to_directory(str(place))
    return str(place), (place / "config.json").is_file()


def _is_first() -> bool:
    return import_module("ray.train").get_context().get_world_rank() == 0


def _copy_run(run: Path, place: Path, known: str) -> str | None:
    """Copy what a run is resumed from, its records and its newest checkpoint, unless that is the known one."""
    if checkpoints_of(run) != run / "checkpoints":
        raise ConfigError(
            f"The run saves its checkpoints in {checkpoints_of(run)}.",
            rule="Under Ray they are in the run's directory, so that Ray can keep them.",
            remedy="Leave checkpoint_dir out.",
        )
    while (newest := newest_good(run / "checkpoints")[0]) is not None and newest.name != known:
        others = {path.name for path in (run / "checkpoints").iterdir()} - {newest.name}
        try:
            shutil.copytree(run, place, ignore=shutil.ignore_patterns(".*", *others))
            return newest.name
        except (OSError, shutil.Error):  # its turn to be deleted came while it was copied: a newer one is there
            shutil.rmtree(place, ignore_errors=True)
            if newest.is_dir():
                raise
    return None
