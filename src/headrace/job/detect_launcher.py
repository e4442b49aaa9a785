"""Detect which process of a job this is: a pure function of the environment, by the rows of `launchers/`."""

from dataclasses import replace

from headrace.core.errors import ConfigError
from headrace.job.launchers import LAUNCHERS
from headrace.job.launchers.row import Launcher
from headrace.job.launchers.unread import UNREAD
from headrace.job.process_info import ProcessInfo
from headrace.job.variables import (
    COORDINATOR,
    JOIN_SECONDS,
    NUM_PROCESSES,
    PROCESS,
    SECRET,
    SILENCE_SECONDS,
    TOGETHER,
    Environ,
    says_alone,
    seconds_of,
)


def detect_process_info(environ: Environ, *, distributed: bool = False) -> ProcessInfo | None:
    """Return which process this is, or None if nothing in the environment describes a job.

    With `distributed`, the option of that name, TF_CONFIG is read too and takes precedence.
    """
    if says_alone(environ):
        return None
    launchers = (row for row in LAUNCHERS if distributed or not row.asked_for)
    launcher = next((row for row in launchers if row.is_present(environ)), None)
    if launcher is None:
        _check_not_incomplete(environ, distributed)
        return None
    info = launcher.read(environ)
    if distributed and info.num_replicas is not None:
        raise ConfigError(
            "--distributed is given under headrace launch.",
            rule="The launcher already defines which processes belong together.",
            remedy="Remove --distributed.",
        )
    # 0 processes: only JAX knows their number, later.
    if info.num_processes and not 0 <= info.process < info.num_processes:
        raise ConfigError(
            f"{launcher.name} says that this is process {info.process} of {info.num_processes}.",
            rule="Processes are numbered from 0.",
        )
    _check_no_contradiction(launcher, info, environ)
    return replace(
        info,
        join_seconds=seconds_of(environ, JOIN_SECONDS, info.join_seconds),
        silence_seconds=seconds_of(environ, SILENCE_SECONDS, info.silence_seconds),
        secret=environ.get(SECRET) or info.secret,
    )


def _check_not_incomplete(environ: Environ, distributed: bool) -> None:
    """Raise ConfigError if there are other processes but nothing tells which one this is."""
    if distributed:
        raise ConfigError(
            "--distributed is given, but nothing defines which processes belong together.",
            rule="It reads TF_CONFIG, or the variables of mpirun, srun or headrace launch.",
            remedy='export TF_CONFIG=\'{"cluster":{"worker":["host0:3636","host1:3636"]},'
            '"task":{"type":"worker","index":0}}\', or start with mpirun.',
        )
    if incomplete := [name for name in (NUM_PROCESSES, COORDINATOR) if environ.get(name)]:
        raise ConfigError(
            f"{' and '.join(incomplete)} is set, so there are other processes, but nothing tells which one this is.",
            rule=TOGETHER,
            remedy=f"Set {PROCESS} as well, or unset {' and '.join(incomplete)}.",
        )


def _check_no_contradiction(launcher: Launcher, info: ProcessInfo, environ: Environ) -> None:
    """Raise ConfigError if a launcher contradicts explicit variables, such as some exported for an earlier job."""
    if not launcher.by_hand or not info.num_processes:
        return
    for other in LAUNCHERS:
        if not other.counts or not other.is_present(environ):
            continue
        # The explicit variables have the coordinator's address; the other launcher need not know it.
        found = other.read({**environ, COORDINATOR: info.coordinator})
        size, rank = found.num_processes, found.process
        if size > 1 and (rank, size) != (info.process, info.num_processes):
            raise ConfigError(
                f"{launcher.name} says process {info.process} of {info.num_processes}, "
                f"and {other.name} says process {rank} of {size}.",
                rule="Both describe the same process.",
                remedy=f"Unset the variables of one of them ({launcher.name}: probably exported for an earlier job).",
            )


def refuse_unread_launcher(environ: Environ) -> None:
    """Raise ConfigError if this process, which joins no job, seems to be one of several.

    Each would train a model of its own and end with success. Only commands that join a job ask: reading options, or a
    prediction for each process, needs no others.
    """
    if says_alone(environ):
        return
    for launcher in (*(unread for row in LAUNCHERS for unread in row.unread), *UNREAD):
        if said := launcher.others(environ):
            raise ConfigError(
                f"This process seems to be one of several, started by {launcher.name} ({said}), but cannot join them.",
                rule="Processes that do not know of each other would each train a model of their own.",
                remedy=f"{launcher.remedy}. If it is to train alone: {NUM_PROCESSES}=1.",
            )
