"""Polite interruption: SIGTERM, SIGUSR1 or Ctrl-C ask the run to finish its call, save and leave; a second one leaves at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 75  # EX_TEMPFAIL: nothing is lost, the same run can go on with `headrace resume`
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interrupt:
    """Whether somebody asked the run to stop, and with which signal."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name


@contextmanager
def listen() -> Iterator[Interrupt]:
    """Catch the signals while the block runs; in a thread that is not the main one nothing is caught."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt._receive) for number in _SIGNALS}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
