"""A real Slurm of two nodes: srun, the launcher inside a job, job arrays, time limits, preemption, lost nodes."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.checkpoint.store import list_checkpoints, load
from headrace.telemetry.records import Note, RunEnd, RunStart, read_records

from .processes import SRC
from .slurm_cluster import Cluster, why_no_slurm
from .test_hosts import LINE, weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_no_slurm()), reason=f"Slurm: {why_no_slurm()}"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def script(folder: Path, line: str, num_epochs: int = 2, program: str = "srun") -> str:
    """Return a batch script that trains; LINE and LOG_DIR in `line` stand for the options of a small run."""
    options = shlex.join([*LINE, "--log-dir", str(folder), "--num-epochs", str(num_epochs)])
    options += f" --executable-cache-path {folder.parent}/programs"
    return (
        f"export PYTHONPATH={SRC} JAX_PLATFORMS=cpu PYTHONUNBUFFERED=1 HEADRACE_SECRET=among-nodes\n"
        f"{program} {sys.executable} -m headrace {line.replace('LINE', options)}"
    )


def step(folder: Path) -> int:
    found = list_checkpoints(folder / "run" / "checkpoints")
    return load(found[-1])[1]["step"] if found else 0


def wait_for_step(cluster: Cluster, job: int, folder: Path, least: int) -> None:
    cluster.wait_for("true", lambda _: step(folder) >= least or cluster.state(job) in ("FAILED", "COMPLETED"), 240)
    assert cluster.state(job) == "RUNNING", cluster.printed(job)


def interrupted_at(folder: Path, signal_name: str) -> int:
    """Check that a run was interrupted once, by that signal, and saved; return its step."""
    records = read_records(folder / "run")
    ends = [record for record in records if isinstance(record, RunEnd)]
    assert [record.outcome for record in ends] == ["interrupted"]
    notes = "\n".join(record.text for record in records if isinstance(record, Note))
    assert re.search(rf"{signal_name}( at process \d)?: (saved|stopped) at step {ends[0].step}\b", notes), notes
    assert step(folder) == ends[0].step
    return ends[0].step


def test_srun_on_two_nodes_has_the_bits_of_a_launch_on_one(cluster: Cluster, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("srun", "launch", "here")]
    inside = f"launch --num-instances 2 -- {'LINE'}"
    jobs = [
        cluster.submit(script(folders[0], "LINE"), "--nodes=2", "--ntasks=2"),
        cluster.submit(script(folders[1], inside, program=""), "--nodes=2", "--ntasks=2"),
        cluster.submit(script(folders[2], inside, program=""), "--nodes=1", "--ntasks=2"),
    ]
    for job in jobs:
        assert cluster.wait_for_state(job, "COMPLETED", "FAILED", seconds=400) == "COMPLETED", cluster.printed(job)
    assert weights(folders[0]) == weights(folders[1]) == weights(folders[2])
    assert "no HEADRACE_SECRET" not in cluster.printed(jobs[0])
    assert "Traceback" not in "".join(map(cluster.printed, jobs))


def test_the_tasks_of_an_array_are_runs_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    line = "LINE --run-name run-$SLURM_ARRAY_TASK_ID --seed $SLURM_ARRAY_TASK_ID --num-replicas 1"
    plain = script(tmp_path / "runs", line, 1, program="")
    steps = script(tmp_path / "runs", line.replace("run-$", "step-$"), 1, program="srun")
    job = cluster.submit(f"{plain}\n{steps}", "--array=1-2", "--ntasks=1", f"--output={tmp_path}/%a.txt")
    found = cluster.wait_for_state(job, "COMPLETED", "FAILED", "COMPLETED,FAILED", seconds=400)
    assert found == "COMPLETED", [path.read_text() for path in tmp_path.glob("*.txt")]
    runs = [tmp_path / "runs" / name for name in ("run-1", "run-2", "step-1", "step-2")]
    losses = [read_records(run)[-1].to_json() for run in runs]
    assert all('"outcome": "finished"' in text for text in losses)
    seeds = [next(record.seed for record in read_records(run) if isinstance(record, RunStart)) for run in runs]
    assert seeds == [1, 2, 1, 2]


# Slurm takes a job that ends by itself for a failed one, even if it was about to requeue it.
REQUEUE = "[ $? -eq 75 ] && scontrol requeue $SLURM_JOB_ID"


def test_before_the_time_limit_a_job_saves_and_requeues_itself(cluster: Cluster, tmp_path: Path) -> None:
    line = script(tmp_path, "LINE --resume auto", 100000)
    options = ["--nodes=2", "--ntasks=2", "--time=1", "--signal=USR1@20", "--requeue", "--open-mode=append"]
    job = cluster.submit(f"{line}\n{REQUEUE}", *options)
    cluster.wait_for_requeue(job, 200)
    saved = interrupted_at(tmp_path, "SIGUSR1")
    wait_for_step(cluster, job, tmp_path, saved + 8)
    assert f"resume from step {saved:,}" in cluster.printed(job)
    assert cluster.call(["scancel", str(job)]).returncode == 0  # for good, although it saves and exits with 75
    assert cluster.wait_for_state(job, "CANCELLED") == "CANCELLED"


@pytest.mark.parametrize("partition", ["low", "grace"])
def test_a_preempted_job_saves_is_requeued_and_goes_on(cluster: Cluster, tmp_path: Path, partition: str) -> None:
    line = script(tmp_path, "LINE --resume auto", 100000)
    options = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--requeue", "--exclusive", "--open-mode=append"]
    job = cluster.submit(f"{line}\n{REQUEUE if partition == 'grace' else ''}", *options, f"--partition={partition}")
    wait_for_step(cluster, job, tmp_path, 8)
    other = cluster.submit("sleep 5", "--partition=high", "--nodes=2", "--exclusive")
    cluster.wait_for_state(other, "RUNNING", "COMPLETED", seconds=120)
    saved = interrupted_at(tmp_path, "SIGTERM")
    cluster.wait_for_state(other, "COMPLETED")
    cluster.wait_for_requeue(job)
    wait_for_step(cluster, job, tmp_path, saved + 8)
    assert f"resume from step {saved:,}" in cluster.printed(job)
    cluster.call(["scancel", str(job)])
    cluster.wait_for_state(job, "CANCELLED")


def test_a_killed_task_ends_the_step_and_the_launcher_restarts_it(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    line = script(folder, "launch --num-instances 2 --max-restarts 1 --silence-seconds 3 -- LINE", 20, program="")
    job = cluster.submit(line, "--nodes=2", "--ntasks=2", "--ntasks-per-node=1")
    wait_for_step(cluster, job, folder, 8)
    pids = cluster.call(["pgrep", "-f", "headrace train"], "b").stdout.split()  # only those of the host
    cluster.call(["kill", "-KILL", *pids], "b")
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED", seconds=300) == "COMPLETED", cluster.printed(job)
    notes = [record.text for record in read_records(folder / "run") if isinstance(record, Note)]
    assert any(text.startswith("restart 1 of 1 by the launcher: process 1 (pid") for text in notes), notes
