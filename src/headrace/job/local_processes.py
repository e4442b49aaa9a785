"""Processes on this host: started with their share of devices and cores, watched, and ended together."""

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

from headrace.core.errors import ConfigError, ProcessLost
from headrace.job.detect_launcher import address
from headrace.job.launch_request import LaunchRequest
from headrace.job.process_info import (
    COORDINATOR,
    INTERRUPTED,
    LOCAL_PROCESS,
    NUM_LOCAL,
    NUM_PROCESSES,
    PARENT,
    PROCESS,
    Place,
)
from headrace.job.remote_processes import job_variables, own_variables

# What processes print, line by line, with the process's number in front.


# What C++ libraries print at every start, or about the end of another process, which the watch tells in one line.
NOISE = re.compile(
    rb"\[Gloo\] Rank \d+ is connected|[EFW]\d{4} [\d:.]+ +\d+ (coordination_service|client\.h|preemption_sync)"
    rb"|Additional GRPC error information|:UN(KNOWN|AVAILABLE):|=== Source Location Trace: ===|external/xla\S*:\d+\s*$"
    rb"|\*\*\* Check failure stack|    @ +0x"
)


class Output:
    """Follows the output of processes; use as a context, which waits for the last lines."""

    def __init__(self, only: int | None) -> None:
        self._only, self._threads, self._lock = only, list[threading.Thread](), threading.Lock()

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(5)

    def follow(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """Print what a process prints, from now on."""
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert source is not None
            thread = threading.Thread(target=self._copy, args=(number, source, target), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _copy(self, number: int, source: IO[bytes], target: IO[str]) -> None:
        noise = False
        for row in source:
            noise = bool(NOISE.match(row)) or (noise and not row.strip())  # an empty line after it belongs to it
            if noise or (self._only is not None and number != self._only):
                continue
            text = row.decode(errors="replace").rstrip("\r\n")
            with self._lock:
                print(f"[{number}] {text}", file=target, flush=True)
        source.close()


# Which GPUs of its host belong to a process: found out without starting CUDA.


# Those who start the processes and deal out the GPUs as well; each process then sees its own.
DEALT_OUT = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "HEADRACE_LAUNCHER")


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the GPUs of this host that may be used."""
    if (said := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [word.strip() for word in said.split(",") if word.strip() not in ("", "-1")]
    return [str(number) for number in range(len(list(root.iterdir())))] if root.is_dir() else []


def gpu_share(place: Place, environ: Mapping[str, str], num_visible: int) -> list[int] | None:
    """Return this process's GPUs among the visible ones, or None where all that it sees is its own.

    mpirun deals out no GPUs: all processes of a host see all of them.
    """
    local, count = place.local_process, place.num_local_processes
    if local is None or count is None or count == 1 or any(environ.get(name) for name in DEALT_OUT):
        return None
    each = num_visible // count
    return list(range(local * each, (local + 1) * each)) or None


PATIENCE = 6.0  # seconds that the others have to end by themselves after one has ended badly
HANGING = 2.0  # and those that the others have given up, who waited for them already
LOST = ProcessLost.exit_code
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Started:
    """A process of ours."""

    number: int
    process: subprocess.Popen[bytes]

    def send(self, number: int) -> None:
        """Send a signal to the process and to what it has started itself (a script that calls python, say)."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def __str__(self) -> str:
        return f"process {self.number} (pid {self.process.pid}, host {socket.gethostname()})"


def process_variables(request: LaunchRequest, number: int, coordinator: str, gpus: Sequence[str]) -> dict[str, str]:
    """Return what one process must know that the others do not, and what all of them must know."""
    found = {
        **own_variables(request),
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
    if gpus and 0 < each * request.num_processes <= len(gpus):
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[number * each : (number + 1) * each])
    return found


def run_local(request: LaunchRequest, command: Sequence[str]) -> int:
    """Start the processes, pass on signals, and wait; when one ends badly, end all. Return the exit code."""
    coordinator = request.coordinator or address("127.0.0.1", _free_port())
    gpus, shares = visible_gpus(os.environ), core_shares(request.num_processes) if request.numa_aware else []
    with Output(request.only_output_from) as output:
        job: list[Started] = []
        try:
            for number in range(request.num_processes):
                environ = {**os.environ, PARENT: str(os.getpid())}
                environ |= process_variables(request, number, coordinator, gpus)
                job.append(Started(number, _start(command, environ)))
                output.follow(number, job[-1].process)
                if shares:
                    os.sched_setaffinity(job[-1].process.pid, shares[number])
            with _Signals(job) as signals:
                return _Ending(job, signals).wait()
        finally:
            for started in job:
                started.send(signal.SIGKILL)
                started.process.wait()


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        # In a session of its own: Ctrl-C reaches the launcher alone, which passes it on once.
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


class _Signals:
    """Passes signals on to the processes while the block runs."""

    def __init__(self, job: Sequence[Started]) -> None:
        self._job, self.asked = job, False

    def __enter__(self) -> "_Signals":
        here = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._pass_on) for number in SIGNALS} if here else {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.asked = True
        for started in self._job:
            if started.process.poll() is None:
                started.send(number)


class _Ending:
    """Waits for the end of all, and finds out who was the cause of a bad one."""

    def __init__(self, job: Sequence[Started], signals: _Signals) -> None:
        self._running, self._signals = list(job), signals
        self._ended: list[tuple[Started, int]] = []
        self._worst: tuple[Started, int] | None = None
        self._killed: list[Started] = []  # those that hung

    def wait(self) -> int:
        """Return the exit code of the job: that of the process that ended first and badly, or 0."""
        begin = 0.0
        while self._running:
            self._collect()
            if self._worst:
                begin = begin or time.monotonic()
                if time.monotonic() - begin > (HANGING if self._worst[1] == LOST else PATIENCE):
                    self._kill()
            time.sleep(0.05)
        if self._worst is None:
            return INTERRUPTED if any(code == INTERRUPTED for _, code in self._ended) else 0
        started, code = self._worst
        how = "hung and was killed" if started in self._killed else how_it_ended(code)
        print(f"headrace launch: {started} {how}", file=sys.stderr, flush=True)
        return code if code > 0 else 128 - code

    def _collect(self) -> None:
        """Take those that have ended. Who only followed another (ProcessLost) is not the cause."""
        for started in list(self._running):
            code = started.process.poll()
            if code is None:
                continue
            self._running.remove(started)
            self._ended.append((started, code))
            expected = code == 0 or (code == INTERRUPTED and self._signals.asked)
            followed = self._worst is None or self._worst[1] == ProcessLost.exit_code
            if not expected and ((followed and code != ProcessLost.exit_code) or self._worst is None):
                self._worst = (started, code)

    def _kill(self) -> None:
        """End what does not end by itself. Where all others only followed, it was the cause: it hung."""
        for started in self._running:
            started.send(signal.SIGKILL)
            code = started.process.wait()
            if self._worst is None or self._worst[1] == LOST:
                self._worst = (started, code)
                self._killed.append(started)
            self._ended.append((started, code))
        self._running = []


def how_it_ended(code: int) -> str:
    """Say how a process ended, from its code as `Popen` has it."""
    if code < 0:
        return f"died: signal {-code} ({signal.Signals(-code).name})"
    if code == LOST:
        return "ended because another process was lost"
    return f"ended with exit code {code}"


def core_shares(count: int, root: Path = Path("/sys/devices/system/node")) -> list[set[int]]:
    """Return the cores of each process: neighbours on one NUMA node, none shared where there are enough."""
    allowed = os.sched_getaffinity(0)
    nodes = [_cores(file.read_text()) & allowed for file in sorted(root.glob("node[0-9]*/cpulist"))]
    ordered = [core for node in nodes for core in sorted(node)] or sorted(allowed)
    if len(ordered) < count:
        return [allowed] * count
    cuts = [number * len(ordered) // count for number in range(count + 1)]
    return [set(ordered[begin:end]) for begin, end in itertools.pairwise(cuts)]


def _cores(text: str) -> set[int]:
    """Return the cores of a list as the kernel writes it: `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
