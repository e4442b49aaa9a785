"""What a launcher says about itself: how it is recognised, and how its variables are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.job.process_info import ProcessInfo
from headrace.job.variables import COORDINATOR, NUM_PROCESSES, PROCESS, Environ

if TYPE_CHECKING:
    from headrace.job.launch_request import LaunchRequest

BY_HAND = f"Set {PROCESS}, {NUM_PROCESSES} and {COORDINATOR}=HOST_OF_PROCESS_0:61440 for each process"


@dataclass(frozen=True, kw_only=True)
class Unread:
    """Variables that tell of other processes, but not all that joining them needs.

    `others` returns what the environment says of other processes, or an empty text.
    """

    name: str
    others: Callable[[Environ], str]
    remedy: str = BY_HAND


@dataclass(frozen=True, kw_only=True)
class Driver:
    """A program that starts the processes of `headrace launch`, on other hosts, too.

    `command`(request, command of one process, environment, number of the job) returns its command line.
    """

    program: str
    command: "Callable[[LaunchRequest, Sequence[str], Environ, int], list[str]]"


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Something that starts processes: how to recognise it, and how to read its variables."""

    name: str
    variables: tuple[str, ...]  # from which it is read
    is_present: Callable[[Environ], bool]
    read: Callable[[Environ], ProcessInfo]
    asked_for: bool = False  # read only where --distributed says so
    by_hand: bool = False  # its variables may have been exported for an earlier job
    counts: bool = False  # numbers all processes of a job, so that variables set by hand must agree
    unread: tuple[Unread, ...] = ()  # what it may say that does not suffice
    driver: Driver | None = None


def sized(rank: str, size: str) -> Callable[[Environ], str]:
    """Return the text of a launcher that numbers its processes by these two variables."""

    def others(environ: Environ) -> str:
        count = environ.get(size, "").strip()
        if not count.isdecimal() or int(count) < 2:
            return ""
        return f"{rank}={environ[rank]}, {size}={count}" if environ.get(rank) else f"{size}={count}"

    return others


def half_of(names: tuple[str, ...], size: str) -> Callable[[Environ], str]:
    """Return the text of a launcher of whose variables some are there: those of one process alone do not count."""

    def others(environ: Environ) -> str:
        here = [name for name in names if environ.get(name)]
        if not here or environ.get(size, "").strip() == "1":
            return ""
        missing = [name for name in names if name not in here]
        return f"{', '.join(f'{name}={environ[name]}' for name in here)}, without {' and '.join(missing)}"

    return others
