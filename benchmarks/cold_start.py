"""Cold start: from typing a command to its first finished step, with an empty and with a full compilation cache.

    python benchmarks/cold_start.py [--repeat 3] -- --config synthetic_resnet50 --num-epochs 1 ...

Runs `headrace train` with the options given, in new processes and a new directory, and prints one row for each run:
seconds until Python has imported Headrace's training, until the run starts to write (dataset, plan, devices, initial
weights), of compiling (training and validation, which may overlap) and until the first results of a step were read;
`exit` is the time from the SIGTERM that it then gets to the end of the process.
PYTHONPATH may name another checkout's src, to compare with an older commit: these are read from outside, by the times
at which lines of a run appear. A second row is the split that the run itself recorded, where it did.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

# The parts end with these: the import's mark, and lines of a run's console (`--progress plain`).
MARKS = {
    "imports": re.compile(r"^imported$"),
    "dataset, devices, state": re.compile(r"^(train|validate|resume)\b.*  | on .*: \d+ epochs?"),
    "compiling": re.compile(r"^training.* compiled in"),
    "first step": re.compile(r"^epoch .*step "),
}
# Says when the training is imported, and imports nothing that the command would not.
CHILD = """
import sys

class Mark:
    def find_spec(self, name, path=None, target=None):
        if name != "headrace.run.fit":
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec
        found = find_spec(name)
        execute = found.loader.exec_module
        found.loader.exec_module = lambda module: (execute(module), print("imported", flush=True))
        return found

sys.meta_path.insert(0, Mark())
from headrace.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def measure(options: list[str], cache: Path, log_dir: Path) -> dict[str, float]:
    """Return the seconds at which each part of one run ended; the run is stopped after its first step."""
    words = [sys.executable, "-c", CHILD, "train", *options, "--progress", "plain", "--log-dir", str(log_dir)]
    words += ["--compilation-cache-dir", str(cache)]
    begin, ended, lines, stopping = time.perf_counter(), {}, [], False
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ, PYTHONUNBUFFERED="1")
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            now = time.perf_counter() - begin
            ended |= {part: now for part, mark in MARKS.items() if part not in ended and mark.search(line)}
            if "first step" in ended and not stopping:  # a second signal would leave without the last record
                stopping = True
                process.terminate()
    ended["exit"] = time.perf_counter() - begin
    if "first step" not in ended:
        sys.exit("".join(lines) + "\nThe run wrote no line of a step: give --logs-per-epoch many, and train.")
    return ended


def recorded(log_dir: Path) -> str:
    """Return what the run's last record says about its start."""
    lines = [line for file in log_dir.rglob("metrics.jsonl") for line in file.read_text().splitlines()]
    parts = json.loads(lines[-1]).get("start", {}) if lines else {}
    return ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())


def main() -> None:
    """Print the parts of cold and warm starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="starts with a full cache")
    parser.add_argument("options", nargs="+", help="options of headrace train, after --")
    args = parser.parse_args()
    print(f"{'cache':8}" + "".join(f"{part:>26}" for part in MARKS) + f"{'total':>10}{'exit':>10}   seconds")
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory) / "programs"
        for number in range(1 + args.repeat):
            log_dir = Path(directory) / f"runs{number}"
            ended = measure(args.options, cache, log_dir)
            exit_seconds = ended["exit"] - ended["first step"]
            moments = [0.0, *(ended[part] for part in MARKS)]
            spent = [after - before for before, after in pairwise(moments)]
            row = "".join(f"{seconds:26.2f}" for seconds in spent)
            print(f"{'full' if number else 'empty':8}{row}{moments[-1]:10.2f}{exit_seconds:10.2f}", flush=True)
            print(f"{'':8}{recorded(log_dir)}", flush=True)


if __name__ == "__main__":
    main()
