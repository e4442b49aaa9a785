"""Infeed: the stream of elements that a loop or a pipeline takes, read ahead by a thread.

An element is a tree of arrays. A dict is passed to the function as keyword arguments, a tuple or list in order. Every
replica takes a different element.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from headrace.core.errors import ConfigError, DataError
from headrace.core.tree import PyTree
from headrace.data.feeding.order import epoch_order
from headrace.data.sets.source import Source
from headrace.program.structure import Structure, difference, host_arrays, structure_of, whole_number

MAX_PREFETCH = 255
_POLL_SECONDS = 0.05  # interval at which a waiting thread checks whether it should stop
_END = object()

Dataset = Iterable[Any] | Callable[[], Iterable[Any]] | Source


class Infeed:
    """Feeds the elements of a dataset to a device program.

    `dataset` is an iterable of elements, a function that returns one (called anew for every pass), or a Headrace source
    with a `batch_size`, whose elements are {"images": uint8 [B, H, W, C], "labels": int32 [B]}, shuffled when a `seed`
    is given. With `repeat` the dataset starts again at its end. A thread prefetches `prefetch_depth` elements.
    `block_size` is the number of elements per replica that one launch of a program takes; None means as many as fit.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        prefetch_depth: int = 1,
        block_size: int | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        repeat: bool = False,
    ) -> None:
        self.prefetch_depth = whole_number(prefetch_depth, "prefetch_depth", 1, MAX_PREFETCH)
        self.block_size = None if block_size is None else whole_number(block_size, "block_size", 1)
        self._passes = passes_over(dataset, batch_size, seed)
        if repeat and isinstance(dataset, Iterator):
            raise ConfigError(
                "An iterator cannot be repeated.",
                rule="repeat=True iterates over the dataset again, and an iterator can be used only once.",
                remedy="Give a list, or a function that returns a fresh iterator.",
            )
        self._repeat = repeat
        self._waiting: deque[Any] = deque()  # elements taken from the queue and not used yet
        self._queue: queue.Queue[Any] | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._is_at_end = False
        self._error: BaseException | None = None  # of the dataset, which ended it

    @property
    def structure(self) -> Structure:
        """Return the structure of an element; reads the first one."""
        with self._lock:
            if not self._waiting:
                element = self._next()
                if element is _END:
                    raise self._error or DataError("The dataset of the infeed is empty.", remedy="Give elements.")
                self._waiting.append(element)
            return structure_of(self._waiting[0])

    def take(self, at_most: int) -> list[PyTree]:
        """Return the next elements, waiting for them; fewer than requested only where the dataset ends."""
        with self._lock:
            taken: list[Any] = []
            while len(taken) < at_most:
                element = self._waiting.popleft() if self._waiting else self._next()
                if element is _END:
                    break
                taken.append(element)
            if not taken and self._error is not None:
                raise self._error
            return taken

    def take_all(self, count: int, why: str) -> list[PyTree]:
        """Return exactly `count` elements, or raise and keep the elements."""
        taken = self.take(count)
        if len(taken) < count:
            self.put_back(taken)
            if self._error is not None:
                raise self._error
            raise DataError(
                f"The dataset of the infeed ended: {len(taken)} elements are left; needed for {why}: {count}.",
                rule="A program takes as many elements as it has iterations, for each replica.",
                remedy="Give more elements, or Infeed(..., repeat=True).",
            )
        return taken

    def put_back(self, elements: list[PyTree]) -> None:
        """Put back elements that were taken and not used."""
        with self._lock:
            self._waiting.extendleft(reversed(elements))

    def close(self) -> None:
        """Stop the reading thread; prefetched elements are dropped."""
        self._stop.set()
        if self._queue is not None:
            # Wakes up whoever waits for the next element; at a full queue nobody does.
            with suppress(queue.Full):
                self._queue.put_nowait(_END)

    def __enter__(self) -> "Infeed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> PyTree:
        """Return the next element from the thread, or _END; the thread starts at the first call."""
        if self._is_at_end or self._stop.is_set():
            return _END
        if self._queue is None:
            self._queue = queue.Queue(self.prefetch_depth)
            reader = _ReadingThread(self._passes, self._repeat, self._queue, self._stop)
            threading.Thread(target=reader.run, name="infeed", daemon=True).start()
            # The thread holds the queue, not the Infeed: one that nobody uses any more is collected, and its thread
            # ends.
            weakref.finalize(self, self._stop.set)
        element = self._queue.get()
        if isinstance(element, _Failure):
            self._error = element.error
            element = _END
        self._is_at_end = element is _END
        return element


