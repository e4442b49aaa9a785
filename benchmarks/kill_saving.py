"""A run that saves all the time is killed again and again, on a quick, a slow or a full disk: what was tried and lost.

    python benchmarks/kill_saving.py --kills 40 [--disk fast|slow|full] [--place DIR] [--epochs 60] [--seed 1]

From the repository's root. A real run (a small network on digits, twelve steps and a validation an epoch, checkpoints
by time, with writing allowed all the time and something due at least every 0.7 s) is ended by `kill -9` at random
moments: some time after it has compiled, when a file is being written, or when a checkpoint has just got its name. Then
it is resumed. One that reaches its end is compared with a run that nothing happened to, and the next one begins.

- slow: the process writes the bytes of checkpoints at `--rate` a second.
- full: DIR has to be on a small file system that nobody else uses (as root: `mount -t tmpfs -o size=2m tmpfs DIR`). In
  six of ten cases it is filled up while the run trains, but for a random rest; four of five of these runs then have to
  end by themselves with an error that says so, the others are killed. Whoever removes what fills the disk resumes.

After each end the newest checkpoint has to be whole and not older than any record says, the list of the best may name
only what is there and whole, and the records have to be readable; at the end of a run its weights, its records but for
times, and the list of the best have to be equal, bit for bit, to those of the undisturbed run. Anything else is lost.
"""

import argparse
import json
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.checkpoint.store import list_checkpoints, load, newest_good, step_of, verify
from headrace.core.errors import HeadraceError
from headrace.telemetry.records import CheckpointRecord, CurvePoint, TrainRecord, ValidationRecord, read_records

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.job.processes import start  # processes that have JAX already: a copy of one, with a number of its own

LINE = shlex.split("""
    --config none --dataset digits --model-name toy_model_bn --micro-batch-size 16 --weight-updates-per-epoch 12
    --logs-per-epoch 2 --validations-per-epoch 1 --train-augmentation crop --ema-decay 0.9
    --optimizer-params '{"momentum": 0.9}' --lr-schedule-params '{"initial_learning_rate": 0.002}' --bn-momentum 0.9
    --max-ckpts-to-keep 2 --keep-best 2 --progress plain --no-report --seed 1
""")
PIECE = 1 << 12  # bytes that a slow disk takes at a time
TIMES = ("images_per_second", "step_seconds", "infeed_wait_seconds", "elapsed_seconds", "seconds")
LIMIT = 300.0  # seconds after which a process counts as hung


def run_process(rate: float, words: list[str]) -> int:
    """Be the run: `headrace` that may write all the time, to a disk that takes `rate` bytes a second."""
    import headrace.checkpoint.saver as saver
    import headrace.checkpoint.store as store
    import headrace.plan.plan as plan
    from headrace.cli.main import main as headrace

    saver._SHARE, plan.CHECKPOINT_SECONDS = 1.0, 0.7
    write = store.write_parts_synced

    def slowly(parts: Iterable[bytes | memoryview]) -> Iterator[bytes]:
        for part in parts:
            whole = bytes(part)
            for first in range(0, len(whole), PIECE):
                piece = whole[first : first + PIECE]
                time.sleep(len(piece) / rate)
                yield piece

    if rate:
        store.write_parts_synced = lambda path, parts: write(path, slowly(parts))
    return headrace(words)


