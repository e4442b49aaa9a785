"""The clock and the throughput, against hand-made time."""

import random
import threading
import time
from contextlib import closing
from itertools import combinations

import pytest

from headrace.telemetry.clock import (
    KINDS,
    CallTime,
    DeviceClock,
    EndWatcher,
    Moment,
    StartTimes,
    Throughput,
    Timeline,
    first_at_target,
)
from headrace.telemetry.records import Note, ValidationRecord


class Hand:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def kept(timeline: Timeline) -> dict[str, float]:
    return {kind: seconds for kind, seconds in timeline.seconds().items() if seconds}


def test_every_moment_counts_once_and_the_device_comes_first() -> None:
    hand = Hand()
    timeline = Timeline(now=hand)
    hand.time += 10
    timeline.add("compile", 103, 107)
    timeline.starting()
    with timeline.measure("wait_validation"):  # 110 to 122
        hand.time += 2
        with timeline.measure("save"):  # 112 to 117: hidden behind the rest
            hand.time += 5
        hand.time += 5
    timeline.add("train", 108, 113)
    timeline.add("validate", 119, 120)
    timeline.add("save", 121, 125)
    hand.time += 8  # up to 130
    # start 100-103, 107-108; compile 103-107; train 108-113; waiting 113-119, 120-122; validate; save 122-125; rest
    wanted = {"start": 4, "compile": 4, "train": 5, "validate": 1, "wait_validation": 8, "save": 3, "rest": 5}
    assert kept(timeline) == wanted
    assert sum(wanted.values()) == 30
    assert timeline.split(112, 121) == dict.fromkeys(KINDS, 0) | {"train": 1, "wait_validation": 7, "validate": 1}
    timeline.settle(121.5)
    assert kept(timeline) == wanted


ORDER = ("train", "validate", "wait", "wait_validation", "save", "compile", "start")


@pytest.mark.parametrize(("first", "second"), list(combinations(ORDER, 2)))
def test_of_two_kinds_at_once_the_one_that_costs_counts(first: str, second: str) -> None:
    """What the device computes hides what the host does meanwhile, and training hides validation."""
    for kinds in ((first, second), (second, first)):
        hand = Hand()
        timeline = Timeline(now=hand)
        for kind in kinds:
            timeline.add(kind, 100, 103)
        hand.time = 103
        assert kept(timeline) == {first: 3}


def test_an_open_measurement_counts_up_to_now_and_is_not_settled() -> None:
    hand = Hand()
    timeline = Timeline(now=hand)
    with timeline.measure("wait"):
        hand.time += 3
        assert kept(timeline) == {"wait": 3}
        timeline.settle(102)
        timeline.add("train", 100, 101)  # known only now: the device was still busy
        hand.time += 1
    assert kept(timeline) == {"train": 1, "wait": 3}


def test_an_error_inside_does_not_stop_the_clock_wrongly() -> None:
    hand = Hand()
    timeline = Timeline(now=hand)

    def fail() -> None:
        with timeline.measure("compile"):
            hand.time += 4
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    hand.time += 9
    assert kept(timeline) == {"compile": 4, "rest": 9}


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="not 'lunch'"):
        Timeline().add("lunch", 0.0, 1.0)


def lasting(seconds: float) -> CallTime:
    return CallTime(seconds=seconds, late=0.0, wait=0.0, busy=seconds)


def test_throughput_leaves_the_first_call_out() -> None:
    rate = Throughput()
    assert (rate.images_per_second, rate.step_seconds) == (None, None)
    rate = rate.add(images=320, steps=10, took=lasting(30.0))
    assert (rate.images_per_second, rate.step_seconds) == (None, None)
    rate = rate.add(images=320, steps=10, took=lasting(2.0)).add(images=160, steps=5, took=lasting(2.0))
    assert rate.images_per_second == 120.0
    assert rate.step_seconds == pytest.approx(4 / 15)
    later = rate.restarted().add(images=64, steps=2, took=lasting(0.5))
    assert later.images_per_second == 128.0
    assert Throughput().restarted().add(images=1, steps=1, took=lasting(1)).images_per_second is None


