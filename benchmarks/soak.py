"""Train, validate, save and resume with a changing number of processes for some minutes; fail when anything grows.

    python benchmarks/soak.py --minutes 60 [--round-seconds 90]

Each round resumes the run with one or two processes (the global batch stays), watches them, and stops them by SIGTERM.
Printed for each process (L: the launcher) and round: steps done, memory, threads and descriptors after warming up and
at the end, the size of the run's checkpoints, and that of all its other files for each step done. Fails when a process
grows by more than 10 % and 16 MiB, or has more threads or descriptors at the end than after warming up, or when
checkpoints take more room than after the first round.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headrace.checkpoint.store import list_checkpoints, step_of

LINE = shlex.split("""
    train --config none --dataset generated --image-size 8 --num-classes 4 --num-samples 512 --model-name cifar_resnet8
    --micro-batch-size 4 --global-batch-size 16 --num-epochs 1000000 --ckpts-per-epoch 1 --max-ckpts-to-keep 3
    --call-seconds 0.2 --platform cpu --progress plain --run-name soak
""")
LAUNCHER = -1  # its number among the processes
WARM_UP_SHARE = 0.6  # of a round's samples: compiling and the first validations take memory that is kept


def workers(launcher: int) -> dict[int, int]:
    """Return {number of the process: pid} of a launcher's processes."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if int((place / "stat").read_text().rpartition(")")[2].split()[1]) != launcher:
                continue
            words = (place / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        numbers = [int(word.partition(b"=")[2]) for word in words if word.startswith(b"HEADRACE_PROCESS=")]
        found |= dict.fromkeys(numbers, int(place.name))
    return found


def sample(pid: int) -> tuple[float, int, int] | None:
    """Return (MiB, threads, descriptors) of a process, None when it is gone."""
    place = Path(f"/proc/{pid}")
    try:
        facts = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
        return int(facts["VmRSS"].split()[0]) / 1024, int(facts["Threads"]), len(list((place / "fd").iterdir()))
    except (OSError, KeyError):
        return None


def disk_mib(folder: Path) -> float:
    """Return the size of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


Samples = dict[int, list[tuple[float, int, int]]]


def play_round(words: list[str], num_processes: int, seconds: float, log: Path) -> Samples:
    """Run for some seconds, then stop; return the samples of each process."""
    command = [sys.executable, "-m", "headrace", "launch", "--num-instances", str(num_processes)]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with log.open("ab") as file:
        job = subprocess.Popen([*command, "--", *words], stdout=file, stderr=file, env=environ)
    samples: Samples = {}
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and job.poll() is None:
        time.sleep(1)
        for number, pid in {**workers(job.pid), LAUNCHER: job.pid}.items():
            found = sample(pid)
            if found:
                samples.setdefault(number, []).append(found)
    job.send_signal(signal.SIGTERM)
    code = job.wait(60)
    if code != 75:
        raise SystemExit(f"a round ended with exit code {code}:\n{log.read_text()[-2000:]}")
    return samples


def main() -> int:
    """Run the rounds; return 1 when something has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--round-seconds", type=float, default=90)
    args = parser.parse_args()
    problems, rounds, checkpoints_mib = [], 0, 0.0
    print("round process     step           MiB   threads descriptors checkpoints MiB  other B/step")
    with tempfile.TemporaryDirectory() as folder:
        run, log = Path(folder) / "soak", Path(folder) / "log"
        ends = time.monotonic() + 60 * args.minutes
        while time.monotonic() < ends:
            rounds += 1
            num_processes = 1 + rounds % 2
            words = ["resume", str(run)] if rounds > 1 else [*LINE, "--log-dir", folder]
            samples = play_round(words, num_processes, args.round_seconds, log)
            size = disk_mib(run / "checkpoints")
            checkpoints_mib = checkpoints_mib or size
            others = 2**20 * (disk_mib(run) - size)
            step = step_of(list_checkpoints(run / "checkpoints")[-1]) or 0
            for number, rows in sorted(samples.items()):
                warm = rows[int(WARM_UP_SHARE * len(rows)) :]
                before, after = warm[0], warm[-2] if len(warm) > 1 else warm[-1]
                shown = [f"{a:.0f} -> {b:.0f}" for a, b in zip(before, after, strict=True)]
                name = "L" if number == LAUNCHER else number
                print(
                    f"{rounds:5} {name:>7} {step:8} {shown[0]:>13} {shown[1]:>9} {shown[2]:>11} "
                    f"{size:15.2f} {others / max(1, step):13.0f}",
                    flush=True,
                )
                if after[0] > 1.1 * before[0] and after[0] > before[0] + 16:
                    problems.append(f"round {rounds}, process {number}: memory grew, {shown[0]} MiB")
                problems += [
                    f"round {rounds}, process {number}: more {what}, {text}"
                    for what, text, a, b in zip(
                        ("threads", "descriptors"), shown[1:], before[1:], after[1:], strict=True
                    )
                    if b > a + 2  # a checkpoint may just be written
                ]
            if size > 1.5 * checkpoints_mib:
                problems.append(f"round {rounds}: checkpoints take {size:.2f} MiB, {checkpoints_mib:.2f} at first")
    print(*problems or [f"nothing grew in {rounds} rounds"], sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
