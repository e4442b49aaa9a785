"""Read the metrics of calls while the next call runs."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


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
