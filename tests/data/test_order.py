"""The order of samples: permutations by address, and their cutting into steps against a plain loop."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.feeding.order import StepShape, epoch_order, step_indices


def shape(**changes: Any) -> StepShape:
    base = StepShape(
        seed=3,
        num_samples=50,
        shuffle=True,
        updates_per_epoch=4,
        gradient_accumulation_count=3,
        num_replicas=2,
        micro_batch_size=2,
    )
    return replace(base, **changes)


@given(st.integers(0, 2**32 - 1), st.integers(0, 1000), st.integers(1, 300))
def test_an_epoch_is_a_permutation(seed: int, epoch: int, num_samples: int) -> None:
    order = epoch_order(seed, epoch, num_samples, True)
    assert order.dtype == np.int32
    assert sorted(order.tolist()) == list(range(num_samples))
    assert (order == epoch_order(seed, epoch, num_samples, True)).all()


def test_without_shuffling_the_order_is_that_of_the_set() -> None:
    assert epoch_order(1, 5, 6, False, 2).tolist() == [0, 1, 2, 3, 4, 5]


def test_seeds_epochs_and_turns_give_different_orders() -> None:
    orders = [epoch_order(seed, epoch, 40, True, turn) for seed in range(3) for epoch in range(20) for turn in range(3)]
    assert len({order.tobytes() for order in orders}) == len(orders)


def test_every_sample_is_equally_likely_at_every_place() -> None:
    """Compare with the chi-squared distribution of 8 x 8 cells with 49 degrees of freedom."""
    counts = np.zeros((8, 8))
    for epoch in range(4000):
        counts[np.arange(8), epoch_order(11, epoch, 8, True)] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 49 + 5 * np.sqrt(2 * 49)


def test_neighbours_do_not_stay_neighbours() -> None:
    order = epoch_order(0, 0, 20_000, True)
    assert np.abs(np.diff(order)).mean() == pytest.approx(20_000 / 3, rel=0.02)


def loop(plan: StepShape, step: int) -> list[list[int]]:
    """Walk through the samples one by one, as the contract is written."""
    epoch, within = divmod(step, plan.updates_per_epoch)
    found: dict[tuple[int, int], list[int]] = {}
    place = within * plan.global_batch_size
    for g in range(plan.gradient_accumulation_count):
        for r in range(plan.num_replicas):
            for _ in range(plan.micro_batch_size):
                turn, at = divmod(place, plan.num_samples)
                sample = epoch_order(plan.seed, epoch, plan.num_samples, plan.shuffle, turn)[at]
                found.setdefault((g, r), []).append(int(sample))
                place += 1
    return [
        [sample for r in range(plan.num_replicas) for sample in found[g, r]]
        for g in range(plan.gradient_accumulation_count)
    ]


@pytest.mark.parametrize(
    "plan",
    [
        shape(),
        shape(shuffle=False),
        shape(num_samples=7),  # less than one batch: several turns in a step
        shape(num_samples=1),
        shape(updates_per_epoch=9),  # more updates than the samples allow
        shape(gradient_accumulation_count=1, num_replicas=1, micro_batch_size=1, updates_per_epoch=50),
    ],
)
def test_steps_against_a_loop(plan: StepShape) -> None:
    index, epoch = step_indices(plan, 2, 11)
    assert index.shape == (11, plan.gradient_accumulation_count, plan.num_replicas * plan.micro_batch_size)
    assert index.dtype == np.int32
    assert epoch.dtype == np.uint32
    assert index.tolist() == [loop(plan, step) for step in range(2, 13)]
    assert epoch.tolist() == [step // plan.updates_per_epoch for step in range(2, 13)]


def test_any_start_gives_the_same_steps() -> None:
    whole, epochs = step_indices(shape(), 0, 20)
    for first in range(20):
        index, epoch = step_indices(shape(), first, 20 - first)
        assert (index == whole[first:]).all()
        assert (epoch == epochs[first:]).all()


def test_an_epoch_shows_no_sample_twice_and_drops_the_rest() -> None:
    index, _ = step_indices(shape(), 4, 4)
    assert len(set(index.ravel().tolist())) == index.size == 48
    far, _ = step_indices(shape(), 4_000_000, 4)
    assert len(set(far.ravel().tolist())) == 48


def test_further_turns_show_every_sample_before_any_again() -> None:
    index, _ = step_indices(shape(num_samples=12, updates_per_epoch=5), 0, 5)
    for turn in index.reshape(5, 12):
        assert sorted(turn.tolist()) == list(range(12))
    assert len({turn.tobytes() for turn in index}) == 5


def test_the_partition_into_micro_batches_is_the_same_for_all_replicas_and_accumulations() -> None:
    micros = set()
    for replicas, count in ((1, 8), (2, 4), (4, 2), (8, 1)):
        plan = shape(num_replicas=replicas, gradient_accumulation_count=count, micro_batch_size=3, updates_per_epoch=2)
        index, _ = step_indices(plan, 0, 6)
        micros.add(index.reshape(6, 8, 3).tobytes())
    assert len(micros) == 1


def test_a_remembering_order_is_asked_once_per_epoch_and_turn() -> None:
    asked = []

    def order(*address: Any) -> np.ndarray:
        asked.append(address)
        return epoch_order(*address)

    step_indices(shape(), 0, 12, order)
    assert asked == [(3, epoch, 50, True, 0) for epoch in range(3)]
