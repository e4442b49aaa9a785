"""The books of a run: what is written down when a call has been settled. Records, checkpoints, validation results."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from headrace.checkpoint.best import Best
from headrace.checkpoint.prune import prune
from headrace.checkpoint.saver import Saver
from headrace.checkpoint.store import checkpoint_name
from headrace.config.load import Resolved
from headrace.core.errors import HeadraceError
from headrace.core.tree import flatten_named
from headrace.core.units import format_bytes, format_duration
from headrace.data.feed import FeedOptions, FeedStats
from headrace.data.verdict import verdict
from headrace.engine.state import State, snapshot
from headrace.run.design import Design
from headrace.run.directory import RunDirectory, saved_form
from headrace.run.ledger import Ledger
from headrace.run.trainer import Compiled
from headrace.run.validator import Started, Validator
from headrace.telemetry.clock import Clock
from headrace.telemetry.record import CheckpointRecord, Note, RunEnd, ValidationRecord
from headrace.telemetry.report import validation_report, write_report
from headrace.telemetry.sinks import Sinks


def utc_now() -> str:
    """Return the time as records write it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A call that the devices are working on, and what was started behind it."""

    last_step: int
    metrics: Any
    wait_seconds: float  # how long the feed kept the host waiting before this call
    copy: State | None  # the state after the call, for a checkpoint
    evaluation: Started | None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run came to. `outcome` is finished, interrupted (resume goes on from its checkpoint) or compiled."""

    outcome: str
    directory: Path
    step: int
    validation: dict[str, ValidationRecord]  # the last one of each set of weights: raw, ema
    images_per_second: float | None
    time_to_train: float


class Ending:
    """How a run ends: failed, until it reaches something better."""

    def __init__(self, books: "Books") -> None:
        self._books, self.outcome, self.step = books, "failed", 0

    def reach(self, outcome: str, step: int) -> RunResult:
        """Set the outcome and return the result."""
        self.outcome, self.step = outcome, step
        return self._books.result(outcome, step)


