"""Where the wall time of a run goes, against delays of known length put into its parts."""

import itertools
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import pytest

from headrace.checkpoint import saver
from headrace.data.feeding.block_reader import BlockReader
from headrace.data.feeding.cache import Resident
from headrace.run import fit, recorder
from headrace.run.fit import resume, train
from headrace.run.validator import Validator
from headrace.telemetry.clock import KINDS
from headrace.telemetry.records import RunEnd, TrainRecord, ValidationRecord, read_records

DELAY = 0.6  # far longer than the calls of a few steps below, behind which a delay may hide
SHORT = {"num_epochs": 4, "weight_updates_per_epoch": 4, "ema_decay": 0.0}
STREAMED = SHORT | {"dataset_cache": "none"}


def delayed(original: Callable[..., Any], when: Callable[..., bool] = lambda *args: True) -> Callable[..., Any]:
    def slow(*args: Any, **options: Any) -> Any:
        if when(*args):
            time.sleep(DELAY)
        return original(*args, **options)

    return slow


@pytest.fixture(autouse=True)
def no_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the one thing that comes after the last record."""
    monkeypatch.setattr(recorder, "write_curve", lambda directory: None)


def run(resolved: Any) -> tuple[RunEnd, list[Any]]:
    """Return the last record and all records of a run; check what always holds."""
    begin = time.perf_counter()
    result = train(resolved)
    wall = time.perf_counter() - begin
    records = read_records(result.directory)
    end = records[-1]
    assert isinstance(end, RunEnd)
    assert set(end.seconds) == set(KINDS)
    assert all(seconds >= 0 for seconds in end.seconds.values())
    assert sum(end.seconds.values()) == pytest.approx(end.wall_seconds)
    assert end.wall_seconds == pytest.approx(wall, rel=0.05, abs=0.25)  # a busy machine takes longer to begin and end
    refuse_impossible_rates(records, end)
    return end, records


def refuse_impossible_rates(records: list[Any], end: RunEnd) -> None:
    """Training at the recorded rates, and what was not training, take together as long as the clock says."""
    trained = [record for record in records if isinstance(record, TrainRecord)]
    batch = records[0].global_batch_size
    at_rates = sum((after.step - before.step) * batch / after.images_per_second for before, after in pairwise(trained))
    elapsed = trained[-1].elapsed_seconds - trained[0].elapsed_seconds
    # Validation may be compiled after training began.
    compiled = max(0.0, end.seconds["compile"] - end.start["compile"] - end.start["trace"])
    not_training = sum(end.seconds[kind] for kind in ("validate", "wait_validation", "save")) + compiled
    late = 0.2  # a record is written when a thread has read its call, which takes longer on a busy machine
    assert at_rates <= 1.02 * elapsed + late
    assert at_rates + not_training >= 0.98 * elapsed - late
    assert end.images_per_second is not None
    training = end.seconds["train"] + end.seconds["wait"] + end.seconds["rest"]
    # The first call has one step, not timed. Twice: a busy machine may notice the ends of such short calls late.
    assert (end.step - 1) * batch / end.images_per_second <= 2 * training + late


def test_a_slow_source_is_waiting_for_training_data(quick, monkeypatch):
    def training(reader: BlockReader, *rest: Any) -> bool:
        return reader._train

    monkeypatch.setattr(BlockReader, "read", delayed(BlockReader.read, training))
    end, records = run(quick(**STREAMED, validation=False, call_seconds=0.2))
    waited = sum(record.infeed_wait_seconds for record in records if isinstance(record, TrainRecord))
    assert end.seconds["wait"] == pytest.approx(waited + end.start["first_block"], abs=0.05)
    assert end.seconds["wait"] > DELAY
    assert end.seconds["wait_validation"] == end.seconds["validate"] == 0
    assert end.verdict.startswith("input-bound")


def test_a_set_that_is_slow_to_decode_is_waited_for_before_the_first_call(quick, monkeypatch):
    """It was counted as training, and the device was said never to have waited."""
    arrays = Resident.arrays.fget
    assert arrays is not None
    first = iter([True])  # it is there from then on
    monkeypatch.setattr(Resident, "arrays", property(delayed(arrays, lambda _: next(first, False))))
    end, _ = run(quick(**SHORT, dataset_cache="device", validation=False))
    assert end.seconds["wait"] == pytest.approx(DELAY, abs=0.3)
    assert end.start["first_block"] > DELAY
    assert end.seconds["train"] < DELAY
    assert not end.verdict.startswith("input-bound")


def test_training_begins_before_validation_is_compiled(quick, monkeypatch):
    begun = threading.Event()
    launch = fit._Training._call

    def call(*args: Any) -> Any:
        begun.set()
        return launch(*args)

    def compile_late(*args: Any) -> Any:
        assert begun.wait(60), "the first call waits for validation's program"
        time.sleep(DELAY)
        return compiled(*args)

    compiled = Validator._compile
    monkeypatch.setattr(fit._Training, "_call", call)
    monkeypatch.setattr(Validator, "_compile", compile_late)
    end, records = run(quick(**SHORT))
    validations = [record for record in records if isinstance(record, ValidationRecord)]
    assert len(validations) == 4
    assert end.seconds["compile"] > DELAY / 2  # training went on for a part of it
    assert all(record.seconds < DELAY / 2 for record in validations)
    assert end.seconds["train"] < DELAY
    not_training = end.seconds["start"] + end.seconds["compile"]
    assert end.time_to_train <= sum(end.seconds.values()) - not_training + 0.2
    elapsed = [record.elapsed_seconds or 0 for record in records if isinstance(record, TrainRecord | ValidationRecord)]
    assert elapsed == sorted(elapsed)


def test_validation_is_compiled_first_where_training_needs_the_memory(quick, monkeypatch):
    waited = []
    wait, launch = recorder.RunRecorder.wait_for_compiled, fit._Training._call
    monkeypatch.setattr(recorder.RunRecorder, "wait_for_compiled", lambda *a: (waited.append("wait"), wait(*a))[1])
    monkeypatch.setattr(fit._Training, "_call", lambda *a: (waited.append("call"), launch(*a))[1])
    monkeypatch.setattr(fit, "device_memory_bytes", lambda device: 1)
    run(quick(**SHORT))
    assert waited[:2] == ["wait", "call"]


def test_slow_validation_images_are_no_training_and_no_time_of_the_device(quick, monkeypatch):
    def validating(reader: BlockReader, *rest: Any) -> bool:
        return not reader._train

    monkeypatch.setattr(BlockReader, "read", delayed(BlockReader.read, validating))
    end, records = run(quick(**STREAMED, validation_cache="none"))
    validations = [record for record in records if isinstance(record, ValidationRecord)]
    assert len(validations) == 4
    held = sum(record.seconds for record in validations)
    assert held == pytest.approx(end.seconds["validate"] + end.seconds["wait_validation"], abs=0.25)
    assert end.seconds["wait_validation"] > DELAY
    for record in validations:  # a record is for raw weights, without averages
        assert record.images_per_second == pytest.approx(record.num_samples / record.seconds)
    assert end.seconds["wait"] < DELAY
    assert end.verdict.startswith("validation-bound")
    assert "--validations-per-epoch" in end.verdict


@pytest.mark.parametrize("where", ["device", "host"])
def test_kept_validation_images_are_read_once_and_before_they_are_due(quick, monkeypatch, where):
    def validating(reader: BlockReader, *rest: Any) -> bool:
        return not reader._train

    monkeypatch.setattr(BlockReader, "read", delayed(BlockReader.read, validating))
    options = STREAMED | {"num_epochs": 2, "weight_updates_per_epoch": 20}
    end, records = run(quick(**options, validation_cache=where))
    plain = [record.loss for record in records if isinstance(record, ValidationRecord)]
    monkeypatch.undo()
    monkeypatch.setattr(recorder, "write_curve", lambda directory: None)
    _, records = run(quick(**options, validation_cache="none"))
    assert plain == [record.loss for record in records if isinstance(record, ValidationRecord)]
    assert end.seconds["wait_validation"] < 1.2 * DELAY  # at most the first, if compiling took no time


def test_slow_evaluation_holds_up_training(quick, monkeypatch):
    monkeypatch.setattr(Validator, "start", delayed(Validator.start))
    end, _ = run(quick(**SHORT))
    assert end.seconds["wait_validation"] > DELAY
    assert end.verdict.startswith("validation-bound")


def test_a_slow_disk_is_saving(quick, monkeypatch):
    monkeypatch.setattr(saver, "save", delayed(saver.save))
    end, _ = run(quick(**SHORT, validation=False))
    assert end.seconds["save"] > 0.9 * DELAY  # the last one hides behind no call
    assert end.verdict.startswith("saving-bound")
    assert "--ckpts-per-epoch" in end.verdict


def test_a_run_without_delays_is_start_compilation_and_training(quick):
    end, _ = run(quick(num_epochs=3, validation=False, checkpoints=False))
    assert end.seconds["validate"] == end.seconds["wait_validation"] == 0
    assert end.seconds["save"] < 0.01
    assert end.seconds["compile"] > 0
    assert end.seconds["train"] > 0
    assert end.seconds["rest"] < 0.1 * sum(end.seconds.values())
    assert list(end.start) == ["process", "dataset", "devices", "state", "trace", "compile", "first_block"]
    assert all(seconds > 0 for seconds in end.start.values())
    assert sum(end.start.values()) == pytest.approx(end.seconds["start"] + end.seconds["compile"], rel=0.05, abs=0.1)


def test_devices_start_while_the_dataset_is_opened(quick, monkeypatch):
    started, start_devices, open_data = threading.Event(), fit.start_run_devices, fit.open_data

    def start(*given: Any) -> Any:
        started.set()
        return start_devices(*given)

    def open_afterwards(*given: Any) -> Any:
        assert started.wait(30), "the devices start only after the dataset was opened"
        return open_data(*given)

    monkeypatch.setattr(fit, "start_run_devices", start)
    monkeypatch.setattr(fit, "open_data", open_afterwards)
    assert train(quick(compile_only=True)).outcome == "compiled"


def test_no_rate_is_too_high_where_a_thread_notices_ends_late(quick, monkeypatch):
    """A host without a processor to spare: 155,804 img/s were printed where 3,000 were true."""
    pause, block, read = 0.15, jax.block_until_ready, BlockReader.read

    def read_slowly(*args: Any) -> Any:
        time.sleep(pause)
        return read(*args)

    def wake_late(arrays: Any) -> Any:
        done = block(arrays)
        if threading.current_thread().name.startswith("read-calls") and next(late):
            time.sleep(1.5 * pause)
        return done

    late = itertools.cycle([False, False, True])
    monkeypatch.setattr(jax, "block_until_ready", wake_late)
    monkeypatch.setattr(BlockReader, "read", read_slowly)
    # One step a call, and little ahead: a step takes as long as its images.
    little_ahead = {"weight_updates_per_epoch": 20, "max_steps_per_call": 1, "prefetch_depth": 1}
    options = STREAMED | little_ahead | {"num_epochs": 1, "validation": False, "checkpoints": False}
    _, records = run(quick(**options, logs_per_epoch=20))
    trained = [record for record in records if isinstance(record, TrainRecord)]
    assert len(trained) == 20
    for record in trained[3:]:
        assert record.images_per_second is not None
        assert record.images_per_second < 3 * 16 / pause, record.step  # images may have been read a step ahead


def test_a_validation_that_a_resumed_run_makes_up_for_counts_alone(quick, monkeypatch):
    """It was recorded with the time of compiling, which the records after it did not have."""
    result = train(quick(**SHORT | {"num_epochs": 1}))
    metrics = result.directory / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines(True) if '"validation"' not in line[:30]]
    metrics.write_text("".join(line for line in lines if '"run_end"' not in line[:30]))
    monkeypatch.setattr(Validator, "_compile", delayed(Validator._compile))
    resume(result.directory, {"num_epochs": 2})
    elapsed = [
        record.elapsed_seconds or 0.0
        for record in read_records(result.directory)
        if isinstance(record, TrainRecord | ValidationRecord)
    ]
    assert elapsed == sorted(elapsed)
    assert len(elapsed) == 4
    assert elapsed[1] - elapsed[0] < DELAY
