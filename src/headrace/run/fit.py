"""One training run, from its configuration to its last checkpoint. `fit()` reads top to bottom as the run."""

import math
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import headrace
from headrace.checkpoint.best import Best
from headrace.checkpoint.restore import fit_tree
from headrace.checkpoint.store import load, newest_good
from headrace.config.load import Resolved, override, to_flat
from headrace.core.errors import CheckpointError, HeadraceError
from headrace.data.dataset import open_dataset
from headrace.data.feed import feed_options
from headrace.engine.devices import replica_mesh, start_devices, use_compilation_cache
from headrace.engine.state import State, init_state, put_state, snapshot
from headrace.run.books import Books, InFlight, utc_now
from headrace.run.design import Design, design_run
from headrace.run.directory import RunDirectory, choose_directory, read_run, write_run
from headrace.run.interrupt import listen
from headrace.run.trainer import advise_on_memory, compile_call, open_feed, step_spec
from headrace.run.validator import Validator
from headrace.telemetry.console import make_console
from headrace.telemetry.files import read_records
from headrace.telemetry.record import RunStart, ValidationRecord
from headrace.telemetry.rewind import rewind
from headrace.telemetry.sinks import open_sinks


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run came to. `outcome` is finished, interrupted (resume goes on from its checkpoint) or compiled."""

    outcome: str
    directory: Path
    step: int
    validation: dict[str, ValidationRecord]  # the last one of each set of weights: raw, ema
    images_per_second: float | None
    time_to_train: float


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint that a run goes on from, and what was passed over to find it."""

    arrays: Mapping[str, Any]
    manifest: Mapping[str, Any]
    notes: tuple[str, ...]


def train(resolved: Resolved) -> RunResult:
    """Start a new run in a directory of its own."""
    return fit(resolved, choose_directory(resolved.config), None)


def resume(path: Path, overrides: Mapping[str, Any] | None = None) -> RunResult:
    """Go on with a run from its newest good checkpoint (from its start when there is none)."""
    directory, saved = read_run(path)
    resolved = override(saved, overrides or {})
    _refuse_other_run(saved, resolved)
    found, damaged = newest_good(directory.checkpoints)
    notes = tuple(f"Checkpoint {bad.name} was passed over: {problem}" for bad, problem in damaged)
    if found is None:
        step, restored = 0, None
        notes += ("There is no good checkpoint yet: the run starts from its beginning.",)
    else:
        arrays, manifest = load(found)
        step = manifest["step"]
        restored = Restored(arrays=arrays, manifest=manifest, notes=notes)
    rewind(path, step)
    Best(directory.checkpoints).rewind(step)
    return fit(resolved, directory, restored)


def fit(resolved: Resolved, directory: RunDirectory, restored: Restored | None) -> RunResult:
    """Train, validate and save as the configuration says. What can be refused is refused before a file is made."""
    config = resolved.config

    # On paper: the data set's shape, the network, the plan. Then the data itself. No device is touched.
    design = design_run(config)
    dataset = open_dataset(config.data, config.run.seed)

    # The devices, and the state on them: initial or restored.
    use_compilation_cache(config.run.compilation_cache_dir)
    devices = start_devices(config.run.platform, design.plan.num_devices)
    mesh = replica_mesh(devices[: design.plan.batch.num_replicas])
    state = _starting_state(design, restored)
    step = int(state["step"])
    design = _from_step(design, step)
    plan, steps = design.plan, design.plan.steps
    options = feed_options(config.data, dataset.info, config.run.seed, plan.num_devices)

    # From here on the run leaves traces: its directory, records, checkpoints.
    write_run(directory, resolved, plan.to_dict(), sys.argv[1:])
    sinks = open_sinks(directory.path, make_console(config.logging.progress, read_records(directory.path)))
    books = Books(resolved, design, directory, sinks, restored.manifest["elapsed_seconds"] if restored else 0.0)
    sinks.write(_run_start(design, devices, step))
    for text in (*resolved.warnings, *plan.warnings, *(restored.notes if restored else ())):
        books.note(text, step, "warning")
    for text in (*resolved.notes, f"data set: {options.cache.reason}", *_hints(design, devices)):
        books.note(text, step)

    outcome = "failed"
    try:
        with ExitStack() as stack:
            interrupt = stack.enter_context(listen())
            stack.enter_context(books.saver)
            stack.enter_context(advise_on_memory(plan))
            validator = None
            if config.validation.validation:
                validator = stack.enter_context(closing(Validator(design, dataset, devices)))

            if config.run.training and step < steps.total_steps:
                # Compile before the first call, so that its time stays apart from training time.
                state = put_state(state, mesh)
                feed = stack.enter_context(closing(open_feed(design, dataset, options, mesh, step)))
                block = feed.next()
                compiled = compile_call(step_spec(design, options), mesh, state, feed.resident, block)
                books.compiled(compiled, step)
                if config.run.compile_only:
                    outcome = "compiled"
                    return _result(outcome, directory, step, books)

                # The calls. While one runs, the numbers of the one before it are read and written down.
                books.begin()
                flying, wait = None, 0.0
                while True:
                    state, metrics = compiled.program(state, feed.resident, block)
                    step += steps.steps_per_call
                    call = InFlight(
                        last_step=step,
                        metrics=metrics,
                        wait_seconds=wait,
                        copy=snapshot(state) if steps.checkpoint_due(step) else None,
                        evaluation=validator.start(state) if validator and steps.validation_due(step) else None,
                    )
                    if flying is not None:
                        books.settle(flying, validator)
                    flying = call
                    if step >= steps.total_steps or interrupt.requested:
                        break
                    waited = feed.stats.wait_seconds
                    block = feed.next(metrics["loss"])
                    wait = feed.stats.wait_seconds - waited
                books.settle(flying, validator)
                books.judge(feed.stats, options)

                # Somebody asked us to leave: the call is finished; save, and `headrace resume` goes on from here.
                if step < steps.total_steps:
                    outcome = "interrupted"
                    books.leave(interrupt.signal_name or "", state if flying.copy is None else None, step)
                    return _result(outcome, directory, step, books)

            elif validator:
                if not restored:
                    books.note("Validating fresh weights: nothing was trained.", step, "warning")
                books.begin()
                books.validated(step, validator, validator.start(state))
            outcome = "finished"
        return _result(outcome, directory, step, books)
    except HeadraceError as error:
        books.note(str(error), step, "warning")
        raise
    finally:
        books.close(outcome, step)
        if outcome == "finished" and config.checkpoint.clean_dir:
            shutil.rmtree(directory.checkpoints, ignore_errors=True)


