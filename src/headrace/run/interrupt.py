"""Interruption: SIGTERM, SIGUSR1, SIGHUP (a closed terminal) or Ctrl-C ask the run to finish its call and save.

After that, SIGINT (a second Ctrl-C) exits at once. The others count once: Slurm, which preempts or cancels a job, sends
SIGTERM to its processes and to srun, which forwards it, and means one request. SIGQUIT (Ctrl-\\) prints where every
thread is, and the run continues.

A thread receives the signals (`signal.set_wakeup_fd`), because the main one may be busy in a long call or compilation,
and Python would run a handler only after that. Exiting at once is safe at any moment: it is what `kill -9` does.
"""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from headrace.core.signals import STOP_SIGNALS, catch_signals, leave_closed_terminal

_SHOW_CURSOR = b"\x1b[?25h\n"  # a live progress line hides it


class Interrupt:
    """Whether the run was asked to stop, and by which signal."""

    def __init__(self, quiet: bool = False) -> None:
        self.signal_name: str | None = None
        self._quiet = quiet
        self._times_handled = 0

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def receive(self, number: int) -> None:
        """Handle a signal in the listening thread."""
        if self.requested:
            # Other signals come more than once for one request (see above); only a person presses Ctrl-C again on
            # purpose.
            if number == signal.SIGINT:
                _exit(number)
            return
        self.signal_name = signal.Signals(number).name
        # The terminal is gone: writing to it would fail, and end the run that is about to save.
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if not self._quiet:
            again = "a second one" if number == signal.SIGINT else "SIGINT"
            text = f"headrace: {self.signal_name}: finishing the call and saving; {again} exits at once"
            print(text, file=sys.stderr, flush=True)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal in the main thread: a second one ends the run of an interactive session, not the session."""
        self._times_handled += 1
        if self._times_handled > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def listen(*, quiet: bool = False) -> Iterator[Interrupt]:
    """Catch the signals while the block runs; in a thread that is not the main one nothing is caught.

    `quiet`: another process prints that the signal was received.
    """
    interrupt = Interrupt(quiet)
    # Python allows handlers in the main thread only; a notebook server may call from another.
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    reader, writer = os.pipe()
    # Python's handler in C writes there; a full pipe must not block it.
    os.set_blocking(writer, False)
    thread = threading.Thread(target=_watch, args=(reader, interrupt), name="signals", daemon=True)
    thread.start()
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handlers_before = catch_signals(STOP_SIGNALS, interrupt.handle)
    with suppress(OSError, ValueError, AttributeError):  # no file behind standard error, as in some notebooks
        faulthandler.register(signal.SIGQUIT, all_threads=True)
    try:
        yield interrupt
    finally:
        faulthandler.unregister(signal.SIGQUIT)
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        # Ends the thread: its `read` returns nothing once the last writer is closed.
        os.close(writer)
        thread.join()
        os.close(reader)


def _watch(reader: int, interrupt: Interrupt) -> None:
    while numbers := os.read(reader, 16):
        for number in numbers:
            if number in STOP_SIGNALS:
                interrupt.receive(number)


def _exit(number: int) -> None:
    """End the process at once, except at an interactive prompt, where `handle` raises KeyboardInterrupt instead."""
    if hasattr(sys, "ps1"):
        return
    if os.isatty(1):
        os.write(1, _SHOW_CURSOR)
    # Not sys.exit, which would wait for threads that may be busy in a call or a compilation.
    os._exit(128 + number)
