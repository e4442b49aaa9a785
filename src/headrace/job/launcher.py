"""Launch a job: choose the driver (this process, or one of DRIVERS), build the command of one process, start."""

import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from headrace.core.errors import ConfigError
from headrace.core.process import STOP_SIGNALS, catch_signals, leave_closed_terminal
from headrace.job.launch_request import LaunchRequest, is_python, script_and_arguments
from headrace.job.launchers import DRIVERS
from headrace.job.liveness import LAST_MESSAGE
from headrace.job.local_processes import (
    describe_exit,
    print_line,
    process_variables,
    run_local,
    start_process,
    visible_gpus,
)
from headrace.job.restarts import JobEnd, answers_ssh, run_with_restarts
from headrace.job.variables import SECRET

DISTRIBUTED_COMMANDS = ("train", "resume", "validate", "bench")  # those that can run in several processes
# The reference's scripts, which also start if there is no file of that name.
SCRIPTS = ("train", "validation", "restore", "weight_avg", "dataset_benchmark", "verify_dataset")
GRACE_SECONDS = 5.0
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def launch(request: LaunchRequest) -> int:
    """Start a job and wait until it ends; return its exit code."""
    command, environ = process_command(request), with_secret(os.environ)
    driver = choose_driver(request, environ)
    for note in request.notes + (_unused(request) if driver == "local" else ()):
        print(f"note: {note}", file=sys.stderr)
    if driver == "local" and (request.dry_run or request.verbose):
        _show_local(request, command)

    def attempt(now: LaunchRequest, variables: Mapping[str, str]) -> JobEnd:
        if driver == "local":
            return JobEnd(code=0) if now.dry_run else run_local(now, command, {**environ, **variables})
        return _run_driver(driver, now, command, {**environ, **variables})

    # On other hosts processes of the lost job may live on until they notice.
    patience = 1.0 if driver == "local" else request.silence_limit + GRACE_SECONDS
    return run_with_restarts(
        request, attempt, answers=lambda host: is_this_host(host) or answers_ssh(host), first_seconds=patience
    )


def _run_driver(driver: str, request: LaunchRequest, command: Sequence[str], environ: Mapping[str, str]) -> JobEnd:
    line = DRIVERS[driver].command(request, command, environ, os.getpid())
    if request.dry_run or request.verbose:
        print(shlex.join(line), flush=True)
    if request.dry_run:
        return JobEnd(code=0)
    return _drive(line, environ, request.silence_limit + GRACE_SECONDS, request.only_output_from)


