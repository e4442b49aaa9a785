"""Sweeps: one run for each combination of values, and for each fold, as processes of their own.

A sweep is a directory: `sweep.json` says what its runs are, and each run has a directory in it. Whatever stopped it, it
goes on from there: finished runs are left as they are, others are resumed.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from headrace.core.errors import INTERRUPTED_EXIT_CODE, CheckpointError, ConfigError
from headrace.core.files import write_atomic
from headrace.core.json_text import parse_json
from headrace.core.process import STOP_SIGNALS, catch_signals
from headrace.report.run_summary import RunSummary, read_summary

SWEEP_FILE = "sweep.json"
FOLD = "fold"
REPEATED = (FOLD, "seed")  # runs that differ in these alone are repetitions: they have a mean and a spread
_DONE = ("finished", "stopped")
_MOST_RUNS = 1_000
_LETTERS = 60  # of a run's name
_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """A run of a sweep: the name of its directory, the values that make it differ, and its arguments of `train`."""

    name: str
    values: Mapping[str, str]
    argv: tuple[str, ...]

    @property
    def text(self) -> str:
        """The values, for people."""
        return ", ".join(f"{name} {value}" for name, value in self.values.items())


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A directory of runs, and how many of them run at the same time."""

    directory: Path
    runs: tuple[SweepRun, ...]
    jobs: int = 1
    started_in: Path  # what relative paths in the arguments are relative to

    def path(self, run: SweepRun) -> Path:
        return self.directory / run.name

    def summary(self, run: SweepRun) -> RunSummary | None:
        """What is known of a run; None of one that was never started."""
        return read_summary(self.path(run)) if (self.path(run) / "config.json").is_file() else None

    def is_done(self, run: SweepRun) -> bool:
        summary = self.summary(run)
        return summary is not None and summary.state in _DONE


def plan_runs(axes: Mapping[str, Sequence[str]], arguments: Callable[[Mapping[str, str]], list[str]]) -> list[SweepRun]:
    """Return a run for each combination of the values; `arguments` makes the argv of `train` of them."""
    count = math.prod(len(values) for values in axes.values())
    if count > _MOST_RUNS:
        raise ConfigError(f"The sweep has {count:,} runs.", rule=f"At most {_MOST_RUNS:,} are started by one command.")
    points: list[dict[str, str]] = [{}]
    for name, values in axes.items():
        points = [{**point, name: value} for point in points for value in values]
    digits = len(str(len(points)))
    runs = []
    for number, point in enumerate(points, 1):
        words = "-".join(f"{name}-{value}" for name, value in point.items())
        plain = "".join(letter if letter.isalnum() or letter in ".-_+" else "_" for letter in words)
        name = f"{number:0{digits}}-{plain}"[:_LETTERS]
        runs.append(SweepRun(name=name, values=point, argv=tuple(arguments(point))))
    return runs


def save_sweep(sweep: Sweep) -> None:
    """Write what the sweep is into its directory; another sweep that is there already is an error."""
    file = sweep.directory / SWEEP_FILE
    if file.is_file():
        if read_sweep(sweep.directory).runs != sweep.runs:
            raise ConfigError(
                f"{sweep.directory} holds another sweep.",
                rule="The same command continues a sweep; another one has a directory of its own.",
                remedy=f"Give another --output, or continue that one: headrace resume {sweep.directory}",
            )
        return
    runs = [{"name": run.name, "values": dict(run.values), "argv": run.argv} for run in sweep.runs]
    saved = {"format": 1, "started_in": str(sweep.started_in), "jobs": sweep.jobs, "runs": runs}
    text = json.dumps(saved, indent=1)
    sweep.directory.mkdir(parents=True, exist_ok=True)
    write_atomic(file, text.encode())


def fold_file(directory: Path, number: int) -> Path:
    """Return the file that lists the images of a fold, numbered from 1."""
    return directory / f"fold_{number}.csv"


def is_sweep(directory: Path) -> bool:
    """Say whether a directory is that of a sweep."""
    return (directory / SWEEP_FILE).is_file()


def read_sweep(directory: Path) -> Sweep:
    """Return the sweep in a directory."""
    file = directory / SWEEP_FILE
    try:
        saved = parse_json(file.read_bytes())
        runs = tuple(_read_run(each) for each in saved["runs"])
        jobs, started_in = int(saved["jobs"]), Path(saved["started_in"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}.", remedy="Start the sweep again in another directory."
        ) from None
    return Sweep(directory=directory, runs=runs, jobs=jobs, started_in=started_in)


