"""A stream from Python: items that are read one after the other while a run trains, and are never all in memory.

An item's place is its number in its epoch. Blocks ask for places in their order, so that reading the stream once is
enough; a shuffle buffer with a seed makes the order another one in each epoch. What is read is a function of (stream,
seed, epoch), but a place can only be reached by reading what comes before it: that is how a run resumes.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from headrace.core.errors import ConfigError, DataError, HeadraceError
from headrace.data.feeding.order import drawn
from headrace.data.sets.objects import Item, feature_names, item_of, undecoded
from headrace.data.sets.source import Source

EXAMPLE = """For example:
    model.fit(hr.Stream(make_items, length=50_000, num_classes=10), steps_per_epoch=100)
    model.fit(hr.Stream(load_dataset(NAME, split="train", streaming=True), length=50_000), validation_data=val)
    model.fit(list(itertools.islice(make_items(), 1000)), validation_split=0.1)"""
_PEEKED = 32  # items whose sizes decide the network's input size
_DRAWS = 4096  # random numbers made at a time
# Writes the image of an item at (sample, epoch) into an array.
WriteItem = Callable[[Any, int, int, np.ndarray], None]


class Stream:
    """Items (image, label), or dicts with `image` and `label`, that are read while a run trains and not kept.

    `items` is an iterable that can be read again, a function that returns a new iterator, or an iterator, which goes on
    from epoch to epoch. An epoch has `length` items; datasets of Hugging Face say it themselves, and their class names.
    `shuffle` is how many items wait to be drawn from, 0 for none; the seed decides what is drawn.
    """

    def __init__(
        self,
        items: Iterable[Any] | Callable[[], Iterator[Any]],
        *,
        length: int | None = None,
        num_classes: int | None = None,
        class_names: Sequence[str] = (),
        shuffle: int = 1000,
        seed: int = 0,
    ) -> None:
        """Take the items; nothing is read yet."""
        if not callable(items) and not isinstance(items, Iterable):
            raise ConfigError(
                f"The items of the stream are a {type(items).__name__}.",
                rule="They are an iterable, an iterator, or a function that returns one.",
                remedy=EXAMPLE,
            )
        self._items: Any = undecoded(items)
        self.can_restart = callable(items) or not isinstance(items, Iterator)
        self.class_names = tuple(map(str, class_names)) or feature_names(items)
        self.num_classes = num_classes or len(self.class_names)
        known = _known_length(items) if length is None else length
        self.shuffle, self.seed = shuffle, seed
        self._first: list[Any] = []  # read before the run, of an iterator that cannot be read again
        if not isinstance(known, int) or known < 1:
            raise ConfigError(
                f"The length of the stream is {'not known' if known is None else repr(known)}.",
                rule="length is how many items an epoch has: those that there are, or any number of an endless stream.",
                remedy=EXAMPLE,
            )
        self.length = known
        if self.num_classes < 2 or (self.class_names and len(self.class_names) != self.num_classes):
            raise ConfigError(
                f"The stream has {self.num_classes or 'an unknown number of'} classes and {len(self.class_names)} "
                "names of classes.",
                rule="num_classes or class_names says how many there are, two at least: it is not read to find out.",
                remedy=EXAMPLE,
            )
        if shuffle < 0:
            raise ConfigError(f"shuffle is {shuffle}.", rule="It is a number of items, 0 for none.")

    def __repr__(self) -> str:
        return f"Stream({self.length:,} items an epoch, {self.num_classes:,} classes, shuffle={self.shuffle})"

    def peek(self) -> list[Item]:
        """Return some of the first items; they are read again by the run, or kept for it."""
        iterator, first = iter(self._items) if not self.can_restart else self._iterate(), []
        for _ in range(min(_PEEKED, self.length)):
            try:
                first.append(next(iterator))
            except StopIteration:
                break
        if not self.can_restart:
            self._first = first
        if not first:
            raise DataError("The stream has no items.", remedy="An iterator can be used only once: give a new one.")
        return [item_of(each) for each in first]

    def started(self, epoch: int) -> Iterator[Item]:
        """Yield the items of a pass, in the order of its epoch."""
        given = self._items
        if hasattr(given, "set_epoch"):  # an order of their own, as datasets of Hugging Face may have
            given.set_epoch(epoch)
        items = map(item_of, self._iterate())
        return _drawn_from(items, self.shuffle, self.seed, epoch) if self.shuffle > 1 else items

    def label_of(self, item: Item) -> int:
        """Return the number of an item's class."""
        label = item.label.item() if hasattr(item.label, "item") else item.label
        if isinstance(label, str):
            if label not in self.class_names:
                raise DataError(
                    f"The class {label!r} is unknown.",
                    rule="Names of classes are those of class_names." if self.class_names else "Labels are numbers.",
                    remedy="Give the stream its class_names.",
                )
            return self.class_names.index(label)
        if not isinstance(label, int) or not 0 <= label < self.num_classes:
            raise DataError(
                f"A label of the stream is {label!r}.",
                rule=f"Labels are whole numbers from 0 to {self.num_classes - 1}.",
            )
        return label

    def _iterate(self) -> Iterator[Any]:
        if self.can_restart:
            given: Any = self._items() if callable(self._items) else self._items
            return iter(given)
        return chain(self._first, self._items)  # which does not close a generator when it is dropped


