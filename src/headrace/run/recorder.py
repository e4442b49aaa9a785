"""Writes records, checkpoints and validation results once the results of a call have been read."""

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from headrace.checkpoint.best import BestCheckpoints
from headrace.checkpoint.saver import Saver
from headrace.checkpoint.store import checkpoint_name
from headrace.checkpoint.upload import Uploader
from headrace.config.load import Resolved
from headrace.config.python_words import in_python
from headrace.core.errors import HeadraceError
from headrace.core.files import write_atomic
from headrace.core.tree import flatten_named
from headrace.core.units import format_bytes, format_duration
from headrace.data.feeding.block_reader import FeedOptions
from headrace.data.feeding.prefetch import FeedStats
from headrace.data.sets.mirror import link_so_far
from headrace.engine.devices import CompileCounts
from headrace.engine.histograms import HISTOGRAMS
from headrace.engine.machine import describe_machine
from headrace.engine.state import State
from headrace.engine.step import Metrics
from headrace.report.curve_svg import write_curve
from headrace.report.run_files import MACHINE_FILE, read_mapping
from headrace.report.run_report import write_run_report
from headrace.rows.metrics import OF_CLASSES
from headrace.run.callbacks import CALLBACK, Callbacks, RunEvent, TrainingEvent, ValidationEvent
from headrace.run.design import Design
from headrace.run.directory import RunDirectory, delete_checkpoints, saved_form
from headrace.run.expected_time import Forecast
from headrace.run.memory_advice import measured_memory
from headrace.run.restored import Past, Restored, score_of
from headrace.run.run_result import RunResult
from headrace.run.time_budget import MeasuredPace, TimeBudget, seconds_of_validation
from headrace.run.training import Compiled
from headrace.run.validator import Started, Validator
from headrace.telemetry.bottleneck import Measured, verdict
from headrace.telemetry.clock import DeviceClock, EndWatcher, Timeline, Watched, first_at_target
from headrace.telemetry.curve_points import CurvePoints
from headrace.telemetry.metric_totals import NOTHING_UNLOGGED, HostMetrics, MetricTotals, Unlogged
from headrace.telemetry.model_verdict import Losses, model_verdict
from headrace.telemetry.records import CheckpointRecord, Note, RunEnd, TrainRecord, ValidationRecord, best_validation
from headrace.telemetry.sinks import Sinks
from headrace.telemetry.validation_report import report_file, write_report
from headrace.weights.input_form import InputForm


def utc_now() -> str:
    """Return the time as records write it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass(frozen=True)
class Evaluating:
    """A validation that the devices are working on, and when they were done with each of its launches."""

    started: Started
    ended: list[Watched]
    compiling: tuple[float, float]  # from when to when its programs were waited for


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A call that the devices are working on, and what was launched behind it."""

    last_step: int
    rows: range  # of its block, which the call ran
    metrics: Metrics  # arrays with a row for each of the block's
    launched: float  # when, on the performance counter
    ended: Watched  # when the devices were done with it
    copy: State | None  # the state after the call, for a checkpoint
    evaluation: Future[Evaluating] | None  # set once the validation due after the call has been launched


class Ending:
    """The outcome of a run: failed, until a better one is reached."""

    def __init__(self, recorder: "RunRecorder") -> None:
        self._recorder, self.outcome, self.reason = recorder, "failed", ""

    def reach(self, outcome: str, reason: str = "") -> RunResult:
        """Set the outcome and return the result."""
        self.outcome, self.reason = outcome, reason
        return self._recorder.result(outcome, reason)