def with_secret(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with a secret for the job, unless it has one. No command line shows it."""
    # In the environment only: command lines can be read by every user of a host.
    return {**environ, SECRET: environ.get(SECRET) or secrets.token_hex(16)}


def process_command(request: LaunchRequest) -> list[str]:
    """Return the command line of one process.

    A bare `python` becomes the one that runs the launcher, because that one has Headrace installed. A script of the
    reference that does not exist here (a path on another machine) is replaced by the package's entry point for it.
    """
    program = list(request.program)
    cached = ["--executable-cache-path", request.cache_dir] if request.cache_dir else []
    if program[0] in DISTRIBUTED_COMMANDS:
        return [sys.executable, "-m", "headrace", *program, *cached]
    if program[0] == "headrace":
        return [sys.executable, "-m", "headrace", *program[1:], *cached]
    if not is_python(program[0]):
        return [*program, *cached]
    python = sys.executable if program[0] in ("python", "python3") else program[0]
    script, arguments = script_and_arguments(program)
    if Path(program[1]).exists() or script not in SCRIPTS or not program[1].endswith(".py"):
        return [python, *program[1:], *cached]
    entry = f"import sys; from headrace.__main__ import run_script; sys.exit(run_script({script!r}))"
    return [python, "-c", entry, *arguments, *cached]


def choose_driver(request: LaunchRequest, environ: Mapping[str, str]) -> str:
    """Return what starts the processes: local, or one of DRIVERS."""
    in_slurm = bool(environ.get("SLURM_JOB_ID"))
    if request.driver != "auto":
        driver = request.driver
    elif request.hosts and not all(is_this_host(host) for host in request.hosts):
        driver = "srun" if in_slurm else "mpirun"
    else:
        several = environ.get("SLURM_JOB_NUM_NODES", "1") != "1"
        driver = "srun" if in_slurm and several and not request.hosts else "local"
    if driver == "local" and not all(is_this_host(host) for host in request.hosts):
        raise ConfigError(f"--driver local cannot start processes on {', '.join(request.hosts)}.")
    if driver != "local" and not request.dry_run and not shutil.which(driver):
        raise ConfigError(
            f"{driver} is not installed here.",
            rule=f"Processes on other hosts are started by {' or '.join(DRIVERS)}.",
            remedy="Install Open MPI (Debian, Ubuntu: apt-get install openmpi-bin) on all hosts; "
            "or start the processes by hand: see docs/howto/hosts.md.",
        )
    return driver


def is_this_host(host: str) -> bool:
    """Whether a name is one of this host's."""
    return host in _LOCAL_NAMES or host in (socket.gethostname(), socket.getfqdn())


def _unused(request: LaunchRequest) -> tuple[str, ...]:
    """Return a note about mpirun's options if mpirun is not used."""
    args = [word for word in request.mpi_global_args if word not in ("--tag-output", "--allow-run-as-root")]
    return (f"without effect here: --mpi-global-args {shlex.join(args)} (mpirun is not used)",) if args else ()


def _show_local(request: LaunchRequest, command: Sequence[str]) -> None:
    """Print the command of each process, as it could be typed."""
    coordinator = request.coordinator or "127.0.0.1:PORT"
    for number in range(request.num_processes):
        variables = process_variables(request, number, coordinator, visible_gpus(os.environ))
        print(
            " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
            shlex.join(command),
            flush=True,
        )


# The process in front of a line: `[1,0]<stdout>:` of mpirun --tag-output, ` 0: ` of srun --label.
_TAG = re.compile(r"\[[^\],]*,(\d+)\]<std|\s*(\d+): ")


class _DriverOutput:
    """Forwards what mpirun or srun prints, and finds in it that a process ended because another one was lost."""

    def __init__(self, process: subprocess.Popen[bytes], only: int | None) -> None:
        self.lost, self.since, self._only = "", 0.0, only
        streams = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        self._threads = [threading.Thread(target=self._copy, args=ends, daemon=True) for ends in streams]
        for thread in self._threads:
            thread.start()

    def _copy(self, source: IO[bytes], target: IO[str]) -> None:
        for raw in source:
            line = raw.decode(errors="replace")
            if not self.lost and (found := LAST_MESSAGE.search(line)):
                self.lost, self.since = found[1], time.monotonic()
            # What has no tag is of mpirun or srun itself.
            tag = _TAG.match(line) if self._only is not None else None
            if tag is None or int(tag[1] or tag[2]) == self._only:
                print_line(line.rstrip("\n"), target)
        source.close()

    def finish(self) -> None:
        """Wait for the last lines."""
        for thread in self._threads:
            thread.join(5)


def _drive(line: Sequence[str], environ: Mapping[str, str], patience: float, only: int | None = None) -> JobEnd:
    """Run mpirun or srun; the first stop signal is passed on as SIGUSR1, which they forward: the processes save.

    A second Ctrl-C ends them; other signals that schedulers send more than once do not.

    mpirun waits for ever for a host that is gone. So it is ended, after some patience, once a process reports a loss.
    """
    process = start_process(line, environ)
    output, num_signals = _DriverOutput(process, only), 0

    def forward(number: int, _frame: FrameType | None) -> None:
        nonlocal num_signals
        if number == signal.SIGHUP:
            leave_closed_terminal()
        num_signals += 1
        if num_signals == 1:
            # Both forward SIGUSR1 and do nothing else; mpirun takes SIGTERM and SIGINT as an order to kill.
            process.send_signal(signal.SIGUSR1)
        elif number == signal.SIGINT:
            process.send_signal(signal.SIGTERM)

    before = catch_signals(STOP_SIGNALS, forward)
    try:
        while (code := process.poll()) is None:
            if output.lost and time.monotonic() - output.since > patience:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.05)
    finally:
        process.kill()
        output.finish()
        for number, handler in before.items():
            signal.signal(number, handler)
    reason = output.lost or f"{Path(line[0]).name} {describe_exit(code)}"
    return JobEnd(code=code if code >= 0 else 128 - code, reason=reason, asked_to_stop=num_signals > 0)
