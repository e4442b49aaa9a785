"""From calls to records: add up metrics, stop at numbers that are not finite, measure time and throughput."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from headrace.core.errors import RunStopped
from headrace.core.units import format_duration
from headrace.engine.devices import CompileCounts
from headrace.engine.objective import SUMS, metric_sums
from headrace.plan.plan import Plan
from headrace.rows.metrics import TOP1
from headrace.rows.row import Metric
from headrace.telemetry.records import Record, TrainRecord, ValidationRecord

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
    """The wall time of a process by kind: every moment counts once, so the kinds add up to the wall time.

    Threads add the spans they know of, in any order; what no span covers is rest.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._began = now, now()
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

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._since = now, now()
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


class EndWatcher:
    """Two threads that find out when the devices are done with launches, which are given in their order.

    One waits and is woken by the end, at once unless the host is busy. The other looks from time to time: the last time
    that a launch had not ended is a bound that holds however late both of them notice.
    """

    def __init__(self) -> None:
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="watch-calls")
        self._looking = ThreadPoolExecutor(1, thread_name_prefix="look-at-calls")

    def watch(self, has_ended: Callable[[], bool], wait: Callable[[], object]) -> Future[Moment]:
        """Return the end of a launch: `has_ended` says whether it is over, `wait` returns then."""
        asked = time.perf_counter()
        if has_ended():  # a CPU may run small programs before a launch returns
            ended: Future[Moment] = Future()
            ended.set_result(Moment(asked, asked))
            return ended
        woken = self._waiting.submit(_when_over, wait)
        return self._looking.submit(_look_until_over, asked, has_ended, woken)

    def close(self) -> None:
        """End the threads, after what they still wait for."""
        self._waiting.shutdown()
        self._looking.shutdown()


def _when_over(wait: Callable[[], object]) -> float:
    wait()
    return time.perf_counter()


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


# The metrics of calls: read while the next call runs, added up, and stopped at where they are not finite.


HostMetrics = dict[str, np.ndarray]  # each [K, ...]: one row per step of the call


