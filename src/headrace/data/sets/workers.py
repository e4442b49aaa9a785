"""Worker processes for a dataset from Python whose items are slow to make and hold Python's lock meanwhile.

Items are read by number, so that the order of a run, and its resume, are what they are without them. The processes are
started from a clean one (forkserver, or spawn), never forked from this one: JAX has threads, which do not survive that.
"""

import multiprocessing
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from headrace.core.errors import ConfigError, DataError
from headrace.core.process import num_processors

METHODS = ("forkserver", "spawn")
_RULE = (
    "A worker process gets the dataset by pickle: its class is at the top level of a module that can be imported, not "
    "of a notebook or of `python -c`, and it holds no open files, locks, lambdas or generators."
)
_REMEDY = (
    "Put the class into a file of its own and import it, and open files in __getitem__ when they are first needed; or "
    "leave hr.Workers out, and threads read the items."
)


class Workers:
    """A dataset with len(data) and data[i], whose items `num_processes` processes make side by side.

    Give it wherever the dataset itself is given: model.fit(hr.Workers(data, 4)). They start when the first item is
    asked for and end with `close()`, with a `with` block, or when nothing refers to them any more. A script needs
    `if __name__ == "__main__":` around what it does, as always with processes.
    """

    def __init__(self, data: Any, num_processes: int = 0, *, method: str = "forkserver") -> None:
        """Take the dataset; without a number, a process for each processor. What cannot be sent is refused here."""
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ConfigError(
                f"Worker processes are asked for a {type(data).__name__}.",
                rule="They read items by number, from an object with len(data) and data[i].",
                remedy="A generator is read by this process alone: hr.Stream(make_items, length=...).",
            )
        if method not in METHODS:
            raise ConfigError(f"method is {method!r}.", rule=f"It is {' or '.join(METHODS)}.")
        if num_processes < 0:
            raise ConfigError(f"num_processes is {num_processes}.", rule="It is a number of processes, 0 for all.")
        self.data, self.num_processes, self.method = data, num_processes or num_processors(), method
        try:
            self._sent = pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # whatever an object's pickling raises
            raise ConfigError(
                f"The dataset, a {type(data).__name__}, cannot be sent to worker processes: {error}.",
                rule=_RULE,
                remedy=_REMEDY,
            ) from None
        self._pool: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Workers({type(self.data).__name__} of {len(self):,} items, {self.num_processes} processes)"

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> Any:
        """Return an item, made by one of the processes."""
        return self._ask(_item, number)

    def label(self, pick: Callable[[Any], Any], number: int) -> Any:
        """Return what `pick`, a function of a module, takes of an item: only that is sent back."""
        return self._ask(_picked, number, pick)

    def over(self, data: Any) -> "Workers":
        """Return as many processes for another form of the dataset."""
        return self if data is self.data else Workers(data, self.num_processes, method=self.method)

    def close(self) -> None:
        """End the processes; another item starts them again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, function: Callable[..., Any], number: int, *more: Any) -> Any:
        if not -len(self) <= number < len(self):
            raise IndexError(f"item {number} of {len(self)}")  # ends a loop over the items
        try:
            return self._started().submit(function, int(number), *more).result()
        except BrokenProcessPool:
            self.close()
            raise DataError(
                f"A worker process ended while item {number:,} was read, or could not start.",
                rule="What it printed before says why: memory that ran out, or a script whose work is not inside of "
                '`if __name__ == "__main__":`.',
                remedy="Fewer processes take less memory; without hr.Workers, threads read the items.",
            ) from None

    def _started(self) -> ProcessPoolExecutor:
        with self._lock:
            if self._pool is None:
                context = multiprocessing.get_context(self.method)
                self._pool = ProcessPoolExecutor(self.num_processes, context, _receive, (self._sent,))
            return self._pool


_received: Any = None  # in a worker process: the dataset, or what went wrong


def _receive(sent: bytes) -> None:
    global _received
    try:
        _received = pickle.loads(sent)  # from the process that started this one
    except Exception as error:
        _received = ConfigError(
            f"The dataset cannot be made again in a worker process: {error}.", rule=_RULE, remedy=_REMEDY
        )


def _item(number: int) -> Any:
    if isinstance(_received, ConfigError):
        raise _received
    return _portable(_received[number])


def _picked(number: int, pick: Callable[[Any], Any]) -> Any:
    return pick(_item(number))


def _portable(item: Any) -> Any:
    """Return an item without tensors of torch, which are sent by files of their own: images have the channels last."""
    if isinstance(item, tuple | list):
        return tuple(map(_portable, item))
    if isinstance(item, dict):
        return {name: _portable(value) for name, value in item.items()}
    if hasattr(item, "detach"):
        from headrace.data.sets.objects import array_of

        return array_of(item) if item.ndim > 1 else item.detach().cpu().numpy()
    return item
