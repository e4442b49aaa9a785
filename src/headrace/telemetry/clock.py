"""What the wall time of a run went to, when calls ended on the device, and the rates that follow."""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from headrace.rows.metrics import TOP1
from headrace.rows.row import Metric
from headrace.telemetry.records import Record, ValidationRecord

# wait: for training data; wait_validation: for validation data; save: only while nothing trains because of it.
KINDS: tuple[str, ...] = ("start", "compile", "train", "wait", "validate", "wait_validation", "save", "rest")

# How people read them, where the word itself is not plain.
KIND_NAMES = {"wait": "waiting for input", "wait_validation": "waiting for validation images"}

# Of spans that cover the same moment the first of these counts: a host that decodes or saves while the device computes
# costs nothing.
_PRECEDENCE = ("train", "validate", "wait", "wait_validation", "save", "compile", "start")

# Kinds of time between two calls that do not count as training.
_NOT_TRAINING = ("validate", "wait_validation", "save", "compile")


class Timeline:
    """The wall time of a process (since `began`) by kind: every moment counts once, so the kinds add up to all of it.

    Threads add the spans they know of, in any order; what no span covers is rest.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, began: float | None = None) -> None:
        self._now, self._began = now, now() if began is None else began
        self._totals = dict.fromkeys(KINDS, 0.0)  # up to `_settled`
        self._settled = self._began
        self._spans: list[tuple[str, float, float]] = []  # that end after `_settled`
        self._open: dict[int, tuple[str, float]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Add the time inside the `with` block as a span."""
        number, begin = next(self._numbers), self._now()
        with self._lock:
            self._open[number] = (kind, begin)
        try:
            yield
        finally:
            with self._lock:
                del self._open[number]
            self.add(kind, begin, self._now())

    def add(self, kind: str, begin: float, end: float) -> None:
        """Add a span that was measured elsewhere."""
        if kind not in _PRECEDENCE:
            raise ValueError(f"time is kept for {', '.join(_PRECEDENCE)}, not {kind!r}")
        with self._lock:
            self._spans.append((kind, begin, end))

    def starting(self) -> None:
        """Count what no span has covered so far as start."""
        self.add("start", self._began, self._now())

    def split(self, begin: float, end: float) -> dict[str, float]:
        """Return the seconds of each kind between two moments."""
        with self._lock:
            return self._split(begin, end)

    def settle(self, until: float) -> None:
        """Count everything before a moment for good: no span that reaches back further is still to come."""
        with self._lock:
            until = max(self._settled, min([until, *(begin for _, begin in self._open.values())]))
            for kind, seconds in self._split(self._settled, until).items():
                self._totals[kind] += seconds
            self._settled = until
            self._spans = [span for span in self._spans if span[2] > until]

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each kind so far; their sum is the wall time."""
        with self._lock:
            later = self._split(self._settled, self._now())
            return {kind: self._totals[kind] + later[kind] for kind in KINDS}

    def _split(self, begin: float, end: float) -> dict[str, float]:
        spans = [*self._spans, *((kind, since, end) for kind, since in self._open.values())]
        spans = [(kind, max(first, begin), min(last, end)) for kind, first, last in spans if first < end]
        spans = [span for span in spans if span[1] < span[2]]
        edges = sorted({begin, max(begin, end), *(edge for _, first, last in spans for edge in (first, last))})
        seconds = dict.fromkeys(KINDS, 0.0)
        for first, last in pairwise(edges):
            covering = {kind for kind, since, until in spans if since <= first and last <= until}
            seconds[next((kind for kind in _PRECEDENCE if kind in covering), "rest")] += last - first
        return seconds


class StartTimes:
    """The seconds of the parts of a start, one after the other."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, began: float | None = None) -> None:
        self._now, self._since = now, now() if began is None else began
        self.seconds: dict[str, float] = {}

    def end(self, part: str, **inside: float) -> None:
        """End a part; `inside` are seconds of it that are parts of their own."""
        now = self._now()
        spent = now - self._since
        for name, seconds in inside.items():
            self.seconds[name] = min(seconds, spent)
            spent -= self.seconds[name]
        self.seconds[part] = spent
        self._since = now


class Moment(NamedTuple):
    """When the devices were done with something: by `latest`, and not before `earliest`.

    They differ where the host may have noticed late, because its processors were busy. A rate is then computed from the
    longest time that is possible: an end that is noticed late must not make the next call look shorter than it was.
    """

    earliest: float
    latest: float


