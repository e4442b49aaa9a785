"""Validate saved weights: one checkpoint or those of a run, raw and averaged weights separately."""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from headrace.checkpoint.best import BestCheckpoints
from headrace.checkpoint.store import MANIFEST_FILE, list_checkpoints, read, read_newest, step_of, verify
from headrace.config.load import NO_RECIPE, Resolved, override, resolve
from headrace.config.schema import Config
from headrace.core.errors import CheckpointError
from headrace.core.process import tuned_interpreter
from headrace.core.stored_copy import here
from headrace.engine.devices import start_run_devices
from headrace.job import ProcessGroup, current_group
from headrace.model.network import weights_like
from headrace.rows.metrics import TOP1
from headrace.rows.row import Metric
from headrace.run.choices import definition_remarks, with_choices, with_definition
from headrace.run.design import Design, described, design_run, open_data, with_set
from headrace.run.directory import from_saved, layout, read_run, saved_form
from headrace.run.given_data import refuse_other_classes
from headrace.run.memory_advice import advise_on_memory
from headrace.run.read_weights import weights_in
from headrace.run.start_weights import adopt_weights
from headrace.run.validator import Validator
from headrace.telemetry.validation_report import write_report
from headrace.weights.weights import RAW, Weights

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
    images: str = ""  # of image files: their path and how the splits were separated
    remarks: tuple[str, ...] = ()  # of weights from elsewhere: lines for the user
    monitor: Metric = TOP1  # by which the run compares its checkpoints


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The checkpoints that a path means, the configuration they were made with, and the run they belong to."""

    checkpoints: list[Path]
    resolved: Resolved
    run: Path | None
    remarks: tuple[str, ...] = ()


def validate(
    path: Path | None, overrides: Mapping[str, Any] | None = None, *, which: str = ALL, report_dir: Path | None = None
) -> Iterator[Validated]:
    """Yield the result of each checkpoint of a run directory (or its last or best good one), or of the one at `path`.

    Without a path the option `weights` names the weights, and the other options the data.

    A damaged checkpoint of a run is reported and skipped; a damaged one that was named is an error. Reports are
    written into `report_dir`, by default `reports/validate` in the run; those written during training stay as they are.
    Of several processes, process 0 reads the checkpoints and writes the reports.
    """
    # A trial run (dry_run_steps) may be validated in full, and one that decoded validation images at a fraction of
    # their size is validated on the exact pixels, unless this call asks for the others.
    given, group = dict(overrides or {}), current_group()
    found = _find_together(group, path, {"dry_run_steps": None, "eval_reduced_decoding": False} | given, which)
    config, checkpoints = found.resolved.config, found.checkpoints
    parts = with_set(config)
    alone = group.is_alone and described(config, parts).num_train  # else there is nothing to plan a training for
    design = design_run(config if alone else only_validating(config), parts, group.num_processes)
    dataset = open_data(design)
    devices = start_run_devices(config.run, design.plan.validation.num_devices, group.num_processes)
    # Apart from the reports of training, which belong to the run's records.
    report_dir = (report_dir or _report_dir(found.run)) if group.is_first else None
    num_good = 0
    with (
        tuned_interpreter(),
        advise_on_memory(design, validates=True),
        closing(Validator(design, dataset, devices)) as validator,
    ):
        for checkpoint in checkpoints:
            reader = partial(_read, design, checkpoint, alone=len(checkpoints) == 1)
            read = group.on_first_process(partial(_read_named, design) if path is None else reader)
            facts = group.broadcast(read and _facts_of(read, checkpoint))
            if problem := facts.get("problem"):
                # The other processes cannot see the file: whether it is there is part of what process 0 tells them.
                if facts["is_there"]:  # a run that is still training may have deleted it meanwhile
                    yield Validated(checkpoint=checkpoint, step=step_of(checkpoint) or 0, problem=problem)
                continue
            weights = read if isinstance(read, Weights) else _blank(design, facts)
            state = group.broadcast_arrays(weights.state(_stored_type(design, weights)))
            if not num_good:
                validator.compile(state)
            num_good += 1
            results = validator.finish(validator.start(state))
            results = {weights.label if name == RAW else name: result for name, result in results.items()}
            reports = {name: design.report(sums) for name, (sums, _) in results.items()}
            report_file = report_dir / f"{checkpoint.name}.json" if report_dir else None
            if report_file is not None:
                write_report(report_file, {"checkpoint": str(checkpoint), "options": given} | reports)
            yield Validated(
                checkpoint=checkpoint,
                step=weights.step,
                epoch=weights.epoch,
                reports=reports,
                seconds={name: seconds for name, (_, seconds) in results.items()},
                report_file=report_file,
                images=design.info.place,
                remarks=found.remarks,
                monitor=design.monitored,
            )
    if not num_good:
        raise CheckpointError(f"None of the {len(checkpoints)} checkpoints of {path} can be used.")


def _read(design: Design, checkpoint: Path, *, alone: bool) -> Weights | str:
    """Read a checkpoint's weights, or say why it cannot be used; that is an error only where it is the only one."""
    try:
        found = read(checkpoint)
    except CheckpointError as error:
        if alone:
            raise
        return error.problem
    if names := found.manifest.get("class_names"):
        refuse_other_classes(design.info, len(names), names)
    return weights_in(found, RAW, design.network)