def _read_run(saved: Mapping[str, Any]) -> SweepRun:
    name = str(saved["name"])
    if name != Path(name).name or name in ("", ".", ".."):
        raise ValueError(f"the run name {name[:40]!r}")
    values = {str(key): str(value) for key, value in saved["values"].items()}
    return SweepRun(name=name, values=values, argv=tuple(map(str, saved["argv"])))


def run_sweep(sweep: Sweep, show: Callable[[str], None]) -> int:
    """Run what is not done, `sweep.jobs` at a time; return the exit code: that of the first run which failed, else 0.

    A signal is passed on once to all runs, which save and end; the code is then 75, and nothing more is started.
    """
    return _Runner(sweep, show).run()


def gpu_of(job: int, environ: Mapping[str, str], num_gpus: int) -> dict[str, str]:
    """Return the variable that gives one of several simultaneous runs an NVIDIA GPU of its own; nothing without one."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(number) for number in range(num_gpus)] if given is None else given.split(",")
    return {"CUDA_VISIBLE_DEVICES": devices[job % len(devices)].strip()} if num_gpus else {}


def _num_gpus() -> int:
    from headrace.engine.visible import visible_devices

    found = visible_devices("auto", details=False)
    return found.count if found.platform == "cuda" else 0


class _Runner:
    def __init__(self, sweep: Sweep, show: Callable[[str], None]) -> None:
        self._sweep, self._show = sweep, show
        self._running: dict[int, tuple[SweepRun, subprocess.Popen[bytes]]] = {}
        self._stopped = False
        self._num_gpus = _num_gpus() if sweep.jobs > 1 else 0

    def run(self) -> int:
        before = catch_signals(STOP_SIGNALS, self._stop)
        try:
            return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        runs = self._sweep.runs
        waiting = [(place, run) for place, run in enumerate(runs, 1) if not self._sweep.is_done(run)]
        if len(waiting) < len(runs):
            self._show(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already")
        code = 0
        while self._running or (waiting and not self._stopped):
            while waiting and len(self._running) < self._sweep.jobs and not self._stopped:
                place, run = waiting.pop(0)
                self._show(f"\nrun {place}/{len(runs)}  {run.text}")
                self._start(run)
            for job, (run, process) in list(self._running.items()):
                if (ended := process.poll()) is None:
                    continue
                del self._running[job]
                if ended not in (0, INTERRUPTED_EXIT_CODE):
                    self._show(f"run {run.name} failed with exit code {ended}")
                code = code or (ended if ended != INTERRUPTED_EXIT_CODE else 0)
                self._stopped = self._stopped or ended == INTERRUPTED_EXIT_CODE
            time.sleep(_POLL_SECONDS)
        return INTERRUPTED_EXIT_CODE if self._stopped else max(code, 1) if code else 0

    def _start(self, run: SweepRun) -> None:
        job = next(job for job in range(self._sweep.jobs) if job not in self._running)
        command = [sys.executable, "-m", "headrace", "train", *run.argv]
        place = self._sweep.path(run)
        away = self._sweep.started_in != Path.cwd()
        command += ["--output", str(place.absolute() if away else place), "--resume", "auto"]
        environ, output = dict(os.environ), None
        if self._sweep.jobs > 1:
            environ |= gpu_of(job, os.environ, self._num_gpus)
            output = (self._sweep.directory / f"{run.name}.log").open("ab")
        # In a session of its own: Ctrl-C reaches the sweep alone, which passes it on once. A second one would end a run
        # before it has saved.
        process = subprocess.Popen(
            command,
            env=environ,
            cwd=self._sweep.started_in,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,
        )
        if output:
            output.close()
        self._running[job] = (run, process)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        passed_on = signal.SIGTERM if number == signal.SIGHUP else number
        self._stopped = True
        for _, process in list(self._running.values()):
            if process.poll() is None:
                process.send_signal(passed_on)


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Runs that differ in seed or fold alone: their common values, and their best top-1."""

    values: Mapping[str, str]
    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float | None:
        """The standard deviation of one run; None of a single one."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None


def repeated(sweep: Sweep) -> list[Repeated]:
    """Return the means over repetitions, best first; of runs that have validated."""
    groups: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for run in sweep.runs:
        summary = sweep.summary(run)
        if summary is None or summary.score is None or not math.isfinite(summary.score):
            continue
        values = tuple((name, value) for name, value in run.values.items() if name not in REPEATED)
        groups.setdefault(values, []).append(summary.score)
    rows = [Repeated(values=dict(values), accuracies=tuple(found)) for values, found in groups.items()]
    return sorted(rows, key=lambda row: -row.mean)
