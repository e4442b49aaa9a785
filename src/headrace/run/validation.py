"""Validation: the forward pass over the validation split, in a run and for saved weights; logits for prediction."""

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from headrace.checkpoint.saver import BestCheckpoints
from headrace.checkpoint.store import MANIFEST_FILE, list_checkpoints, load, newest_good, restore_tree, step_of, verify
from headrace.config.load import NO_RECIPE, Resolved
from headrace.config.schema import Config
from headrace.core.errors import CheckpointError
from headrace.core.tree import PyTree
from headrace.data.dataset import DataSet, describe_dataset
from headrace.data.feeding.block_reader import FeedOptions
from headrace.data.feeding.eval_feed import EvalFeed
from headrace.data.feeding.feed import TrainFeed
from headrace.data.feeding.fetch import fetch, fetch_labels
from headrace.engine.compiler import compiler_options
from headrace.engine.devices import replica_mesh, start_run_devices, take
from headrace.engine.forward import (
    LOGITS,
    EvalSpec,
    Forward,
    Program,
    Reducer,
    Sums,
    WholeForward,
    sums_with,
    total_sums,
)
from headrace.engine.multiprocess_arrays import in_turn, readable
from headrace.engine.objective import SCORES
from headrace.engine.pipeline.evaluate_stages import make_staged_evaluation
from headrace.engine.state import State, evaluated_weights
from headrace.job import ProcessGroup, current_group
from headrace.model.custom_block import weights_like
from headrace.reference.entrance import override, resolve
from headrace.rows.metrics import TOP1
from headrace.rows.row import Metric
from headrace.run.choices import definition_remarks, with_choices, with_definition
from headrace.run.design import Design, design_run, open_data
from headrace.run.directory import from_saved, layout, read_run, saved_form
from headrace.run.memory_advice import advise_on_memory
from headrace.run.start import adopt_weights
from headrace.run.trained_model import refuse_other_classes
from headrace.run.training import Compiled, compiled_from, process_shard
from headrace.telemetry.records import validation_report, write_report

_PREDICTED_BATCHES = 16  # in a block: bounds the logits that are on the devices at a time


def make_forward_pass(design: Design, devices: list[Any], reducer: Reducer) -> tuple[Forward, FeedOptions]:
    """Return the forward pass that a design plans for its validation, and the options of the feed it needs.

    Only sums are computed through the stages of a pipeline; anything else runs on replicas with the whole network.
    """
    plan = design.plan.validation
    options = replace(design.plan.feed, shard=process_shard(design.plan))
    # Forward passes alone compile faster with all algorithms: the plans that cuDNN recommends for a convolution with
    # its bias and activation are generated, compiled one by one.
    compiler = replace(design.config.compiler, convolution_tuning="full", concurrent_kernels="off")
    preprocess = options.preprocess.with_seed(0)  # nothing is drawn: every seed has the same program
    spec = EvalSpec(
        network=design.network,
        fetch=partial(fetch, spec=preprocess, train=False),
        fetch_labels=partial(fetch_labels, spec=preprocess, train=False),
        compute_dtype=design.precision.compute_dtype,
        half_partials=design.precision.half_partials,
        matmul_precision=design.precision.matmul_precision,
        stable_norm=design.config.model.stable_norm,
        cpu_kernels=design.config.compiler.cpu_kernels,
        compiler_options=tuple(compiler_options(compiler).items()),
        num_replicas=plan.num_replicas,
        reducer=reducer,
        flip=design.config.validation.validation_flip,
    )
    pipeline = design.plan.pipeline
    # Stages of an evaluation hand on sums only; the logits of all batches would have to cross to one place.
    if not reducer.adds or pipeline is None or plan.devices_per_replica == 1:
        return WholeForward(replica_mesh(take(devices, plan.num_replicas)), spec), options
    grid = np.array(take(devices, plan.num_devices)).reshape(plan.num_replicas, pipeline.num_devices)
    ranges = [(stage.first, stage.end) for stage in pipeline.stages]
    mapping = [stage.device for stage in pipeline.stages]
    return make_staged_evaluation(spec, ranges, grid, mapping), options


