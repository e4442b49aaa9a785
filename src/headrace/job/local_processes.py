"""Processes on this host: started with their share of devices and cores, supervised, and ended together."""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from headrace.core.errors import INTERRUPTED_EXIT_CODE, ConfigError, ProcessLost, RunHung
from headrace.core.process import STOP_SIGNALS, catch_signals, leave_closed_terminal
from headrace.job.addresses import LOOPBACK, format_address, free_port
from headrace.job.launch_request import LaunchRequest
from headrace.job.launch_variables import job_variables, user_variables
from headrace.job.process_info import ProcessInfo
from headrace.job.restarts import JobEnd
from headrace.job.variables import COORDINATOR, LAUNCHER_PID, LOCAL_PROCESS, NUM_LOCAL, NUM_PROCESSES, PROCESS

EXIT_SECONDS = 6.0  # for the other processes to exit by themselves after one has failed
HUNG_SECONDS = 2.0  # the same after one was lost: the others have waited for it already
LOST = ProcessLost.exit_code

# Launchers that assign GPUs to processes themselves, so that each process sees its own only.
GPUS_ASSIGNED_BY = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", LAUNCHER_PID)

# What C++ libraries print at every start, or when another process ends, which the liveness monitor reports in one line.
# It is searched for anywhere in a line: several threads write to one stream without a lock, so that a line may be cut
# or follow on what another thread was printing. What stands before the head of such a message is the program's own.
NOISE = re.compile(
    rb"(?P<head>\[Gloo\] Rank \d+ is connected|"
    rb"[EFW]\d{4} [\d:.]+ +\d+ (coordination_service|client\.h|preemption_sync|\S*distributed/))"
    rb"|coordination_service(_agent|_error_util)?\.(cc|h):\d+"
    rb"|(Polled an error|polled an error|error was reported|Failed to \w+) .{0,80}coordination service"
    rb"|Additional GRPC error information|^:UN(KNOWN|AVAILABLE):|=== Source Location Trace: ===|external/xla\S*:\d+\s*$"
    rb"|\*\*\* Check failure stack|^ +@ +0x"
)


def program_text(line: bytes) -> bytes:
    """Return the part of a line that the program itself printed."""
    found = NOISE.search(line)
    if found is None:
        return line
    return line[: found.start()] if found["head"] else b""


