"""This process: the signals that ask it to stop, its terminal, processors, memory and threads."""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from headrace.core.device_access import COMPILING
from headrace.core.interpreter import SWITCH_SECONDS
from headrace.core.session import session

# A scheduler sends SIGTERM or SIGUSR1, Ctrl-C is SIGINT, and a terminal that is closed sends SIGHUP.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

SignalHandler = Callable[[int, FrameType | None], None]


def catch_signals(numbers: Iterable[signal.Signals], handler: SignalHandler) -> dict[signal.Signals, Any]:
    """Set the handler of the signals; return the previous handlers.

    SIGHUP stays ignored where nohup ignores it: what it starts is meant to outlive its terminal. A shell also ignores
    SIGINT for what it starts with `&`, but whoever sends it to such a run means it.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    caught = [number for number in numbers if not (ignored and number == signal.SIGHUP)]
    return {number: signal.signal(number, handler) for number in caught}


def leave_closed_terminal() -> None:
    """Redirect standard output and error to nowhere if their terminal was closed: printing would end the program."""
    for handle in (1, 2):
        try:
            os.write(handle, b"")  # a closed terminal fails even at this; a pipe or a file accepts it
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, handle)
            os.close(nowhere)


def leave_closed_pipe() -> bool:
    """Send standard output nowhere and ask the process to stop as a closed terminal does (`headrace train | head`).

    Return False if the process would die of that signal instead of saving: nobody has caught it.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    print("headrace: the program that reads the output has ended", file=sys.stderr, flush=True)
    signal.raise_signal(signal.SIGHUP)
    return True


def num_processors() -> int:
    """Return the number of processors that this process may use; all of them where the system does not say (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_began() -> float:
    """Return when this process began, in seconds since the epoch; where the system does not say, ten seconds ago."""
    try:
        # Its 22nd number counts from the start of the machine; the name before them may contain spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time() - 10


_LONGEST_START = 10.0  # of Python, with the commands' entrance


def start_command() -> None:
    """Say that this process runs one command, which began with the process.

    A shell that became this process may be older than the command (`exec headrace train` after a download).
    """
    age = time.time() - process_began()
    session().command_began = time.perf_counter() - (age if 0 <= age <= _LONGEST_START else 0.0)


def take_command_began() -> float | None:
    """Return when the command of this process was typed, on the performance counter, to the first who asks.

    None to all others, and where Python code runs: what it did before is no part of a run.
    """
    ours = session()
    began, ours.command_began = ours.command_began, None
    return began


_MAY_BE_LEFT = (COMPILING, "feed", "read", "decode", "resident")  # beginnings of names


def leave_threads(code: int, *, surely: bool = False) -> None:
    """End the process with this exit code if it compiles or decodes, since Python would wait; or `surely`.

    A program that was interrupted leaves such threads: neither a compilation nor the decoding of an image can be ended.
    """
    if surely or any(thread.name.startswith(_MAY_BE_LEFT) for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed, or nobody reads it
                stream.flush()
        os._exit(code)


def leave_process(code: int) -> None:
    """End the process with this exit code once its threads and exit functions are done and its output is flushed.

    Python would then take all modules apart, which takes 0.3 to 0.45 s with JAX and does nothing that anybody needs.
    That is left to it where somebody looks on: a debugger, a profiler, `python -i`; or where output cannot be written,
    which it reports.
    """
    watched = sys.flags.inspect or sys.gettrace() or sys.getprofile()
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    if watched or (monitoring and any(monitoring.get_tool(number) for number in range(6))):
        return
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, and for pools of them
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


@contextmanager
def tuned_interpreter(switch_seconds: float = SWITCH_SECONDS) -> Iterator[None]:
    """Let threads get Python's lock after this time, and search less often for garbage, while the block runs.

    Blocks of several threads may overlap: the shortest time counts, and after the last all is as it was.
    """
    interpreter = session().interpreter
    interpreter.ask(switch_seconds)
    try:
        yield
    finally:
        interpreter.leave(switch_seconds)


# Of glibc's mallopt: (parameter, value that keeps what is freed, value after that).
_MALLOC = (
    (-4, 0, 65_536),  # most blocks that are mapped
    (-1, 2**31 - 1, 128 << 10),  # free memory at the end of the heap that is not returned
    (-2, 64 << 20, 128 << 10),  # memory that is taken at a time
    # Size from which a block is mapped. glibc raises it by itself, up to this, until any of these settings is made.
    (-3, 32 << 20, 32 << 20),
)


def keep_freed_memory(*, keep: bool) -> None:
    """Let the C library keep freed memory for the next allocations, or return it to the system again.

    XLA allocates the working memory of a program at each call. If it was returned to the system, it is mapped again and
    every page filled with zeros: a tenth to a fifth of the time of a small inference. Not for training: threads that
    decode images would wait for each other's allocations. Nothing is set before memory is kept for the first time.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or sys.platform != "linux" or keep == session().keeps_freed_memory:
        return
    session().keeps_freed_memory = keep
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # it is not there, or does nothing, where the C library is not glibc
        for parameter, kept, after in _MALLOC:
            mallopt(parameter, kept if keep else after)