@dataclass(frozen=True)
class Started:
    """Evaluations that the devices are working on: {weights: sums still on the devices}."""

    parts: dict[str, list[Sums]]
    launches: list[tuple[float, Sums]]  # in order, each with its time on the performance counter
    requested: float  # when, on the performance counter


class Validator:
    """The validation split, the program that evaluates it, and the devices it runs on.

    In a run an evaluation is started behind a call, without waiting for the call; it is read once the call's results
    have been read.
    """

    def __init__(self, design: Design, dataset: DataSet, devices: list[Any]) -> None:
        batch_size, cache = design.plan.validation.batch_size, design.plan.validation_cache
        self._forward, options = make_forward_pass(design, devices, sums_with(design.objective))
        current_group().connect_devices(self._forward.meshes)
        self._feed = EvalFeed(
            dataset.validation, batch_size, cache.batches_per_block, options, self._forward.put, cache
        )
        self._compiled: dict[str, Program] = {}  # by the name of the weights
        self._compiling: Future[Compiled] | None = None

    def compile(self, state: State) -> Compiled:
        """Compile for the weights of such a state ahead of their use, so that the time stays apart."""
        return compiled_from(lambda: self._compile(self._place(state), *self._feed.described()))

    def compile_beside(self, state: State, threads: Executor) -> None:
        """Compile in a thread, while the run trains; `compiled` waits for it."""
        # Described, since the first call takes over the memory of the state.
        weights = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), self._place(state)
        )
        self._compiling = threads.submit(compiled_from, lambda: self._compile(weights, *self._feed.described()))

    def compiled(self) -> Compiled | None:
        """Wait for what compiles in a thread, and return it once."""
        compiling, self._compiling = self._compiling, None
        return compiling.result() if compiling else None

    def _compile(self, weights: dict[str, Any], resident: object, block: object) -> Program:
        programs: dict[tuple[Any, ...], Program] = {}  # by dtypes: averages are float32 where raw weights have 16 bits
        for name, placed in weights.items():
            dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(placed))
            if dtypes not in programs:
                programs[dtypes] = self._forward.compile(placed, resident, block)
            self._compiled[name] = programs[dtypes]
        return self._compiled["raw"]

    def prefetch(self, training: TrainFeed) -> None:
        """Read validation images from now on, whenever no training images are being prepared."""
        # Training images come first: a device that waits for them stands still, while validation can be read in any
        # pause.
        training.hold(self._feed.gate)
        self._feed.prefetch()

    def start(self, state: State) -> Started:
        """Start the evaluation of a state's weights; the state may be donated to the next call right after."""
        requested, weights = time.perf_counter(), self._place(in_turn(state))
        parts: dict[str, list[Sums]] = {name: [] for name in weights}
        prepared: dict[str, Any] = {}
        launches: list[tuple[float, Sums]] = []
        resident = self._feed.resident  # waits until it is there, which is no time of the devices
        # Blocks outside, weights inside: each block of images is read and sent once for all sets of weights.
        for block in self._feed:
            for name, placed in weights.items():
                launched = time.perf_counter()
                # On several CPU devices one program at a time: collectives of two that overlap may wait for each other
                # forever.
                program = self._compiled[name]
                if name not in prepared:
                    prepared[name] = in_turn(program.prepare(placed, resident, block))
                sums = in_turn(program(prepared[name], resident, block))
                if SCORES in sums:  # those of each process's images
                    sums = sums | {SCORES: jax.tree.map(readable, sums[SCORES])}
                parts[name].append(sums)
                launches.append((launched, sums))
        return Started(parts, launches, requested)

    def finish(self, started: Started) -> dict[str, tuple[dict[str, Any], float]]:
        """Wait for the sums; return {weights: (sums, seconds)}, with the time since the start divided evenly."""
        sums = {name: total_sums(parts) for name, parts in started.parts.items()}
        seconds = (time.perf_counter() - started.requested) / len(sums)
        return {name: (total, seconds) for name, total in sums.items()}

    def close(self, *, wait: bool = True) -> None:
        """End the feed's threads; wait for what they are in the middle of, or do not."""
        self._feed.close(wait=wait)

    def _place(self, state: State) -> dict[str, Any]:
        return {name: self._forward.place(weights) for name, weights in evaluated_weights(state).items()}


