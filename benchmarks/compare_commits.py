"""Compare a commit with its parent on this machine: CPU steps, compile times, import, --help and plan, in turn.

    python benchmarks/compare_commits.py                      # HEAD with HEAD^
    python benchmarks/compare_commits.py --old v0.1 --jobs cifar_resnet8:32 --rounds 7 --tests tests/ops tests/plan

Each commit is checked out into a folder of its own and its libraries are built there (for the working tree as it is,
give `--new .`). The two take turns, so that a busy machine troubles them alike. For each measurement the best and the
median of both are printed with old/new: above 1, the new commit is faster. CPU seconds are hardly troubled by others.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
JOBS = "cifar_resnet8:32 cifar_resnet20:128 resnet50:8 efficientnet_b0:16 mobilenet_v2:16"
STARTS = {
    "import": ["-c", "import headrace"],
    "--help": ["-m", "headrace", "--help"],
    "plan": ["-m", "headrace", "plan", "--generated-data"],
}
# Runs in the folder of either commit, with what both have: benchmarks/cpu_step.py.
STEP = """
import sys, time, json
start = time.process_time()
sys.path.insert(0, "benchmarks")
import jax, jax.numpy as jnp, numpy as np
from cpu_step import fresh_state, make_network, make_step
model, batch = sys.argv[1], int(sys.argv[2])
network = make_network(model, "batch_norm")
rng = np.random.default_rng(0)
images = jnp.array(rng.standard_normal((batch, *network.input_hwc)), jnp.float32)
data = images, jnp.array(rng.integers(0, network.num_classes, batch))
state = fresh_state(network)
start, cpu = time.perf_counter(), time.process_time()
program = jax.jit(make_step(network, jnp.float32), donate_argnums=0).lower(state, data).compile()
print(json.dumps([time.perf_counter() - start, time.process_time() - cpu]), flush=True)
state, loss = program(state, data)
jax.block_until_ready(loss)
for line in sys.stdin:
    start, cpu = time.perf_counter(), time.process_time()
    state, loss = program(state, data)
    jax.block_until_ready((state, loss))
    print(json.dumps([time.perf_counter() - start, time.process_time() - cpu]), flush=True)
"""
Pair = tuple[float, float]  # seconds of wall clock and of CPU


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Yield a folder with a commit, its libraries built; "." is the working tree."""
    if commit == ".":
        yield ROOT
        return
    with tempfile.TemporaryDirectory(prefix="headrace-compare-") as folder:
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, commit], cwd=ROOT, check=True)
        try:
            build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--parallel", "2"]
            subprocess.run(build, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            yield Path(folder)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=False)


def environment(folder: Path) -> dict[str, str]:
    """Return the variables with which a process uses a folder's package, on the CPU."""
    return os.environ | {"PYTHONPATH": str(folder / "src"), "JAX_PLATFORMS": "cpu"}


def timed(folder: Path, arguments: list[str]) -> Pair:
    """Run Python once; return its wall clock and CPU seconds."""
    before, start = os.times(), time.perf_counter()
    command = [sys.executable, *arguments]
    subprocess.run(command, cwd=folder, env=environment(folder), check=True, capture_output=True)
    after = os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return time.perf_counter() - start, cpu


def steps(folders: list[Path], job: str, rounds: int) -> tuple[list[list[Pair]], list[list[Pair]]]:
    """Return the compile times and step times of a job for each folder."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", STEP, *job.split(":")],
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for folder in folders
    ]
    compiled, taken = [], [[] for _ in folders]
    for child in children:
        assert child.stdout is not None
        compiled.append([read(child.stdout.readline())])
    for _ in range(rounds):
        for child, found in zip(children, taken, strict=True):
            assert child.stdin is not None and child.stdout is not None  # noqa: PT018
            child.stdin.write("step\n")
            child.stdin.flush()
            found.append(read(child.stdout.readline()))
    for child in children:
        child.communicate()
    return compiled, taken


def read(line: str) -> Pair:
    """Return the two numbers of a line."""
    wall, cpu = (float(part) for part in line.strip("[] \n").split(","))
    return wall, cpu


def row(name: str, pairs: list[list[Pair]]) -> str:
    """Return a line of the table: old and new in milliseconds, and their ratios."""
    old, new = ([[pair[i] for pair in found] for i in (0, 1)] for found in pairs)
    best = [1000 * min(side[0]) for side in (old, new)]
    ratios = (
        min(old[0]) / min(new[0]),
        statistics.median(old[0]) / statistics.median(new[0]),
        min(old[1]) / min(new[1]),
    )
    return f"{name:30} {best[0]:10.1f} {best[1]:10.1f} {ratios[0]:8.2f} {ratios[1]:8.2f} {ratios[2]:8.2f}"


def main() -> None:
    """Parse, check out, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", default="HEAD^")
    parser.add_argument("--new", default="HEAD")
    parser.add_argument("--jobs", nargs="*", default=JOBS.split(), help="NETWORK:BATCH ...")
    parser.add_argument("--tests", nargs="*", default=[], help="tests of each commit that are timed too, once")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with checkout(args.old) as old, checkout(args.new) as new:
        folders = [old, new]
        print(
            f"{'':30} {'old ms':>10} {'new ms':>10} {'best':>8} {'median':>8} {'CPU':>8}   old/new, above 1 is faster"
        )
        for name, arguments in STARTS.items():
            timed(old, arguments), timed(new, arguments)  # compiles the .pyc files
            pairs: list[list[Pair]] = [[], []]
            for _ in range(args.rounds):
                for folder, found in zip(folders, pairs, strict=True):
                    found.append(timed(folder, arguments))
            print(row(name, pairs), flush=True)
        for job in args.jobs:
            compiled, taken = steps(folders, job, args.rounds)
            print(row(f"{job} compile", compiled), flush=True)
            print(row(f"{job} step", taken), flush=True)
        if args.tests:
            arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *args.tests]
            print(row("tests", [[timed(folder, arguments)] for folder in folders]), flush=True)


if __name__ == "__main__":
    main()
