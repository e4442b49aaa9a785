"""Signals to every process of a job in every phase: how long until the job has ended, what was lost, who was left over.

    python benchmarks/kill_table.py [--only PHASE:PROCESS:SIGNAL ...] [--silence-seconds 4]

A job of two processes under `headrace launch` trains, validates and saves. In each case one process (0, 1 or L, the
launcher) receives one signal while the job is in one phase: the function that the phase is about reports that it was
entered and pauses for a moment, in which the signal is sent. Printed for each case: seconds from the signal until no
process of the job was left, the launcher's exit code, and what the run is worth:

  same      resumed, it ends with the same bits and records as a run that nothing happened to
  nothing   there was no run yet

A launcher that was stopped (SIGSTOP) is continued after two seconds: its job waits for it, nothing more.
Fails when a job hangs, a process is left over, or anything is lost.
"""

import argparse
import importlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import resume
from headrace.checkpoint.store import list_checkpoints, load
from headrace.telemetry.records import TrainRecord, ValidationRecord, read_records

LINE = shlex.split("""
    train --config none --dataset digits --model-name toy_model_bn --micro-batch-size 8 --num-replicas 2
    --weight-updates-per-epoch 6 --num-epochs 3 --ckpts-per-epoch 2 --learning-rate 0.01 --seed 1 --platform cpu
    --progress plain --call-seconds 0.01 --no-report --run-name run
""")
PAUSE = 1.0  # in which the signal arrives
LIMIT = 60.0  # seconds after which a job counts as hung
STOPPED_SECONDS = 2.0
MARK = "HEADRACE_KILL_TABLE"  # a variable that all processes of one case have, and no others
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP")
PROCESSES = ("0", "1", "L")


@dataclass(frozen=True)
class Phase:
    """A phase: the function that it is about, and which of its calls is meant."""

    module: str
    function: str
    number: int = 0


PHASES = {
    "join": Phase("headrace.job.join", "rendezvous"),
    "compile": Phase("headrace.run.training", "TracedCall.compile"),
    "training": Phase("headrace.run.training", "CallProgram.__call__", 4),
    "checkpoint": Phase("headrace.checkpoint.store", "_rename_into_place", 1),  # written, but without its name
    "validation": Phase("headrace.run.validation", "Validator.start", 1),
    "end": Phase("headrace.job.liveness", "LivenessMonitor.wait_until_all_done"),
}


def run_process(phase_name: str, folder: Path, words: list[str]) -> int:
    """Be one process of the job: `headrace` with a pause in one function."""
    from headrace.cli.main import main as headrace

    phase = PHASES[phase_name]
    *owners, name = phase.function.split(".")
    owner: Any = importlib.import_module(phase.module)
    for part in owners:
        owner = getattr(owner, part)
    calls, work = itertools.count(), getattr(owner, name)

    def pausing(*args: Any, **more: Any) -> Any:
        if next(calls) == phase.number:
            (folder / f"entered-{os.environ['HEADRACE_PROCESS']}").touch()
            time.sleep(PAUSE)
        return work(*args, **more)

    setattr(owner, name, pausing)
    return headrace(words)


def marked_processes(mark: str) -> dict[int, str]:
    """Return {pid: number of the process, or L} of all processes of a case that still run."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(
                word.split(b"=", 1) for word in (place / "environ").read_bytes().split(b"\0") if b"=" in word
            )
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ValueError):
            continue
        if variables.get(MARK.encode()) == mark.encode() and state != "Z":
            found[int(place.name)] = variables.get(b"HEADRACE_PROCESS", b"L").decode()
    return found


def wait_until(happened: Callable[[], object], seconds: float = LIMIT) -> bool:
    """Wait until something has happened, or the time is over; return whether it has."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@dataclass(frozen=True)
class Outcome:
    """What a signal led to."""

    seconds: float
    code: int
    worth: str

    @property
    def is_good(self) -> bool:
        return self.worth in ("same", "nothing")


