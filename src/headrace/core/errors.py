"""Errors for people: the value that cannot work, the rule it breaks, and what to do about it."""

import difflib
from collections.abc import Iterable
from typing import Self

# EX_TEMPFAIL of sysexits.h: stopped by a signal, nothing is lost, and `headrace resume` continues the run.
INTERRUPTED_EXIT_CODE = 75


class HeadraceError(Exception):
    """Anything the user can fix. The command line prints it without a traceback and exits with `exit_code`."""

    exit_code = 2

    def __init__(self, problem: str, *, rule: str = "", remedy: str = "") -> None:
        self.problem, self.rule, self.remedy = problem, rule, remedy
        super().__init__(" ".join(part for part in (problem, rule, remedy) if part))

    def reworded(self, problem: str) -> Self:
        """Return the error with the problem in other words, such as with the place where it occurred."""
        return type(self)(problem, rule=self.rule, remedy=self.remedy)


class ConfigError(HeadraceError):
    """An option, a value or a combination of options that cannot work."""


class DataError(HeadraceError):
    """A dataset that is missing, truncated or wrong."""


class DownloadError(HeadraceError):
    """A file that could not be downloaded, or whose content is not the published one."""


class CheckpointError(HeadraceError):
    """A checkpoint or run directory that is missing, damaged or does not fit."""


class RunStopped(HeadraceError):
    """Training had to stop: a number that is not finite, not enough memory, not enough devices."""

    exit_code = 3


class ProcessLost(RunStopped):
    """This process had to end because another one of its job died, hangs or failed."""

    # Unlike 2 and 3, this code and the next say that another attempt may succeed: a launcher that restarts jobs tries
    # again.
    exit_code = 76


class RunHung(RunStopped):
    """The run made no progress for longer than was allowed; another attempt may."""

    exit_code = 77


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that `name` was most likely meant to be, or None."""
    choices = list(choices)
    # What begins so comes first: cos is cosine, though const has fewer other letters.
    begins = [choice for choice in choices if name and choice.startswith(name)]
    if len(begins) == 1:
        return begins[0]
    found = difflib.get_close_matches(name, begins, n=1) or difflib.get_close_matches(name, choices, n=1)
    return found[0] if found else None


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return 'Did you mean X?' or, when nothing is near, the list of choices."""
    choices = list(choices)
    guess = nearest(name, choices)
    return f"Did you mean {guess}?" if guess else f"Possible: {', '.join(choices)}."
