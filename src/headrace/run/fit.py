"""One training run, from its configuration to its last checkpoint. `fit()` reads top to bottom as the run."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import headrace
from headrace.checkpoint.best import Best
from headrace.checkpoint.lock import hold
from headrace.checkpoint.restore import fit_tree
from headrace.checkpoint.store import load, newest_good
from headrace.config.load import Resolved, override, to_flat
from headrace.core.errors import CheckpointError
from headrace.data.dataset import open_dataset
from headrace.data.feed import feed_options
from headrace.engine.devices import replica_mesh, start_devices, use_compilation_cache
from headrace.engine.state import put_state, snapshot
from headrace.run.books import Books, InFlight, RunResult, utc_now
from headrace.run.design import Design, design_run, starting_state
from headrace.run.directory import RunDirectory, choose_directory, read_run, write_run
from headrace.run.interrupt import listen
from headrace.run.settle import Settler
from headrace.run.trainer import advise_on_memory, compile_call, open_feed, step_spec
from headrace.run.validator import Validator
from headrace.telemetry.console import make_console
from headrace.telemetry.record import Record, RunStart, ValidationRecord
from headrace.telemetry.rewind import rewind
from headrace.telemetry.sinks import open_sinks


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a run goes on from: a checkpoint's tensors (None: its beginning), and what the user should hear of it."""

    step: int = 0
    arrays: Mapping[str, Any] | None = None
    elapsed_seconds: float = 0.0
    notes: tuple[str, ...] = ()


def train(resolved: Resolved) -> RunResult:
    """Start a new run in a directory of its own."""
    return fit(resolved, choose_directory(resolved.config), None)


def resume(path: Path, overrides: Mapping[str, Any] | None = None) -> RunResult:
    """Go on with a run from its newest good checkpoint (from its beginning when there is none)."""
    directory, saved = read_run(Path(path))
    resolved = override(saved, overrides or {})
    _refuse_other_run(saved, resolved)
    found, damaged = newest_good(directory.checkpoints)
    notes = tuple(f"Checkpoint {bad.name} was passed over: {problem}" for bad, problem in damaged)
    if found is None:
        return fit(resolved, directory, Restored(notes=(*notes, "No good checkpoint yet: the run begins anew.")))
    arrays, manifest = load(found)
    step, elapsed = manifest["step"], manifest["elapsed_seconds"]
    return fit(resolved, directory, Restored(step=step, arrays=arrays, elapsed_seconds=elapsed, notes=notes))


def fit(resolved: Resolved, directory: RunDirectory, restored: Restored | None) -> RunResult:
    """Train, validate and save as the configuration says. What can be refused is refused before a file is made."""
    config = resolved.config

    # On paper: the data set's shape, the network, the plan. Then the data itself. No device is touched.
    design = design_run(config)
    dataset = open_dataset(config.data, config.run.seed)
    step = restored.step if restored else 0
    design = replace(design, plan=replace(design.plan, steps=design.plan.steps.from_step(step)))
    plan, steps = design.plan, design.plan.steps
    options = feed_options(config.data, dataset.info, config.run.seed, plan.num_devices)

    # The devices, and the state that they start from.
    use_compilation_cache(config.run.compilation_cache_dir)
    devices = start_devices(config.run.platform, plan.num_devices)
    mesh = replica_mesh(devices[: plan.batch.num_replicas])
    state = starting_state(design)
    if restored and restored.arrays is not None:
        state = fit_tree(restored.arrays, state)

    with ExitStack() as stack:
        # From here on the run leaves traces: its directory, records, checkpoints.
        write_run(directory, resolved, plan.to_dict(), sys.argv[1:])
        stack.enter_context(hold(directory.path))
        past = _rewind(directory, step) if restored else ()
        console = make_console(config.logging.progress, past)
        sinks = stack.enter_context(closing(open_sinks(directory.path, console)))
        books = Books(resolved, design, directory, sinks, restored.elapsed_seconds if restored else 0.0)
        sinks.write(_run_start(design, devices, step))
        for text in (*resolved.warnings, *plan.warnings, *(restored.notes if restored else ())):
            books.note(text, step, "warning")
        for text in (*resolved.notes, f"data set: {options.cache.reason}", *_hints(design, devices)):
            books.note(text, step)

        ending = stack.enter_context(books.ending())  # writes the last record, whatever happens
        interrupt = stack.enter_context(listen())
        stack.enter_context(advise_on_memory(plan))
        validator = None
        if config.validation.validation:
            validator = stack.enter_context(closing(Validator(design, dataset, devices)))
            fresh = not any(isinstance(record, ValidationRecord) and record.step == step for record in past)
            if fresh and (steps.validation_due(step) or not config.run.training):
                # Nothing to train, or a kill came between a checkpoint and its validation.
                books.validated(step, validator, validator.start(state))

        if config.run.training and step < steps.total_steps:
            # Compile before the first call, so that its time stays apart from training time.
            state = put_state(state, mesh)
            feed = stack.enter_context(closing(open_feed(design, dataset, options, mesh, step)))
            block = feed.next()
            compiled = compile_call(step_spec(design, options), mesh, state, feed.resident, block)
            books.compiled(compiled, step)
            if config.run.compile_only:
                return ending.reach("compiled", step)

            # The calls. While one runs, the numbers of the one before it are read and written down.
            settler = stack.enter_context(closing(Settler(partial(books.settle, validator=validator))))
            books.begin()
            wait = 0.0
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
                settler.submit(call)
                if step >= steps.total_steps or interrupt.requested:
                    break
                waited = feed.stats.wait_seconds
                block = feed.next(metrics["loss"])
                wait = feed.stats.wait_seconds - waited
            settler.drain()
            books.judge(feed.stats, options)

            # Somebody asked us to leave: the call is finished; save, and `headrace resume` goes on from here.
            if step < steps.total_steps:
                books.leave(interrupt.signal_name or "", state if call.copy is None else None, step)
                return ending.reach("interrupted", step)
        return ending.reach("finished", step)


def _rewind(directory: RunDirectory, step: int) -> tuple[Record, ...]:
    """Bring records and the list of the best back to the restored step; return the records that are left."""
    Best(directory.checkpoints).rewind(step)
    return rewind(directory.path, step).records


def _hints(design: Design, devices: list[Any]) -> list[str]:
    """Return advice that no error gives: what most people would want to know before they wait."""
    numerics = design.config.numerics
    if devices[0].platform != "cpu" and numerics.precision == "32.32":
        return ["precision is 32.32; --precision 16.32 (bfloat16 compute, float32 weights) is often twice as fast here"]
    return []


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