@dataclass(frozen=True, kw_only=True)
class Unlogged:
    """Sums over the calls since the last record. A checkpoint keeps them, so that a resumed run logs the same numbers.

    They are added call by call, in order, so that a resumed run gets the same bits as one that was never interrupted.
    A step whose loss is not finite (--nan-policy skip) enters `skipped` alone.
    """

    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0
    count: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)  # custom ones
    skipped: int = 0
    wait_seconds: float = 0.0

    def add(self, metrics: HostMetrics, wait: float) -> "Unlogged":
        """Return the sums with one more call."""
        # With nan_policy skip a bad step changes no weight, and must not make the mean of all others NaN.
        good = np.isfinite(metrics["loss"])
        # One after the other, as np.sum does not: the bits of a sum must not depend on how steps are cut into calls.
        sums = {key: sum(metrics[key][good].tolist(), getattr(self, key)) for key in SUMS}
        custom = {
            name: sum(rows[good].tolist(), self.metrics.get(name, 0.0)) for name, rows in metric_sums(metrics).items()
        }
        # Skipped steps have finite losses as well: with dynamic loss scaling only their gradients overflowed.
        skipped = self.skipped + int(metrics["skipped"].sum())
        return Unlogged(**sums, metrics=custom, skipped=skipped, wait_seconds=self.wait_seconds + wait)

    def mean(self, total: float) -> float:
        """Return a sum as the mean over the samples counted, NaN when there were none."""
        return total / self.count if self.count else float("nan")

    def metric_means(self) -> dict[str, float]:
        """Return the custom metrics as means."""
        return {name: self.mean(total) for name, total in self.metrics.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as plain values, for a manifest."""
        return asdict(self)

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> "Unlogged":
        """Return the sums that `to_dict` was given; names that a newer Headrace may have added are ignored."""
        return Unlogged(**{key: saved[key] for key in asdict(NOTHING_UNLOGGED) if key in saved})


NOTHING_UNLOGGED = Unlogged()


@dataclass
class MetricTotals:
    """Totals of the calls since the last record, and the throughput of this process; skipped steps of the whole run."""

    plan: Plan
    block_names: tuple[str, ...]
    nan_policy: str
    throughput: Throughput = field(default_factory=Throughput)
    skipped_steps: int = 0
    unlogged: Unlogged = NOTHING_UNLOGGED
    _last: HostMetrics | None = None  # of the last call; None when there was none since the last record
    _recent: Throughput = field(default_factory=Throughput)

    def continue_from(self, unlogged: Unlogged, skipped_in_records: int) -> None:
        """Start with the totals of the earlier process of the run."""
        self.unlogged, self.skipped_steps = unlogged, skipped_in_records + unlogged.skipped

    def add_call(self, last_step: int, metrics: HostMetrics, took: CallTime) -> None:
        """Add the metrics of the call that ended with `last_step`."""
        # First, so that nothing of a call with bad numbers is recorded or saved.
        self._refuse_bad(last_step - len(metrics["loss"]), metrics)
        steps = len(metrics["loss"])
        images = steps * self.plan.batch.global_batch_size
        self.throughput = self.throughput.add(images=images, steps=steps, took=took)
        self._recent = self._recent.add(images=images, steps=steps, took=took)
        self.skipped_steps += int(metrics["skipped"].sum())
        self.unlogged, self._last = self.unlogged.add(metrics, took.wait), metrics

    def record(self, last_step: int, elapsed: float) -> TrainRecord | None:
        """Return a record of all calls since the last one, or None when there were none."""
        if self._last is None:
            return None
        sums, last = self.unlogged, self._last
        record = TrainRecord(
            step=last_step,
            epoch=last_step / self.plan.steps.updates_per_epoch,
            loss=sums.mean(sums.loss),
            accuracy=sums.mean(sums.top1),
            top5=sums.mean(sums.top5),
            metrics=sums.metric_means(),
            # Of the last step: a mean over the steps of a record would be no rate that was ever used.
            learning_rate=last["learning_rate"][-1],
            grad_norm=last["grad_norm"][-1],
            images_per_second=self._recent.images_per_second,
            step_seconds=self._recent.step_seconds,
            loss_scale=last["loss_scale"][-1],
            skipped_steps=sums.skipped,
            infeed_wait_seconds=sums.wait_seconds,
            elapsed_seconds=elapsed,
        )
        # `restarted` keeps whether the first call is over: that one never counts.
        self.unlogged, self._last, self._recent = NOTHING_UNLOGGED, None, self._recent.restarted()
        return record

    def _refuse_bad(self, first_step: int, metrics: HostMetrics) -> None:
        bad = np.flatnonzero(metrics["bad"])
        # `bad` leaves out the overflows that dynamic loss scaling expects.
        if self.nan_policy == "skip" or not len(bad):
            return
        at = int(bad[0])
        where = _first_layer(metrics, at, self.block_names)
        remedy = "Lower the learning rate, clip gradients (--gradient-clipping), or use a wider --precision."
        if not where:
            remedy += " --fp-exceptions names the first layer."
        raise RunStopped(
            f"Step {first_step + at + 1} gave numbers that are not finite{where} "
            f"(loss {metrics['loss'][at] / metrics['count'][at]:g}, gradient norm {metrics['grad_norm'][at]:g}, "
            f"learning rate {metrics['learning_rate'][at]:g}).",
            rule="The weights before that step were kept, and so was the last checkpoint.",
            remedy=remedy + " --nan-policy skip leaves such steps out and continues.",
        )


def _first_layer(metrics: HostMetrics, at: int, block_names: tuple[str, ...]) -> str:
    """Name the first block that made a non-finite number in that step: forward in order, else backward from the end."""
    if "forward_finite" not in metrics:
        return ""
    forward, backward = metrics["forward_finite"][at], metrics["gradient_finite"][at]
    if not forward.all():
        return f", first in the output of {block_names[int(np.argmin(forward))]}"
    if not backward.all():
        # Backward the last block comes first, so the search runs from the end.
        return f", first in the gradients of {block_names[len(backward) - 1 - int(np.argmin(backward[::-1]))]}"
    return ", first in the loss"


class CallReader:
    """A thread that reads the results of calls, in order, while the next call is launched.

    A thread, because launching is not always instant: on a GPU the host walks through a device loop's steps, so that
    launching a call takes as long as running it.
    """

    def __init__(self, read: Callable[[Any], None]) -> None:
        self._read_call, self._failed = read, False
        # One thread, so that calls are read in their order.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="read-calls")
        self._unread: deque[Future[None]] = deque()

    def submit(self, call: object) -> None:
        """Take a launched call, without waiting."""
        self._unread.append(self._worker.submit(self._read, call))

    def _read(self, call: object) -> None:
        # The next call is launched before this one is read. After bad numbers, or a record that could not be written,
        # nothing later may be recorded or saved: a resumed run would continue behind the failure.
        if self._failed:
            return
        try:
            self._read_call(call)
        except BaseException:
            self._failed = True
            raise

    def keep_up(self, behind: int = 1) -> None:
        """Wait until at most so many calls are unread: launching must not get far ahead. Raise what went wrong."""
        while len(self._unread) > behind:
            self._unread.popleft().result()

    def drain(self) -> None:
        """Wait for the last call; raise what went wrong there."""
        self.keep_up(behind=0)

    def close(self) -> None:
        """End the thread, after what it still has to read; errors there are not raised."""
        self._worker.shutdown(wait=True)


@contextmanager
def passing_failure_to(future: Future[Any]) -> Iterator[None]:
    """Raise an error of the `with` block for whoever waits for the future as well."""
    try:
        yield
    except BaseException as error:
        future.set_exception(error)
        raise


# The verdict on what limited a run: computing on the device, or preparing its input on the host.


# Shares of the time that the device waited: below the first nothing worth changing is lost, above the second a lot.
_COMPUTE, _MIXED = 0.02, 0.10

_SHORT = 1.0  # seconds: in less, the first checkpoint alone is a large share


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured over a run's calls, the first one excluded."""

    images: int
    seconds: float
    wait_seconds: float  # of `seconds`: the device had no block
    read_seconds: float  # the host took to prepare that many images in its memory
    send_seconds: float = 0.0  # beside reading: until the devices had the bytes
    bytes_per_image: float = 0.0
    threads: int = 1
    cached: bool = False  # the dataset is on the device
    decodes: bool = False  # the host decodes image files
    validate_seconds: float = 0.0  # beside `seconds`: the device evaluated
    validation_wait_seconds: float = 0.0  # and it waited for validation images
    save_seconds: float = 0.0  # and it waited for a checkpoint
    start_seconds: float = 0.0  # before the first call
    first_wait_seconds: float = 0.0  # before the first call, with programs compiled: for its images, or the whole set
    compile_seconds: float = 0.0
    programs: CompileCounts = field(default_factory=CompileCounts)  # found in the cache, and compiled
    num_validation_batches: int = 2  # of each validation
    rest_seconds: float = 0.0  # nothing of all this
    wall_seconds: float = 0.0  # of the whole run


def verdict(run: Measured) -> str:
    """Return a sentence on what limited the run and, where the device waited a lot, which options would help.

    The longest kind of waiting is named first, then what else took longer than that.
    """
    said = _bound(run)
    if run.images <= 0 or run.seconds <= 0:
        return said
    # What is worth naming must be larger than the waiting that is already named.
    waited = max(run.wait_seconds, run.validation_wait_seconds, run.save_seconds)
    parts = {part: seconds for part, seconds in _other_parts(run).items() if seconds > waited}
    wall = run.wall_seconds
    largest = max(parts, key=lambda part: parts[part], default="")
    if not largest or parts[largest] < _MIXED * wall:
        return said
    share = f"{100 * parts[largest] / wall:.0f} % of the {format_duration(wall)}"
    advice = _CHANGED_BY[largest] or _compiling_advice(run.programs)
    if largest == "validation" and run.num_validation_batches > 1:
        advice += " or in larger batches (--validation-micro-batch-size)"
    if run.decodes and largest in _HELPED_BY_PACKING:
        advice = f"pack the images (headrace data pack), or {advice}"
    return f"{said}; {largest} took {share}: {advice}"


# What else takes time beside training, and what changes it.
_CHANGED_BY = {
    "starting": "train longer in one run",
    "reading the first images": "train longer in one run",
    "compiling": "",  # it depends on the cache
    "validation": "validate less often (--validations-per-epoch)",
    "the host between calls": "make calls longer (--call-seconds, a lower --logs-per-epoch)",
}
_HELPED_BY_PACKING = ("starting", "reading the first images")  # where there are image files


def _compiling_advice(programs: CompileCounts) -> str:
    if not programs.hits + programs.misses:
        return "keep the compiled programs for the next run (--compilation-cache-dir)"
    if programs.misses:
        return "the next run of this network and batch finds its programs in the cache"
    return "the programs came from the cache, and only a longer run makes tracing and loading them a smaller part"


def _other_parts(run: Measured) -> dict[str, float]:
    before = (run.start_seconds, run.first_wait_seconds, run.compile_seconds)
    return dict(zip(_CHANGED_BY, (*before, run.validate_seconds, run.rest_seconds), strict=True))


def _bound(run: Measured) -> str:
    """Say whether the device computed or what it waited for."""
    if run.images <= 0 or run.seconds <= 0:
        return "no verdict: no call after the first one was timed"
    waited_seconds = min(max(run.wait_seconds, 0.0), run.seconds)
    # Without start and compilation, which do not grow with the run.
    total = run.seconds + run.validate_seconds + run.validation_wait_seconds + run.save_seconds
    waits = {"input": waited_seconds, "validation": run.validation_wait_seconds, "saving": run.save_seconds}
    bound = max(waits, key=lambda kind: waits[kind])
    share = sum(waits.values()) / total
    # A set that was decoded before the first call made the device wait, and the split of the wall time shows it.
    time = "the time after the first images" if run.first_wait_seconds > _COMPUTE * run.wall_seconds else "the time"
    # Below 2 % nothing is worth changing, and advice would only distract.
    if share < _COMPUTE:
        where = "the dataset is on the device, which" if run.cached else "the device"
        return f"compute-bound: {where} waited {100 * share:.1f} % of {time}"
    if total < _SHORT:
        return f"no verdict: {format_duration(total)} after the first call are too short to tell what limited the run"
    # The time is named: that of the whole run, which is printed above, has the start and the first call in it.
    waited = f"{100 * waits[bound] / total:.1f} % of the {format_duration(total)} after the first call"
    rates = _rates(run, run.seconds - waited_seconds)
    if bound == "input":
        if share < _MIXED:
            return f"mostly compute-bound: the device waited {waited}; {rates}"
        return f"input-bound: {rates} and waited {waited}; {_advice(run)}"
    what, advice = {
        "validation": (
            "validation images",
            "keep them (--validation-cache host, or a larger --validation-host-budget), validate less often (a lower "
            f"--validations-per-epoch) or use more --pipeline-num-parallel (now {run.threads})",
        ),
        "saving": (
            "checkpoints",
            "save less often (no --ckpts-per-epoch, or a lower one) or to a faster disk (--checkpoint-dir)",
        ),
    }[bound]
    if share < _MIXED:
        return f"mostly compute-bound: the device waited {waited} for {what}"
    return f"{bound}-bound: the device waited {waited} for {what}; {advice}"


def _rates(run: Measured, busy_seconds: float) -> str:
    host = "the host is idle"
    slower = max(run.read_seconds, run.send_seconds)  # they overlap
    if slower > 0:
        host = f"the host prepares {run.images / slower:,.0f} img/s"
    if run.send_seconds > 0 and run.read_seconds > 0 and run.bytes_per_image > 0:
        bandwidth = run.images * run.bytes_per_image / run.send_seconds / 1e9
        verb = "decodes" if run.decodes else "reads"
        read, sent = run.images / run.read_seconds, run.images / run.send_seconds
        host += f" ({verb} {read:,.0f}, sends {sent:,.0f} at {bandwidth:.2g} GB/s)"
    device = f"{run.images / busy_seconds:,.0f}" if busy_seconds > 0 else "any number of"
    return f"{host}, the device takes {device} img/s"


def _advice(run: Measured) -> str:
    if run.cached:
        return "the set is already on the device: make calls longer (a lower --logs-per-epoch)"
    # Sending dominates: more threads or packed files would not help.
    if run.send_seconds > run.read_seconds:
        return "sending is the limit: leave --eight-bit-transfer on, or use --dataset-cache device"
    if run.decodes:
        return (
            "pack the images (headrace data pack), keep them decoded (--dataset-cache decoded), "
            f"or use more --pipeline-num-parallel (now {run.threads})"
        )
    return f"use --dataset-cache device or more --pipeline-num-parallel (now {run.threads})"
