"""Calls of any length: the same bits however the steps are cut, and calls about as long as they were asked to be."""

from dataclasses import replace

import pytest

from headrace.run.fit import train
from headrace.run.training import CallLength
from headrace.telemetry.records import TrainRecord, read_records

from .conftest import assert_same_bits, final_state

TIMES = {"images_per_second": None, "step_seconds": None, "infeed_wait_seconds": 0.0, "elapsed_seconds": 0.0}


@pytest.mark.parametrize("where", ["device", "host"])
def test_the_bits_do_not_depend_on_the_lengths_of_calls(quick, where):
    """One step at a time, seven (which divides nothing), the whole epoch, and whatever the clock gives."""
    ways = {
        "one": {"max_steps_per_call": 1, "call_seconds": 0},
        "seven": {"max_steps_per_call": 7, "call_seconds": 0},
        "whole": {"call_seconds": 0},
        "changing": {"call_seconds": 0.05},
    }
    found = {}
    for name, options in ways.items():
        result = train(quick(run_name=name, num_epochs=2, dataset_cache=where, ema_decay=0.9, **options))
        records = [replace(r, **TIMES) for r in read_records(result.directory) if isinstance(r, TrainRecord)]
        found[name] = final_state(result.directory), records
    state, records = found.pop("one")
    assert [record.step for record in records] == [20, 40]
    for name, (other, others) in found.items():
        assert_same_bits(state, other)
        assert others == records, name


def test_calls_get_as_long_as_the_time_allows_and_no_longer():
    length = CallLength(seconds=1.0, most=400)
    assert length.steps == 1, "nothing is known of a step before the first"
    assert length.update(None) == 1
    assert [length.update(0.01) for _ in range(4)] == [8, 64, 100, 100]
    assert length.update(0.001) == 400, "never more than a block holds"
    assert length.update(3.0) == 1, "a step is never cut"
    assert CallLength(seconds=0, most=400).update(0.01) == 400, "no limit was asked for"
