"""Runs with a time budget: they end on time, with the rate at the end of its curve, however fast they are."""

import json
import math
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint.store import list_checkpoints, load
from headrace.config.load import resolve
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.units import parse_duration
from headrace.engine.lr_curve import make_lr_curve, rate_table
from headrace.plan.steps import Events, make_epoch_plan, make_step_plan
from headrace.run.callbacks import Callback, TrainingEvent
from headrace.run.choices import settle
from headrace.run.design import CustomParts, design_run
from headrace.run.fit import resume, train
from headrace.run.time_budget import END_SECONDS, PARTS, MeasuredPace, TimeBudget, open_ended
from headrace.telemetry.records import TrainRecord, ValidationRecord, read_records


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), (45.5, 45.5), ("10m", 600), ("1h30m", 5400), ("1.5 h", 5400), ("2 h 5 min 3 s", 7503), ("1d", 86400)],
)
def test_times_are_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "10x", "10 20", "1h 30", "-5", "1:30", "ten minutes", "nan"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="such as 90s, 10m or 1h30m"):
        parse_duration(text)
    with pytest.raises(ConfigError, match="not a time, such as"):
        resolve({"time_budget": text}, "none", environ={})


def some_steps(epochs: int = 10, validations: float | None = None):
    epoch = make_epoch_plan(num_samples=1000, global_batch_size=10, weight_updates_per_epoch=100)
    return make_step_plan(epoch, epochs, Events(logs=1, checkpoints=None, validations=validations), None)


def simulated(budget: TimeBudget, steps, step_seconds, validation: float = 0.0, first: float = 2.0):
    """Train with a clock that is a number: return the places of all steps, and when the run ends."""
    now, step, timed, places, limit = 3.0 + first, 0, (0, 0.0), [], 1
    known = step, now, timed  # the call whose results were read last; the next one is decided while one is under way
    while step < steps.total_steps:
        count = min(limit, steps.next_event(step) - step)
        if budget.is_last(count):
            steps = replace(steps, total_steps=step + count)
        places += budget.places(step, count).tolist()
        took = sum(step_seconds(step + at) for at in range(count))
        now, timed = now + took, (timed[0] + count, timed[1] + took) if step else timed
        step += count
        now += validation if validation and steps.validation_due(step) else 0.0
        measured = MeasuredPace(
            now=known[1], step=known[0], timed_steps=known[2][0], timed_seconds=known[2][1], validation=validation
        )
        known = step, now, timed
        left = budget.decide(*budget.measure(measured, step, steps))
        limit = min(left, max(1, int(1.0 / step_seconds(step))))
    return np.array(places), now


@pytest.mark.parametrize("planned", [1, 10, 500])
@pytest.mark.parametrize("validation", [0.0, 1.5])
@pytest.mark.parametrize(
    "step_seconds",
    [
        lambda step: 0.05,
        lambda step: 0.05 if step < 400 else 0.12,  # somebody else comes to the machine
        lambda step: 0.3 if step < 30 else 0.04,
    ],
)
def test_it_ends_on_time_at_the_end_of_the_curve(planned, validation, step_seconds):
    """Whatever was planned, whether the machine becomes slower or faster, with validations on the way."""
    steps = some_steps(planned, 1 if validation else None)
    budget = TimeBudget(seconds=60.0, began=0.0, curve_steps=steps.total_steps, left=2**30)
    places, ended = simulated(budget, replace(steps, total_steps=2**30), step_seconds, validation)
    assert ended == pytest.approx(60.0 - END_SECONDS, abs=1.6)
    assert budget.place == steps.total_steps * PARTS
    assert places[0] == 0
    assert (np.diff(places) >= 0).all()
    # The last step is about one share before the end, as in a run without a budget.
    assert places[-1] >= 0.97 * steps.total_steps - 1
    halfway = len(places) // 2
    if step_seconds(10) == step_seconds(1000):
        assert places[halfway] == pytest.approx(steps.total_steps / 2, rel=0.1, abs=2)


def test_given_epochs_are_the_most():
    steps = some_steps(2)
    budget = TimeBudget(seconds=60.0, began=0.0, curve_steps=200, left=200)
    places, ended = simulated(budget, steps, lambda step: 0.05)
    np.testing.assert_array_equal(places, np.arange(200))  # the run without a budget
    assert ended == pytest.approx(5 + 200 * 0.05)
    assert not steps.validate_every
    assert steps.log_every == Fraction(100)


BUDGET = {
    "lr_schedule": "cosine",
    "lr_warmup_params": "none",
    "num_epochs": 100_000,
    "ema_decay": 0,
    "logs_per_epoch": 5,
}


def in_time(quick, seconds: float, **options):
    """Train, up to three times: a busy machine may hold up the last record, or the last step, of a short run."""
    took, last = 0.0, 1.0
    for attempt in range(3):
        begin = time.perf_counter()
        result = train(quick(run_name=f"try{attempt}", time_budget=seconds, **BUDGET, **options))
        took = time.perf_counter() - begin
        last = rates_of(result.directory)[-1] / (0.002 * 16)
        if took == pytest.approx(seconds, rel=0.1) and last < 0.02:
            return result
    pytest.fail(f"{took:.2f} s with a budget of {seconds:g} s, a rate of {last:.3f} of the peak at the end")


