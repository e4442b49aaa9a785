"""Calls of any length: the same bits however the steps are cut, and calls about as long as they were asked to be."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from headrace.run.fit import resume, train
from headrace.run.training import CallLength
from headrace.telemetry.records import CurvePoint, TrainRecord, ValidationRecord, read_records

from .conftest import assert_same_bits, final_state

TIMES = {"images_per_second": None, "step_seconds": None, "infeed_wait_seconds": 0.0, "elapsed_seconds": 0.0}


@pytest.mark.parametrize("where", ["device", "host"])
def test_the_bits_do_not_depend_on_the_lengths_of_calls(quick, where):
    """One step at a time, seven (which divides nothing), the whole epoch, and whatever the clock gives.

    Images that are sent come in blocks of seven in three of them: calls end inside these, at checkpoints or by the
    clock, and blocks go on across the end of an epoch.
    """
    ways = {
        "one": {"max_steps_per_call": 1, "call_seconds": 0},
        "seven": {"max_steps_per_call": 7, "call_seconds": 0},
        "whole": {"call_seconds": 0},
        "changing": {"call_seconds": 0.05},
        "some rows": {"max_steps_per_call": 7, "call_seconds": 0, "ckpts_per_epoch": 1 / 0.3},
        "changing rows": {"max_steps_per_call": 7, "call_seconds": 0.02, "ckpts_per_epoch": 1 / 0.3},
    }
    found = {}
    for name, options in ways.items():
        same = {"num_epochs": 2, "dataset_cache": where, "ema_decay": 0.9, "validation": False}
        result = train(quick(run_name=name, **same, **options))
        records = [replace(r, **TIMES) for r in read_records(result.directory) if isinstance(r, TrainRecord)]
        points = [
            (r.step, r.loss, r.accuracy, r.learning_rate)
            for r in read_records(result.directory)
            if isinstance(r, CurvePoint)
        ]
        found[name] = final_state(result.directory), records, points
    state, records, points = found.pop("one")
    assert [record.step for record in records] == [20, 40]
    assert [point[0] for point in points] == list(range(1, 41))
    for first, last, record in ((0, 20, records[0]), (20, 40, records[1])):
        assert np.mean([point[1] for point in points[first:last]]) == pytest.approx(record.loss)
        assert np.mean([point[2] for point in points[first:last]]) == pytest.approx(record.accuracy)
        assert points[last - 1][3] == record.learning_rate
    for name, (other, others, other_points) in found.items():
        assert_same_bits(state, other)
        assert others == records, name
        assert other_points == points, name


def test_events_may_fall_anywhere_and_a_resumed_run_has_the_same_ones(quick):
    """Seven logs in an epoch of 20 steps, checkpoints every 0.3 of an epoch, validations every 1.5 epochs."""
    odd = {"logs_per_epoch": 7, "ckpts_per_epoch": 1 / 0.3, "validations_per_epoch": "1/1.5", "max_ckpts_to_keep": 99}
    plain = train(quick(run_name="plain", num_epochs=2))
    result = train(quick(run_name="odd", num_epochs=2, **odd))
    assert_same_bits(final_state(plain.directory), final_state(result.directory))

    def events():
        records = read_records(result.directory)
        logs = [record for record in records if isinstance(record, TrainRecord)]
        validations = [record.step for record in records if isinstance(record, ValidationRecord)]
        saved = sorted(
            int(path.name.removeprefix("step_")) for path in (result.directory / "checkpoints").glob("step_*")
        )
        return [replace(record, **TIMES) for record in logs], sorted(set(validations)), saved

    logs, validations, saved = events()
    assert [record.step for record in logs] == [3, 6, 9, 11, 14, 17, 20, 23, 26, 29, 31, 34, 37, 40]
    assert (validations, saved) == ([30, 40], [6, 12, 18, 24, 30, 36, 40])
    for step in (24, 30, 36, 40):
        shutil.rmtree(result.directory / "checkpoints" / f"step_{step:08}")
    assert resume(result.directory).step == 40
    assert events() == (logs, validations, saved)
    assert_same_bits(final_state(plain.directory), final_state(result.directory))


def test_calls_get_as_long_as_the_time_allows_and_no_longer():
    length = CallLength(seconds=1.0, most=400)
    assert length.steps == 1, "nothing is known of a step before the first"
    assert length.update(None) == 1
    assert [length.update(0.01) for _ in range(4)] == [8, 64, 100, 100]
    assert length.update(0.001) == 400, "never more than a block holds"
    assert length.update(3.0) == 1, "a step is never cut"
    assert CallLength(seconds=0, most=400).update(0.01) == 400, "no limit was asked for"
