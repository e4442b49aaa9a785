"""A training run: from its options to its end."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from headrace.checkpoint.store import restore_tree, write_error
from headrace.checkpoint.upload import Uploader
from headrace.config.checks import check_start
from headrace.config.load import Resolved, override, to_flat
from headrace.config.schema import Logging
from headrace.config.section_compiler import describe_without_effect
from headrace.config.spellings import shown
from headrace.core import __version__
from headrace.core.device_access import COMPILING
from headrace.core.errors import ConfigError
from headrace.core.process import take_command_began, tuned_interpreter
from headrace.core.session import session
from headrace.core.tree import PyTree
from headrace.data.dataset import DataInfo, DataSet
from headrace.data.decoding.jpeg import describe_slower
from headrace.data.feeding.block_reader import FeedOptions
from headrace.data.feeding.feed import TrainFeed
from headrace.data.feeding.prefetch import GivenUp
from headrace.data.sets.bad_samples import FILE as BAD_FILE
from headrace.data.verify import refuse_problems
from headrace.engine.compiler import compiles_alone, describe_compiler_options
from headrace.engine.devices import start_run_devices, warm_up
from headrace.engine.lr_curve import rate_table
from headrace.engine.pipeline.dispatch import Dispatcher
from headrace.engine.placement import host_memory_of
from headrace.engine.state import State, evaluated_weights
from headrace.engine.step import Metrics
from headrace.engine.step_stream import listening
from headrace.engine.visible import device_memory_bytes
from headrace.job import Restart, check_consistency, current_group, is_watched, report_lost_process, watch_progress
from headrace.ops import describe_missing_kernels
from headrace.plan.image_sizes import describe_sizes
from headrace.rows.metrics import class_ratio
from headrace.run.callbacks import CALLBACK
from headrace.run.choices import settle, with_chosen_decoding, with_replicas
from headrace.run.custom_functions import refuse_monitor
from headrace.run.design import (
    NOTHING,
    CustomParts,
    Design,
    dataset_identity,
    derived_facts,
    design_run,
    digest_of_dataset,
    given_facts,
    open_data,
    starting_state,
    uneven_remarks,
    with_batch_of,
    with_scale_of,
    with_set,
)
from headrace.run.directory import (
    RunDirectory,
    command_line,
    layout,
    make_directory,
    refuse_taken,
    saved_form,
    with_absolute_paths,
    write_run,
)
from headrace.run.expected_time import say_expected
from headrace.run.interruption import LOOK_SECONDS, Interrupt, Programs, listen
from headrace.run.memory_advice import advise_on_memory
from headrace.run.profiling import FOLDER, CallProfile, describe_profile, trace_schedule, with_measured_blocks
from headrace.run.recorder import Ending, InFlight, RunRecorder, utc_now
from headrace.run.restored import (
    Past,
    Restored,
    broadcast_restored,
    find_restored,
    free_options,
    has_finished,
    has_stopped,
    read_run_together,
    refuse_changed_dataset,
    refuse_fewer_steps,
    refuse_other_command,
    refuse_other_run,
    rewind_run,
)
from headrace.run.run_result import RunResult, ended_result
from headrace.run.start_weights import adopt_weights, whitened_weights, write_table
from headrace.run.step_reports import StepReports, refuse_streaming
from headrace.run.stored_run import bring_run, is_taken, refuse_unwritable, run_path, upload_rest, uploading
from headrace.run.time_budget import TimeBudget, describe_end, describe_late, make_budget, open_ended, refuse_lost_pace
from headrace.run.training import CallLength, Calls, Placed, open_feed
from headrace.run.validator import Validator
from headrace.telemetry.call_reader import CallReader, passing_failure_to
from headrace.telemetry.clock import StartTimes, Timeline
from headrace.telemetry.console import make_console
from headrace.telemetry.energy import energy_meter
from headrace.telemetry.records import RunStart, asked_metrics
from headrace.telemetry.sinks import Sinks, WarningSink, open_sinks
from headrace.telemetry.trackers.sink import make_trackers, refuse_missing
from headrace.telemetry.trackers.tracker import RunDescription
from headrace.weights.convert import table_lines
from headrace.weights.weights import Weights


def train(resolved: Resolved, custom: CustomParts = NOTHING) -> RunResult:
    """Start a new run in a new directory; `custom` holds a network and data given by code instead of options."""
    if not isinstance(resolved, Resolved):
        raise ConfigError(
            f"train was given a {type(resolved).__name__}.",
            rule="It takes a configuration, as `resolve` returns it.",
            remedy='With options, use headrace.Model("resnet50", ...).fit(PATH, epochs=3).',
        )
    began = _began()
    check_start(resolved, has_weights=custom.weights is not None)
    # First of all, since what follows may measure blocks for minutes.
    current_group().on_first_process(lambda: refuse_taken(resolved.config))
    custom = with_set(resolved.config, custom, absent_ok=True)
    settled = with_measured_blocks(settle(resolved, custom), custom)
    return fit(with_absolute_paths(settled), None, custom, began)


def train_or_resume(resolved: Resolved, options: Mapping[str, Any], restart: Restart | None = None) -> RunResult:
    """Start the run that the configuration names, or resume it where it was started before, with `options` as typed."""
    group, logging = current_group(), resolved.config.logging
    if logging.run_name is None:
        raise ConfigError(
            f"{'--max-restarts' if restart else '--resume auto'} is given, but the run has no name.",
            rule="The next attempt has to find the run that this one starts.",
            remedy="Give --output DIR, or --run-name NAME.",
        )
    path = run_path(logging.log_dir, logging.run_name)
    notes = (restart.note,) if restart and restart.number else ()
    # Under --max-restarts the first attempt starts anew, all others resume.
    may_resume = logging.resume == "auto" or bool(notes)
    if not may_resume or not group.broadcast(group.on_first_process(lambda: _is_there(logging))):
        return train(replace(resolved, warnings=(*notes, *resolved.warnings)))
    _, saved = read_run_together(group, path)
    refuse_other_command(path, saved, with_absolute_paths(resolved))
    # The next validation would stop it again. `headrace resume` continues it, since that is asked for in so many words.
    if group.broadcast(group.on_first_process(lambda: has_stopped(path))):
        return ended_result(path)
    return resume(path, free_options(options), notes=notes)


def _is_there(logging: Logging) -> bool:
    """Say whether the run of a configuration was started before; one in a store is brought here."""
    assert logging.run_name is not None
    path = run_path(logging.log_dir, logging.run_name)
    if is_taken(logging.log_dir, logging.run_name):
        bring_run(f"{logging.log_dir.rstrip('/')}/{logging.run_name}")
    return (path / "config.json").is_file()


def resume(
    path: Path | str,
    overrides: Mapping[str, Any] | None = None,
    custom: CustomParts = NOTHING,
    notes: tuple[str, ...] = (),
) -> RunResult:
    """Resume a run from its newest good checkpoint (from its beginning when it has not saved one yet).

    Its records get the notes, as warnings.
    """
    began, group = _began(), current_group()
    path = group.broadcast(str(group.on_first_process(lambda: bring_run(path)) or ""))
    with ExitStack() as stack:
        before, saved = read_run_together(group, Path(path), given=custom.parts)
        group.on_first_process(lambda: refuse_unwritable(saved.config.logging.log_dir))
        resolved = override(saved, overrides or {})
        parts = with_set(resolved.config, custom, absent_ok=True)
        if resolved.origins["num_replicas"].is_given:  # else a resumed run keeps its number, whatever the machine has
            resolved = with_replicas(resolved, parts)
        # With other replicas the batch of a step must stay: accumulation makes up for the difference.
        resolved = with_absolute_paths(with_batch_of(saved, resolved, parts))
        planned = refuse_other_run(saved, resolved, parts)
        directory = layout(before.path, resolved.config)

        def find() -> Restored:
            stack.enter_context(directory.held())  # nobody adds or deletes a checkpoint from here on
            found = find_restored(directory, before.checkpoints)
            refuse_lost_pace(resolved.config.run.time_budget, found.pace)
            refuse_fewer_steps(found, open_ended(resolved, planned, found.step, found.pace))
            return replace(found, notes=(*notes, *found.notes))

        restored = broadcast_restored(group, group.on_first_process(find), directory)
        # Code that gives parts wants the trained state; a command has nothing to do, and leaves all files as they are.
        steps = open_ended(resolved, planned, restored.step, restored.pace)
        if custom is NOTHING and group.broadcast(group.on_first_process(lambda: has_finished(restored, steps))):
            group.on_first_process(lambda: upload_rest(resolved.config.logging.log_dir, directory.path))
            return ended_result(directory.path)
        return fit(resolved, restored, parts, began)


def _began() -> float:
    """Return when a run begins: with the command, where the process has been started for it."""
    began = take_command_began()
    return time.perf_counter() if began is None else began


@tuned_interpreter()
def fit(resolved: Resolved, restored: Restored | None, custom: CustomParts, run_began: float) -> RunResult:
    """Train, validate and save as the configuration says. What can be refused is refused before a file is made.

    Its time, and a time budget, count from `run_began`, on the performance counter.
    """
    timeline, times = Timeline(began=run_began), StartTimes(began=run_began)
    times.end("process")
    config, group = resolved.config, current_group()
    progress = watch_progress()
    prepared = _prepare(resolved, restored, custom)
    design, dataset, step = prepared.design, prepared.dataset, prepared.step
    plan, running = design.plan, prepared.running
    steps = running.plan.steps
    times.end("dataset")

    # The devices, and the state that they start from.
    devices = prepared.devices()
    times.end("devices")
    calls = Calls(running, plan.feed, dataset, devices, step)
    # Before the first compilation: gloo gives up when a peer is 30 s late for a first exchange.
    group.connect_devices(calls.executor.meshes, config.model.dbn_replica_group_size)
    state = _first_state(prepared)

    with ExitStack() as stack:
        # From here on the run writes: its directory, records, checkpoints. Only process 0 does.
        interrupt = stack.enter_context(listen(quiet=not group.is_first))
        stack.enter_context(progress)
        recorder, directory = _open_recorder(prepared, stack, timeline, devices)
        interrupt.directory = directory.path

        def moved() -> None:
            progress.moved()
            interrupt.moved()

        if devices[0].platform == "gpu":
            recorder.energy = energy_meter(len(jax.local_devices()))
        recorder.start_times, recorder.moved, recorder.steps = times.seconds, moved, steps
        recorder.budget = budget = make_budget(resolved, plan.steps, steps, run_began, step, prepared.pace)
        _say_first(prepared, recorder, devices, directory)

        ending = stack.enter_context(recorder.ending())  # writes the last record however the run ends
        stack.enter_context(advise_on_memory(design, validates=not config.run.training))
        stack.enter_context(report_lost_process())
        times.end("state")
        # Compile before anything is run, so that its time stays apart.
        to_train = config.run.training and step < steps.total_steps
        # A process may have been killed after a checkpoint and before the validation due there.
        due = config.validation.validation and (steps.validation_due(step) or not config.run.training)
        to_validate = group.broadcast(bool(due and recorder.missing_validation(step, evaluated_weights(state))))
        length = CallLength(config.batch.call_seconds, steps.steps_per_call)
        validator, feed, compiling, trained, began = None, None, None, None, 0.0
        session().devices.leave(left=False)  # an interrupted run of this process may have
        # One for the programs of training, one for those of validation.
        threads = ThreadPoolExecutor(2, thread_name_prefix=COMPILING)

        # Whoever interrupts a run does not wait for programs that it no longer needs, or for images; processes of a job
        # leave as one.
        def is_left() -> bool:
            return interrupt.requested and group.is_alone

        stack.callback(lambda: threads.shutdown(wait=not is_left(), cancel_futures=True))
        if to_train:
            feed = opened = open_feed(running, dataset, plan.feed, calls.executor, step, length.steps)
            stack.callback(lambda: opened.close(wait=not is_left()))
            began, placed = time.perf_counter(), Future()
            compiling = threads.submit(calls.compile, state, feed, placed.result)
            with passing_failure_to(placed):
                trained = calls.executor.place(state)
                placed.set_result(trained)
            state = calls.executor.join(trained)  # until the first call takes these arrays over
            # Several processes compile in one order; and where nothing else may happen on the devices, tracing
            # validation would.
            one_by_one = not group.is_alone or compiles_alone(design.compiler)
            if one_by_one and _wait_unless_interrupted(compiling, interrupt) is None:
                return _leave(interrupt, recorder, ending, state, began)
        if config.validation.validation and (to_train or to_validate):
            validator = validating = Validator(design, dataset, devices)
            stack.callback(lambda: validating.close(wait=not is_left()))
            if feed:
                validator.prefetch(feed)
            if to_validate or not group.is_alone:  # several processes compile in one order
                recorder.compiled("validation", validator.compile(state))
            else:
                validator.compile_beside(state, threads)
            if to_validate:  # nothing to train, or killed between a checkpoint and the end of its validation
                recorder.validated(step, validator, recorder.start_validation(validator, state))

        threads.shutdown(wait=False)  # they end with what they compile
        if prepared.adopted is not None and not config.run.training and config.checkpoint.checkpoints:
            recorder.save(state, step)  # imported weights become a checkpoint, to predict with and to export
        if not feed or not compiling:
            return replace(ending.reach("finished"), state=state)
        programs = _wait_unless_interrupted(compiling, interrupt)
        if programs is None:
            return _leave(interrupt, recorder, ending, state, began)
        for what, compiled in programs:
            recorder.compiled(what, compiled)
        if validator and (config.run.compile_only or not _leave_room(programs, devices)):
            recorder.wait_for_compiled(validator)
        times.end("compile", trace=sum(compiled.trace_seconds for _, compiled in programs))
        traces = config.pipeline.trace_schedule and isinstance(calls.executor, Dispatcher)
        if config.run.compile_only and not traces:  # images are not needed, and decoding them all may take long
            return ending.reach("compiled")
        try:
            with timeline.measure("wait"):  # a set that is kept on the device is decoded whole before the first call
                feed.wait_for_resident(is_left)
                block, resident = feed.next(given_up=is_left), feed.resident
        except GivenUp:
            return replace(_stop(interrupt.signal_name or "", recorder, ending, state), state=state)
        times.end("first_block")
        if traces and isinstance(calls.executor, Dispatcher) and plan.pipeline:
            place = directory.path if group.is_first else None
            for text in trace_schedule(calls.executor, plan.pipeline, (trained, resident, block), place):
                recorder.note(text)
        if config.run.compile_only:
            return ending.reach("compiled")

        reader = stack.enter_context(closing(CallReader(partial(recorder.read_call, validator=validator))))
        reports = StepReports(plan, directory.path, recorder.callbacks, recorder.advance)
        if config.batch.stream_results:
            stack.enter_context(listening(reports))
        wanted = config.run.profile and group.is_first
        profile = stack.enter_context(closing(CallProfile(directory.path / FOLDER, wanted=wanted)))
        if budget and group.is_first and (late := describe_late(budget)):
            recorder.note(late, "warning")
        interrupt.begin()
        rates = rate_table(design.lr_curve)
        training = _Training(
            prepared, calls, feed, recorder, validator, reader, profile, length, interrupt, is_left, rates, reports
        )
        recorder.training_begins(step)
        trained, stopped_by = training.run(trained, block)
        recorder.training_ended(stopped_by)
        recorder.fed(feed.stats, plan.feed)
        for text in describe_profile(profile, design, devices) if wanted else ():
            recorder.note(text)
        if dataset.bad:
            recorder.note(dataset.bad.describe(), "warning")
        if stopped_by is None:
            if budget:
                recorder.note(describe_end(budget, recorder.step, recorder.step / steps.updates_per_epoch))
            return replace(ending.reach("finished"), state=calls.executor.join(trained))
        saved = calls.executor.copy_to_save(trained)
        return replace(_stop(stopped_by, recorder, ending, saved), state=calls.executor.join(trained))


def _wait_unless_interrupted(compiling: Future[Programs], interrupt: Interrupt) -> Programs | None:
    """Return the programs of training, or None if a signal comes first; not in a job, whose processes stop together."""
    while not wait([compiling], timeout=LOOK_SECONDS).done:
        if interrupt.requested and current_group().is_alone:
            return None
    return compiling.result()


def _leave(interrupt: Interrupt, recorder: RunRecorder, ending: Ending, state: State, began: float) -> RunResult:
    """Stop before the first call, while programs are compiled: there is nothing to save."""
    session().devices.leave()
    recorder.timeline.add("compile", began, time.perf_counter())
    return replace(_stop(interrupt.signal_name or "", recorder, ending, state), state=state)


def _leave_room(programs: Programs, devices: list[Any]) -> bool:
    """Say whether validation may be compiled while these programs run: a GPU tries convolutions in its own memory."""
    limit = device_memory_bytes(devices[0])
    return limit is None or 2 * max(compiled.device_bytes for _, compiled in programs) <= limit


def _stop(asked_by: str, recorder: RunRecorder, ending: Ending, saved: State) -> RunResult:
    """Save after the call that a callback or a signal made the last one, so that `headrace resume` continues there."""
    if asked_by.startswith(CALLBACK):
        reason = asked_by.removeprefix(CALLBACK)
        recorder.save_stopped(reason, saved)
        return ending.reach("stopped", reason)
    recorder.save_interrupted(asked_by, saved)
    return ending.reach("interrupted")


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A run before it uses a device: everything that can be refused has been."""

    resolved: Resolved
    restored: Restored | None
    design: Design
    dataset: DataSet
    devices: Callable[[], list[Any]]  # starts them, or waits until they have started
    identity: Mapping[str, Any]  # of the dataset
    adopted: Weights | None  # weights of a file or another run to start from
    drawn: Callable[[], tuple[PyTree, PyTree]]  # (params, stats) to start from where there are no others

    @property
    def step(self) -> int:
        """The number of steps done before."""
        return self.restored.step if self.restored else 0

    @property
    def pace(self) -> Mapping[str, Any]:
        """Where a run with a time budget was on its curve."""
        return self.restored.pace if self.restored else {}

    @property
    def running(self) -> Design:
        """The design with as many steps as there may be: of a run with a time budget nobody knows their number."""
        plan = self.design.plan
        steps = open_ended(self.resolved, plan.steps, self.step, self.pace)
        return replace(self.design, plan=replace(plan, steps=steps)) if steps is not plan.steps else self.design


