"""Validate saved weights: one checkpoint, or those of a run, raw and averaged weights apart."""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from headrace.checkpoint.best import Best
from headrace.checkpoint.manifest import MANIFEST_FILE
from headrace.checkpoint.restore import fit_tree
from headrace.checkpoint.store import list_checkpoints, load, newest_good, step_of, verify
from headrace.config.load import Resolved, override
from headrace.core.errors import CheckpointError
from headrace.data.dataset import open_dataset
from headrace.engine.devices import start_devices, use_compilation_cache
from headrace.run.design import Design, design_run
from headrace.run.directory import from_saved, layout, read_run
from headrace.run.validator import Validator
from headrace.telemetry.report import validation_report, write_report

ALL, LAST, BEST = "all", "last", "best"


@dataclass(frozen=True, kw_only=True)
class Validated:
    """The result of one checkpoint: {weights: report}, or why it could not be read."""

    checkpoint: Path
    step: int
    epoch: float = 0.0
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    report_file: Path | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The checkpoints that a path means, the configuration they were made with, and the run they belong to."""

    checkpoints: list[Path]
    resolved: Resolved
    run: Path | None


def validate(
    path: Path, overrides: Mapping[str, Any] | None = None, *, which: str = ALL, report_dir: Path | None = None
) -> Iterator[Validated]:
    """Yield the result of each checkpoint of a run directory (or its last or best good one), or of the one at `path`.

    A damaged checkpoint of a run is reported and passed over; a damaged one that was named is an error. Reports are
    written into `report_dir`, by default `reports/validate` in the run; those of the training stay as they are.
    """
    overrides = overrides or {}
    found = _find(Path(path), overrides)
    checkpoints = _choose(found, which)
    design = design_run(found.resolved.config)
    config = design.config
    dataset = open_dataset(config.data, config.run.seed)
    use_compilation_cache(config.run.compilation_cache_dir)
    devices = start_devices(config.run.platform, design.plan.validation.num_devices)
    report_dir = report_dir or _report_dir(found.run)
    num_good = 0
    with closing(Validator(design, dataset, devices)) as validator:
        for checkpoint in checkpoints:
            try:
                arrays, manifest = load(checkpoint)
            except CheckpointError as error:
                if len(checkpoints) == 1:
                    raise
                if checkpoint.exists():  # a training that goes on may have deleted it meanwhile
                    yield Validated(checkpoint=checkpoint, step=step_of(checkpoint) or 0, problem=error.problem)
                continue
            weights = _weights(design, arrays, averaged="averaged" in manifest)
            label = manifest.get("weights", "raw")  # an average has a name of its own
            if not num_good:
                validator.compile(weights)
            num_good += 1
            results = validator.finish(validator.start(weights))
            results = {label if name == "raw" else name: result for name, result in results.items()}
            reports = {name: validation_report(sums, design.info.class_names) for name, (sums, _) in results.items()}
            report_file = report_dir / f"{checkpoint.name}.json" if report_dir else None
            if report_file is not None:
                write_report(report_file, {"checkpoint": str(checkpoint), "options": dict(overrides)} | reports)
            yield Validated(
                checkpoint=checkpoint,
                step=manifest["step"],
                epoch=manifest["epoch"],
                reports=reports,
                seconds={name: seconds for name, (_, seconds) in results.items()},
                report_file=report_file,
            )
    if not num_good:
        raise CheckpointError(f"None of the {len(checkpoints)} checkpoints of {path} can be used.")


def _find(path: Path, overrides: Mapping[str, Any]) -> _Found:
    """Find what is to be validated, with the command line's options over the saved ones."""
    if (path / MANIFEST_FILE).exists():
        resolved = override(from_saved(load(path)[1]["config"]), overrides)
        return _Found(checkpoints=[path], resolved=resolved, run=_run_of(path))
    if checkpoints := list_checkpoints(path):  # the directory of a run's checkpoints, be it elsewhere
        newest = newest_good(path)[0] or checkpoints[-1]
        resolved = override(from_saved(load(newest)[1]["config"]), overrides)
        return _Found(checkpoints=checkpoints, resolved=resolved, run=_run_of(newest))
    run, saved = read_run(path)
    resolved = override(saved, overrides)
    place = layout(run.path, resolved.config).checkpoints
    if checkpoints := list_checkpoints(place):
        return _Found(checkpoints=checkpoints, resolved=resolved, run=path)
    remedy = "Resume the run, or train with checkpoints on. If they are elsewhere, give --checkpoint-dir."
    raise CheckpointError(f"{place} holds no checkpoint.", remedy=remedy)


def _run_of(checkpoint: Path) -> Path | None:
    """Return the run that a checkpoint lies in, or None where it lies by itself."""
    run = checkpoint.parent.parent
    return run if (run / "config.json").is_file() else None


def _choose(found: _Found, which: str) -> list[Path]:
    if which == ALL or len(found.checkpoints) == 1:
        return found.checkpoints
    folder = found.checkpoints[0].parent
    if which == BEST:
        best = Best(folder).first_good()
        if best is None:
            raise CheckpointError(
                f"No good checkpoint is listed as the best in {folder}.",
                rule="The best are those with the highest validation accuracy during training.",
                remedy="Validate all of them: leave --best out.",
            )
        return [folder / best.name]
    # the damaged ones that are passed over for the last good one come along, to be named
    newest_first = list(reversed(found.checkpoints))
    good = next((number for number, path in enumerate(newest_first) if not verify(path)), len(newest_first) - 1)
    return newest_first[: good + 1]


def _report_dir(run: Path | None) -> Path | None:
    """Return where reports go when nobody says where: into the run, unless it is not ours to write into."""
    return run / "reports" / "validate" if run and os.access(run, os.W_OK) else None


def _weights(design: Design, arrays: Mapping[str, Any], averaged: bool) -> dict[str, Any]:
    """Return the parts of a state that validation needs, from a checkpoint's tensors."""
    params, stats = design.network.init(0)
    stored = params if averaged else jax.tree.map(lambda w: w.astype(design.precision.weight_dtype), params)
    found = {"params": fit_tree(arrays, stored, "params"), "stats": fit_tree(arrays, stats, "stats")}
    if any(name.startswith("ema/") for name in arrays):
        found["ema"] = fit_tree(arrays, {"params": params, "stats": stats}, "ema")
    return found