def predict_all(design: Design, dataset: DataSet, devices: list[Any], weights: tuple[PyTree, PyTree]) -> np.ndarray:
    """Return the logits [N, classes], float32, of the whole validation split with these (params, stats)."""
    forward, options = make_forward_pass(design, devices, LOGITS)
    placed, size = forward.place(weights), design.plan.validation.batch_size
    parts, program, prepared = [], None, None
    with closing(EvalFeed(dataset.validation, size, _PREDICTED_BATCHES, options, forward.put)) as feed:
        for block in feed:
            if program is None:
                program = forward.compile(placed, feed.resident, block)
                prepared = program.prepare(placed, feed.resident, block)
            # Still on the devices: reading them here would wait for each block before the next one is launched.
            parts.append(readable(program(prepared, feed.resident, block)))
    logits = np.concatenate([part.reshape(-1, design.network.num_classes) for part in jax.device_get(parts)])
    # The last batch was padded, so that all batches have the compiled size.
    return logits[: len(dataset.validation)]


# Saved weights: one checkpoint or those of a run, raw and averaged weights separately.


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
    alone = group.is_alone and describe_dataset(config.data).num_train  # else there is nothing to plan a training for
    design = design_run(config if alone else only_validating(config), num_processes=group.num_processes)
    dataset = open_data(design)
    devices = start_run_devices(config.run, design.plan.validation.num_devices, group.num_processes)
    # Apart from the reports of training, which belong to the run's records.
    report_dir = (report_dir or _report_dir(found.run)) if group.is_first else None
    num_good = 0
    with advise_on_memory(design, validates=True), closing(Validator(design, dataset, devices)) as validator:
        for checkpoint in checkpoints:
            reader = partial(_read, design, checkpoint, alone=len(checkpoints) == 1)
            read = group.on_first_process(partial(_read_named, design) if path is None else reader)
            manifest = group.broadcast(read and read.facts)
            if problem := manifest.get("problem"):
                # The other processes cannot see the file: whether it is there is part of what process 0 tells them.
                if manifest["is_there"]:  # a run that is still training may have deleted it meanwhile
                    yield Validated(checkpoint=checkpoint, step=step_of(checkpoint) or 0, problem=problem)
                continue
            weights = group.broadcast_arrays(read.weights if read else _blank(design, manifest))
            label = manifest["weights"]
            if not num_good:
                validator.compile(weights)
            num_good += 1
            results = validator.finish(validator.start(weights))
            results = {label if name == "raw" else name: result for name, result in results.items()}
            reports = {name: validation_report(sums, design.info.class_names) for name, (sums, _) in results.items()}
            report_file = report_dir / f"{checkpoint.name}.json" if report_dir else None
            if report_file is not None:
                write_report(report_file, {"checkpoint": str(checkpoint), "options": given} | reports)
            yield Validated(
                checkpoint=checkpoint,
                step=manifest["step"],
                epoch=manifest["epoch"],
                reports=reports,
                seconds={name: seconds for name, (_, seconds) in results.items()},
                report_file=report_file,
                images=design.info.place,
                remarks=found.remarks,
                monitor=design.monitored,
            )
    if not num_good:
        raise CheckpointError(f"None of the {len(checkpoints)} checkpoints of {path} can be used.")


