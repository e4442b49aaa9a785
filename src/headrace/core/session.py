"""What a process has one of: all of this package that outlives a run and is no constant, in one object."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from headrace.core.device_access import DeviceAccess
from headrace.core.interpreter import Interpreter
from headrace.core.last_used import LastUsed

_MOST_PROGRAMS = 32  # a pipeline has one for each stage; each holds compiled programs, which take memory of the devices


@dataclass
class Session:
    """The state of a process, for all of its threads."""

    interpreter: Interpreter = field(default_factory=Interpreter)
    devices: DeviceAccess = field(default_factory=DeviceAccess)
    programs: LastUsed = field(default_factory=lambda: LastUsed(_MOST_PROGRAMS))  # traced and compiled by earlier runs
    starts_early: threading.Event = field(default_factory=threading.Event)  # a thread opens the devices, or has
    command_began: float | None = None  # on the performance counter, until the command's first run has taken it
    keeps_freed_memory: bool = False  # the C library does


_sessions = [Session()]


def session() -> Session:
    """Return the session of this process."""
    return _sessions[-1]


@contextmanager
def new_session() -> Iterator[Session]:
    """Begin a session as a new process has it, for the block and all threads: in tests, or where two runs must not
    share anything.
    """
    _sessions.append(Session())
    try:
        yield _sessions[-1]
    finally:
        _sessions.pop()