def _prepare(resolved: Resolved, restored: Restored | None, custom: CustomParts) -> _Prepared:
    """Derive network and plan from the dataset's shape, then open the data itself; compare with the other processes."""
    config, group = resolved.config, current_group()
    refuse_missing(config.logging)
    design = design_run(config, custom, group.num_processes)
    refuse_monitor(config.run, design.metrics)
    refuse_streaming(design.plan, design.callbacks(), streams=config.batch.stream_results)
    devices = partial(start_run_devices, config.run, design.plan.num_devices, group.num_processes)
    drawn = partial(design.network.init, config.run.seed)
    starter = ThreadPoolExecutor(2, thread_name_prefix="start")
    if group.is_alone:
        # A GPU takes seconds to start, and opening a dataset may. Several processes start together: one that refuses
        # its dataset must not leave the others waiting there.
        starting = starter.submit(devices)
        devices = starting.result
    # Not of a network given by code, whose functions may use JAX: its devices could then no longer be chosen.
    if config.weights.weights is None and custom.weights is None and custom.network is None:
        drawn = starter.submit(drawn).result
    if group.is_alone:
        starter.submit(lambda: warm_up(devices()))
    starter.shutdown(wait=False)
    if config.data.verify_dataset and not custom.dataset:
        group.on_first_process(lambda: refuse_problems(config.data))
    dataset = open_data(design)
    identity = dataset_identity(dataset)
    if restored:
        refuse_changed_dataset(restored, identity)
    prepared = _Prepared(
        resolved=with_chosen_decoding(resolved, design.info),
        restored=restored,
        design=design,
        dataset=dataset,
        devices=devices,
        identity=identity,
        adopted=adopt_weights(design) if restored is None or restored.arrays is None else None,
        drawn=drawn,
    )
    # Options first: their names explain a difference better than those of what follows from them.
    check_consistency(group, given_facts(design))
    check_consistency(group, derived_facts(design, dataset, prepared.step))
    return prepared


