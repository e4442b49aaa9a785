"""Execute commands of the seeds made as short as possible: one update, synthetic data, images of 8 pixels."""

import os
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest

from headrace_reference.applications import detect_application
from tests.fork_server import run
from tests.seeds.reading import SeedCommand, planned, read_commands, script_words, split_launch

ROOT = Path(__file__).parents[2]
GIB_OF_A_PROCESS = 1.4  # 1.3 was measured of one process alone, in `CROWDED`
# Up to 32 processes share two cores and their memory: longer limits, and glibc gives back what XLA freed (1.3 GiB
# instead of 2.0 for a process of the largest).
CROWDED = {
    "HEADRACE_JOIN_SECONDS": "900",
    "HEADRACE_SILENCE_SECONDS": "300",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "1000000",
    "MALLOC_MMAP_THRESHOLD_": "1000000",
}
SHORT = ["--dry-run-steps", "1", "--dataset-device-budget", "1MiB", "--progress", "plain", "--platform", "cpu"]


def at(seed: str, line: int) -> SeedCommand:
    return next(command for command in read_commands() if (command.seed, command.line) == (seed, line))


def tf_config(line: int) -> str:
    """Return what an `export TF_CONFIG=...` of seed 001 sets."""
    return shlex.split(at("001", line).text)[1].removeprefix("TF_CONFIG=")


def reduced(script: str, argv: list[str], place: Path, cache: Path) -> list[str]:
    """Return an argv with what makes it short: one update, synthetic data, small images; nothing else changes."""
    words = script_words(script, argv)
    more = ["--compilation-cache-dir", str(cache)]
    if not any(word.partition("=")[0] == "--config" for word in argv):
        more += [
            "--application",
            "tf1" if script == "validation" else detect_application(argv),
        ]  # not judged by what is added
    if words[0] == "bench":
        return [*argv, *more, "--image-size", "8", "--steps-per-call", "1", "--repeat", "1", "--num-requests", "1"]
    resolved, _ = planned(words)
    size = "32" if resolved.config.model.model_name == "toy_model" else "8"  # its pools are 5 pixels wide
    images = ["--image-size", size] if resolved.config.data.dataset == "imagenet" else []
    made_up = [] if resolved.config.data.synthetic_on else ["--generated-data"]
    return [*argv, *SHORT, *made_up, *images, *more, "--log-dir", str(place / "runs"), "--run-name", "seed"]


def launched_words(command: SeedCommand, place: Path, cache: Path) -> list[str]:
    """Return a poprun line of this host, its program reduced."""
    hosts = {word for word in command.words(place) if re.fullmatch(r"[\d.]+(,[\d.]+)+", word)}
    words = ["localhost" if word in hosts else word for word in command.words(place)]
    _, script, argv = split_launch(words)
    return [sys.executable, "-m", "headrace", *words[: len(words) - len(argv)], *reduced(script, argv, place, cache)]


def execute(words: list[str], place: Path, **variables: str) -> str:
    """Run a command in a process of its own; return what it printed."""
    environ = {key: value for key, value in os.environ.items() if key not in ("DATASETS_DIR", "DATA_DIR")}
    environ |= {"WANDB_MODE": "offline", "PYTHONPATH": str(ROOT / "src"), **variables}
    done = run(words, cwd=place, env=environ, timeout=7200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def reduced_worker(argv: list[str], place: Path, cache: Path) -> list[str]:
    """Return the command of a worker, reduced; its plan needs the others, so it is not made here."""
    short = [*SHORT, "--generated-data", "--image-size", "8", "--application", "tf1"]
    return [
        *argv,
        *short,
        "--compilation-cache-dir",
        str(cache),
        "--log-dir",
        str(place / "runs"),
        "--run-name",
        "seed",
    ]


def needs_memory(processes: int) -> None:
    """Skip where so many processes, each with a compiler, would not fit."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = sum(int(lines[kind].split()[0]) for kind in ("MemAvailable", "SwapFree")) / 2**20
    needed = GIB_OF_A_PROCESS * processes
    if free < needed:
        pytest.skip(f"{processes} processes need about {needed:.0f} GiB, {free:.0f} are free (swap counts)")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens at."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports


def check_output(command: SeedCommand, printed: str) -> None:
    """See to it that a weight update was made, or something measured."""
    if command.bench:
        assert re.search(r"img/s", printed), printed
    else:
        assert re.search(r"step 1/1  loss \d", printed), printed