def _read_named(design: Design) -> Weights:
    """Read weights that were given by name or as a file; their classes must be those of the dataset."""
    adopted = adopt_weights(design)
    assert adopted is not None
    if other := adopted.loading.not_loaded:
        raise CheckpointError(
            f"Not all of {adopted.origin} fits {design.network.name} with the {design.info.num_classes} classes of "
            f"{design.info.place or design.info.name}: {other[0].name} {other[0].note or 'is not in the file'}.",
            rule="Weights are validated on the classes that they were trained for.",
            remedy="Choose their dataset, or fine-tune them: headrace train --weights NAME.",
        )
    return adopted


def _facts_of(read: Weights | str, checkpoint: Path) -> dict[str, Any]:
    """Return what the other processes need to know of what was read."""
    if isinstance(read, str):
        return {"problem": read, "is_there": checkpoint.exists()}
    return {"step": read.step, "epoch": read.epoch, "label": read.label, "has_ema": read.ema is not None}


def _blank(design: Design, facts: Mapping[str, Any]) -> Weights:
    """Return weights of the shapes that process 0 has read."""
    params, stats = jax.tree.map(lambda w: np.zeros(w.shape, np.float32), weights_like(design.network))
    return Weights(
        network=design.network,
        params=params,
        stats=stats,
        ema=(params, stats) if facts["has_ema"] else None,
        origin="",
        step=facts["step"],
        epoch=facts["epoch"],
        label=facts["label"],
    )


def _stored_type(design: Design, weights: Weights) -> jax.typing.DTypeLike:
    """Return the type of raw parameters: averages are float32 in every precision."""
    return design.precision.weight_dtype if weights.label == RAW else np.float32


def only_validating(config: Config) -> Config:
    """Return the configuration of a run that only validates: the replicas of its training do not matter."""
    run, validation = replace(config.run, training=False), replace(config.validation, validation=True)
    return replace(config, run=run, validation=validation)


def _find_together(group: ProcessGroup, path: Path | None, overrides: Mapping[str, object], which: str) -> _Found:
    """Find what is to be validated: process 0 looks, the others receive what it found."""

    def find() -> _Found:
        if path is None:
            asked = resolve({"training": False, **overrides}, NO_RECIPE)
            resolved = with_definition(asked)
            remarks = definition_remarks(asked, resolved)
            checkpoints = [Path(resolved.config.weights.weights or "")]
            return _Found(checkpoints=checkpoints, resolved=with_choices(resolved), run=None, remarks=remarks)
        found = _find(here(str(path)), overrides)
        return replace(found, checkpoints=_choose(found, which))

    found = group.on_first_process(find)
    shared = group.broadcast(
        found and {"checkpoints": [*map(str, found.checkpoints)], "config": saved_form(found.resolved)}
    )
    checkpoints = [Path(checkpoint) for checkpoint in shared["checkpoints"]]
    return found or _Found(checkpoints=checkpoints, resolved=from_saved(shared["config"]), run=None)


def _find(path: Path, overrides: Mapping[str, object]) -> _Found:
    """Find what is to be validated, with the command line's options over the saved ones."""
    if (path / MANIFEST_FILE).exists():
        resolved = override(from_saved(read(path).manifest["config"]), overrides)
        return _Found(checkpoints=[path], resolved=resolved, run=_run_of(path))
    if checkpoints := list_checkpoints(path):  # the directory of a run's checkpoints, which may be outside the run
        newest = read_newest(path)[0] or read(checkpoints[-1])
        resolved = override(from_saved(newest.manifest["config"]), overrides)
        return _Found(checkpoints=checkpoints, resolved=resolved, run=_run_of(newest.path))
    run, saved = read_run(path)
    resolved = override(saved, overrides)
    place = layout(run.path, resolved.config).checkpoints
    if checkpoints := list_checkpoints(place):
        return _Found(checkpoints=checkpoints, resolved=resolved, run=path)
    remedy = "Resume the run, or train with checkpoints on. If they are elsewhere, give --checkpoint-dir."
    raise CheckpointError(f"{place} holds no checkpoint.", remedy=remedy)


def _run_of(checkpoint: Path) -> Path | None:
    """Return the run that a checkpoint belongs to, or None where it was copied elsewhere."""
    run = checkpoint.parent.parent
    return run if (run / "config.json").is_file() else None


def _choose(found: _Found, which: str) -> list[Path]:
    if which == ALL or len(found.checkpoints) == 1:
        return found.checkpoints
    folder = found.checkpoints[0].parent
    if which == BEST:
        best = BestCheckpoints(folder).read_first_good()
        if best is None:
            raise CheckpointError(
                f"No good checkpoint is listed as the best in {folder}.",
                rule="The best are those with the highest validation accuracy during training.",
                remedy="Validate all of them: leave --best out.",
            )
        return [best[1].path]
    # damaged ones that are newer than the last good one are kept in the list, to be reported
    newest_first = list(reversed(found.checkpoints))
    good = next((number for number, path in enumerate(newest_first) if not verify(path)), len(newest_first) - 1)
    return newest_first[: good + 1]


def _report_dir(run: Path | None) -> Path | None:
    """Return where reports are written by default: into the run, unless it is read-only."""
    return run / "reports" / "validate" if run and os.access(run, os.W_OK) else None
