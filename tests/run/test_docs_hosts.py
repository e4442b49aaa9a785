"""docs/howto/hosts.md: its lines are read as they stand, its manifest gives every pod a place, and its commands run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from headrace.cli.main import main
from headrace.job.detect_launcher import detect_process_info
from headrace.job.launch_request import parse_launch_options
from tests.job.processes import SRC

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "hosts.md").read_text()
BLOCKS = [
    block for language, block in re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) if not language
]
LINES = [line.split("  #")[0].strip() for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]


def lines_with(word: str) -> list[str]:
    return [line for line in LINES if line.startswith(word)]


@pytest.mark.parametrize("line", [*lines_with("headrace launch"), *lines_with("poprun")])
def test_lines_of_the_launcher_are_read(line: str) -> None:
    words = shlex.split(line)
    request = parse_launch_options(words[1:] if words[0] == "poprun" else words[2:])
    assert request.num_processes > 1
    assert request.program[0] in ("train", "resume", "python3")
    assert request.notes == ()


def test_pods_find_their_places() -> None:
    service, job = yaml.safe_load_all(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
    pod = job["spec"]["template"]["spec"]
    said = {row["name"]: row["value"] for row in pod["containers"][0]["env"]}
    assert pod["subdomain"] == service["metadata"]["name"] == said["HEADRACE_SERVICE"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(said["HEADRACE_NUM_PROCESSES"])
    name = job["metadata"]["name"]
    for index in range(job["spec"]["completions"]):
        place = detect_process_info(said | {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{name}-{index}"})
        assert place is not None
        assert (place.process, place.num_processes) == (index, 4)
        assert place.coordinator == "train-0.train:61440"


def test_the_table_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers are those of seed 001: 16 x 4 x 256 = 16 x 16 x 64 = 16 x 32 x 32 = 16,384."""
    (block,) = [block for block in BLOCKS if "headrace plan" in block]
    command, *table = block.strip().splitlines()
    assert main(shlex.split(command.removeprefix("$ headrace "))) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in printed[1 : 1 + len(table)]] == table
    for row in table[2:-1]:
        _, replicas, _, _, micro, count, batch, _ = row.split()
        assert int(replicas) * int(micro) * int(count) == int(batch.replace(",", "")) == 16384


def run(line: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a line of the page in a shell, with our own python for `headrace` and `poprun`."""
    ours = {"headrace": "-m headrace", "poprun": "-m headrace poprun"}
    for name, words in ours.items():
        line = re.sub(rf"(?<!\S){name}(?= )", f"{sys.executable} {words}", line, count=1)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HEADRACE_", "OMPI_"))}
    environ = kept | {"PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu"} | variables
    words = ["bash", "-c", f"exec env {line}"]
    return subprocess.Popen(words, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(*processes: subprocess.Popen[str]) -> str:
    printed = [process.communicate(timeout=280)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(printed)
    assert sum(text.count("finished at epoch") for text in printed) == 1
    return printed[0]


@pytest.mark.slow
def test_the_launcher_and_poprun_run(tmp_path: Path) -> None:
    printed = end(run(lines_with("headrace launch --num-instances 2")[0], tmp_path))
    assert "1 epoch of 22 steps, 64 images each on cpu (4 replicas)" in printed
    printed = end(run(lines_with("poprun")[0], tmp_path))
    assert "(2 replicas)" in printed


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun (Debian: openmpi-bin) is not installed")
def test_mpirun_runs(tmp_path: Path) -> None:
    line = lines_with("mpirun --bind-to none -n 2")[0].replace(
        "mpirun", "mpirun --allow-run-as-root --oversubscribe", 1
    )
    printed = end(run(line, tmp_path))
    assert "(2 replicas)" in printed
    assert (tmp_path / "runs" / "with-mpirun" / "checkpoints").is_dir()


@pytest.mark.slow
def test_by_hand(tmp_path: Path) -> None:
    (exported,) = lines_with("export HEADRACE")
    shared = dict(word.split("=", 1) for word in shlex.split(exported)[1:])
    end(*(run(lines_with(f"HEADRACE_PROCESS={number}")[0], tmp_path, **shared) for number in (0, 1)))


@pytest.mark.slow
def test_the_older_form(tmp_path: Path) -> None:
    (exported,) = lines_with("export TF_CONFIG")
    first = shlex.split(exported)[1].partition("=")[2]
    line = lines_with("headrace train --distributed")[0]
    configs = (first, first.replace('"index":0', '"index":1'))
    printed = end(*(run(line, tmp_path, TF_CONFIG=config) for config in configs))
    assert "32 images each on cpu (2 replicas)" in printed  # 2 workers x 1 replica x 16