def _first_state(prepared: _Prepared) -> State:
    """Return the state to start from, in host memory; every process gets that of process 0, bit by bit."""
    design, adopted, restored, group = prepared.design, prepared.adopted, prepared.restored, current_group()
    given = adopted.raw if adopted else design.custom.weights
    given = given or prepared.drawn()
    if not adopted and not design.custom.weights and not (restored and restored.arrays is not None):
        given = whitened_weights(design, prepared.dataset, given)
    state = starting_state(design, given)
    if restored and restored.arrays is not None:
        arrays, blank = restored.arrays, state
        state = group.on_first_process(lambda: restore_tree(arrays, blank)) or blank
        state = with_scale_of(design, state, restored.step)  # an option that may be changed, unlike a dynamic scale
    return group.broadcast_arrays(state)


def _open_recorder(
    prepared: _Prepared, stack: ExitStack, timeline: Timeline, devices: list[Any]
) -> tuple[RunRecorder, RunDirectory]:
    """Make the run directory, or rewind it to the step to resume from, and open what is written there."""
    restored, design, dataset, group = prepared.restored, prepared.design, prepared.dataset, current_group()
    config = design.config

    def open_run() -> tuple[RunDirectory, Past, Sinks, Uploader | None]:
        if restored is None:
            directory, past = make_directory(config, f"{design.network.name}-{design.info.name}"), Past()
            stack.enter_context(directory.held())
        else:
            directory, past = restored.directory, rewind_run(restored, config.checkpoint.keep_best, design.monitored)
        # Entered before what is recorded into: left after it, with the last file written.
        uploader = stack.enter_context(uploading(config.logging.log_dir, directory.path))
        if dataset.bad is not None:
            dataset.bad.write_to(directory.path / BAD_FILE)
        saved = saved_form(prepared.resolved, design.custom.record())
        write_run(directory, saved, design.plan.to_dict(), command_line(sys.argv), is_new=restored is None)
        if prepared.adopted is not None:
            write_table(directory, prepared.adopted)
        console = make_console(config.logging.progress, past.records)
        trackers = partial(make_trackers, config.logging, _about(design, directory.path, prepared.step))
        sinks = open_sinks(directory.path, console, trackers=trackers, check=directory.check)
        return directory, past, stack.enter_context(closing(sinks)), uploader

    def open_or_refuse() -> tuple[RunDirectory, Past, Sinks, Uploader | None]:
        try:
            return open_run()
        except OSError as error:  # a disk that fails: of an fsync the error names no file
            place = restored.directory.path if restored else Path(config.logging.log_dir)
            raise write_error(Path(os.fsdecode(error.filename)) if error.filename else place, error) from error

    # Only process 0 makes files. The others learn the path from it: its name contains the time.
    opened = group.on_first_process(open_or_refuse)
    path = group.broadcast(str(opened[0].path) if opened else None)
    others = layout(Path(path), config), Past(), Sinks([WarningSink(group.process)]), None
    directory, past, sinks, uploader = opened or others
    recorder = RunRecorder(
        prepared.resolved,
        design,
        directory,
        sinks,
        timeline,
        callbacks=design.callbacks(),
        writes=group.is_first,
        uploader=uploader,
    )
    if uploader is not None:
        printed, uploader.note = uploader.note, lambda text: recorder.note(text, "warning")
        stack.callback(setattr, uploader, "note", printed)  # the records are closed before it is
    recorder.dataset_identity = prepared.identity
    if restored is not None:
        recorder.continue_from(restored, past)
    sinks.write(_run_start(prepared, devices))
    return recorder, directory


