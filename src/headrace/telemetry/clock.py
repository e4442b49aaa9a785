"""Time by what it was spent on, and throughput without the first call."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from headrace.telemetry.records import Record, ValidationRecord

KINDS: tuple[str, ...] = ("compile", "train", "validate", "save", "wait")  # wait: for data


class Clock:
    """Seconds by kind. A measurement inside another one is not counted in the outer one, so no time counts twice.

    For one thread. `earlier` are the seconds of earlier processes of the same run.
    """

    def __init__(
        self, earlier: Mapping[str, float] | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._now = now
        self._open: list[str] = []
        self._since = 0.0
        for kind, seconds in (earlier or {}).items():
            self.add(kind, seconds)

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Count the time inside the `with` block as `kind`."""
        self._check(kind)
        self._charge()
        self._open.append(kind)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def add(self, kind: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._check(kind)
        self._seconds[kind] += seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each kind so far."""
        self._charge()
        return dict(self._seconds)

    def _charge(self) -> None:
        """Add the time since the last change to the innermost open kind."""
        now = self._now()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now

    def _check(self, kind: str) -> None:
        if kind not in self._seconds:
            raise ValueError(f"time is kept for {', '.join(KINDS)}, not {kind!r}")


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Images and steps per second. The first call, which loads the program and fills the feed, is excluded."""

    calls_to_skip: int = 1
    images: int = 0
    steps: int = 0
    seconds: float = 0.0

    def add(self, *, images: int, steps: int, seconds: float) -> "Throughput":
        """Return the throughput with one more call."""
        if self.calls_to_skip:
            return replace(self, calls_to_skip=self.calls_to_skip - 1)
        return replace(self, images=self.images + images, steps=self.steps + steps, seconds=self.seconds + seconds)

    def restarted(self) -> "Throughput":
        """Return an empty one for the next interval; the first call is not excluded a second time."""
        return Throughput(calls_to_skip=self.calls_to_skip)

    @property
    def images_per_second(self) -> float | None:
        """Return the rate, or None when no call has been counted yet."""
        return self.images / self.seconds if self.seconds > 0 else None

    @property
    def step_seconds(self) -> float | None:
        """Return the mean time of a step, or None when no call has been counted yet."""
        return self.seconds / self.steps if self.steps else None


def first_at_target(records: Iterable[Record], target_accuracy: float) -> ValidationRecord | None:
    """Return the first validation that reached the target; its `elapsed_seconds` is the time to the target."""
    validations = (record for record in records if isinstance(record, ValidationRecord))
    return next((record for record in validations if record.top1 >= target_accuracy), None)