class RunRecorder:
    """Everything that a run records while it trains."""

    def __init__(
        self,
        resolved: Resolved,
        design: Design,
        directory: RunDirectory,
        sinks: Sinks,
        timeline: Timeline,
        *,
        callbacks: Callbacks | None = None,
        writes: bool = True,
        uploader: Uploader | None = None,
    ) -> None:
        keep = resolved.config.checkpoint
        self.timeline = timeline
        self._link_before = link_so_far()
        # Before the saver, which asks it what to keep after every save.
        self.best = BestCheckpoints(directory.checkpoints, keep.keep_best)
        self.saver = Saver(
            directory.checkpoints,
            keep_last=keep.max_ckpts_to_keep,
            best=self.best,
            every_seconds=design.plan.steps.checkpoint_seconds or math.inf,
            prepare=self._before_saving,
            written=uploader.changed if uploader else lambda: None,
        )
        self.totals = MetricTotals(design.plan, design.network.block_names, resolved.config.numerics.nan_policy)
        self.validations: list[ValidationRecord] = []  # of the whole run
        self._fed: tuple[FeedStats, FeedOptions] | None = None  # of a run that trained
        self.start_times: Mapping[str, float] = {}
        self.energy: Callable[[], float | None] = lambda: None  # joules used since the process began
        self.moved: Callable[[], None] = lambda: None  # called whenever the run has made progress
        self._resolved, self._design, self._directory, self._sinks = resolved, design, directory, sinks
        # One process of a job writes; the others track the same counters but write nothing.
        self._writes = writes
        self.callbacks = callbacks or Callbacks()
        self._epoch_sums = NOTHING_UNLOGGED  # over the calls of the epoch so far
        self._points = CurvePoints(design.plan.steps.updates_per_epoch)
        # Of what counts as the run's time: what came before the first call, and when that was launched.
        self._elapsed_before, self._began = 0.0, None
        self._first_wait = 0.0  # for the images of the first call, with programs compiled
        # Apart from the thread that reads results, so that times are exact however long it takes to save and report.
        self._watcher = EndWatcher()
        self._device_clock = DeviceClock(timeline, time.perf_counter())
        self._losses: tuple[float, float] | None = None  # of the first and the last training record of the run
        self.steps = design.plan.steps  # as planned now: the end of a run with a time budget is found on the way
        self.budget: TimeBudget | None = None
        self.step = 0  # the last one whose results have been read
        self.step_seconds: float | None = None  # of the call that was read last
        self._saved_step = 0  # of the state that was handed to the saver last; 0: there is none
        self._programs = CompileCounts()
        plan = design.plan
        self._forecast = Forecast(plan.steps, plan.batch.global_batch_size, plan.validation.num_samples)
        self.dataset_identity: Mapping[str, Any] = {}  # for a resume, which refuses other data

    def continue_from(self, restored: Restored, past: Past) -> None:
        """Start with the counters of the earlier process of the run."""
        # A validation of the restored step may have ended after its checkpoint was saved: that time was spent, too.
        ended = [record.elapsed_seconds or 0.0 for record in past.validations]
        self._elapsed_before = max([restored.elapsed_seconds, *ended])
        self.step = self._saved_step = restored.step
        self.totals.continue_from(restored.unlogged, past.skipped_steps)
        self._epoch_sums, self._points.sums = restored.epoch_sums, restored.point_sums
        self.validations = past.validations
        trained = [record.loss for record in past.records if isinstance(record, TrainRecord)]
        self._losses = (trained[0], trained[-1]) if trained else None

    def begin(self) -> None:
        """Start measuring the run's time: everything before was preparation."""
        self.timeline.starting()
        self._first_wait = self.timeline.seconds()["wait"]
        self._began = now = time.perf_counter()
        self._device_clock = DeviceClock(self.timeline, now)
        self._sinks.advance(self.step)

    @property
    def elapsed(self) -> float:
        """Seconds of training, validating and saving so far, those of earlier processes of the run included."""
        return self._elapsed_before + (0.0 if self._began is None else time.perf_counter() - self._began)

    def note(self, text: str, level: str = "info") -> None:
        """Record a sentence for people."""
        self._sinks.write(Note(step=self.step, level=level, text=self._words(text)))

    def _words(self, text: str) -> str:
        """Return a sentence for who started the run: a command, or code."""
        return in_python(text) if self._design.custom.speaks_python else text

    def when_ready(self, launched: object) -> Watched:
        """Watch when the devices will be done with arrays; to be asked for in the order of launches."""
        leaves = jax.tree.leaves(launched)
        return self._watcher.watch(
            lambda: all(leaf.is_ready() for leaf in leaves), lambda: jax.block_until_ready(leaves)
        )

    def read_call(self, call: InFlight, validator: Validator | None) -> None:
        """Wait for a call's metrics, refuse bad ones, then record, save and validate what was due after it."""
        took = self._device_clock.call(call.launched, call.ended.end())
        self.moved()
        found = jax.device_get(call.metrics)
        histograms = found.pop(HISTOGRAMS, {})
        metrics = {name: rows[call.rows.start : call.rows.stop] for name, rows in found.items()}
        # Without the time in which the devices waited: the length of calls follows from what a step takes, not from
        # its input.
        self.step_seconds = max(took.busy, 1e-6) / len(call.rows)
        self.totals.add_call(call.last_step, metrics, took)
        self.step = call.last_step
        done = self.totals.throughput
        forecast = None if self.budget else self._forecast
        if forecast and (text := forecast.after(self.step, done.step_seconds, done.longest, done.steps)):
            self.note(text)
        images = len(call.rows) * self._design.plan.batch.global_batch_size
        sums = NOTHING_UNLOGGED.add(metrics, 0.0)
        # Divided by the longest that the call may have taken: better a rate that is too low than one that is not true.
        rate = images / took.longest if took.longest > 0 else None
        self._sinks.advance(self.step, sums.mean(sums.loss), rate)
        # The first call loads the program and fills the feed.
        is_timed = bool(self.totals.throughput.steps)
        self._sinks.points(self._points.add(self.step - len(call.rows), metrics, rate if is_timed else None))
        if self.steps.log_due(call.last_step):
            self.log(call.last_step)
            self._sinks.histograms(call.last_step, histograms)
        self._call_back(call.last_step, metrics, sums)
        if call.copy is not None:
            steps = self.steps
            self.save(call.copy, call.last_step, must=not steps.checkpoint_seconds or self.step == steps.total_steps)
        if call.evaluation is not None and validator is not None:
            nothing_left = time.perf_counter()
            evaluating = call.evaluation.result()
            # Compiling is no part of the time to train, and the first validation may have waited for it. Only since
            # the last record was written: elapsed times must not go back.
            begin, end = evaluating.compiling
            self._elapsed_before -= max(0.0, end - max(begin, nothing_left))
            self.validated(call.last_step, validator, evaluating)

    def steps_left(self, step: int) -> tuple[int, bool]:
        """Return how many steps from `step` on fit the time budget, and whether the run ends with them.

        Process 0 is asked, between two calls.
        """
        assert self.budget is not None
        done, plan = self.totals.throughput, self._design.plan
        last = [record for record in self.validations if record.step == self.validations[-1].step]
        validation = sum(record.seconds for record in last)
        if not last and self.steps.validate_every:
            images = plan.validation.num_samples * (2 if self._design.config.learning.ema_decay else 1)
            validation = seconds_of_validation(images, plan.batch.global_batch_size, self.step_seconds)
        measured = MeasuredPace(
            now=time.perf_counter(),
            step=self.step,
            timed_steps=done.steps,
            timed_seconds=done.longest,
            validation=validation,
            saving=self.saver.write_seconds / self.saver.num_written if self.saver.num_written else 0.0,
        )
        return self.budget.measure(measured, step, self.steps)

    def advance(self, step: int, loss: float | None) -> None:
        """Move the progress line to a step of a call that still runs."""
        self._sinks.advance(step, loss, None)

    def _call_back(self, step: int, metrics: HostMetrics, sums: Unlogged) -> None:
        """Run the callbacks of a call with these sums, and of an epoch where it was the last of one."""
        self.callbacks.call_ended(self._training_event(step, sums))
        self._epoch_sums = self._epoch_sums.add(metrics, 0.0)
        if step % self._design.plan.steps.updates_per_epoch == 0:
            self.callbacks.epoch_ended(self._training_event(step, self._epoch_sums))
            self._epoch_sums = NOTHING_UNLOGGED

    def _training_event(self, step: int, sums: Unlogged) -> TrainingEvent:
        return TrainingEvent(
            directory=self._directory.path,
            step=step,
            epoch=self._epoch(step),
            loss=sums.mean(sums.loss),
            accuracy=math.nan if self._design.task.per_output else sums.mean(sums.top1),
            metrics=sums.metric_means(),
            validation_follows=self._design.config.validation.validation and self.steps.validation_due(step),
        )

    def training_begins(self, step: int) -> None:
        """Run the callbacks of the beginning."""
        self.callbacks.train_begins(self._run_event(step))

    def training_ended(self, stopped_by: str | None) -> None:
        """Run the callbacks of the end: stopped by a signal or a callback, None if there is nothing more to train."""
        reason = (stopped_by or "").removeprefix(CALLBACK) if (stopped_by or "").startswith(CALLBACK) else ""
        outcome = "finished" if stopped_by is None else "stopped" if reason else "interrupted"
        self.callbacks.train_ended(self._run_event(self.step, outcome, reason))

    def _run_event(self, step: int, outcome: str = "", reason: str = "") -> RunEvent:
        return RunEvent(
            directory=self._directory.path,
            step=step,
            epoch=self._epoch(step),
            num_epochs=self._design.config.batch.num_epochs,
            steps_per_epoch=self._design.plan.steps.updates_per_epoch,
            outcome=outcome,
            reason=reason,
        )

    def log(self, step: int) -> None:
        """Record the training since the last record, if there was any."""
        record = self.totals.record(step, self.elapsed)
        if record is not None:
            self._sinks.write(record)
            self._losses = (self._losses or (record.loss, record.loss))[0], record.loss

    def result(self, outcome: str, reason: str = "") -> RunResult:
        return RunResult(
            outcome=outcome,
            reason=reason,
            directory=self._directory.path,
            step=self.step,
            validation={record.weights: record for record in self.validations},
            images_per_second=self.totals.throughput.images_per_second,
            time_to_train=self.elapsed,
            can_resume=outcome in ("interrupted", "stopped") and self.step == self._saved_step,
        )

    def compiled(self, what: str, compiled: Compiled) -> None:
        """Record how long compiling took."""
        # By its own times, since programs are compiled in threads beside each other and beside reading.
        self.timeline.add("compile", compiled.began, compiled.began + compiled.seconds)
        self._programs = CompileCounts(
            self._programs.hits + compiled.counts.hits, self._programs.misses + compiled.counts.misses
        )
        held = f"; one device holds {format_bytes(compiled.device_bytes)}" if compiled.device_bytes else ""
        self.note(f"{what} compiled in {format_duration(compiled.seconds)} ({compiled.counts}){held}")

    def wait_for_compiled(self, validator: Validator) -> None:
        """Wait until a validation that compiles while the run trains can be used, and record how long that took."""
        with self.timeline.measure("compile"):
            compiled = validator.compiled()
        if compiled:
            self.compiled("validation", compiled)

    def fed(self, stats: FeedStats, options: FeedOptions) -> None:
        """Keep what the feed measured, for the verdict."""
        self._fed = stats, options

    def _verdict(self, spent: Mapping[str, float]) -> str:
        """Say what limited the run: the device, its input, validation or saving."""
        if self._fed is None:
            return ""
        stats, options = self._fed
        throughput, link = self.totals.throughput, link_so_far()
        came = link.num_bytes - self._link_before.num_bytes
        images = throughput.images // self._design.plan.num_processes  # those that this process prepared
        prepared = images / stats.images if stats.images else 0.0  # the share of the images whose calls were timed
        return verdict(
            Measured(
                images=images,
                seconds=throughput.longest,
                wait_seconds=spent["wait"] - self._first_wait,
                first_wait_seconds=self._first_wait,
                read_seconds=stats.read_seconds * prepared,
                send_seconds=stats.send_seconds * prepared,
                bytes_per_image=stats.bytes / stats.images if stats.images else 0.0,
                threads=options.num_threads,
                cached=options.cache.where == "device",
                decodes=bool(self._design.info.place),
                validate_seconds=spent["validate"],
                validation_wait_seconds=spent["wait_validation"],
                save_seconds=spent["save"],
                start_seconds=spent["start"],
                compile_seconds=spent["compile"],
                programs=self._programs,
                num_validation_batches=self._design.plan.validation.num_batches,
                rest_seconds=spent["rest"],
                wall_seconds=sum(spent.values()),
                link=", ".join(link.places_since(self._link_before)),
                link_bytes_per_second=came / max(1e-9, link.seconds - self._link_before.seconds),
                link_waited_seconds=link.waited_seconds - self._link_before.waited_seconds,
            )
        )

    def save_interrupted(self, signal_name: str, state: State) -> None:
        """Save what an interruption would lose. Sums that no record holds yet are saved with it."""
        # A checkpoint was due at the very step of the signal; writing it again would only take time.
        if self.step == self._saved_step:
            self.saver.must_write(self.step)
            self.note(f"{signal_name}: stopped at step {self.step}, nothing is lost")
        elif self._resolved.config.checkpoint.checkpoints:
            self.save(state, self.step)  # no call follows, so nothing donates the buffers
            self.note(f"{signal_name}: saved at step {self.step}")
        else:
            self.log(self.step)
            self.note(f"{signal_name}: stopped at step {self.step}, nothing saved: checkpoints are off", "warning")

    def save_stopped(self, reason: str, state: State) -> None:
        """Save and record what a callback ended."""
        self.log(self.step)
        if self.step == self._saved_step:
            self.saver.must_write(self.step)
        elif self._resolved.config.checkpoint.checkpoints:
            self.save(state, self.step)
        self.note(f"stopped at step {self.step}: {reason}")

    @contextmanager
    def ending(self) -> Iterator["Ending"]:
        """Wait for the last checkpoint and write the last record, however the block is exited."""
        ending = Ending(self)
        try:
            with self.saver:
                yield ending
                with self.timeline.measure("save"):  # the last checkpoint is still being written
                    # Before the outcome is written: a run that says finished has its last checkpoint on the disk.
                    self.saver.wait()
            if ending.outcome in ("finished", "stopped") and self._writes:
                self._tidy()
        # An error that users read becomes part of the records: whoever looks at the run later sees why it ended.
        except HeadraceError as error:
            ending.outcome = "failed"
            if self._writes:
                self.note(str(error), "warning")
            raise
        finally:
            # In `finally`, in this order: the records of checkpoints, then the end, then what is made from the
            # records.
            self._watcher.close()
            if self._writes:
                self.record_saved()
                self._sinks.write(self._run_end(ending))
                self._sinks.sync()
                # From the records on the disk, not from memory: a resumed run has the earlier part of the curve there
                # only.
                path = self._directory.path
                self._make("plot", lambda: write_curve(path))
                if self._resolved.config.logging.report:
                    self._make("report", lambda: _write_report(path))

    def _make(self, what: str, write: Callable[[], None]) -> None:
        """Write what shows the run. Whatever goes wrong with it, the run has ended as its records say."""
        try:
            write()
        except Exception as error:
            retry = f"; try: headrace report {self._directory.path}" if what == "report" else ""
            with suppress(HeadraceError):
                self.note(f"no {what} was written: {error!r}{retry}", "warning")

    def _tidy(self) -> None:
        """Delete what is not to be kept: the last validation may have changed which checkpoint is the best."""
        options = self._resolved.config.checkpoint
        if options.clean_dir:
            delete_checkpoints(self._directory)
        elif options.checkpoints:
            self.saver.prune()

    def _run_end(self, ending: "Ending") -> RunEnd:
        entries = self.best.entries()
        goal = self._resolved.config.run.target_accuracy
        monitor = self._design.monitored
        reached = None if goal is None else first_at_target(self.validations, goal, monitor)
        spent = self.timeline.seconds()
        best = best_validation(self.validations, monitor)
        values = {name: best.metric(name) for name in self._design.metrics} if best else {}
        return RunEnd(
            step=self.step,
            time=utc_now(),
            outcome=ending.outcome,
            reason=ending.reason,
            epoch=self._epoch(self.step),
            time_to_train=self.elapsed,
            time_to_target=reached.elapsed_seconds if reached else None,
            epoch_at_target=reached.epoch if reached else None,
            images_per_second=self.totals.throughput.images_per_second,
            best_top1=best.top1 if best else None,
            best={name: value for name, value in values.items() if value is not None},
            best_checkpoint=entries[0].name if entries else None,
            skipped_steps=self.totals.skipped_steps,
            wall_seconds=sum(spent.values()),
            seconds=spent,
            start=dict(self.start_times),
            memory=measured_memory(jax.local_devices()),
            saving=self._saving(spent),
            energy_joules=self.energy(),
            verdict=self._words(self._verdict(spent)),
            model_verdict=self._words(self._model_verdict(best)),
        )

    def _saving(self, spent: Mapping[str, float]) -> dict[str, float]:
        if not self._resolved.config.checkpoint.checkpoints:
            return {}
        saver = self.saver
        counts = {"written": saver.num_written, "passed_over": saver.num_passed_over}
        return {**counts, "write_seconds": saver.write_seconds, "waited_seconds": spent["save"]}

    def _model_verdict(self, best: ValidationRecord | None) -> str:
        """Say why the result is useless, if it is; a trial run has none."""
        config = self._design.config
        if config.run.dry_run_steps:
            return ""
        learning, num_classes = config.learning, self._design.info.num_classes
        # Weights of classes that are balanced have a mean of 1; others scale the loss.
        plain = self._design.objective.loss is None and learning.class_weights in ((), ("balanced",))
        chance = math.log(num_classes) if plain and num_classes > 1 else None
        losses = Losses(first=self._losses[0], last=self._losses[1], chance=chance) if self._losses else None
        report = read_mapping(self._report_file(best.step)).get(best.weights) if best else None
        evened_out = config.data.balanced_sampling or bool(learning.class_weights)
        return model_verdict(losses, report, evened_out=evened_out)

    @property
    def save_is_overdue(self) -> bool:
        """Whether the next call should end with a checkpoint, since the last one is minutes old. Process 0 knows."""
        return self._writes and self.saver.is_overdue

    def save(self, state: State, step: int, *, must: bool = True) -> None:
        """Give a state to the thread that writes checkpoints; one that need not be written may be passed over."""
        if self._writes:
            # Only what blocks counts as saving: the file is written by another thread while training continues.
            with self.timeline.measure("save"):
                self.saver.save(flatten_named(state), self._manifest(step), must=must)
        # Also in processes that write nothing: all must agree on whether a stopped run can be resumed.
        self._saved_step = step
        self.record_saved()

    def _before_saving(self) -> None:
        self.moved()  # each of those that wait may take its time before an interrupted run is left
        # A resume keeps the records up to its checkpoint. After a power failure it must find them, so they reach the
        # disk before the checkpoint does.
        self._directory.check()
        self._sinks.sync()

    def record_saved(self) -> None:
        """Record the checkpoints that reached the disk since the last time."""
        for saved in self.saver.finished():
            self.moved()
            self._sinks.write(
                CheckpointRecord(
                    step=saved.step,
                    epoch=self._epoch(saved.step),
                    name=saved.path.name,
                    num_bytes=saved.num_bytes,
                    seconds=saved.seconds,
                    blocked_seconds=saved.blocked_seconds,
                )
            )

    def missing_validation(self, step: int, weights: Collection[str]) -> set[str]:
        """Return those of the weights whose validation after `step` is not fully recorded (the process was killed)."""
        # The report is written before the records: where it is missing, the validation was interrupted.
        if not self._report_file(step).exists():
            return set(weights)
        return set(weights) - self._recorded(step)

    def start_validation(self, validator: Validator, state: State) -> Evaluating:
        """Launch a validation. While this runs and the devices have nothing to do, they wait for validation data."""
        begin = time.perf_counter()
        self.wait_for_compiled(validator)
        compiling = begin, time.perf_counter()
        with self.timeline.measure("wait_validation"):
            started = validator.start(state)
        return Evaluating(started, [self.when_ready(sums) for _, sums in started.launches], compiling)

    def validated(self, step: int, validator: Validator, evaluating: Evaluating) -> None:
        """Wait for a validation, write the report, and record it for each set of weights that has no record yet."""
        started = evaluating.started
        moments = []
        for watched in evaluating.ended:
            moments.append(watched.end())
            self.moved()
        launches = [(launched, ended) for (launched, _), ended in zip(started.launches, moments, strict=True)]
        held = self._device_clock.validation(started.requested, launches)
        if self._began is None:
            # Made up for by a resumed run before its first call: only the validation counts, not the compiling.
            self._elapsed_before += held
        results = {weights: sums for weights, (sums, _) in validator.finish(started).items()}
        seconds = held / len(results)
        reports = {weights: self._design.report(sums) for weights, sums in results.items()}
        if self._writes:
            self._directory.check()
            write_report(self._report_file(step), reports)
        # After a kill between the records of raw and averaged weights only the missing one is written.
        recorded = self._recorded(step)
        for weights in results:
            if weights not in recorded:
                self._record_validation(step, weights, reports[weights], seconds)
        self._sinks.sync()
        event = ValidationEvent(
            directory=self._directory.path,
            step=step,
            epoch=self._epoch(step),
            results={record.weights: record for record in self.validations if record.step == step},
            history=tuple(self.validations),
        )
        self.callbacks.validation_ended(event)

    def _record_validation(self, step: int, weights: str, report: dict[str, Any], seconds: float) -> None:
        record = ValidationRecord(
            step=step,
            epoch=self._epoch(step),
            weights=weights,
            loss=report["loss"],
            top1=report.get("top1"),
            top5=report.get("top5"),
            metrics={row.name: value for row in OF_CLASSES if (value := report.get(row.name)) is not None}
            | report.get("metrics", {}),
            num_samples=report["num_samples"],
            seconds=seconds,
            images_per_second=report["num_samples"] / seconds if seconds > 0 else None,
            # A validation between checkpoints has no weights on the disk that could be called the best.
            checkpoint=checkpoint_name(step) if step and step == self._saved_step else None,
            elapsed_seconds=self.elapsed,
        )
        self._sinks.write(record)
        self.validations.append(record)
        # After the record: if the process dies between the two, a resume makes the list of the best from the records.
        if record.checkpoint and self._writes:
            self._add_to_best(record)

    def _add_to_best(self, record: ValidationRecord) -> None:
        scored = score_of(record, self._design.monitored)
        if scored is not None:
            self.saver.add_score(scored)

    def _recorded(self, step: int) -> set[str]:
        return {record.weights for record in self.validations if record.step == step}

    def _report_file(self, step: int) -> Path:
        return report_file(self._directory.path, step)

    def _epoch(self, step: int) -> float:
        return step / self._design.plan.steps.updates_per_epoch

    def _manifest(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "epoch": self._epoch(step),
            "seed": self._resolved.config.run.seed,
            "config": saved_form(self._resolved, self._design.custom.record()),
            "plan": self._design.plan.to_dict(),
            "class_names": list(self._design.info.class_names),
            "dataset": self.dataset_identity,
            "input": InputForm.of_data(self._design.info, self._resolved.config).saved(),
            "elapsed_seconds": self.elapsed,
            "unlogged": self.totals.unlogged.to_dict(),
            "epoch_sums": self._epoch_sums.to_dict(),
            "point_sums": self._points.sums,
        } | ({"pace": self.budget.to_dict(step)} if self.budget else {})


def _write_report(path: Path) -> None:
    machine = json.dumps(asdict(describe_machine()), indent=1) + "\n"
    write_atomic(path / MACHINE_FILE, machine.encode())
    write_run_report(path)