class Books:
    """Everything that a run writes down while it trains."""

    def __init__(self, resolved: Resolved, design: Design, directory: RunDirectory, sinks: Sinks, elapsed: float) -> None:
        keep = resolved.config.checkpoint
        self.clock = Clock()
        self.best = Best(directory.checkpoints, keep.keep_best)
        self.saver = Saver(directory.checkpoints, keep_last=keep.max_ckpts_to_keep, keep=self.best.names)
        self.ledger = Ledger(design.plan, design.network.block_names, resolved.config.numerics.nan_policy)
        self.last_validation: dict[str, ValidationRecord] = {}
        self.verdict = ""
        self.target: tuple[float, float] | None = None  # (seconds, epoch) at which the target accuracy was reached
        self._resolved, self._design, self._directory, self._sinks = resolved, design, directory, sinks
        self._elapsed_before, self._began = elapsed, time.perf_counter()
        self._settled = self._began

    def begin(self) -> None:
        """Start the run's time: everything before was preparation."""
        self._began = self._settled = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds of training, validating and saving so far, those of earlier processes of the run included."""
        return self._elapsed_before + time.perf_counter() - self._began

    def note(self, text: str, step: int = 0, level: str = "info") -> None:
        """Write down a sentence for people."""
        self._sinks.write(Note(step=step, level=level, text=text))

    def settle(self, call: InFlight, validator: Validator | None) -> None:
        """Wait for a call's numbers, refuse bad ones, then record, save and validate what was due behind it."""
        jax.block_until_ready(call.metrics)
        now = time.perf_counter()
        metrics = jax.device_get(call.metrics)
        seconds, self._settled = now - self._settled, now
        self.clock.add("train", seconds)
        self.clock.add("wait", call.wait_seconds)
        self.ledger.settle(call.last_step, metrics, seconds, call.wait_seconds)
        self._sinks.advance(call.last_step)
        if self._design.plan.steps.log_due(call.last_step):
            self.log(call.last_step)
        if call.copy is not None:
            self.save(call.copy, call.last_step)
        if call.evaluation is not None and validator is not None:
            self.validated(call.last_step, validator, call.evaluation)
            self._settled = time.perf_counter()

    def log(self, step: int) -> None:
        """Write down the training since the last record, if there was any."""
        record = self.ledger.record(step, self.elapsed)
        if record is not None:
            self._sinks.write(record)

    def result(self, outcome: str, step: int) -> RunResult:
        """Return what the run came to."""
        return RunResult(
            outcome=outcome,
            directory=self._directory.path,
            step=step,
            validation=dict(self.last_validation),
            images_per_second=self.ledger.pace.images_per_second,
            time_to_train=self.elapsed,
        )

    def compiled(self, compiled: Compiled, step: int) -> None:
        """Write down what compiling took."""
        self.clock.add("compile", compiled.seconds)
        took, held = format_duration(compiled.seconds), format_bytes(compiled.device_bytes)
        self.note(f"compiled in {took} ({compiled.counts}); one device holds {held}", step)

    def judge(self, stats: FeedStats, options: FeedOptions) -> None:
        """Say what bound the run: the device or its input."""
        pace = self.ledger.pace
        prepared = pace.images / stats.images if stats.images else 0.0  # the share of the images whose calls were timed
        self.verdict = verdict(
            pace.images,
            pace.seconds,
            stats.wait_seconds,
            stats.prepare_seconds * prepared,
            options.num_threads,
            options.cache.where == "device",
        )

    def leave(self, signal_name: str, unsaved: State | None, step: int) -> None:
        """Log and save what an interruption would lose, and say how to go on."""
        self.log(step)
        if not self._resolved.config.checkpoint.checkpoints:
            self.note(f"{signal_name}: left at step {step}; nothing is saved, because checkpoints are off.", step, "warning")
            return
        if unsaved is not None:
            self.save(snapshot(unsaved), step)
        self.note(f"{signal_name}: saved at step {step}; go on with: headrace resume {self._directory.path}", step)

    @contextmanager
    def ending(self) -> Iterator["Ending"]:
        """Wait for the last checkpoint and write the last record, however the block is left."""
        ending = Ending(self)
        try:
            with self.saver:
                yield ending
            if ending.outcome == "finished":
                self._tidy()
        except HeadraceError as error:
            ending.outcome = "failed"
            self.note(str(error), ending.step, "warning")
            raise
        finally:
            self.tell_saved()
            self._sinks.write(self._run_end(ending))

    def _tidy(self) -> None:
        """Delete what is not to be kept: the last validation may have moved the best checkpoint on."""
        options = self._resolved.config.checkpoint
        if options.clean_dir:
            shutil.rmtree(self._directory.checkpoints, ignore_errors=True)
        elif options.checkpoints:
            prune(self._directory.checkpoints, options.max_ckpts_to_keep, self.best.names())

    def _run_end(self, ending: "Ending") -> RunEnd:
        entries = self.best.entries()
        seconds, epoch = self.target or (None, None)
        return RunEnd(
            step=ending.step,
            time=utc_now(),
            outcome=ending.outcome,
            epoch=self._epoch(ending.step),
            time_to_train=self.elapsed,
            time_to_target=seconds,
            epoch_at_target=epoch,
            images_per_second=self.ledger.pace.images_per_second,
            best_top1=entries[0].score if entries else None,
            best_checkpoint=entries[0].name if entries else None,
            skipped_steps=self.ledger.skipped_steps,
            seconds=self.clock.seconds(),
            verdict=self.verdict,
        )

    def save(self, state: State, step: int) -> None:
        """Hand a state to the thread that writes checkpoints."""
        with self.clock.measure("save"):
            self.saver.save(flatten_named(state), self._manifest(step))
        self.tell_saved()

    def tell_saved(self) -> None:
        """Record the checkpoints that are safe on the disk since the last time."""
        for saved in self.saver.finished():
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

    def validated(self, step: int, validator: Validator, evaluation: Started) -> None:
        """Wait for a validation, record it for each set of weights, and write the report."""
        has_checkpoint = self._resolved.config.checkpoint.checkpoints
        reports = {}
        for weights, (sums, seconds) in validator.finish(evaluation).items():
            self.clock.add("validate", seconds)
            report = validation_report(sums, self._design.info.class_names)
            reports[weights] = report
            record = ValidationRecord(
                step=step,
                epoch=self._epoch(step),
                weights=weights,
                loss=report["loss"],
                top1=report["top1"],
                top5=report["top5"],
                num_samples=report["num_samples"],
                seconds=seconds,
                images_per_second=report["num_samples"] / seconds,
                checkpoint=checkpoint_name(step) if has_checkpoint else None,
                elapsed_seconds=self.elapsed,
            )
            self._sinks.write(record)
            self.last_validation[weights] = record
            self._note_best(record)
        write_report(self._directory.reports / f"{checkpoint_name(step)}.json", reports)

    def _note_best(self, record: ValidationRecord) -> None:
        if record.checkpoint:
            self.best.add(record.top1, record.checkpoint, record.weights)
        goal = self._resolved.config.run.target_accuracy
        if goal is not None and self.target is None and record.top1 >= goal:
            self.target = (self.elapsed, record.epoch)

    def _epoch(self, step: int) -> float:
        return step / self._design.plan.steps.updates_per_epoch

    def _manifest(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "epoch": self._epoch(step),
            "seed": self._resolved.config.run.seed,
            "config": saved_form(self._resolved),
            "plan": self._design.plan.to_dict(),
            "class_names": list(self._design.info.class_names),
            "elapsed_seconds": self.elapsed,
        }
