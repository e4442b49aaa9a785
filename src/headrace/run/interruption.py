r"""Interruption: SIGTERM, SIGUSR1, SIGHUP (a closed terminal) or Ctrl-C ask the run to finish its call and save.

After that, SIGINT (a second Ctrl-C) exits at once, and so does a SIGTERM that comes some seconds later. At first it
counts once, and the others always: Slurm, which preempts or cancels a job, sends SIGTERM to its processes and to
srun, which forwards it, and means one request. SIGQUIT (Ctrl-\) prints where every thread is, and the run continues.

What does not end soon is left: an image that takes minutes to decode, a device or a file system that hangs.

A thread receives the signals (`signal.set_wakeup_fd`), because the main one may be busy in a long call or
compilation, and Python would run a handler only after that. Exiting at once is safe at any moment: it is what
`kill -9` does.
"""

import os
import select
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from headrace.core.device_access import SAVING
from headrace.core.errors import INTERRUPTED_EXIT_CODE
from headrace.core.process import STOP_SIGNALS, catch_signals, leave_closed_terminal
from headrace.run.training import Compiled

_INSISTS_SECONDS = 5.0  # after the first SIGTERM; another one then is meant
# Without a call, a validation batch or a checkpoint that ends, after a signal. Slurm kills 30 s after SIGTERM.
_PATIENCE_SECONDS = 25.0
_SAVING_SECONDS = 120.0  # the same while a checkpoint is being written: disks may be slow
Programs = list[tuple[str, Compiled]]  # with their purposes
LOOK_SECONDS = 0.1  # between two looks for a signal while programs are compiled
_SHOW_CURSOR = b"\x1b[?25h\n"  # a live progress line hides it


class Interrupt:
    """Whether the run was asked to stop, and by which signal."""

    def __init__(self, quiet: bool = False) -> None:
        self.signal_name: str | None = None
        self.has_begun = False  # the first call: before it there is nothing to save
        self.directory: Path | None = None  # of the run, to say how to resume it
        self._quiet = quiet
        self._times_handled = 0
        self._received = 0.0
        self._moved, self._longest = time.monotonic(), 0.0

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def begin(self) -> None:
        """Note that the first call is next."""
        self.has_begun, self._moved = True, time.monotonic()

    def moved(self) -> None:
        """Note that something has ended: a call, a validation batch, a checkpoint."""
        now = time.monotonic()
        self._moved, self._longest = now, max(self._longest, now - self._moved if self.has_begun else 0.0)

    def receive(self, number: int) -> None:
        """Handle a signal in the listening thread."""
        now = time.monotonic()
        if self.requested:
            # Other signals come more than once for one request (see above); only a person presses Ctrl-C again on
            # purpose.
            insists = number == signal.SIGTERM and now - self._received > _INSISTS_SECONDS
            if number == signal.SIGINT or insists:
                self._exit(f"{signal.Signals(number).name}: leaving at once", 128 + number)
            return
        self.signal_name, self._received, self._moved = signal.Signals(number).name, now, now
        # The terminal is gone: writing to it would fail, and end the run that is about to save.
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if not self._quiet:
            again = "a second one" if number == signal.SIGINT else "SIGINT"
            what = "finishing the call and saving" if self.has_begun else "stopping"
            text = f"headrace: {self.signal_name}: {what}; {again} exits at once"
            print(text, file=sys.stderr, flush=True)

    def look(self, pause: float) -> None:
        """Leave if nothing has ended for too long since the signal; `pause` is the time since the last look."""
        if pause > 1:  # this process was stopped, or the machine suspended
            self._moved += pause
        # Where calls take long, since they were asked to or the network is large, the last of them may take so, too.
        is_saving = any(thread.name == SAVING for thread in threading.enumerate())
        patience = max(_PATIENCE_SECONDS, 2 * self._longest, _SAVING_SECONDS * is_saving)
        if time.monotonic() - self._moved > patience:
            text = f"nothing has ended for {patience:.0f} s; leaving with what the last checkpoint holds"
            self._exit(f"{self.signal_name}: {text}", INTERRUPTED_EXIT_CODE)

    def _exit(self, text: str, code: int) -> None:
        """End the process at once; not at an interactive prompt, where `handle` raises KeyboardInterrupt instead."""
        if hasattr(sys, "ps1"):
            return
        if not self._quiet:
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)
            resumed = f"\nnext        headrace resume {shlex.quote(str(self.directory))}" if self.directory else ""
            # Not by print: a thread that hangs may hold the stream's lock.
            with suppress(OSError):
                os.write(2, f"headrace: {text}{resumed}\n".encode())
        # Not sys.exit, which would wait for threads that may be busy in a call or a compilation.
        os._exit(code)

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
    handlers_before |= catch_signals((signal.SIGQUIT,), lambda *_: None)
    try:
        yield interrupt
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        # Ends the thread: its `read` returns nothing once the last writer is closed.
        os.close(writer)
        thread.join()
        os.close(reader)


def _watch(reader: int, interrupt: Interrupt) -> None:
    looked = time.monotonic()
    while True:
        while not select.select([reader], [], [], LOOK_SECONDS if interrupt.requested else None)[0]:
            interrupt.look(time.monotonic() - looked)
            looked = time.monotonic()
        looked = time.monotonic()
        if not (numbers := os.read(reader, 16)):
            return
        for number in numbers:
            if number in STOP_SIGNALS:
                interrupt.receive(number)
            elif number == signal.SIGQUIT:
                _print_threads()


def _print_threads() -> None:
    """Print where every thread is, the main one last."""
    # Not by `faulthandler`, which reads the frames of threads while they run, and crashed some runs.
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames, main = sys._current_frames(), threading.main_thread().ident
    del frames[threading.get_ident()]
    for ident in sorted(frames, key=lambda ident: ident == main):
        lines = traceback.format_stack(frames[ident])
        print(f"thread {names.get(ident, ident)}:\n{''.join(lines)}", end="", file=sys.stderr, flush=True)