class Table:
    """The cases, in one folder; and the run that nothing happens to."""

    def __init__(self, folder: Path, silence_seconds: float) -> None:
        self._folder, self._silence = folder, silence_seconds
        self._number = itertools.count()

    def start(self, phase: str, mark: str) -> tuple[Path, subprocess.Popen[bytes]]:
        """Start a job with a pause in one phase; return its folder and launcher."""
        folder = self._folder / f"{next(self._number):03}-{phase}"
        folder.mkdir()
        places = ["--log-dir", str(folder), "--executable-cache-path", str(self._folder / "programs")]
        process = [sys.executable, str(Path(__file__).resolve()), "--process", phase, str(folder)]
        command = [sys.executable, "-m", "headrace", "launch", "--num-instances", "2", "--silence-seconds"]
        command += [f"{self._silence:g}", "--", *process, *LINE, *places]
        environ = {**os.environ, MARK: mark, "JAX_PLATFORMS": "cpu"}
        with (folder / "printed.txt").open("wb") as file:
            # Like a shell that starts a job: signals of the terminal of this program do not reach it.
            job = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ, start_new_session=True
            )
        return folder, job

    def undisturbed(self) -> Path:
        """Run the job to its end; return its folder."""
        folder, job = self.start("join", uuid.uuid4().hex)
        if job.wait(10 * LIMIT):
            raise SystemExit((folder / "printed.txt").read_text())
        return folder

    def play(self, phase: str, victim: str, number: signal.Signals, expected: Path) -> Outcome:
        """Play one case."""
        mark = uuid.uuid4().hex
        folder, job = self.start(phase, mark)
        # Only process 0 saves. Otherwise the victim is meant to be in the phase itself.
        who = "0" if phase == "checkpoint" else victim.replace("L", "[01]")
        try:
            if not wait_until(lambda: any(folder.glob(f"entered-{who}")) or job.poll() is not None, 4 * LIMIT):
                return Outcome(0.0, 0, "did not start")
            pids = {name: pid for pid, name in marked_processes(mark).items()}
            if victim not in pids:
                return Outcome(0.0, job.poll() or 0, "ended too early")
            begin = time.monotonic()
            os.kill(pids[victim], number)
            if victim == "L" and number == signal.SIGSTOP:
                time.sleep(STOPPED_SECONDS)
                os.kill(job.pid, signal.SIGCONT)
            ended = wait_until(lambda: job.poll() is not None)
            left = not wait_until(lambda: not marked_processes(mark), 20.0 if ended else 0.0)
            seconds = time.monotonic() - begin
        finally:
            for pid in marked_processes(mark):
                os.kill(pid, signal.SIGKILL)
            code = job.wait()
        if left:
            return Outcome(seconds, code, "left over" if ended else "HANGS")
        return Outcome(seconds, code, self._worth(folder, expected))

    def _worth(self, folder: Path, expected: Path) -> str:
        """Resume the run, in this process, and compare it."""
        if "Traceback" in (folder / "printed.txt").read_text():
            return "traceback"
        if not (folder / "run" / "config.json").exists():
            return "nothing"
        with (folder / "resumed.txt").open("w") as file:
            before, sys.stdout = sys.stdout, file
            try:
                resume(folder / "run")
            finally:
                sys.stdout = before
        return "same" if run_facts(folder / "run") == run_facts(expected / "run") else "LOST"


def run_facts(run: Path) -> Any:
    """Return what must be equal in two runs: the weights, and the losses of every record."""
    arrays, manifest = load(list_checkpoints(run / "checkpoints")[-1])
    records = [(r.step, r.loss) for r in read_records(run) if isinstance(r, (TrainRecord, ValidationRecord))]
    return manifest["step"], {name: array.tobytes() for name, array in arrays.items()}, records


def main() -> int:
    """Play the cases and print the table; return 1 when one of them is not as promised."""
    if sys.argv[1:2] == ["--process"]:
        return run_process(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="PHASE:PROCESS:SIGNAL")
    parser.add_argument("--silence-seconds", type=float, default=4.0)
    args = parser.parse_args()
    # nohup and `&` have signals ignored, and so would the jobs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    cases = [tuple(case.split(":")) for case in args.only] or list(itertools.product(PHASES, PROCESSES, SIGNALS))
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        table = Table(Path(place), args.silence_seconds)
        expected = table.undisturbed()
        print(f"{'phase':<11} process  signal   seconds  code  the run", flush=True)
        for phase, victim, name in cases:
            outcome = table.play(phase, victim, signal.Signals[name], expected)
            bad += not outcome.is_good
            row = f"{phase:<11} {victim:^7}  {name:<7} {outcome.seconds:8.1f} {outcome.code:5}  {outcome.worth}"
            print(row, flush=True)
    print(f"{len(cases)} cases, {len(cases) - bad} as promised")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