def rates_of(directory: Path) -> list[float]:
    return [record.learning_rate for record in read_records(directory) if isinstance(record, TrainRecord)]


def test_a_run_ends_on_time_with_its_rate_at_the_end(quick):
    result = in_time(quick, 6.0)
    assert result.outcome == "finished"
    records = read_records(result.directory)
    rates = rates_of(result.directory)
    assert rates[0] == pytest.approx(0.002 * 16, rel=0.02)
    assert (np.diff(rates) <= 0).all()
    assert [record.step for record in records if isinstance(record, ValidationRecord)][-1] == result.step
    newest = list_checkpoints(result.directory / "checkpoints")[-1]
    arrays, manifest = load(newest)
    assert manifest["step"] == result.step == int(arrays["step"])
    assert manifest["pace"]["place"] == 100_000 * 20 * PARTS
    assert any("time budget 6.0 s: " in line for line in (result.directory / "log.txt").read_text().splitlines())
    # Nothing is left to do.
    assert resume(result.directory).step == result.step
    assert load(list_checkpoints(result.directory / "checkpoints")[-1])[1] == manifest


class StopAt(Callback):
    """Stop after so many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_call_end(self, event: TrainingEvent) -> str | None:
        return "enough" if event.step >= self.step else None


def test_a_resumed_run_goes_on_from_its_place_with_the_time_that_is_left(quick):
    options = BUDGET | {"logs_per_epoch": 20}
    result = train(quick(run_name="cut", time_budget=30, **options), CustomParts(callbacks=(StopAt(5),)))
    assert result.outcome == "stopped"
    pace = load(list_checkpoints(result.directory / "checkpoints")[-1])[1]["pace"]
    assert 0 < pace["place"] < 2_000_000 * PARTS
    assert 0 < pace["spent"] < 30
    with pytest.raises(CheckpointError, match="had a time budget, and is resumed without one"):
        resume(result.directory, {"time_budget": "none"})
    begin = time.perf_counter()
    ended = resume(result.directory, {"time_budget": pace["spent"] + 4})
    took = time.perf_counter() - begin
    assert ended.outcome == "finished"
    assert took < 8
    records = [record for record in read_records(result.directory) if isinstance(record, TrainRecord)]
    rates = [record.learning_rate for record in records]
    assert (np.diff(rates) <= 1e-9).all()
    assert rates[-1] < 0.05 * rates[0]
    # The first steps after the resume are where the checkpoint said.
    config = quick(**options).config
    curve = rate_table(make_lr_curve(config.learning, global_batch_size=16, updates_per_epoch=20, num_epochs=100_000))
    after = next(record for record in records if record.step > result.step)
    assert after.learning_rate <= curve(np.array([pace["place"] // PARTS]))[0]


def test_epochs_follow_from_the_time(monkeypatch, tmp_path):
    """As many as are expected to fit, for what depends on them; the run itself has no other end than its time."""
    options = {"dataset": "digits", "model_name": "cifar_resnet8", "log_dir": str(tmp_path)}
    short, long = (settle(resolve(options | {"time_budget": text}, "none", environ={})) for text in ("20s", "10m"))
    assert 1 <= short.config.batch.num_epochs < long.config.batch.num_epochs <= 1000
    assert "as many epochs as fit 10 min 00 s" in long.notes[0]
    planned = design_run(long.config).plan.steps
    assert open_ended(long, planned).total_steps > 10**9
    given = settle(resolve(options | {"time_budget": "10m", "num_epochs": 3}, "none", environ={}))
    assert open_ended(given, planned).total_steps == planned.total_steps
    assert open_ended(long, planned, 77, {"place": planned.total_steps * PARTS}).total_steps == 77
    assert math.isclose(long.config.run.time_budget or 0, 600)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"progressive_resolution": 16, "model_name": "cifar_resnet8"},
            "progressive_resolution 16.*image sizes change",
        ),
        ({"call_seconds": 0}, "call_seconds 0.*looks at the clock between two calls"),
        ({"dry_run_steps": 3}, "dry_run_steps 3.*A trial ends after its steps"),
        (
            {"loss_scaling": "doubling", "loss_scaling_params": {"initial": 1, "final": 8}},
            "loss_scaling doubling.*in equal parts of the run",
        ),
        ({"num_pipeline_stages": 2}, "in 2 stages.*compute the learning rate from the step.*--num-epochs"),
        ({"time_budget": 0}, "must be more than 0"),
    ],
)
def test_what_cannot_be_paced_is_refused(quick, tmp_path, options, told):
    with pytest.raises(ConfigError, match=told):
        train(quick(**{"time_budget": "10s"} | options))
    assert not (tmp_path / "runs").exists()


def test_other_runs_know_nothing_of_it(quick):
    result = train(quick(num_epochs=1))
    start = json.loads((result.directory / "metrics.jsonl").read_text().splitlines()[0])
    assert start["seconds_left"] is None
    assert "pace" not in load(list_checkpoints(Path(result.directory) / "checkpoints")[-1])[1]
