"""What a run resumes from: its newest good checkpoint, with records and the list of the best rewound to that step."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.checkpoint.best import BestCheckpoints, ScoredCheckpoint
from headrace.checkpoint.store import checkpoint_name, read_newest
from headrace.config.field import CHOSEN, normalise_name, option_names
from headrace.config.layers import LAUNCHER
from headrace.config.load import Resolved, to_flat
from headrace.config.networks import NORM_OPTIONS
from headrace.config.schema import all_options
from headrace.config.spellings import shown
from headrace.config.translations import known_options
from headrace.core.errors import CheckpointError, ConfigError
from headrace.job import ProcessGroup
from headrace.plan.steps import StepPlan
from headrace.rows.networks import OPTION_FAMILIES
from headrace.rows.row import Metric
from headrace.run.design import BATCH_OPTIONS, NOTHING, CustomParts, design_run
from headrace.run.directory import PARTS, RunDirectory, parse_run, read_saved, sweep
from headrace.telemetry.curve_points import NOTHING_SUMMED, Sums
from headrace.telemetry.metric_totals import NOTHING_UNLOGGED, Unlogged
from headrace.telemetry.records import (
    CheckpointRecord,
    Record,
    RunEnd,
    RunStart,
    TrainRecord,
    ValidationRecord,
    read_records,
    validation_rank,
)
from headrace.telemetry.sinks import rewind


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Where an earlier process of the run was: a checkpoint's tensors (None: the beginning) and its counters."""

    directory: RunDirectory
    step: int = 0
    arrays: Mapping[str, Any] | None = None
    elapsed_seconds: float = 0.0
    unlogged: Unlogged = NOTHING_UNLOGGED
    epoch_sums: Unlogged = NOTHING_UNLOGGED  # over the epoch that the checkpoint is in the middle of
    point_sums: Sums = NOTHING_SUMMED  # over the point of the curves that it is in the middle of
    notes: tuple[str, ...] = ()
    pace: Mapping[str, Any] = field(default_factory=dict)  # of a run with a time budget
    dataset: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # its identity; old checkpoints have none


@dataclass(frozen=True, kw_only=True)
class Past:
    """The records up to the restored step, and what follows from them."""

    records: tuple[Record, ...] = ()

    @property
    def validations(self) -> list[ValidationRecord]:
        return [record for record in self.records if isinstance(record, ValidationRecord)]

    @property
    def skipped_steps(self) -> int:
        return sum(record.skipped_steps for record in self.records if isinstance(record, TrainRecord))


def find_restored(directory: RunDirectory, earlier_place: Path) -> Restored:
    """Return the newest good checkpoint of a run, or its beginning when it never saved one.

    `earlier_place` held the checkpoints so far: where a resume names another directory, that one is empty at first.
    """
    found, damaged = read_newest(directory.checkpoints)
    # Only if the new place is empty: a damaged checkpoint there belongs to this run, and older ones elsewhere must not
    # win.
    if found is None and not damaged:
        found, damaged = read_newest(earlier_place)
    if found is None:
        _refuse_lost(directory, damaged)
        return Restored(directory=directory, notes=("No checkpoint was saved yet: the run starts from the beginning.",))
    manifest = found.manifest
    return Restored(
        directory=directory,
        step=manifest["step"],
        arrays=found.arrays,
        elapsed_seconds=manifest["elapsed_seconds"],
        unlogged=Unlogged.from_dict(manifest.get("unlogged", {})),
        epoch_sums=Unlogged.from_dict(manifest.get("epoch_sums", {})),
        point_sums=tuple(manifest.get("point_sums", NOTHING_SUMMED)),
        notes=tuple(f"Checkpoint {bad.name} was skipped: {problem}" for bad, problem in damaged),
        dataset=manifest.get("dataset", {}),
        pace=manifest.get("pace", {}),
    )


def read_run_together(group: ProcessGroup, path: Path, *, given: Collection[str] = ()) -> tuple[RunDirectory, Resolved]:
    """Return the layout and the configuration of a run, as process 0 reads them."""
    saved = group.broadcast(group.on_first_process(lambda: read_saved(path)))
    return parse_run(path, saved, given=given, needed=PARTS)