def _known_length(items: Any) -> int | None:
    """Return the length that a dataset states."""
    if hasattr(items, "__len__"):
        return len(items)
    splits, split = getattr(getattr(items, "info", None), "splits", None), str(getattr(items, "split", ""))
    if isinstance(splits, Mapping) and split in splits:
        return int(splits[split].num_examples)
    return None


def _drawn_from(items: Iterator[Item], size: int, seed: int, epoch: int) -> Iterator[Item]:
    """Yield items in the order of a shuffle buffer, a pure function of (items, size, seed, epoch)."""
    buffer: list[Item] = []
    draws = _draws(seed, epoch)
    for item in items:
        if len(buffer) < size:
            buffer.append(item)
            continue
        place = next(draws) % size
        yield buffer[place]
        buffer[place] = item
    while buffer:
        place = next(draws) % len(buffer)
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        yield buffer.pop()


def _draws(seed: int, epoch: int) -> Iterator[int]:
    turn = 0
    while True:
        yield from drawn(seed, epoch, turn, np.arange(_DRAWS), "stream").tolist()
        turn += 1


class _Pass:
    """One reading of the stream: what was read and is still to be asked for."""

    def __init__(self, items: Iterator[Item]) -> None:
        self.items, self.next, self.held = items, 0, dict[int, Item]()

    def pull(self, *, keep: bool) -> None:
        item = next(self.items)
        if keep:
            self.held[self.next] = item
        self.next += 1


class _Places:
    """The items of a stream by (epoch, place), for threads that ask for the places of a block in any order."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._passes, self._lock = stream, dict[int, _Pass](), threading.Lock()

    def begin(self, places: np.ndarray, epochs: np.ndarray) -> None:
        """Expect the places of a block: go to the first of each epoch, so that nothing before it is kept."""
        epochs = np.broadcast_to(epochs, places.shape)
        with self._lock:
            for epoch in np.unique(epochs).tolist():
                self._go(epoch, int(places[epochs == epoch].min()))

    def take(self, epoch: int, place: int) -> Item:
        """Return the item at a place, once."""
        with self._lock:
            number, at = self._key(epoch, place)
            found = self._passes.get(number)
            if found is None or (at < found.next and at not in found.held):
                self._go(epoch, place)
                found = self._passes[number]
            while at not in found.held:
                self._pull(found, epoch, place, keep=True)
            return found.held.pop(at)

    def _go(self, epoch: int, place: int) -> None:
        number, at = self._key(epoch, place)
        found = self._passes.get(number)
        if found is None or (at < found.next and at not in found.held):
            if found is not None and not self._stream.can_restart:
                raise DataError(
                    f"Item {at:,} of the stream is asked for again, and {found.next:,} were read.",
                    rule="An iterator can be used only once.",
                    remedy="Give a function that returns a new one: hr.Stream(make_items, ...), without calling it.",
                )
            found = self._passes[number] = _Pass(self._stream.started(number))
            for old in [each for each in self._passes if each < number - 1]:  # a block spans two epochs at most
                del self._passes[old]
        for old in [each for each in found.held if each < at - self._stream.length]:
            del found.held[old]  # of an iterator: items that steps of the last epoch left out
        while found.next < at:
            self._pull(found, epoch, place, keep=found.next >= at)

    def _key(self, epoch: int, place: int) -> tuple[int, int]:
        """Return (number of the pass, place in it): an iterator goes on from epoch to epoch."""
        return (epoch, place) if self._stream.can_restart else (0, epoch * self._stream.length + place)

    def _pull(self, found: _Pass, epoch: int, place: int, *, keep: bool) -> None:
        try:
            found.pull(keep=keep)
        except StopIteration:
            raise DataError(
                f"The stream ended after {found.next:,} items, and item {place:,} of epoch {epoch} is needed.",
                rule=f"Its length is {self._stream.length:,}.",
                remedy="Give the length that it has. An iterator has to last for all epochs; a function that returns a "
                "new one is called for each.",
            ) from None
        except HeadraceError:
            raise
        except Exception as error:
            raise DataError(f"The stream failed after {found.next:,} items: {error!r}.") from error


def stream_source(
    stream: Stream, image_hwc: tuple[int, int, int], dtype: np.dtype, write: WriteItem, *, pictures: bool
) -> Source:
    """Return the training split that a stream is. Its labels become known as its images are read."""
    places, labels = _Places(stream), np.zeros(stream.length, np.int32)
    shown = labels.view()

    def read_into(indices: np.ndarray, epochs: np.ndarray | int, out: np.ndarray) -> None:
        when = np.broadcast_to(np.asarray(epochs), indices.shape)
        for position, (place, epoch) in enumerate(zip(indices.tolist(), when.tolist(), strict=True)):
            item = places.take(epoch, place)
            labels[place] = stream.label_of(item)
            write(item.image, place, epoch, out[position])

    return Source(
        labels=shown,
        image_hwc=image_hwc,
        num_distinct=stream.length,
        read_into=read_into,
        begin=places.begin,
        dtype=dtype,
        slow=pictures,
    )