def _from_step(design: Design, step: int) -> Design:
    """Return the design with calls that fit behind `step`: a resumed run may log at another pace than before."""
    steps = design.plan.steps
    per_call = math.gcd(steps.steps_per_call, step)
    return replace(design, plan=replace(design.plan, steps=replace(steps, steps_per_call=per_call)))


def _hints(design: Design, devices: list[Any]) -> list[str]:
    """Return advice that no error gives: what most people would want to know before they wait."""
    numerics = design.config.numerics
    if devices[0].platform != "cpu" and numerics.precision == "32.32":
        return ["precision is 32.32; --precision 16.32 (bfloat16 compute, float32 weights) is often twice as fast here"]
    return []


def _starting_state(design: Design, restored: Restored | None) -> State:
    """Return the state in host memory that the run starts from."""
    config = design.config
    state = init_state(
        design.network,
        design.optimizer,
        design.precision,
        config.numerics,
        seed=config.run.seed,
        ema=config.learning.ema_decay > 0,
    )
    return fit_tree(restored.arrays, state) if restored else state


def _run_start(design: Design, devices: list[Any], first_step: int) -> RunStart:
    config, plan = design.config, design.plan
    return RunStart(
        step=first_step,
        time=utc_now(),
        model=config.model.model_name,
        dataset=config.data.dataset,
        num_epochs=plan.steps.num_epochs,
        total_steps=plan.steps.total_steps,
        updates_per_epoch=plan.steps.updates_per_epoch,
        global_batch_size=plan.batch.global_batch_size,
        version=headrace.__version__,
        platform=devices[0].platform,
        device=devices[0].device_kind,
        num_replicas=plan.batch.num_replicas,
        num_parameters=design.network.total_cost().params,
        seed=config.run.seed,
        target_accuracy=config.run.target_accuracy,
    )


def _result(outcome: str, directory: RunDirectory, step: int, books: Books) -> RunResult:
    return RunResult(
        outcome=outcome,
        directory=directory.path,
        step=step,
        validation=dict(books.last_validation),
        images_per_second=books.ledger.pace.images_per_second,
        time_to_train=books.elapsed,
    )


# A run is these: with another value its steps would mean something else.
_FIXED = ("model_name", "norm_layer", "dataset", "seed", "shuffle", "optimizer", "precision", "half_type", "ema_decay")


def _refuse_other_run(saved: Resolved, resolved: Resolved) -> None:
    """Refuse overrides that would make another run of it; replicas, epochs, periods and places may change."""
    old, new = to_flat(saved.config), to_flat(resolved.config)
    changed = [name for name in _FIXED if old[name] != new[name]]
    before, after = design_run(saved.config).plan, design_run(resolved.config).plan
    if before.batch.global_batch_size != after.batch.global_batch_size:
        changed.append(f"global batch size ({before.batch.global_batch_size} -> {after.batch.global_batch_size})")
    if before.steps.updates_per_epoch != after.steps.updates_per_epoch and not changed:
        changed.append("weight_updates_per_epoch")
    if changed:
        raise CheckpointError(
            f"A run cannot go on with another {', '.join(changed)}.",
            rule="Steps before and after must mean the same.",
            remedy="Start a new run with headrace train.",
        )
