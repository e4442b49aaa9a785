"""Who may use the devices while a program is compiled.

Threads of a run send images from its first second on. cuDNN records some of its plans as CUDA graphs, when a program
is compiled and when it first runs, and whatever another thread asks of the driver meanwhile fails, or makes the
recording fail. So transfers share the devices, and a compilation of that kind has them to itself.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceAccess:
    """The devices of a process, for its threads: shared by transfers, or one compilation's alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_transfers = 0
        self._is_exclusive = self._is_left = False

    @contextmanager
    def transferring(self) -> Iterator[None]:
        """Use the devices beside other transfers; waits while a thread has them to itself."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_exclusive or self._is_left)
            if self._is_left:
                raise RuntimeError("The run that wanted to transfer something has been interrupted.")
            self._num_transfers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_transfers -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Use the devices alone: wait for the transfers under way, and let new ones wait for the end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_exclusive)
            self._is_exclusive = True  # before the transfers have ended, so that no others begin
        try:  # already here: a signal that ends the wait must not leave all other threads waiting
            with self._changed:
                self._changed.wait_for(lambda: not self._num_transfers)
            yield
        finally:
            with self._changed:
                self._is_exclusive = self._is_left = False
                self._changed.notify_all()

    def leave(self, *, left: bool = True) -> None:
        """Let no thread of a run wait for one that has the devices to itself, as the run ends; until another begins."""
        with self._changed:
            self._is_left = left and self._is_exclusive
            self._changed.notify_all()


COMPILING, SAVING = "compile", "checkpoint"  # names of threads
