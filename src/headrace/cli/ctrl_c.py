"""Ctrl-C ends a command with a word and exit code 130, whatever Python is doing.

Where a command works, KeyboardInterrupt is right: what is half written is removed. While modules are imported it is
not: thrown into the initialization of a C extension it crashed Python, or became an ImportError, or was lost. Nothing
is half written then, and the process can be left. This module imports as little as can be, since it is the first.
"""

import _thread
import atexit
import os
import signal
import time

TYPE_CHECKING = False  # for type checkers, as in typing, which takes longer to import than all of this
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_PATIENCE_SECONDS = 10.0  # for what KeyboardInterrupt ends: some library may have swallowed it, or wait for a thread


def catch_ctrl_c() -> None:
    """Answer Ctrl-C from here on, unless somebody else does, or it is ignored (a shell's `&`)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _CtrlC())
        # The first to be registered is the last to be called. What remains is the interpreter's own end, a tenth of a
        # second in which it would give the signal back to the system, which ends the process without its exit code.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def leave_on_ctrl_c() -> None:
    """Leave at once on Ctrl-C from here on: the command has done its work, and nobody catches KeyboardInterrupt."""
    if isinstance(signal.getsignal(signal.SIGINT), _CtrlC):
        signal.signal(signal.SIGINT, lambda *_: _leave())


class _CtrlC:
    def __init__(self) -> None:
        self._comes_again = False

    def __call__(self, _number: int, frame: "FrameType | None") -> None:
        if self._comes_again or _is_importing(frame):
            _leave()
        self._comes_again = True
        # Not a threading.Thread: this may have interrupted the start of one, which holds a lock.
        _thread.start_new_thread(_leave_later, ())
        raise KeyboardInterrupt


def _is_importing(frame: "FrameType | None") -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _leave_later() -> None:
    time.sleep(_PATIENCE_SECONDS)
    _leave()


def _leave() -> "NoReturn":
    # Not by print and sys.exit: this may have interrupted a print, and threads that are busy would be waited for.
    for number, text in ((1, b"\x1b[?25h"), (2, b"headrace: interrupted\n")):
        if number == 2 or os.isatty(1):  # a live line hides the cursor
            try:
                os.write(number, text)
            except OSError:  # the terminal is closed
                continue
    os._exit(INTERRUPTED)