@dataclass
class Campaign:
    """The runs of a campaign, in one folder; `place` is where their directories are."""

    folder: Path
    place: Path
    disk: str
    rate: float
    epochs: int
    random: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)

    def words(self, name: str, place: Path) -> list[str]:
        places = ["--log-dir", place, "--run-name", name, "--compilation-cache-dir", self.folder / "programs"]
        return ["train", *LINE, "--num-epochs", str(self.epochs), *map(str, places)]

    def begin(self, words: list[str], rate: float) -> subprocess.Popen[bytes]:
        program = (str(Path(__file__).resolve()), "--process", f"{rate:g}")
        return start(words, self.folder / "printed.txt", program=program)

    def undisturbed(self) -> Path:
        """Make the run that nothing happens to, on a disk with room."""
        if (process := self.begin(self.words("whole", self.folder), 0)).wait(LIMIT):
            raise SystemExit(f"the undisturbed run ended with {process.returncode}: {self.folder / 'printed.txt'}")
        return self.folder / "whole"

    def run(self, kills: int) -> None:
        """End runs in bad ways until `kills` processes were killed."""
        whole, number = self.undisturbed(), 0
        while self.counts["killed"] < kills:
            number += 1
            run = self.place / f"run{number}"
            words = self.words(run.name, self.place)
            while (ended := self.disturb(run, words)) != "finished":
                self.check(run, ended)
                begun = (run / "config.json").is_file()
                words = ["resume", str(run)] if begun else self.words(run.name, self.place)
                if self.counts["killed"] >= kills:  # this one may now come to its end
                    if self.begin(words, self.rate).wait(LIMIT):
                        self.lose(run, "it could not be finished")
                    break
            self.counts["runs finished"] += 1
            self.check(run, "finished")
            self.compare(whole, run)
            print(f"{run.name}: {dict(self.counts)}, lost: {len(self.lost)}", flush=True)
            if not self.lost:
                subprocess.run(["rm", "-rf", str(run)], check=True)

    def disturb(self, run: Path, words: list[str]) -> str:
        """Start the run and end it in one way; say which."""
        ballast, filled = self.place / "ballast", False
        begun, printed = self.compiled(), self.folder / "printed.txt"
        said = printed.stat().st_size if printed.exists() else 0
        process = self.begin(words, self.rate)
        self.wait(process, begun)
        if self.disk == "full" and self.random.random() < 0.6:
            self.wait_some(process, run)
            filled = self.fill(ballast)
        # Of those that fill the disk most have to notice it by themselves.
        kills = not filled or self.random.random() < 0.2
        if kills:
            self.wait_some(process, run)
            process.send_signal(signal.SIGKILL)
        code = self.code_of(process)
        is_written = any((run / "checkpoints").glob(".tmp-step_*"))
        ballast.unlink(missing_ok=True)
        if code == 0:
            return "finished"
        if code == -signal.SIGKILL:
            self.counts["killed"] += 1
            self.counts["killed while a checkpoint was written"] += is_written
            self.counts["killed with a full disk"] += filled
            return "killed"
        text = printed.read_bytes()[said:].decode(errors="replace")
        if not filled or "Traceback" in text or "No space left on device" not in text:
            self.lose(run, f"ended with {code}: {text[-400:]}")
        self.counts["ended by a full disk"] += 1
        return "full"

    def fill(self, ballast: Path) -> bool:
        """Leave a random rest of the disk, none to all that three checkpoints take."""
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 12))
            except OSError:
                file.truncate(max(0, file.tell() - self.random.choice((0, self.random.randrange(3 << 16)))))
        return True

    def compiled(self) -> Callable[[], bool]:
        printed = self.folder / "printed.txt"
        before = printed.stat().st_size if printed.exists() else 0
        return lambda: b"training compiled" in printed.read_bytes()[before:] if printed.exists() else False

    def wait_some(self, process: subprocess.Popen[bytes], run: Path) -> None:
        """Wait until something is written, has just been written, or for a random time."""
        place, until = run / "checkpoints", time.monotonic() + self.random.uniform(0, 1.5)
        before = {path.name for path in list_checkpoints(place)}
        kind = self.random.choice(("time", "written", "written", "named"))
        if kind == "written":
            self.wait(process, lambda: any(place.glob(".tmp-step_*")))
            until = time.monotonic() + self.random.uniform(0, 0.3 if self.rate else 0.005)
        if kind == "named":
            self.wait(process, lambda: not {path.name for path in list_checkpoints(place)} <= before)
            until = time.monotonic() + self.random.uniform(0, 0.02)
        self.wait(process, lambda: time.monotonic() >= until)

    def wait(self, process: subprocess.Popen[bytes], happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while process.poll() is None and not happened() and time.monotonic() < deadline:
            time.sleep(0.001)

    def code_of(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            self.lost.append(f"a process hung for {LIMIT:g} s")
            return process.wait()

    def check(self, run: Path, ended: str) -> None:
        """Note what the end of a process has lost."""
        if not (run / "metrics.jsonl").is_file():
            return
        place = run / "checkpoints"
        try:
            recorded = max((r.step for r in read_records(run) if isinstance(r, CheckpointRecord)), default=0)
            best = json.loads(file.read_text())["best"] if (file := place / "best.json").is_file() else []
        except (HeadraceError, ValueError) as error:
            self.lose(run, f"{ended}: {error}")
            return
        found, damaged = newest_good(place)
        if damaged:
            self.lose(run, f"{ended}: damaged {damaged}")
        if recorded > ((step_of(found) or 0) if found else 0):
            self.lose(run, f"{ended}: step {recorded} is recorded, {found} is the newest")
        for entry in best:
            if problems := verify(place / entry["name"]):
                self.lose(run, f"{ended}: of the best {entry['name']}: {problems}")

    def compare(self, whole: Path, run: Path) -> None:
        """Note where a run that was disturbed is another one than `whole`."""
        for kind in (TrainRecord, CurvePoint, ValidationRecord):
            if facts(whole, kind) != facts(run, kind):
                self.lose(run, f"other records: {kind.__name__}")
        pairs = [load(list_checkpoints(each / "checkpoints")[-1])[0] for each in (whole, run)]
        same = pairs[0].keys() == pairs[1].keys()
        if not same or any(np.asarray(pairs[1][name]).tobytes() != array.tobytes() for name, array in pairs[0].items()):
            self.lose(run, "other weights")
        if (whole / "checkpoints/best.json").read_text() != (run / "checkpoints/best.json").read_text():
            self.lose(run, "another list of the best")

    def lose(self, run: Path, what: str) -> None:
        self.lost.append(f"{run.name}: {what}")
        print(f"LOST {self.lost[-1]}", flush=True)


def facts(run: Path, kind: type) -> list[dict[str, Any]]:
    records = [json.loads(record.to_json()) for record in read_records(run) if isinstance(record, kind)]
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def main() -> int:
    if sys.argv[1:2] == ["--process"]:
        return run_process(float(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="processes to kill")
    parser.add_argument("--disk", choices=("fast", "slow", "full"), default="fast")
    parser.add_argument("--place", type=Path, help="where the runs are written; of a full disk a small file system")
    parser.add_argument("--rate", type=float, default=1e4, help="bytes a second that a slow disk takes")
    parser.add_argument("--epochs", type=int, default=60, help="of each run")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = given.place or Path(folder) / "runs"
        place.mkdir(exist_ok=True)
        rate = given.rate if given.disk == "slow" else 0.0
        campaign = Campaign(Path(folder), place, given.disk, rate, given.epochs, random.Random(given.seed))
        try:
            campaign.run(given.kills)
        finally:
            print(f"{given.disk}: {dict(campaign.counts)}; lost: {len(campaign.lost)}")
    return bool(campaign.lost)


if __name__ == "__main__":
    sys.exit(main())
