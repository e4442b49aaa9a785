"""Who may use the devices while a program is compiled.

Threads of a run send images from its first second on. cuDNN records some of its plans as CUDA graphs, when a program is
compiled and when it first runs, and whatever another thread asks of the driver meanwhile fails, or makes the recording
fail. So transfers share the devices, and a compilation of that kind has them to itself.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_changed = threading.Condition()
_num_transfers = 0
_is_exclusive = False


@contextmanager
def transferring() -> Iterator[None]:
    """Use the devices beside other transfers; waits while a thread has them to itself."""
    global _num_transfers
    with _changed:
        _changed.wait_for(lambda: not _is_exclusive)
        _num_transfers += 1
    try:
        yield
    finally:
        with _changed:
            _num_transfers -= 1
            _changed.notify_all()


@contextmanager
def exclusive() -> Iterator[None]:
    """Have the devices to oneself: no transfer is under way, and those that threads begin wait for the end."""
    global _is_exclusive
    with _changed:
        _changed.wait_for(lambda: not _is_exclusive)
        _is_exclusive = True  # before the transfers have ended, so that no others begin
        _changed.wait_for(lambda: not _num_transfers)
    try:
        yield
    finally:
        with _changed:
            _is_exclusive = False
            _changed.notify_all()
