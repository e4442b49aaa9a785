"""The clock and the throughput, against hand-made time."""

import pytest

from headrace.telemetry.clock import Clock, Throughput, first_at_target
from headrace.telemetry.records import Note, ValidationRecord


class Hand:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_time_is_kept_apart_and_nothing_counts_twice() -> None:
    hand = Hand()
    clock = Clock(now=hand)
    hand.time += 50  # nobody's time
    with clock.measure("train"):
        hand.time += 2
        with clock.measure("wait"):
            hand.time += 3
            with clock.measure("train"):
                hand.time += 5
        hand.time += 7
    with clock.measure("validate"):
        hand.time += 11
    clock.add("save", 0.5)
    assert clock.seconds() == {"compile": 0, "train": 14, "validate": 11, "save": 0.5, "wait": 3}


def test_an_open_measurement_counts_up_to_now() -> None:
    hand = Hand()
    clock = Clock({"train": 10.0}, now=hand)
    with clock.measure("train"):
        hand.time += 1
        assert clock.seconds()["train"] == 11
        hand.time += 1
    assert clock.seconds()["train"] == 12


def test_an_error_inside_does_not_stop_the_clock_wrongly() -> None:
    hand = Hand()
    clock = Clock(now=hand)

    def fail() -> None:
        with clock.measure("compile"):
            hand.time += 4
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    hand.time += 9
    assert clock.seconds()["compile"] == 4


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="not 'lunch'"), Clock().measure("lunch"):
        pass
    with pytest.raises(ValueError, match="not 'lunch'"):
        Clock({"lunch": 1.0})


def test_throughput_leaves_the_first_call_out() -> None:
    rate = Throughput()
    assert (rate.images_per_second, rate.step_seconds) == (None, None)
    rate = rate.add(images=320, steps=10, seconds=30.0)
    assert (rate.images_per_second, rate.step_seconds) == (None, None)
    rate = rate.add(images=320, steps=10, seconds=2.0).add(images=160, steps=5, seconds=2.0)
    assert rate.images_per_second == 120.0
    assert rate.step_seconds == pytest.approx(4 / 15)
    later = rate.restarted().add(images=64, steps=2, seconds=0.5)
    assert later.images_per_second == 128.0
    assert Throughput().restarted().add(images=1, steps=1, seconds=1).images_per_second is None


def test_time_to_target_is_the_first_validation_that_reaches_it() -> None:
    records = [Note(step=0, text="")] + [
        ValidationRecord(
            step=k, epoch=k, weights=weights, loss=0.0, top1=top1, num_samples=1, seconds=1.0, elapsed_seconds=10.0 * k
        )
        for k, (top1, weights) in enumerate([(0.5, "raw"), (0.7, "raw"), (0.759, "ema"), (0.9, "raw")])
    ]
    reached = first_at_target(records, 0.759)
    assert reached is not None
    assert (reached.elapsed_seconds, reached.epoch, reached.weights) == (20.0, 2.0, "ema")
    assert first_at_target(records, 0.95) is None