class _Failure:
    """An error in the thread, to be raised by the consumer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _ReadingThread:
    """The thread: iterates over the dataset, checks each element and queues it. Holds no reference to the Infeed."""

    def __init__(
        self, passes: Callable[[int], Iterable[Any]], repeat: bool, out: "queue.Queue[Any]", stop: threading.Event
    ) -> None:
        self._passes, self._repeat, self._out, self._stop = passes, repeat, out, stop
        self._first: Structure | None = None
        self._number = 0

    def run(self) -> None:
        """Read until the end, an error, or a request to stop."""
        try:
            last, number = -1, 0
            while number == 0 or (self._repeat and self._number > last):  # an empty pass would repeat for ever
                last = self._number
                for element in self._passes(number):
                    if not self._hand_over(self._checked(element)):
                        return
                number += 1
            self._hand_over(_END)
        except BaseException as error:  # also SystemExit: without a message the consumer would wait for ever
            self._hand_over(_Failure(error))

    def _checked(self, element: PyTree) -> PyTree:
        # In the reader's thread: converting a batch would otherwise hold up the launches.
        element = host_arrays(element)
        found = structure_of(element)
        if self._first is None:
            self._first = found
        elif change := difference(self._first, found):
            raise DataError(
                f"Element {self._number} of the infeed {change}.",
                rule="A device program is compiled for one shape: all elements have the shapes and types of the first.",
                remedy="Drop the remainder: leave the last, smaller batch out.",
            )
        self._number += 1
        return element

    def _hand_over(self, element: PyTree) -> bool:
        while not self._stop.is_set():
            try:
                # With a timeout, or a reader of an abandoned feed would wait for ever at a full queue.
                self._out.put(element, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False


def passes_over(dataset: Any, batch_size: int | None, seed: int | None) -> Callable[[int], Iterable[PyTree]]:
    """Return a function of the pass number that starts a pass over the dataset."""
    if hasattr(dataset, "read") and hasattr(dataset, "labels"):
        if batch_size is None:
            raise ConfigError("A source of images needs a batch_size.", remedy="Write Infeed(source, batch_size=32).")
        size = whole_number(batch_size, "batch_size", 1, len(dataset))
        return lambda number: _batches(dataset, size, seed, number)
    for name, value in (("batch_size", batch_size), ("seed", seed)):
        if value is not None:
            raise ConfigError(
                f"{name} is {value}, but the dataset is a {type(dataset).__name__}.",
                rule=f"{name} is for Headrace sources, which hold single images.",
                remedy="Let the dataset yield whole, shuffled batches.",
            )
    if isinstance(dataset, Iterable):
        return lambda _: dataset
    if callable(dataset):
        return lambda _: _called(dataset)
    raise ConfigError(
        f"The dataset of an infeed cannot be of type {type(dataset).__name__}.",
        rule="It is an iterable of elements, a function that returns one, or a Headrace source.",
    )


def _called(dataset: Callable[[], Any]) -> Iterable[PyTree]:
    made = dataset()
    if not isinstance(made, Iterable):
        raise ConfigError(
            f"The dataset function of the infeed returned a {type(made).__name__}.",
            rule="It returns an iterable of elements, a fresh one at each call.",
        )
    return made


def _batches(source: Source, size: int, seed: int | None, epoch: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the whole batches of one pass over a source; the remainder is dropped."""
    order = epoch_order(seed or 0, epoch, len(source), seed is not None)
    for first in range(0, len(source) - size + 1, size):
        index = order[first : first + size]
        yield {"images": source.read(index, epoch), "labels": source.labels[index]}
