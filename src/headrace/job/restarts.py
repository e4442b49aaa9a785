"""Restarts: when, after how long, on which hosts, and what the processes are told about it.

Only what another attempt can fix is tried again: a process that died, hung or failed unexpectedly. Errors whose
cause remains (an option, the data, a full disk, a loss that is not finite) and signals end the job.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headrace.core.errors import INTERRUPTED_EXIT_CODE, HeadraceError, RunStopped
from headrace.job.launch_request import LaunchRequest
from headrace.job.variables import BATCH_REPLICAS, RESTART

# The last is that of a shell's Ctrl-C.
_FINAL_CODES = (0, HeadraceError.exit_code, RunStopped.exit_code, INTERRUPTED_EXIT_CODE, 130)
_FIRST_SECONDS, _MOST_SECONDS = 1.0, 60.0  # of waiting before a restart; doubled each time
_CONNECT_SECONDS = 10
_NOT_FOUND = 127  # of a shell


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How an attempt ended: its exit code, what happened, and whether it was asked to stop."""

    code: int
    reason: str = ""
    asked_to_stop: bool = False

    @property
    def is_final(self) -> bool:
        """Whether another attempt would be pointless or unwanted."""
        return self.asked_to_stop or self.code in (*_FINAL_CODES, _NOT_FOUND)


Attempt = Callable[[LaunchRequest, Mapping[str, str]], JobEnd]


def run_with_restarts(
    request: LaunchRequest, attempt: Attempt, *, answers: Callable[[str], bool], first_seconds: float = _FIRST_SECONDS
) -> int:
    """Run a job, restart it after a loss until it ends by itself or no restarts are left, and return the exit code.

    `attempt` starts the processes with additional variables and waits for them; `answers(host)` says whether a host is
    reachable.
    """
    now, number, reason, batch = request, 0, "", dict[str, str]()
    while True:
        known = {RESTART: f"{number}/{request.max_restarts}:{reason}"} if request.max_restarts else {}
        end = attempt(now, known | batch)
        if end.is_final:
            return end.code
        if number == request.max_restarts:
            if number:
                _say(f"gave up after {number} restart{'s' * (number != 1)}")
            return end.code
        # Doubled: what failed twice is rarely back after a second.
        seconds = min(_MOST_SECONDS, first_seconds * 2**number)
        number += 1
        _say(f"restart {number} of {request.max_restarts} in {seconds:g} s")
        time.sleep(seconds)
        now, reason = fitting(request, [host for host in request.hosts if answers(host)]), end.reason
        if now.num_processes != request.num_processes:
            lost = ", ".join(host for host in request.hosts if host not in now.hosts)
            fewer = f"without {lost}: {now.num_processes} of {request.num_processes} processes"
            reason, batch = f"{reason}; {fewer}", {BATCH_REPLICAS: str(request.num_replicas)}
            _say(fewer)
        else:
            batch = {}


def fitting(request: LaunchRequest, hosts: list[str]) -> LaunchRequest:
    """Return the job for the hosts that answer, with as many processes on each as before.

    The number of processes divides the original one, so that the accumulation can make up for the missing replicas.
    Where fewer than `--min-processes` are left, the job stays as it was: the missing hosts may come back.
    """
    if len(hosts) == len(request.hosts) or request.min_processes is None:
        return request
    each = request.num_processes // len(request.hosts)
    for count in range(len(hosts), 0, -1):
        processes = count * each
        # Divisors only: the global batch stays the same with a whole number of micro-batches more.
        if request.num_processes % processes == 0 and processes >= request.min_processes:
            return replace(
                request,
                hosts=tuple(hosts[:count]),
                num_processes=processes,
                num_replicas=processes * request.replicas_per_process,
            )
    return request


def answers_ssh(host: str) -> bool:
    """Return whether a host lets this user in, as mpirun will need; True where there is no ssh to ask with."""
    if not shutil.which("ssh"):
        return True
    # BatchMode: without it ssh would ask for a password and wait.
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}"]
    try:
        done = subprocess.run(
            ["ssh", *options, host, "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=2 * _CONNECT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _say(text: str) -> None:
    print(f"headrace launch: {text}", file=sys.stderr, flush=True)
