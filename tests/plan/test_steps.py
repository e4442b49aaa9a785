"""Periods and calls: the examples of the reference, and every property against brute force."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.plan.steps import (
    Events,
    StepPlan,
    dividing_period,
    divisors,
    event_period,
    frequency,
    make_epoch_plan,
    make_step_plan,
    nearest_divisor,
    no_steps,
)


def steps(*, logs=1.0, ckpts=None, validations=None, epochs=6, updates=781, most=None, divide=False) -> StepPlan:
    """Plan a run of `updates` steps of 64 samples per epoch; checkpoints and validations are off unless given."""
    epoch = make_epoch_plan(num_samples=64 * updates + 16, global_batch_size=64, weight_updates_per_epoch=-1)
    events = Events(logs=logs, checkpoints=ckpts, validations=validations, divide_epoch=divide)
    return make_step_plan(epoch, epochs, events, most)


# The seven examples of the reference: 50,000 samples in steps of 8 x 8 are 781 = 11 x 71 updates.


def test_the_examples_have_781_updates_per_epoch():
    epoch = make_epoch_plan(num_samples=50_000, global_batch_size=64, weight_updates_per_epoch=-1)
    assert (epoch.updates_per_epoch, epoch.dropped, epoch.repeated) == (781, 16, 0)


@pytest.mark.parametrize(
    ("logs", "calls", "steps_per_call", "warns"),
    [
        (1, 6, 781, False),
        (2, 6, 781, True),
        (10, 66, 71, True),
        (0.5, 3, 2 * 781, False),
        (1 / 3, 2, 3 * 781, False),
        (0.3333333333333333333, 2, 3 * 781, False),
        (0, 1, 6 * 781, True),
    ],
)
def test_the_logs_per_epoch_examples(logs, calls, steps_per_call, warns):
    plan = steps(logs=logs, divide=True)
    assert (plan.num_calls, plan.steps_per_call, plan.log_every) == (calls, steps_per_call, steps_per_call)
    assert plan.total_steps == 4686
    assert bool(plan.warnings) == warns


def test_the_adjusted_frequency_is_said():
    (warning,) = steps(logs=10, divide=True).warnings
    assert "--logs-per-epoch 10" in warning
    assert "11 per epoch, every 71 steps" in warning


def test_a_run_without_events_says_what_that_means():
    (warning,) = steps(logs=0, ckpts=0, validations=0).warnings
    assert "4,686 steps goes without an event" in warning
    assert "saved or validated" in warning


def test_explicit_checkpoints_decide_the_calls_of_a_run_without_logs():
    plan = steps(logs=0, ckpts=1, validations=0)
    assert (plan.log_every, plan.checkpoint_every, plan.validate_every) == (4686, 781, 4686)
    assert (plan.steps_per_call, plan.num_calls, plan.warnings) == (781, 6, ())


def test_a_call_lasts_until_the_next_event():
    plan = steps(logs=4, ckpts=6, validations=1 / 2, updates=24, epochs=4)
    assert (plan.log_every, plan.checkpoint_every, plan.validate_every) == (6, 4, 48)
    assert [plan.next_event(step) for step in (0, 1, 4, 5, 6, 8, 47, 95)] == [4, 4, 6, 6, 8, 12, 48, 96]
    assert (plan.steps_per_call, plan.num_calls) == (4, 32)  # 4 6 8 12, 16 18 20 24, ...


def test_events_that_are_off_have_period_zero_and_do_not_shorten_calls():
    plan = steps(logs=1, ckpts=None, validations=None)
    assert (plan.checkpoint_every, plan.validate_every, plan.steps_per_call) == (0, 0, 781)


def test_events_that_follow_the_logs_do_not_repeat_their_warning():
    plan = steps(logs=0.4, ckpts=0.4, validations=0.4, epochs=5, updates=7, divide=True)
    assert plan.log_every == plan.checkpoint_every == plan.validate_every == 35
    assert len(plan.warnings) == 1


def test_events_are_due_after_every_period_and_at_the_end():
    plan = steps(logs=2, ckpts=1, validations=0, updates=4, epochs=3)
    run = range(plan.total_steps + 1)
    assert [step for step in run if plan.log_due(step)] == [2, 4, 6, 8, 10, 12]
    assert [step for step in run if plan.checkpoint_due(step)] == [4, 8, 12]
    assert [step for step in run if plan.validation_due(step)] == [12]
    assert not any(steps(ckpts=None).checkpoint_due(step) for step in range(4687))


# The divisor search.


@pytest.mark.parametrize(
    ("number", "target", "answer"), [(12, 5, 6), (4, 2, 2), (9, 3, 3), (16, 4, 4), (25, 5, 5), (1, 7, 1)]
)
def test_known_nearest_divisors(number, target, answer):
    assert nearest_divisor(number, target) == answer


@given(st.integers(1, 3000), st.integers(1, 3500) | st.floats(1, 3500))
def test_nearest_divisor_is_the_best_of_all(number, target):
    answer = nearest_divisor(number, target)
    every = [d for d in range(1, number + 1) if number % d == 0]
    assert divisors(number) == every
    best = min(abs(d - target) for d in every)
    assert answer == max(d for d in every if abs(d - target) == best)


# The plan as a whole.

FREQUENCIES = st.sampled_from([0, 1e-9, 1 / 6, 0.3, 1 / 3, 0.4, 1 / 1.5, 1, 1.5, 2, 3.7, 7, 16, 100])


def event_steps(per_epoch, updates, epochs) -> list[int]:
    """Return where events belong, counted in floating point: after the step nearest to k / per_epoch epochs."""
    total = updates * epochs
    times = (number * updates / per_epoch for number in range(1, int(per_epoch * epochs) + 2)) if per_epoch else ()
    return sorted({*(step for time in times if 1 <= (step := math.floor(time + 0.5 + 1e-9)) < total), total})


@given(
    st.integers(1, 400),
    st.integers(1, 12),
    FREQUENCIES,
    st.none() | FREQUENCIES,
    st.none() | FREQUENCIES,
    st.integers(1, 50),
)
def test_events_of_any_frequency_happen_at_their_time_and_at_the_end(updates, epochs, logs, ckpts, validations, most):
    plan = steps(logs=logs, ckpts=ckpts, validations=validations, updates=updates, epochs=epochs)
    every_step = range(plan.total_steps + 1)
    due = {
        logs: (plan.log_due, plan.log_every),
        ckpts: (plan.checkpoint_due, plan.checkpoint_every),
        validations: (plan.validation_due, plan.validate_every),
    }
    ends: set[int] = set()
    for per_epoch, (is_due, every) in due.items():
        if per_epoch is None:
            assert every == plan.num_events(every) == 0
            continue
        wanted = event_steps(min(per_epoch, updates), updates, epochs)
        assert [step for step in every_step if is_due(step)] == wanted
        assert plan.num_events(every) == len(wanted)
        ends |= set(wanted)
    spans = list(pairwise([0, *sorted(ends)]))
    for begin, end in spans:
        assert plan.next_event(begin) == plan.next_event(end - 1) == end
    gaps = [end - begin for begin, end in spans]
    assert max(gaps) <= plan.steps_per_call
    assert plan.num_calls == len(gaps)
    shorter = replace(plan, steps_per_call=most)
    assert shorter.num_calls == sum(math.ceil(gap / most) for gap in gaps)


def test_sixteen_logs_of_an_epoch_of_1251_steps():
    plan = steps(logs=16, ckpts=1, validations=0.3, updates=1251, epochs=90)
    assert plan.warnings == ()
    logs = [step for step in range(1252) if plan.log_due(step)]
    assert {after - before for before, after in pairwise([0, *logs])} == {78, 79}
    assert (len(logs), logs[-1], plan.steps_per_call) == (16, 1251, 79)
    validations = [step for step in range(10, plan.total_steps + 1, 10) if plan.validation_due(step)]
    assert validations[:3] == [4170, 8340, 12510]  # 10/3, 20/3 and 10 epochs
    assert plan.num_events(plan.validate_every) == len(validations) == 27


def test_an_event_every_one_and_a_half_epochs():
    plan = steps(logs=1 / 1.5, updates=7, epochs=5)
    assert [step for step in range(36) if plan.log_due(step)] == [11, 21, 32, 35]  # 10.5, 21, 31.5, and the end


def test_more_events_than_steps_are_one_for_each():
    plan = steps(logs=16, updates=5, epochs=2)
    assert (plan.log_every, plan.num_calls) == (1, 10)
    assert plan.warnings == ("--logs-per-epoch 16: an epoch has 5 steps, so each step has one.",)


@given(st.integers(1, 200), st.integers(1, 10), st.integers(1, 250))
def test_a_dividing_period_against_brute_force(updates, epochs, wanted):
    period, warning = dividing_period("--logs-per-epoch", wanted, updates, epochs)
    distance = {p: abs(updates // p - wanted) for p in range(1, updates + 1) if updates % p == 0}
    assert period == min(p for p, d in distance.items() if d == min(distance.values()))
    assert (warning is None) == (updates % wanted == 0)


@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 12))
def test_one_event_in_so_many_epochs(updates, multiple, each):
    epochs = multiple * each
    assert dividing_period("--logs-per-epoch", 1 / each, updates, epochs) == (each * updates, None)
    assert event_period("--logs-per-epoch", 1 / each, updates, epochs) == (each * updates, None)


# Calls that carry their data.


def test_a_call_that_carries_its_data_is_bounded():
    plan = steps(logs=1, updates=24, most=9)
    assert (plan.steps_per_call, plan.num_calls) == (9, 18)  # 9 + 9 + 6 steps in each of six epochs
    assert steps(logs=1, updates=24, most=0).steps_per_call == 1
    assert steps(logs=1, updates=24, most=100).steps_per_call == 24


def test_a_bounded_run_without_logs_has_several_calls_and_no_event():
    plan = steps(logs=0, updates=24, epochs=1, most=12)
    assert plan.num_calls == 2
    assert [text.startswith("--logs-per-epoch 0: the whole run of 24 steps") for text in plan.warnings] == [True]


def test_an_epoch_of_a_prime_number_of_steps_has_long_calls():
    plan = steps(logs=1, updates=101, most=20)
    assert (plan.steps_per_call, plan.num_calls, plan.warnings) == (20, 6 * 6, ())


# The epoch.


def test_updates_asked_for_may_repeat_or_leave_out_samples():
    epoch = make_epoch_plan(num_samples=100, global_batch_size=30, weight_updates_per_epoch=5)
    assert (epoch.updates_per_epoch, epoch.dropped, epoch.repeated) == (5, 0, 50)
    epoch = make_epoch_plan(num_samples=100, global_batch_size=30, weight_updates_per_epoch=1)
    assert (epoch.updates_per_epoch, epoch.dropped, epoch.repeated) == (1, 70, 0)


def test_a_step_larger_than_the_set_is_refused_with_a_remedy():
    with pytest.raises(ConfigError, match="One step takes 1,024 samples, the training set has 1,000") as caught:
        make_epoch_plan(num_samples=1000, global_batch_size=1024, weight_updates_per_epoch=-1)
    assert "--micro-batch-size" in caught.value.remedy


def test_a_run_that_does_not_train_has_no_steps():
    plan = no_steps(num_samples=100, global_batch_size=30, num_epochs=4)
    assert (plan.total_steps, plan.num_calls, plan.steps_per_call, plan.updates_per_epoch) == (0, 0, 0, 3)


@pytest.mark.parametrize(
    ("value", "text"), [(1, "1"), (0.5, "0.5"), (1 / 3, "1/3"), (2 / 7, "2/7"), (1.25, "1.25"), (math.pi, "3.14159")]
)
def test_frequencies_as_people_write_them(value, text):
    assert frequency(value) == text