@pytest.mark.parametrize("lateness", [0.0, 0.01, 2.0])
def test_no_rate_exceeds_what_the_device_did_however_late_the_host_notices(lateness: float) -> None:
    """Calls, pauses for input and validations of known length, whose ends a busy host notices too late."""
    draw = random.Random(7)
    timeline = Timeline(now=Hand())
    clock = DeviceClock(timeline, 100.0)
    interval, trained, noticed, free = Throughput(calls_to_skip=0), 0.0, 100.0, 100.0
    for number in range(300):
        waited, began = draw.choice([0.0, 0.5]), free
        timeline.add("wait", free, free + waited)
        launched, free = free + waited, free + waited + draw.uniform(0.001, 1)
        trained += free - began
        noticed = max(noticed, free + draw.choice([0.0, 1.0]) * lateness)  # in order
        took = clock.call(launched, Moment(launched if noticed > free else free, noticed))
        assert took.longest >= (free - began) * (1 - 1e-9)
        assert took.busy >= (free - launched) * (1 - 1e-9)
        interval = interval.add(images=64, steps=1, took=took)
        if number % 10 == 9:
            begun, free = free, free + draw.uniform(0.0001, 0.1)
            noticed = max(noticed, free + draw.choice([0.0, 1.0]) * lateness)
            late = noticed > free
            held = clock.validation(begun, [(begun, Moment(begun if late else free, noticed))])
            assert held >= (free - begun) * (1 - 1e-9)
            if not lateness:
                assert held == pytest.approx(free - begun)
        if draw.random() < 0.1:
            rate, seconds = interval.images_per_second, interval.step_seconds
            assert rate is not None
            assert seconds is not None
            assert rate <= interval.images / trained * (1 + 1e-9)
            assert seconds >= trained / interval.steps * (1 - 1e-9)
            if not lateness:
                assert rate == pytest.approx(interval.images / trained)
            interval, trained = interval.restarted(), 0.0


class Device:
    """Runs launches one after the other, each for its seconds; a thread that waits for one may be woken late."""

    def __init__(self) -> None:
        self.free = time.perf_counter()

    def launch(self, seconds: float) -> "Launch":
        self.free = max(self.free, time.perf_counter()) + seconds
        return Launch(self.free)


class Launch:
    def __init__(self, end: float) -> None:
        self.end = end

    def has_ended(self) -> bool:
        return time.perf_counter() >= self.end

    def wait(self, late: float = 0.0) -> None:
        time.sleep(max(0.0, self.end + late - time.perf_counter()))


@pytest.mark.parametrize("both", [False, True])
def test_an_end_that_is_noticed_late_bounds_the_next_call(both: bool) -> None:
    """Every third end of calls of 60 ms is noticed 50 or 90 ms late, by one thread or by both."""
    device, clock = Device(), DeviceClock(Timeline(), time.perf_counter())
    begun, rates = time.perf_counter(), []
    with closing(EndWatcher()) as watcher:
        watched = []
        for number in range(12):
            launch = device.launch(0.06)
            late = (0.05 if number % 2 else 0.09) if number % 3 == 2 else 0.0

            def has_ended(launch: Launch = launch, late: float = late) -> bool:
                if both and late and launch.has_ended() and threading.current_thread() is not threading.main_thread():
                    launch.wait(late)
                return launch.has_ended()

            ended = watcher.watch(has_ended, lambda launch=launch, late=late: launch.wait(late))
            watched.append((begun, ended, launch))
        for launched, ended, launch in watched:
            moment = ended.end()
            assert moment.earliest <= launch.end + 0.01
            assert moment.latest >= launch.end
            rates.append(1 / clock.call(launched, moment).longest)
    assert max(rates) < 1.2 / 0.06  # one call in 60 ms
    if not both:
        assert sorted(rates)[6] > 0.8 / 0.06


def test_an_error_of_a_launch_is_raised_for_who_asks_when_it_ended() -> None:
    def fail() -> None:
        time.sleep(0.02)
        raise FloatingPointError

    with closing(EndWatcher()) as watcher, pytest.raises(FloatingPointError):
        watcher.watch(lambda: False, fail).end()


def test_two_ends_noticed_together_are_not_work_done_in_no_time() -> None:
    clock = DeviceClock(Timeline(now=Hand()), 100.0)
    clock.call(100.0, Moment(100.1, 103.0))  # ended at 102, noticed at 103
    assert clock.validation(100.2, [(100.3, Moment(100.3, 103.0))]) == pytest.approx(2.8)


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


def test_the_parts_of_a_start_add_up() -> None:
    hand = Hand()
    times = StartTimes(now=hand)
    hand.time += 3
    times.end("dataset")
    hand.time += 10
    times.end("compile", trace=4)
    hand.time += 1
    times.end("more", inside=2)  # measured by another thread: never more than the whole
    assert times.seconds == {"dataset": 3, "trace": 4, "compile": 6, "inside": 1, "more": 0}