def broadcast_restored(group: ProcessGroup, found: Restored | None, directory: RunDirectory) -> Restored:
    """Return what process 0 found, in every process; the tensors stay there, and reach the others with the state."""
    facts = group.broadcast(
        found
        and {
            "step": found.step,
            "begins_anew": found.arrays is None,
            "epoch_sums": found.epoch_sums.to_dict(),
            "pace": dict(found.pace),
        }
    )
    # The other processes have no tensors; `{}` only says that there are some, which decides what is restored from.
    return found or Restored(
        directory=directory,
        step=facts["step"],
        arrays=None if facts["begins_anew"] else {},
        epoch_sums=Unlogged.from_dict(facts["epoch_sums"]),
        pace=facts["pace"],
    )


def _refuse_lost(directory: RunDirectory, damaged: list[tuple[Path, str]]) -> None:
    """Refuse to start again, which erases records, where the run had saved checkpoints or had finished."""
    problems = "".join(f" {bad.name}: {problem}." for bad, problem in damaged)
    records = read_records(directory.path)
    # A run that has finished keeps its records, whatever became of its checkpoints.
    if any(isinstance(record, RunEnd) and record.outcome == "finished" for record in records):
        problem = f"The run {directory.path} has finished, and none of its checkpoints can be used.{problems}"
    elif damaged or any(isinstance(record, CheckpointRecord) for record in records):
        place = directory.checkpoints
        problem = f"The run {directory.path} has saved checkpoints, but {place} holds no good one.{problems}"
    else:
        return
    raise CheckpointError(
        problem,
        rule="A run is resumed from a checkpoint.",
        remedy="Give the directory of its checkpoints (--checkpoint-dir), or start a new run with headrace train.",
    )


def rewind_run(restored: Restored, keep_best: int, monitor: Metric) -> Past:
    """Rewind records and the list of the best to the restored step; both may be behind or ahead of it."""
    # Under the run's lock, so that no file of a living process is among them.
    sweep(restored.directory)
    past = Past(records=rewind(restored.directory.path, restored.step))
    scores = (scored for record in past.validations if (scored := score_of(record, monitor)))
    # From the records, which were rewound: the list may name checkpoints of steps that will be trained again.
    BestCheckpoints(restored.directory.checkpoints, keep_best).reset(scores)
    return past


def score_of(record: ValidationRecord, monitor: Metric) -> ScoredCheckpoint | None:
    """Return a validation as the score of its checkpoint; None for one without a checkpoint or a number."""
    rank = validation_rank(record, monitor)
    if not record.checkpoint or rank is None:
        return None
    loss = record.loss if math.isfinite(record.loss) else None
    return ScoredCheckpoint(score=rank[0], name=record.checkpoint, weights=record.weights, loss=loss)


