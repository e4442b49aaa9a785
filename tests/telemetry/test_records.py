"""Records: exact to JSON and back, plain values only, damage told apart from a crash's cut-off tail."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import CheckpointError
from headrace.telemetry.records import (
    KINDS,
    CheckpointRecord,
    CurvePoint,
    Note,
    RunEnd,
    RunStart,
    TrainRecord,
    ValidationRecord,
    parse_record,
    parse_records,
)

TRAIN = TrainRecord(step=44, epoch=1.0, loss=0.5, accuracy=0.25, learning_rate=0.1, elapsed_seconds=3.5)
START = RunStart(
    step=0, time="2026-01-02T03:04:05+00:00", model="toy_model", dataset="digits", num_epochs=2, total_steps=88,
    updates_per_epoch=44, global_batch_size=32,
)  # fmt: skip
EVERY_KIND = [
    START,
    TRAIN,
    CurvePoint(step=44, epoch=1.0, loss=0.5, accuracy=0.25, learning_rate=0.1, images_per_second=90.0),
    ValidationRecord(step=44, epoch=1.0, weights="ema", loss=0.1, top1=0.9, num_samples=360, seconds=0.4),
    CheckpointRecord(step=44, epoch=1.0, name="step_00000044", num_bytes=10**12, seconds=0.2),
    Note(step=44, level="warning", text='a "quoted" text,\nwith a line\'s end and é'),
    RunEnd(step=88, time="t", outcome="finished", epoch=2.0, time_to_train=41.0, seconds={"train": 40.5, "save": 0.5}),
]


@pytest.mark.parametrize("record", EVERY_KIND, ids=lambda r: r.kind)
def test_every_kind_comes_back_equal_from_one_line(record) -> None:
    line = record.to_json()
    assert "\n" not in line
    assert json.loads(line)["kind"] == record.kind
    again = parse_record(line)
    assert type(again) is type(record)
    assert again == record


def test_no_kind_is_forgotten() -> None:
    assert {type(record) for record in EVERY_KIND} == set(KINDS.values())


@given(st.floats(allow_nan=False), st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 2**60))
def test_numbers_come_back_bit_for_bit(loss: float, rate: float, step: int) -> None:
    record = TrainRecord(step=step, epoch=1.0, loss=loss, accuracy=0.0, learning_rate=rate, elapsed_seconds=0.0)
    again = parse_record(record.to_json())
    assert isinstance(again, TrainRecord)
    assert (again.loss, again.learning_rate, again.step) == (loss, rate, step)
    assert math.copysign(1, again.loss) == math.copysign(1, loss)


def test_numbers_that_are_not_finite_are_words_and_none_is_null() -> None:
    record = TrainRecord(
        step=1, epoch=0.1, loss=math.nan, accuracy=0.0, learning_rate=math.inf, grad_norm=-math.inf, elapsed_seconds=1.0
    )
    values = json.loads(record.to_json(), parse_constant=pytest.fail)
    assert (values["loss"], values["learning_rate"], values["grad_norm"]) == ("NaN", "Infinity", "-Infinity")
    assert values["images_per_second"] is None
    again = parse_record(record.to_json())
    assert isinstance(again, TrainRecord)
    assert math.isnan(again.loss)
    assert (again.learning_rate, again.grad_norm, again.images_per_second) == (math.inf, -math.inf, None)


def test_numpy_scalars_become_plain_numbers() -> None:
    given: dict[str, Any] = {
        "step": np.int64(44), "epoch": np.float32(1), "loss": np.float32(0.1), "accuracy": np.array(0.25),
        "learning_rate": 1, "elapsed_seconds": np.float64(2),
    }  # fmt: skip
    record = TrainRecord(**given)
    assert type(record.step) is int
    assert type(record.loss) is float
    assert type(record.learning_rate) is float
    assert record.loss == 0.10000000149011612  # float32's 0.1, exactly
    assert parse_record(record.to_json()) == record


def test_wrong_values_are_refused_when_the_record_is_made() -> None:
    with pytest.raises(TypeError, match=r"whole number, not 1\.5"):
        Note(step=1.5, text="")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="expected text"):
        Note(step=1, text=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="null"):
        CheckpointRecord(step=1, epoch=None, name="", num_bytes=1, seconds=1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "3", "null", '{"kind": "train"}', '{"kind": "unknown", "step": 1}', '{"step": 1}',
     '{"kind": "note", "step": "three", "text": ""}', '{"kind": "note", "step": null, "text": ""}', "\x00\x00"],
)  # fmt: skip
def test_a_line_that_is_no_record_is_a_value_error(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_record(line)


def test_a_field_of_a_newer_version_is_ignored() -> None:
    values = json.loads(TRAIN.to_json()) | {"mood": "good"}
    assert parse_record(json.dumps(values)) == TRAIN


def test_a_tail_that_a_crash_cut_off_or_garbled_is_left_out() -> None:
    good = b"".join(record.to_json().encode() + b"\n" for record in EVERY_KIND)
    assert parse_records(good, "x") == EVERY_KIND
    assert parse_records(good + b'{"kind": "train", "st', "x") == EVERY_KIND
    assert parse_records(good + TRAIN.to_json().encode(), "x") == EVERY_KIND  # whole, but its end was never written
    assert parse_records(good + b"\x00" * 100 + b"\n" + b"\x00" * 9, "x") == EVERY_KIND
    assert parse_records(b"", "x") == []


def test_damage_before_good_records_is_named_with_its_line() -> None:
    lines = [record.to_json().encode() for record in EVERY_KIND]
    lines[2] = lines[2][:-10]
    with pytest.raises(CheckpointError, match=r"runs/x/metrics\.jsonl, line 3 is damaged"):
        parse_records(b"\n".join(lines) + b"\n", "runs/x/metrics.jsonl")