class Output:
    """Forwards the output of processes, each line prefixed with the process number.

    Use it as a context manager: leaving it waits for the last lines.
    """

    def __init__(self, only: int | None) -> None:
        self._only, self._threads, self._lock = only, list[threading.Thread](), threading.Lock()

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            # Not for ever: a grandchild that lives on keeps the pipe open.
            thread.join(5)

    def follow(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """Print what a process prints, from now on."""
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert source is not None
            thread = threading.Thread(target=self._copy, args=(number, source, target), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _copy(self, number: int, source: IO[bytes], target: IO[str]) -> None:
        after_noise = False
        for line in source:
            text = program_text(line)
            after_noise = text != line or (after_noise and not line.strip())  # empty lines after noise are noise too
            if (after_noise and not text.strip()) or self._only not in (None, number):
                continue
            shown = text.decode(errors="replace").rstrip("\r\n")
            # Lines of several processes must not be mixed into each other.
            with self._lock:
                print_line(f"[{number}] {shown}", target)
        source.close()


def print_line(text: str, target: IO[str]) -> None:
    """Print a line of a process, to the null device once nobody reads the target any more (`| head`)."""
    try:
        print(text, file=target, flush=True)
    except BrokenPipeError:
        # An exception would end the thread that reads the process, which then blocks for ever on a full pipe.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target.fileno())
        os.close(nowhere)


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the GPUs of this host that may be used, without starting CUDA."""
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu.strip() for gpu in visible.split(",") if gpu.strip() not in ("", "-1")]
    return [str(number) for number in range(len(list(root.iterdir())))] if root.is_dir() else []


def process_gpus(info: ProcessInfo, environ: Mapping[str, str], num_visible: int) -> list[int] | None:
    """Return this process's GPUs among the visible ones, or None if it may use all that it sees.

    mpirun assigns no GPUs: all processes of a host see all of them.
    """
    local, count = info.local_process, info.num_local_processes
    if local is None or count is None or count == 1 or any(environ.get(name) for name in GPUS_ASSIGNED_BY):
        return None
    each = num_visible // count
    return list(range(local * each, (local + 1) * each)) or None


@dataclass(frozen=True)
class LaunchedProcess:
    """A process that this launcher started."""

    number: int
    process: subprocess.Popen[bytes]

    def send(self, number: int) -> None:
        """Send a signal to the process and its children (the Python of a shell script, say)."""
        with suppress(ProcessLookupError):
            # Each process leads a session and thereby a group: its children get the signal as well.
            os.killpg(self.process.pid, number)

    @property
    def is_stopped(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except (ChildProcessError, AttributeError):  # it has ended; macOS has no waitid
            return False

    def __str__(self) -> str:
        return f"process {self.number} (pid {self.process.pid}, host {socket.gethostname()})"


def process_variables(request: LaunchRequest, number: int, coordinator: str, gpus: Sequence[str]) -> dict[str, str]:
    variables = {
        **user_variables(request),
        **job_variables(request),
        PROCESS: str(number),
        NUM_PROCESSES: str(request.num_processes),
        COORDINATOR: coordinator,
        LOCAL_PROCESS: str(number),
        NUM_LOCAL: str(request.num_processes),
        "PYTHONUNBUFFERED": "1",
    }
    each = request.replicas_per_process * (request.devices_per_replica or 1)
    if gpus and request.devices_per_replica is None:
        each = len(gpus) // request.num_processes
    # Where there are fewer GPUs than asked for, none is assigned: the processes themselves report what is missing,
    # with a remedy.
    if gpus and 0 < each * request.num_processes <= len(gpus):
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[number * each : (number + 1) * each])
    return variables


def run_local(request: LaunchRequest, command: Sequence[str], base: Mapping[str, str]) -> JobEnd:
    """Start the processes in an environment, forward signals and wait; if one fails, end all."""
    coordinator = request.coordinator or format_address(LOOPBACK, free_port(LOOPBACK))
    gpus, cores = visible_gpus(base), cores_per_process(request.num_processes) if request.numa_aware else []
    with Output(request.only_output_from) as output:
        job: list[LaunchedProcess] = []
        try:
            for number in range(request.num_processes):
                # The processes watch this pid, and end when the launcher is killed.
                environ = {**base, LAUNCHER_PID: str(os.getpid())}
                environ |= process_variables(request, number, coordinator, gpus)
                job.append(LaunchedProcess(number, start_process(command, environ)))
                output.follow(number, job[-1].process)
                if cores:
                    os.sched_setaffinity(job[-1].process.pid, cores[number])
            with _SignalForwarding(job) as signals:
                return _JobEnd(job, signals, request.silence_limit + EXIT_SECONDS).wait()
        finally:
            for started in job:
                started.send(signal.SIGKILL)
                started.process.wait()


def start_process(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process whose output is read; ConfigError if that is impossible."""
    try:
        # In its own session, so that Ctrl-C reaches only the launcher, which forwards it once: mpirun would end its
        # processes before they can save.
        return subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started: {error.strerror}.") from error


class _SignalForwarding:
    """Forwards signals to the processes while the block runs."""

    def __init__(self, job: Sequence[LaunchedProcess]) -> None:
        self._job, self.received = job, False

    def __enter__(self) -> "_SignalForwarding":
        # Python allows signal handlers in the main thread only.
        is_main = threading.current_thread() is threading.main_thread()
        self._previous = catch_signals((*STOP_SIGNALS, signal.SIGQUIT), self._forward) if is_main else {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        self.received |= number in STOP_SIGNALS  # SIGQUIT does not stop a process: it prints where its threads are
        for started in self._job:
            if started.process.poll() is None:
                started.send(number)


class _JobEnd:
    """Waits until all processes have ended, and finds out which one caused a failure."""

    def __init__(self, job: Sequence[LaunchedProcess], signals: _SignalForwarding, stopped_seconds: float) -> None:
        self._running, self._signals, self._stopped_seconds = list(job), signals, stopped_seconds
        self._last_ran = dict.fromkeys(job, time.monotonic())  # when each was last seen not to be stopped
        self._checked = time.monotonic()
        self._ended: list[tuple[LaunchedProcess, int]] = []
        self._cause: tuple[LaunchedProcess, int] | None = None
        self._hung: list[LaunchedProcess] = []

    def wait(self) -> JobEnd:
        """Return how the job ended; its exit code is that of the process that failed first, or 0."""
        failed_at = 0.0
        while self._running:
            self._collect()
            self._kill_stopped()
            if self._cause:
                failed_at = failed_at or time.monotonic()
                # The others get time to write their last record, then nothing more is waited for.
                if time.monotonic() - failed_at > (HUNG_SECONDS if self._cause[1] == LOST else EXIT_SECONDS):
                    self._kill()
            time.sleep(0.05)
        if self._cause is None:
            stopped = any(code == INTERRUPTED_EXIT_CODE for _, code in self._ended)
            return JobEnd(code=INTERRUPTED_EXIT_CODE if stopped else 0)
        started, code = self._cause
        how = "hung and was killed" if started in self._hung else describe_exit(code)
        print(f"headrace launch: {started} {how}", file=sys.stderr, flush=True)
        return JobEnd(
            code=code if code > 0 else 128 - code, reason=f"{started} {how}", asked_to_stop=self._signals.received
        )

    def _collect(self) -> None:
        """Note the processes that have ended. One that only followed another (ProcessLost) is not the cause."""
        for started in list(self._running):
            code = started.process.poll()
            if code is None:
                continue
            self._running.remove(started)
            self._ended.append((started, code))
            expected = code == 0 or (code == INTERRUPTED_EXIT_CODE and self._signals.received)
            # A process that follows may be seen to end before the one that it followed: the cause is replaced when
            # that one shows up.
            if not expected and (self._cause is None or (self._cause[1] == LOST and code != LOST)):
                self._cause = (started, code)

    def _kill_stopped(self) -> None:
        """Kill processes that were stopped (SIGSTOP) and not continued: those of a job of one have nobody to notice."""
        now = time.monotonic()
        if now - self._checked > self._stopped_seconds / 2:  # the launcher itself was stopped, maybe with them
            self._last_ran = dict.fromkeys(self._last_ran, now)
        self._checked = now
        for started in self._running:
            if not started.is_stopped:
                self._last_ran[started] = now
            elif now - self._last_ran[started] > self._stopped_seconds and started not in self._hung:
                self._hung.append(started)
                started.send(signal.SIGKILL)

    def _kill(self) -> None:
        """Kill what does not exit by itself. If all others only followed, it was the cause: it hung."""
        for started in self._running:
            started.send(signal.SIGKILL)
            code = started.process.wait()
            if self._cause is None or self._cause[1] == LOST:
                self._cause = (started, code)
                self._hung.append(started)
            self._ended.append((started, code))
        self._running = []


def describe_exit(code: int) -> str:
    """Describe how a process ended, from its return code as `Popen` has it."""
    if code < 0:
        # Python has no names for most real-time signals.
        name = next((known.name for known in signal.Signals if known == -code), "real-time")
        return f"died: signal {-code} ({name})"
    if code == LOST:
        return "ended because another process was lost"
    if code == RunHung.exit_code:
        return "hung: it made no progress"
    return f"ended with exit code {code}"


def cores_per_process(count: int, root: Path = Path("/sys/devices/system/node")) -> list[set[int]]:
    """Return the cores of each process: neighbours on one NUMA node, not shared if there are enough."""
    allowed = os.sched_getaffinity(0)
    nodes = [_cores(file.read_text()) & allowed for file in sorted(root.glob("node[0-9]*/cpulist"))]
    ordered = [core for node in nodes for core in sorted(node)] or sorted(allowed)
    # More processes than cores: pinning would put several on one core while others are free.
    if len(ordered) < count:
        return [allowed] * count
    cuts = [number * len(ordered) // count for number in range(count + 1)]
    return [set(ordered[begin:end]) for begin, end in itertools.pairwise(cuts)]


def _cores(text: str) -> set[int]:
    """Return the cores of a list in the kernel's notation: `0-3,8`."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores
