"""A thread that settles calls: it waits for each call's numbers and writes them down while the next call is launched.

It needs a thread because launching is not always instant: on a GPU the host walks a device loop's steps, so that the
launch of a call takes as long as the call.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Settler:
    """Calls are settled in order; at most one waits behind the one that is being launched."""

    def __init__(self, settle: Callable[[Any], None]) -> None:
        self._settle = settle
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="settle")
        self._last: Future[None] | None = None

    def submit(self, call: Any) -> None:
        """Take a launched call; first wait for the one before it, and raise what went wrong there."""
        last, self._last = self._last, self._worker.submit(self._settle, call)
        if last is not None:
            last.result()

    def drain(self) -> None:
        """Wait for the last call; raise what went wrong there."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """End the thread. What it had left to do is done, its errors are not raised."""
        self._worker.shutdown(wait=True)
