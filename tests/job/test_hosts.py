"""Several hosts, each with its own name and address (namespaces): joining, bad networks, pulled cables, lost hosts."""

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from headrace.checkpoint.store import list_checkpoints, load
from headrace.telemetry.records import Note, RunStart, read_records

from .namespaces import Hosts, why_not
from .processes import PATIENCE, SRC
from .test_control_join import PROGRAM, wait_ready

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"hosts as namespaces: {why_not()}")
needs_ssh = pytest.mark.skipif(
    not (shutil.which("mpirun") and Path("/usr/sbin/sshd").exists()),
    reason="mpirun or sshd (Debian: openmpi-bin, openssh-server) is not installed",
)

LOST = 76
ENVIRON = {"PYTHONPATH": SRC, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "HEADRACE_SECRET": "between hosts"}
LINE = shlex.split("""
    train --config none --dataset generated --image-size 8 --num-classes 4 --num-samples 64 --model-name cifar_resnet8
    --micro-batch-size 4 --num-replicas 2 --learning-rate 0.02 --ckpts-per-epoch 1 --no-validation --platform cpu
    --progress plain --call-seconds 0.05 --run-name run
""")
Processes = list[subprocess.Popen[bytes]]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(["a", "b"], tmp_path / "hosts") as found:
        yield found


def headrace(folder: Path, num_epochs: int, *more: str) -> list[str]:
    places = ["--log-dir", str(folder), "--executable-cache-path", str(folder.parent / "programs")]
    return [sys.executable, "-m", "headrace", *LINE, *places, "--num-epochs", str(num_epochs), *more]


def start(hosts: Hosts, words: list[str], folder: Path, **more: str) -> Processes:
    """Start one process on each host, by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    size, first = str(len(hosts.hosts)), f"{next(iter(hosts.hosts))}:61440"
    started = []
    for number, (name, host) in enumerate(hosts.hosts.items()):
        info = {"HEADRACE_PROCESS": str(number), "HEADRACE_NUM_PROCESSES": size, "HEADRACE_COORDINATOR": first}
        started.append(host.start(words, folder / f"{name}.txt", ENVIRON | info | more))
    return started


def launch(hosts: Hosts, folder: Path, num_epochs: int, *options: str) -> subprocess.Popen[bytes]:
    """Start the launcher on the first host, for all of them: mpirun over ssh."""
    hosts.serve_ssh()
    folder.mkdir(parents=True, exist_ok=True)
    line = [*LINE, "--log-dir", str(folder), "--num-epochs", str(num_epochs)]
    command = [sys.executable, "-m", "headrace", "launch", "--host", ",".join(hosts.hosts), "--num-instances", "2"]
    command += ["--mpi-global-args=--allow-run-as-root", "--silence-seconds", "3", *options, "--", *line]
    return hosts["a"].start(command, folder / "launch.txt", ENVIRON)


def wait_for_checkpoint(folder: Path, job: Processes) -> None:
    deadline = time.monotonic() + PATIENCE
    while not list_checkpoints(folder / "run" / "checkpoints"):
        assert all(process.poll() is None for process in job), printed(folder)
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)


def printed(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.txt")))


def weights(folder: Path) -> Mapping[str, bytes]:
    arrays, _ = load(list_checkpoints(folder / "run" / "checkpoints")[-1])
    return {name: array.tobytes() for name, array in arrays.items()}


def test_hosts_join_by_name_and_a_pulled_cable_ends_both(hosts: Hosts, tmp_path: Path) -> None:
    words = [sys.executable, str(PROGRAM), str(tmp_path), "100000", "-"]
    job = start(hosts, words, tmp_path / "out", HEADRACE_SILENCE_SECONDS="2")
    wait_ready(tmp_path, 2)
    hosts.pull("b")
    begin = time.monotonic()
    assert [process.wait(PATIENCE) for process in job] == [LOST, LOST]
    assert time.monotonic() - begin < 15
    for mine, other in (("a", "1"), ("b", "0")):
        text = (tmp_path / "out" / f"{mine}.txt").read_text()
        assert f"because process {other} (pid" in text
        assert f"host {'ab'.replace(mine, '')}) has not responded for 2 s: it hangs, or its host is gone" in text


@pytest.mark.slow
def test_two_hosts_train_to_the_bits_of_one_whatever_the_network(hosts: Hosts, tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    here = [*headrace(one, 2)[:3], "launch", "--num-instances", "2", "--", *headrace(one, 2)[3:]]
    subprocess.run(hosts["a"].command(["env", *(f"{k}={v}" for k, v in ENVIRON.items()), *here]), check=True)
    for name, quality in (("clean", {}), ("bad", {"delay_seconds": 0.005, "loss": 0.01})):
        hosts.impair(**quality)
        job = start(hosts, headrace(tmp_path / name, 2), tmp_path / name)
        assert [process.wait(300) for process in job] == [0, 0], printed(tmp_path / name)
        assert weights(tmp_path / name) == weights(one)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_link_that_goes_down_ends_both_and_the_run_resumes(hosts: Hosts, tmp_path: Path, victim: str) -> None:
    folder = tmp_path / "runs"
    job = start(hosts, headrace(folder, 100000), folder, HEADRACE_SILENCE_SECONDS="3")
    wait_for_checkpoint(folder, job)
    hosts[victim].set_link("down")
    begin = time.monotonic()
    assert [process.wait(PATIENCE) for process in job] == [LOST, LOST]
    assert time.monotonic() - begin < 20
    before = load(list_checkpoints(folder / "run/checkpoints")[-1])[1]["step"]
    hosts[victim].set_link("up")
    last = before + 16
    again = [*headrace(folder, 1)[:3], "resume", str(folder / "run"), "--num-epochs", str(last // 8)]
    job = start(hosts, again, tmp_path / "again")
    assert [process.wait(PATIENCE) for process in job] == [0, 0], printed(tmp_path / "again")
    assert load(list_checkpoints(folder / "run/checkpoints")[-1])[1]["step"] == last


@needs_ssh
@pytest.mark.slow
def test_mpirun_over_ssh_restarts_after_a_cable_was_pulled_for_a_while(hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    job = launch(hosts, folder, 30, "--max-restarts", "2")
    wait_for_checkpoint(folder, [job])
    hosts.pull("b")
    time.sleep(6)
    hosts.plug("b")
    assert job.wait(240) == 0, printed(folder)
    notes = [record.text for record in read_records(folder / "run") if isinstance(record, Note)]
    assert any("restart 1 of 2 by the launcher: process" in text for text in notes)
    starts = [record for record in read_records(folder / "run") if isinstance(record, RunStart)]
    assert [record.num_replicas for record in starts] == [2, 2]


@needs_ssh
@pytest.mark.slow
def test_a_host_without_power_is_left_out_and_used_again(hosts: Hosts, tmp_path: Path) -> None:
    """mpirun waits for ever for a host that is gone; the launcher does not, and keeps the global batch."""
    folder, options = tmp_path / "runs", ("--max-restarts", "1", "--min-instances", "1")
    job = launch(hosts, folder, 12, *options)
    wait_for_checkpoint(folder, [job])
    hosts["b"].power_off()
    assert job.wait(240) == 0, printed(folder)
    text = printed(folder)
    assert "without b: 1 of 2 processes" in text
    starts = [record for record in read_records(folder / "run") if isinstance(record, RunStart)]
    assert [record.global_batch_size for record in starts] == [8, 8]
    hosts.restart("b")
    again = launch(hosts, tmp_path / "again", 1, *options)
    assert again.wait(240) == 0, printed(tmp_path / "again")
    assert "without b" not in printed(tmp_path / "again")
