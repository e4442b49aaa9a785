"""Who may use the devices while a program is compiled.

Threads of a run send images from its first second on. cuDNN records some of its plans as CUDA graphs, when a program
is compiled and when it first runs, and whatever another thread asks of the driver meanwhile fails, or makes the
recording fail. So transfers share the devices, and a compilation of that kind has them to itself.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_changed = threading.Condition()
_num_transfers = 0
_is_exclusive = False
_is_left = False


@contextmanager
def transferring() -> Iterator[None]:
    """Use the devices beside other transfers; waits while a thread has them to itself."""
    global _num_transfers
    with _changed:
        _changed.wait_for(lambda: not _is_exclusive or _is_left)
        if _is_left:
            raise RuntimeError("The run that wanted to transfer something has been interrupted.")
        _num_transfers += 1
    try:
        yield
    finally:
        with _changed:
            _num_transfers -= 1
            _changed.notify_all()


@contextmanager
def exclusive() -> Iterator[None]:
    """Use the devices alone: wait for the transfers under way, and let new ones wait for the end."""
    global _is_exclusive, _is_left
    with _changed:
        _changed.wait_for(lambda: not _is_exclusive)
        _is_exclusive = True  # before the transfers have ended, so that no others begin
    try:  # already here: a signal that ends the wait must not leave all other threads waiting
        with _changed:
            _changed.wait_for(lambda: not _num_transfers)
        yield
    finally:
        with _changed:
            _is_exclusive = _is_left = False
            _changed.notify_all()


def leave_devices(*, left: bool = True) -> None:
    """Let no thread of a run wait for one that has the devices to itself, as the run ends; until another begins."""
    global _is_left
    with _changed:
        _is_left = left and _is_exclusive
        _changed.notify_all()


COMPILING, SAVING = "compile", "checkpoint"  # names of threads