NOT_WATCHED = (
    "the processes of this job were connected by what started them, not by Headrace. Its affair now: to notice and "
    "name a process that died or hangs (JAX ends all when one is silent for its heartbeat_timeout_seconds), who may "
    "join, and restarts. Headrace's as ever: one run, the same weights, signals, --hang-seconds, and a resume that "
    "loses nothing that was saved"
)


def _say_first(prepared: _Prepared, recorder: RunRecorder, devices: list[Any], directory: RunDirectory) -> None:
    """Record what the user should read before a long run begins: warnings, then notes."""
    resolved, restored, design, adopted = prepared.resolved, prepared.restored, prepared.design, prepared.adopted
    config, info = design.config, prepared.dataset.info
    warnings = [*resolved.warnings, *design.plan.warnings, *info.remarks, *uneven_remarks(config, info)]
    warnings += restored.notes if restored else ()
    if config.run.dry_run_steps:
        few = design.plan.validation.num_samples
        warnings.append(f"a trial: its accuracies are those of the first {few} validation images, and mean nothing")
    notes = [*resolved.notes, _describe(info, design.plan.feed), *_hints(design, devices, resolved)]
    if adopted is not None:
        notes = [*table_lines(adopted), *notes]
    if not current_group().is_alone and not is_watched():
        warnings.append(NOT_WATCHED)
    recorder.note(f"data: {info.size_text}")
    # Processes other than the first print warnings; those that all of them would print are said once.
    for text in warnings if current_group().is_first else ():
        recorder.note(text, "warning")
    notes += say_expected(resolved, design, devices[0].platform, devices[0].device_kind)
    for text in (*notes, f"run directory: {directory.path}"):
        recorder.note(text)


