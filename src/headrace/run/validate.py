"""Validate saved weights: one checkpoint, or every checkpoint of a run, raw and averaged weights apart."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from headrace.checkpoint.restore import fit_tree
from headrace.checkpoint.store import list_checkpoints, load
from headrace.config.load import Resolved, override
from headrace.core.errors import CheckpointError
from headrace.data.dataset import open_dataset
from headrace.engine.devices import start_devices, use_compilation_cache
from headrace.run.design import Design, design_run
from headrace.run.directory import from_saved, read_run
from headrace.run.validator import Validator
from headrace.telemetry.report import validation_report, write_report


@dataclass(frozen=True, kw_only=True)
class Validated:
    """The result of one checkpoint: {weights: report}, or why it could not be read."""

    checkpoint: Path
    step: int
    epoch: float
    reports: dict[str, dict[str, Any]]
    seconds: dict[str, float]
    problem: str = ""


def validate(path: Path, overrides: Mapping[str, Any] | None = None) -> Iterator[Validated]:
    """Yield the result of each checkpoint of a run directory, or of the one checkpoint at `path`.

    A damaged checkpoint of a run is reported and passed over; a damaged one that was named is an error.
    """
    checkpoints, resolved = _find(path)
    design = design_run(override(resolved, overrides or {}).config)
    config = design.config
    dataset = open_dataset(config.data, config.run.seed)
    use_compilation_cache(config.run.compilation_cache_dir)
    validator = Validator(design, dataset, start_devices(config.run.platform, design.plan.validation.num_replicas))
    for checkpoint in checkpoints:
        try:
            arrays, manifest = load(checkpoint)
        except CheckpointError as error:
            if len(checkpoints) == 1:
                raise
            yield Validated(checkpoint=checkpoint, step=0, epoch=0.0, reports={}, seconds={}, problem=error.problem)
            continue
        results = validator.finish(validator.start(_weights(design, arrays)))
        reports = {name: validation_report(sums, design.info.class_names) for name, (sums, _) in results.items()}
        if checkpoint.parent.name == "checkpoints":
            write_report(checkpoint.parent.parent / "reports" / f"{checkpoint.name}.json", reports)
        yield Validated(
            checkpoint=checkpoint,
            step=manifest["step"],
            epoch=manifest["epoch"],
            reports=reports,
            seconds={name: seconds for name, (_, seconds) in results.items()},
        )


def _find(path: Path) -> tuple[list[Path], Resolved]:
    """Return the checkpoints that `path` means and the configuration they were made with."""
    if (path / "manifest.json").exists():
        return [path], from_saved(load(path)[1]["config"])
    directory, resolved = read_run(path)
    checkpoints = list_checkpoints(directory.checkpoints)
    if not checkpoints:
        raise CheckpointError(
            f"{directory.checkpoints} holds no checkpoint.", remedy="Train with --checkpoints True, or resume the run."
        )
    return checkpoints, resolved


def _weights(design: Design, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a state that validation needs, from a checkpoint's tensors."""
    params, stats = design.network.init(0)
    stored = jax.tree.map(lambda w: w.astype(design.precision.weight_dtype), params)
    found = {"params": fit_tree(arrays, stored, "params"), "stats": fit_tree(arrays, stats, "stats")}
    if any(name.startswith("ema/") for name in arrays):
        found["ema"] = fit_tree(arrays, {"params": params, "stats": stats}, "ema")
    return found