class Watched:
    """A launch that is watched by another thread as well; `wait` returns when it is over."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait
        self.woken: Future[float] = Future()
        self.found: Future[Moment] = Future()

    def end(self) -> Moment:
        """Wait until the devices are done; return when that was. For one thread, in the order of launches."""
        if not self.found.done() and not self.woken.done():
            try:
                self._wait()
            except BaseException as error:
                self.woken.set_exception(error)
            else:
                self.woken.set_result(time.perf_counter())
        return self.found.result()


class EndWatcher:
    """Finds out when the devices are done with launches, which are given in their order.

    Who asks for an end waits for it, and is woken at once unless the host is busy. Since it may ask late, having
    written what the launch before gave, a thread of this looks from time to time: the last time that a launch had not
    ended is a bound that holds however late both of them notice.
    """

    def __init__(self) -> None:
        self._looking = ThreadPoolExecutor(1, thread_name_prefix="look-at-calls")

    def watch(self, has_ended: Callable[[], bool], wait: Callable[[], object]) -> Watched:
        """Watch a launch: `has_ended` says whether it is over, `wait` returns then."""
        asked, watched = time.perf_counter(), Watched(wait)
        if has_ended():  # a CPU may run small programs before a launch returns
            watched.found.set_result(Moment(asked, asked))
        else:
            watched.found = self._looking.submit(_look_until_over, asked, has_ended, watched.woken)
        return watched

    def close(self) -> None:
        """End the thread, after what it still looks at."""
        self._looking.shutdown()


# The seconds between two looks, as a share of those since the first, and their limits: some 60 looks at a call of a
# second.
_PAUSE, _SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 0.001, 0.05


def _look_until_over(asked: float, has_ended: Callable[[], bool], woken: Future[float]) -> Moment:
    begin, earliest = time.perf_counter(), asked
    while not woken.done():
        looked = time.perf_counter()
        if has_ended():
            # Without the other thread, which may be late: the next launch must be looked at from its beginning.
            return _end_between(begin, earliest, time.perf_counter())
        earliest = looked
        with suppress(TimeoutError):
            woken.exception(min(max(_PAUSE * (looked - begin), _SHORTEST_PAUSE), _LONGEST_PAUSE))
    return _end_between(begin, earliest, woken.result())


def _end_between(begin: float, earliest: float, latest: float) -> Moment:
    """Return when a launch ended that was looked at since `begin`: in doubt only if the last pause was too long."""
    longest_pause = 1.5 * min(_PAUSE * (latest - begin), _LONGEST_PAUSE)
    return Moment(earliest if latest - earliest > longest_pause else latest, latest)


@dataclass(frozen=True, kw_only=True)
class CallTime:
    """The seconds of a call; those of successive calls add up to the time of training."""

    seconds: float  # waiting for input included, but no saving, no validation and no compiling
    late: float  # the seconds by which the call before it may have ended earlier than `seconds` says
    wait: float  # part of `seconds`: without input
    busy: float  # the devices worked on it, at most

    @property
    def longest(self) -> float:
        """Return the longest that the call alone may have taken."""
        return self.seconds + self.late


class DeviceClock:
    """Divides the time of the devices among calls and validations, which are given in the order of their launches."""

    def __init__(self, timeline: Timeline, now: float) -> None:
        self._timeline, self._free = timeline, Moment(now, now)
        self._after_validation = False

    def call(self, launched: float, ended: Moment) -> CallTime:
        """Add a training call."""
        free = self._free
        end = max(ended.latest, free.latest)
        begun = min(max(launched, free.latest), end)
        self._timeline.add("train", begun, end)
        idle = self._timeline.split(free.latest, begun)
        self._timeline.settle(begun)
        seconds = end - free.latest - sum(idle[kind] for kind in _NOT_TRAINING)
        late = free.latest - free.earliest
        # Where the end of a call was noticed late, its own seconds have what those of the next one lack. Those of a
        # validation are not training.
        if self._after_validation:
            seconds, late = seconds + late, 0.0
        self._free, self._after_validation = Moment(min(max(ended.earliest, free.earliest), end), end), False
        busy = end - min(max(launched, free.earliest), end)
        return CallTime(seconds=seconds, late=late, wait=idle["wait"], busy=busy)

    def validation(self, requested: float, launches: Sequence[tuple[float, Moment]]) -> float:
        """Add a validation as (launched, ended) of its parts; return the seconds in which nothing trained for it."""
        held_up = max(requested, self._free.earliest)
        free = max(requested, self._free.latest)
        earliest = held_up
        for launched, ended in launches:
            self._timeline.add("validate", max(launched, free), max(ended.latest, free))
            free, earliest = max(free, ended.latest), max(earliest, ended.earliest)
        self._free, self._after_validation = Moment(min(earliest, free), free), True
        return free - held_up


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Images and steps per second. The first call, which loads the program and fills the feed, is excluded."""

    calls_to_skip: int = 1
    images: int = 0
    steps: int = 0
    seconds: float = 0.0
    late: float = 0.0  # the seconds by which the first call may have begun earlier

    def add(self, *, images: int, steps: int, took: CallTime) -> "Throughput":
        """Return the throughput with one more call."""
        if self.calls_to_skip:
            return replace(self, calls_to_skip=self.calls_to_skip - 1)
        return replace(
            self,
            images=self.images + images,
            steps=self.steps + steps,
            seconds=self.seconds + took.seconds,
            late=self.late if self.steps else took.late,
        )

    def restarted(self) -> "Throughput":
        """Return an empty one for the next interval; the first call is not excluded a second time."""
        return Throughput(calls_to_skip=self.calls_to_skip)

    @property
    def longest(self) -> float:
        """Return the longest that the calls may have taken."""
        return self.seconds + self.late

    @property
    def images_per_second(self) -> float | None:
        """Return the rate, or None when no call has been counted yet."""
        return self.images / self.longest if self.longest > 0 else None

    @property
    def step_seconds(self) -> float | None:
        """Return the mean time of a step, or None when no call has been counted yet."""
        return self.longest / self.steps if self.steps else None


def first_at_target(
    records: Iterable[Record], target_accuracy: float, monitor: Metric = TOP1
) -> ValidationRecord | None:
    """Return the first validation that reached the target; its `elapsed_seconds` is the time to the target."""
    for record in records:
        if isinstance(record, ValidationRecord):
            value = record.metric(monitor.name)
            if value is not None and value >= target_accuracy:
                return record
    return None