@dataclass(frozen=True)
class _Training:
    """The calls of a run. While one runs, the results of the one before it are read and recorded."""

    prepared: _Prepared
    calls: Calls
    feed: TrainFeed
    recorder: RunRecorder
    validator: Validator | None
    reader: CallReader
    profile: CallProfile
    length: CallLength
    interrupt: Interrupt
    is_left: Callable[[], bool]  # whether nobody waits for the images of another call
    rates: Callable[[np.ndarray], np.ndarray]  # of places on the curve
    reports: StepReports

    def run(self, state: Placed, block: PyTree) -> tuple[Placed, str | None]:
        """Run calls until the planned end, or until a signal or a callback asks to stop; say which."""
        step, recorder, group = self.prepared.step, self.recorder, current_group()
        budget = recorder.budget
        self.recorder.begin()
        stopped_by, overdue = self._asked_to_stop(), False
        while step < recorder.steps.total_steps and not stopped_by:
            step, state, metrics = self._call(step, state, block, overdue)
            is_over = step >= recorder.steps.total_steps
            stopped_by = None if is_over else self._asked_to_stop()
            if not is_over and not stopped_by:
                # All processes must launch calls of the same length, and copy the state together: the first one's
                # measurement decides.
                limit = self.profile.limit(self.length.update(self.recorder.step_seconds))
                left = recorder.steps_left(step) if budget and group.is_first else None
                limit, overdue, left = group.broadcast([limit, recorder.save_is_overdue, left])
                if budget:
                    limit = min(limit, budget.decide(*left))
                self.feed.limit(limit)
                with self.recorder.timeline.measure("wait"), suppress(GivenUp):
                    block = self.feed.next(metrics["loss"], self.is_left)
                stopped_by = self._asked_to_stop()  # waiting may have taken long
        self.reader.drain()
        self.reports.raise_error()
        return state, (stopped_by or "") if step < recorder.steps.total_steps else None

    def _call(self, step: int, state: Placed, block: PyTree, saves: bool) -> tuple[int, Placed, Metrics]:
        """Launch a call and what is due after it, and hand both to the thread that reads results."""
        callbacks, rows = self.recorder.callbacks, self.feed.rows
        if budget := self.recorder.budget:
            block = self._paced(budget, step, block)
        steps, launched = self.recorder.steps, time.perf_counter()
        self.profile.launching(is_last=step + len(rows) >= steps.total_steps)
        state, metrics = self.calls.at(step)(state, self.feed.resident, block, rows)
        self.profile.called(metrics, len(rows))
        step += len(rows)
        validating = Future() if self.validator and steps.validation_due(step) else None
        call = InFlight(
            last_step=step,
            rows=rows,
            metrics=metrics,
            launched=launched,
            ended=self.recorder.when_ready(metrics),
            # Copied on the devices right behind the call: the next one takes over the state's memory.
            copy=self.calls.executor.copy_to_save(state) if saves or steps.checkpoint_due(step) else None,
            evaluation=validating,
        )
        # Before the validation is launched: on a GPU launching takes as long as running, and the call's results
        # need not wait for that.
        self.reader.submit(call)
        if self.validator and validating:
            with passing_failure_to(validating):  # the reader must not wait for a validation that failed
                whole = self.calls.executor.join(state)
                validating.set_result(self.recorder.start_validation(self.validator, whole))
        epoch_ends = step % steps.updates_per_epoch == 0
        decides = callbacks.decide_after(epoch_ends=epoch_ends, validated=validating is not None)
        self.reader.keep_up(behind=0 if decides else 1)
        self.reports.raise_error()
        return step, state, metrics

    def _paced(self, budget: TimeBudget, step: int, block: PyTree) -> PyTree:
        """Return the block with the rates of the next call, which may turn out to be the last one."""
        rows, group = self.feed.rows, current_group()
        if budget.is_last(len(rows)):
            self.recorder.steps = replace(self.recorder.steps, total_steps=step + len(rows))
        rates = self.rates(budget.places(step, len(rows)))
        # Processes on unlike processors might round a rate differently.
        rates = np.array(group.broadcast(rates.tolist() if group.is_first else None), np.float32)
        all_rows = np.zeros(block["rate"].shape, np.float32)
        all_rows[rows.start : rows.stop] = rates
        return block | self.calls.executor.put({"rate": all_rows}, "steps")

    def _asked_to_stop(self) -> str | None:
        """Return why to stop before the next call, the same in all processes."""
        callbacks = self.recorder.callbacks
        reason = self.interrupt.signal_name or (callbacks.reason and CALLBACK + callbacks.reason)
        return current_group().agree_to_stop(reason)