@dataclass(frozen=True, kw_only=True)
class _Read:
    """A checkpoint's weights, and the facts that the other processes need: `problem` where it cannot be used."""

    weights: dict[str, Any]
    facts: dict[str, Any]


def _read(design: Design, checkpoint: Path, *, alone: bool) -> _Read:
    """Read a checkpoint's weights; a damaged one is an error only where it is the only one."""
    try:
        arrays, manifest = load(checkpoint)
    except CheckpointError as error:
        if alone:
            raise
        return _Read(weights={}, facts={"problem": error.problem, "is_there": checkpoint.exists()})
    if names := manifest.get("class_names"):
        refuse_other_classes(design.info, len(names), names)
    facts = {
        "step": manifest["step"],
        "epoch": manifest["epoch"],
        "weights": manifest.get("weights", "raw"),  # an average has another label
        "averaged": "averaged" in manifest,
        "ema": any(name.startswith("ema/") for name in arrays),
    }
    blank = _blank(design, facts)
    return _Read(weights={key: restore_tree(arrays, part, key) for key, part in blank.items()}, facts=facts)


def _read_named(design: Design) -> _Read:
    """Read weights that were given by name or as a file; their classes must be those of the dataset."""
    adopted = adopt_weights(design)
    assert adopted is not None
    if other := adopted.not_loaded:
        raise CheckpointError(
            f"Not all of {adopted.source} fits {design.network.name} with the {design.info.num_classes} classes of "
            f"{design.info.place or design.info.name}: {other[0].name} {other[0].note or 'is not in the file'}.",
            rule="Weights are validated on the classes that they were trained for.",
            remedy="Choose their dataset, or fine-tune them: headrace train --weights NAME.",
        )
    cast = jax.tree.map(lambda w: w.astype(design.precision.weight_dtype), adopted.params)
    facts = {"step": 0, "epoch": 0.0, "weights": "raw", "averaged": False, "ema": False}
    return _Read(weights={"params": cast, "stats": adopted.stats}, facts=facts)


def _blank(design: Design, facts: Mapping[str, object]) -> dict[str, Any]:
    """Return weights of the shapes and dtypes that such a checkpoint holds."""
    params, stats = jax.tree.map(lambda w: np.zeros(w.shape, np.float32), weights_like(design.network))
    stored = params if facts["averaged"] else jax.tree.map(lambda w: w.astype(design.precision.weight_dtype), params)
    return {"params": stored, "stats": stats} | ({"ema": {"params": params, "stats": stats}} if facts["ema"] else {})


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
        found = _find(Path(path), overrides)
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
        resolved = override(from_saved(load(path)[1]["config"]), overrides)
        return _Found(checkpoints=[path], resolved=resolved, run=_run_of(path))
    if checkpoints := list_checkpoints(path):  # the directory of a run's checkpoints, which may be outside the run
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
    """Return the run that a checkpoint belongs to, or None where it was copied elsewhere."""
    run = checkpoint.parent.parent
    return run if (run / "config.json").is_file() else None


def _choose(found: _Found, which: str) -> list[Path]:
    if which == ALL or len(found.checkpoints) == 1:
        return found.checkpoints
    folder = found.checkpoints[0].parent
    if which == BEST:
        best = BestCheckpoints(folder).first_good()
        if best is None:
            raise CheckpointError(
                f"No good checkpoint is listed as the best in {folder}.",
                rule="The best are those with the highest validation accuracy during training.",
                remedy="Validate all of them: leave --best out.",
            )
        return [folder / best.name]
    # damaged ones that are newer than the last good one are kept in the list, to be reported
    newest_first = list(reversed(found.checkpoints))
    good = next((number for number, path in enumerate(newest_first) if not verify(path)), len(newest_first) - 1)
    return newest_first[: good + 1]


def _report_dir(run: Path | None) -> Path | None:
    """Return where reports are written by default: into the run, unless it is read-only."""
    return run / "reports" / "validate" if run and os.access(run, os.W_OK) else None