def refuse_changed_dataset(restored: Restored, identity: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to resume on other data: epochs would have other lengths, or samples other labels."""
    # Checkpoints of earlier versions have no identity, and nothing is compared.
    for split, before in restored.dataset.items():
        if (now := identity[split]) != before:
            sizes = f"{before['images']:,} images then, {now['images']:,} now"
            raise CheckpointError(
                f"The {split} set has changed since the run saved {checkpoint_name(restored.step)}: "
                + (sizes if now["images"] != before["images"] else "its labels differ")
                + ".",
                rule="A resumed run continues in the same order of the same samples.",
                remedy="Restore the dataset, or start a new run from these weights with --weights RUN.",
            )


# Options that identify a run: with another value its steps would mean something else.
_FIXED = (
    "model_name",
    *OPTION_FAMILIES,
    *NORM_OPTIONS,
    "dataset",
    "balanced_sampling",
    "repeated_augmentation",
    "decode_once",
    "seed",
    "shuffle",
    "optimizer",
    "precision",
    "half_type",
    "ema_decay",
    "weights",
)


# What the same command may have different where it is typed again: the devices, where files are, what is printed.
_FREE_SECTIONS = ("logging", "checkpoint", "compiler")
_FREE = (
    *("platform", "first_device", "profile", "distributed", "compilation_cache_dir", "compile_only"),
    *("dataset_path", "validation_path", "num_replicas"),
)


def _is_free(name: str) -> bool:
    return name in _FREE or all_options()[name].section in _FREE_SECTIONS


def free_options(options: Mapping[str, object]) -> dict[str, Any]:
    """Return the options of a command line that may differ from those of the run that it resumes."""
    known = option_names(known_options())
    named = {written: known[normalise_name(written)].name for written in options}
    # Options of the reference's applications are translated from the saved ones, and cannot be changed alone. `output`
    # has named the run already, and stands for the log_dir and run_name that are saved.
    ours = all_options().keys() - {"output"}
    return {written: value for written, value in options.items() if named[written] in ours and _is_free(named[written])}


def refuse_other_command(path: Path, saved: Resolved, resolved: Resolved) -> None:
    """Refuse to resume a run that was started with another configuration; devices and paths may differ."""
    old, new = (shown(to_flat(each.config)) for each in (saved, resolved))
    # What nobody gave, then or now, was chosen for the dataset and the devices of then, and stays.
    unasked = (CHOSEN, LAUNCHER, "measured")
    given = {
        name
        for each in (saved, resolved)
        for name in (*each.origins, *each.source)
        if each.origin(name).is_given and each.origin(name).kind not in unasked
    }
    changed = [name for name in old if old[name] != new[name] and not _is_free(name) and name in given]
    # The same batch can be divided in many ways.
    if batch := [name for name in changed if name in BATCH_OPTIONS]:
        plans = [design_run(each.config, absent_ok=True).plan.batch for each in (saved, resolved)]
        if plans[0].global_batch_size == plans[1].global_batch_size:
            changed = [name for name in changed if name not in batch]
    if changed:
        listed = ", ".join(f"{name} ({old[name]} there, {new[name]} here)" for name in changed[:6])
        raise ConfigError(
            f"The run in {path} was started with another {listed}{', ...' if len(changed) > 6 else ''}.",
            rule="--resume auto continues a run of the same configuration.",
            remedy=f"Choose another --run-name; or change the run on purpose: headrace resume {path} OPTIONS.",
        )


def refuse_fewer_steps(restored: Restored, steps: StepPlan) -> None:
    """Refuse to resume a run that has been trained for more steps than are asked for."""
    if restored.step > steps.total_steps:
        done = restored.step / steps.updates_per_epoch
        raise CheckpointError(
            f"The run has been trained for {done:.4g} epochs ({restored.step:,} steps), more than the "
            f"{steps.num_epochs} asked for ({steps.total_steps:,} steps).",
            rule="Resuming continues a run from its newest checkpoint; it takes no steps back.",
            remedy=f"Ask for more epochs (--num-epochs {math.ceil(done) + 1}), or validate its checkpoints: headrace "
            f"validate {restored.directory.path}.",
        )


def last_end(path: Path) -> RunEnd | None:
    """Return how the last process of a run ended; None where it was killed or still runs."""
    # A start behind the last end belongs to a process that was killed.
    last = next((record for record in reversed(read_records(path)) if isinstance(record, RunStart | RunEnd)), None)
    return last if isinstance(last, RunEnd) else None


def has_finished(restored: Restored, steps: StepPlan) -> bool:
    """Say whether a run has been trained to the planned end, with nothing left to validate or record."""
    end = last_end(restored.directory.path)
    return bool(end and end.outcome == "finished" and end.step == restored.step == steps.total_steps)


def has_stopped(path: Path) -> bool:
    """Say whether a run has ended before its last step as it was asked to: at a target accuracy, or stopped early."""
    end = last_end(path)
    return bool(end and end.outcome == "stopped")


def refuse_other_run(saved: Resolved, resolved: Resolved, custom: CustomParts = NOTHING) -> StepPlan:
    """Refuse overrides that would make it another run; replicas, epochs, periods and directories may change.

    Return the steps that are planned now.
    """
    old, new = to_flat(saved.config), to_flat(resolved.config)
    # By value, not by who gave it: an option that is typed again as it was changes nothing.
    changed = [name for name in _FIXED if old[name] != new[name]]
    before, after = (design_run(each.config, custom).plan for each in (saved, resolved))
    if before.batch.global_batch_size != after.batch.global_batch_size:
        changed.append(f"global batch size ({before.batch.global_batch_size} -> {after.batch.global_batch_size})")
    # The step's number is translated to an epoch by this, for the order of samples and the learning rate. Named alone:
    # where the batch changed, this follows from it.
    # One epoch of more steps (tf1's --iterations) begins with the same ones.
    longer = (before.steps.num_epochs, after.steps.num_epochs) == (1, 1)
    longer = longer and before.steps.updates_per_epoch <= after.steps.updates_per_epoch
    if before.steps.updates_per_epoch != after.steps.updates_per_epoch and not changed and not longer:
        changed.append("weight_updates_per_epoch")
    if changed:
        raise CheckpointError(
            f"A run cannot be resumed with another {', '.join(changed)}.",
            rule="Steps before and after must mean the same.",
            remedy="Start a new run with headrace train.",
        )
    return after.steps