def _seconds_left(prepared: _Prepared) -> float | None:
    """Return what is left of a time budget."""
    seconds = prepared.design.config.run.time_budget
    return None if seconds is None else max(0.0, seconds - prepared.pace.get("spent", 0.0))


def _describe(info: DataInfo, options: FeedOptions) -> str:
    """Say where the dataset is stored and where it is cached."""
    return f"dataset: {info.place + '; ' if info.place else ''}{options.cache.reason}"


def _about(design: Design, directory: Path, step: int) -> RunDescription:
    """Return what trackers receive about the run."""
    plan = design.plan.to_dict()
    return RunDescription(
        directory=directory, name=directory.name, options=shown(to_flat(design.config)), plan=plan, step=step
    )


def _hints(design: Design, devices: list[Any], resolved: Resolved) -> list[str]:
    """Return advice that no error gives, to be read before a long run rather than after it."""
    numerics, backend = design.config.numerics, jax.default_backend()
    hints = [design.trainable.summary] if design.trainable.summary else []
    hints += describe_without_effect(design.config, backend, resolved.origins)
    hints += describe_compiler_options(design.config.compiler, design.compiler, backend)
    hints += describe_slower() if design.info.varies else []
    hints += describe_missing_kernels(design.config.compiler.cpu_kernels) if backend == "cpu" else []
    if sizes := describe_sizes(design.sizes, design.network):
        hints += [sizes]
    if devices[0].platform != "cpu" and numerics.precision == "32.32":
        hints += [
            "precision is 32.32; --precision 16.32 (bfloat16 compute, float32 weights) is often twice as fast here"
        ]
    if design.config.pipeline.optimizer_state_offloading:
        if not host_memory_of(devices[0]):
            hints.append("optimizer_state_offloading is off: programs here cannot reach into host memory")
        elif devices[0].platform == "cpu":
            hints.append("optimizer_state_offloading saves nothing here: the CPU's memory is the host's")
    return hints


def _run_start(prepared: _Prepared, devices: list[Any]) -> RunStart:
    design, info = prepared.design, prepared.dataset.info
    config, plan = design.config, design.plan
    return RunStart(
        step=prepared.step,
        time=utc_now(),
        model=design.network.name,
        dataset=design.info.name,
        num_epochs=plan.steps.num_epochs,
        total_steps=plan.steps.total_steps,
        updates_per_epoch=plan.steps.updates_per_epoch,
        global_batch_size=plan.batch.global_batch_size,
        version=__version__,
        platform=devices[0].platform,
        device=devices[0].device_kind,
        num_devices=plan.num_devices,
        num_replicas=plan.batch.num_replicas,
        num_parameters=design.network.total_cost().params,
        seed=config.run.seed,
        target_accuracy=config.run.target_accuracy,
        monitor=config.run.monitor,
        num_train=prepared.identity["training"]["images"],
        num_validation=prepared.identity["validation"]["images"],
        num_classes=info.num_classes,
        dataset_digest=digest_of_dataset(prepared.identity, info.class_names),
        class_ratio=class_ratio(info.train_counts),
        seconds_left=_seconds_left(prepared),
        asked_metrics=asked_metrics(design.metric_rows),
        task=design.task.name,
    )
