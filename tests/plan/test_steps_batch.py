"""Batch arithmetic against the closed form and the values of the reference's own tests."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.schema import Batch
from headrace.core.errors import ConfigError
from headrace.plan.batch import BatchPlan, make_batch_plan, make_validation_plan


def batch(micro=None, replicas=1, count=None, total=None, size=None) -> BatchPlan:
    wanted = Batch(micro_batch_size=micro, num_replicas=replicas, gradient_accumulation_count=count)
    return make_batch_plan(replace(wanted, global_batch_size=total, batch_size=size))


@pytest.mark.parametrize(
    ("given_", "micro", "count"),
    [
        ({}, 64, 1),
        ({"replicas": 4}, 16, 1),
        ({"replicas": 4, "count": 2}, 8, 2),
        ({"micro": 16}, 16, 4),
        ({"micro": 100}, 64, 1),
        ({"micro": 8, "replicas": 2, "count": 4}, 8, 4),
        ({"micro": 40}, 32, 2),
    ],
)
def test_the_batch_size_is_the_batch_of_a_step(given_, micro, count):
    plan = batch(size=64, **given_)
    assert (plan.micro_batch_size, plan.gradient_accumulation_count, plan.global_batch_size) == (micro, count, 64)
    assert bool(plan.warnings) == (given_.get("micro") == 40)


@pytest.mark.parametrize(
    ("given_", "parts"),
    [
        (
            {"size": 100, "replicas": 3},
            ["--batch-size 100 does not divide by 3 replicas", "Use --batch-size 99 or 102"],
        ),
        ({"size": 2, "replicas": 4}, ["does not divide by 4 replicas", "Use --batch-size 4,"]),
        ({"size": 96, "replicas": 2, "count": 5}, ["2 replicas and accumulation 5", "90 or 100"]),
        ({"size": 64, "micro": 8, "count": 4}, ["--micro-batch-size 8 and --gradient-accumulation-count 4"]),
        ({"size": 1021, "micro": 256}, ["--batch-size 1,021 does not go with --micro-batch-size 256", "1024"]),
    ],
)
def test_a_batch_size_that_does_not_divide_is_refused_with_the_nearest(given_, parts):
    with pytest.raises(ConfigError) as caught:
        batch(**given_)
    for part in parts:
        assert part in str(caught.value)


@given(st.integers(1, 2000), st.integers(1, 9), st.none() | st.integers(1, 300))
def test_a_batch_size_is_exact_or_refused(size, replicas, micro):
    if size % replicas or (micro and all(size // replicas % d for d in range(-(-micro // 2), micro + 1))):
        if size % replicas or size // replicas > micro:
            with pytest.raises(ConfigError):
                batch(size=size, replicas=replicas, micro=micro)
        return
    plan = batch(size=size, replicas=replicas, micro=micro)
    assert plan.global_batch_size == size
    assert plan.micro_batch_size <= (micro or size)


def test_neither_given_accumulates_once():
    plan = batch(micro=3, replicas=2)
    assert (plan.gradient_accumulation_count, plan.global_batch_size, plan.warnings) == (1, 6, ())


def test_global_batch_from_the_accumulation_count():
    plan = batch(micro=3, replicas=4, count=2)
    assert plan.global_batch_size == 24
    assert plan.micro_batches_per_step == 8


def test_accumulation_count_from_the_global_batch():
    plan = batch(micro=3, replicas=2, total=12)
    assert (plan.gradient_accumulation_count, plan.global_batch_size, plan.warnings) == (2, 12, ())


def test_a_global_batch_that_does_not_fit_is_rounded_and_said():
    plan = batch(micro=3, replicas=2, total=10)
    assert (plan.gradient_accumulation_count, plan.global_batch_size) == (2, 12)
    assert len(plan.warnings) == 1
    assert "--global-batch-size 10" in plan.warnings[0]
    assert "12" in plan.warnings[0]


def test_a_global_batch_below_one_round_accumulates_once():
    plan = batch(micro=8, replicas=4, total=2)
    assert (plan.gradient_accumulation_count, plan.global_batch_size) == (1, 32)
    assert plan.warnings


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 4096))
def test_the_global_batch_is_the_nearest_possible(micro, replicas, total):
    plan = batch(micro=micro, replicas=replicas, total=total)
    possible = range(micro * replicas, total + 2 * micro * replicas, micro * replicas)
    assert abs(plan.global_batch_size - total) == min(abs(size - total) for size in possible)
    assert bool(plan.warnings) == (plan.global_batch_size != total)


def test_validation_is_as_training_unless_said_otherwise():
    plan = make_validation_plan(
        batch(micro=8, replicas=2, count=5), micro_batch_size=None, num_replicas=None, num_samples=100
    )
    assert (plan.micro_batch_size, plan.num_replicas, plan.num_batches, plan.padding) == (8, 2, 7, 12)
    plan = make_validation_plan(batch(micro=8, replicas=2), micro_batch_size=50, num_replicas=1, num_samples=100)
    assert (plan.batch_size, plan.num_batches, plan.padding) == (50, 2, 0)


@given(st.integers(1, 300), st.integers(1, 8), st.integers(0, 5000))
def test_validation_counts_every_sample_and_pads_less_than_a_batch(micro, replicas, num_samples):
    plan = make_validation_plan(batch(), micro_batch_size=micro, num_replicas=replicas, num_samples=num_samples)
    assert plan.num_batches * plan.batch_size == num_samples + plan.padding
    assert 0 <= plan.padding < plan.batch_size


def test_a_validation_batch_is_not_larger_than_the_set():
    plan = make_validation_plan(batch(), micro_batch_size=5000, num_replicas=2, num_samples=361)
    assert (plan.micro_batch_size, plan.num_batches, plan.padding) == (181, 1, 1)
    assert make_validation_plan(batch(), micro_batch_size=8, num_replicas=1, num_samples=0).micro_batch_size == 1
