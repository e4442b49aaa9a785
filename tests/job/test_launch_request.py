"""Lines of the launcher, those of the seeds above all, read into requests; and the command lines made from them."""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.job.launch_request import LaunchRequest, parse_launch_options, script_and_arguments
from headrace.job.launch_variables import job_variables, split_evenly, user_variables
from headrace.job.launcher import choose_driver, process_command
from headrace.job.launchers.open_mpi import mpirun_command
from headrace.job.launchers.slurm import srun_command
from headrace.job.local_processes import cores_per_process, describe_exit, process_gpus, process_variables, visible_gpus
from headrace.job.process_info import ProcessInfo

# Seed 001, as printed, and what the text around each says: (processes, replicas, devices of a replica, hosts)
POD16 = """-v --numa-aware 1 --num-instances 8 --num-replicas 16 --ipus-per-replica 1 --mpi-local-args="--tag-output"
    python3 train.py --config mk2_resnet50_gn_16ipus --data-dir your_dataset_dir_path --no-validation"""
BARE = """-v --numa-aware 1 --num-instances 4 --num-replicas 4 --ipus-per-replica --mpi-local-args="--tag-output"
    python3 train.py --config mk2_resnet50_bn_16ipus --data-dir your_dataset_path --no-validation"""
POD64 = """-v --host 10.1.3.101,10.1.3.102,10.1.3.103,10.1.3.104 --numa-aware=yes --vipu-server-host=10.1.3.101
    --vipu-partition=p64 --reset-partition=no --update-partition=no
    --mpi-global-args="--tag-output --mca btl_tcp_if_include 10.1.3.0/24"
    --mpi-local-args="-x LD_LIBRARY_PATH -x PATH -x PYTHONPATH -x TF_CPP_VMODULE=poplar_compiler=1
    -x IPUOF_VIPU_API_TIMEOUT=300 -x TF_POPLAR_FLAGS=--executable_cache_path=/w/exec_cache" --num-replicas=16
    --num-instances=16 --ipus-per-replica 4 python3 /w/examples/applications/tensorflow/cnns/training/train.py
    --config mk2_resnet50_bn_64ipus --no-validation --data-dir your_dataset_path"""
POD128 = """-v --host
    10.10.19.150,10.10.19.151,10.10.19.152,10.10.19.153,10.10.20.150,10.10.20.151,10.10.20.152,10.10.20.153
    --numa-aware=yes --vipu-server-host=10.3.19.150 --vipu-server-timeout=300 --vipu-partition=gcl128
    --vipu-cluster=gcl --reset-partition=no --update-partition=no --num-ilds=2
    --mpi-global-args="--tag-output --allow-run-as-root --mca oob_tcp_if_include 10.10.0.0/16
    --mca btl_tcp_if_include 10.10.0.0/16" --mpi-local-args="-x LD_LIBRARY_PATH -x TF_CPP_VMODULE=poplar_compiler=1
    -x PATH -x PYTHONPATH -x IPUOF_VIPU_API_TIMEOUT=600 -x POPLAR_ENGINE_OPTIONS" --ipus-per-replica 4
    --num-replicas=32 --num-instances=32 python3 --config mk2_resnet50_bn_128ipus --no-validation"""
# Seed 003
BENCH = """--numa-aware=yes --num-replicas=4 --num-instances=4 --ipus-per-replica 4 python train.py --model resnet"""
INFERENCE = "--num-replicas 4 --ipus-per-replica 1 --num-instances 4 --numa-aware 1 python3 validation.py --repeat 10"


@pytest.mark.parametrize(
    ("line", "expected", "script"),
    [
        (POD16, (8, 16, 1, 0, True), "train"),
        (BARE, (4, 4, None, 0, True), "train"),
        (POD64, (16, 16, 4, 4, True), "train"),
        (POD128, (32, 32, 4, 8, True), "train"),
        (BENCH, (4, 4, 4, 0, True), "train"),
        (INFERENCE, (4, 4, 1, 0, True), "validation"),
        ("--num-instances 2 -- train --num-epochs 1", (2, 2, None, 0, False), "train"),
        ("--num-processes 2 --devices-per-replica 2 -- train --num-epochs 1", (2, 2, 2, 0, False), "train"),
        ("--host node[1-3] --num-replicas 6 train", (3, 6, None, 3, False), "train"),
    ],
)
def test_lines(line: str, expected: tuple, script: str) -> None:
    request = parse_launch_options(shlex.split(line), "poprun")
    found = (request.num_processes, request.num_replicas, request.devices_per_replica, len(request.hosts))
    assert (*found, request.numa_aware) == expected
    name, arguments = script_and_arguments(request.program)
    assert name == script
    words = shlex.split(line)
    assert arguments == words[len(words) - len(arguments) :]


def test_what_has_no_effect_is_named_once() -> None:
    request = parse_launch_options(shlex.split(POD128), "poprun")
    effect, python = request.notes
    for name in ("--vipu-server-host", "--vipu-server-timeout", "--vipu-cluster", "--num-ilds", "--reset-partition"):
        assert effect.count(name) == 1
    assert "--numa-aware" not in effect
    assert python == "python3 is given no script: train.py is assumed"
    assert parse_launch_options(shlex.split(BARE)).notes == (
        "--ipus-per-replica has no value: the program's configuration decides",
    )
    assert parse_launch_options(shlex.split(POD16)).notes == ()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "no program to start"),
        ("--num-instances 2", "no program to start"),
        ("--num-instances 2 --", "no program to start"),
        ("--num-instances two train", "--num-instances is 'two'"),
        ("--num-instances 0 train", "a whole number of at least 1"),
        ("--num-instances", "--num-instances needs a value"),
        ("--num-instances --num-replicas 2 train", "--num-instances needs a value"),
        ("--num-instances 3 --num-replicas 4 train", "4 replicas cannot be divided evenly among 3 processes"),
        ("--num-instances 4 --num-replicas 2 train", "Give --num-replicas 4"),
        ("--num-instance 3 train", "Did you mean --num-instances?"),
        ("--host a,b --num-instances 1 train", "2 hosts for 1 processes"),
        ("--numa-aware=perhaps train", "yes or no"),
        ("--driver ssh train", "--driver is 'ssh'"),
        ("--dry-run=1 train", "takes no value"),
        ("--join-seconds -1 train", "greater than 0"),
        ("--num-instances 2 --only-output-from-instance 2 train", "no process 2 of 2"),
    ],
)
def test_bad_lines_are_refused(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_launch_options(shlex.split(line))
    assert words in str(caught.value)


def request_of(line: str) -> LaunchRequest:
    return parse_launch_options(shlex.split(line))


def test_command_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [sys.executable, "-m", "headrace", "train", "--seed", "1"]
    assert process_command(request_of("-- train --seed 1")) == own
    assert process_command(request_of("headrace train --seed 1")) == own
    assert process_command(request_of("--executable-cache-path /c train")) == [
        *own[:4],
        "--executable-cache-path",
        "/c",
    ]
    assert process_command(request_of("/opt/py/bin/python3.12 mine.py x")) == ["/opt/py/bin/python3.12", "mine.py", "x"]
    assert process_command(request_of("./run.sh x")) == ["./run.sh", "x"]
    monkeypatch.chdir(tmp_path)
    # no such file here: the script of the package
    first = process_command(request_of("python3 /elsewhere/train.py --model resnet"))
    assert first[:2] == [sys.executable, "-c"]
    assert "run_script('train')" in first[2]
    assert first[3:] == ["--model", "resnet"]
    (tmp_path / "train.py").touch()
    assert process_command(request_of("python train.py x")) == [sys.executable, "train.py", "x"]


def test_only_a_job_that_is_restarted_is_watched_for_hangs_by_itself() -> None:
    assert "HEADRACE_HANG_SECONDS" not in job_variables(request_of("train"))
    assert job_variables(request_of("--max-restarts 2 train"))["HEADRACE_HANG_SECONDS"] == "1800"
    assert job_variables(request_of("--hang-seconds 90 train"))["HEADRACE_HANG_SECONDS"] == "90"


def test_line_for_mpirun() -> None:
    """Against the manual of Open MPI: slots behind a colon, -x for variables, -n for the number."""
    line = mpirun_command(request_of(POD64), ["prog", "x"], {"PATH": "/bin", "XLA_FLAGS": "f"}, job=5)
    assert line == shlex.split(
        "mpirun --tag-output --mca btl_tcp_if_include 10.1.3.0/24 "
        "--host 10.1.3.101:4,10.1.3.102:4,10.1.3.103:4,10.1.3.104:4 -n 16 --bind-to numa -x LD_LIBRARY_PATH -x PATH "
        "-x PYTHONPATH -x TF_CPP_VMODULE=poplar_compiler=1 -x IPUOF_VIPU_API_TIMEOUT=300 "
        "-x TF_POPLAR_FLAGS=--executable_cache_path=/w/exec_cache -x XLA_FLAGS -x HEADRACE_NUM_REPLICAS=16 "
        "-x HEADRACE_DEVICES_PER_REPLICA=4 -x HEADRACE_COORDINATOR=10.1.3.101:61445 prog x"
    )
    plain = mpirun_command(request_of("--driver mpirun --num-instances 2 train"), ["prog"], {}, job=5)
    assert plain == shlex.split("mpirun --tag-output -n 2 --bind-to none -x HEADRACE_NUM_REPLICAS=2 prog")


def test_line_for_srun() -> None:
    request = request_of("--host n[1-2] --num-instances 8 --num-replicas 16 --join-seconds 300 train")
    assert srun_command(request, ["prog"], {}, job=5) == shlex.split(
        "srun --label --kill-on-bad-exit=0 --ntasks=8 --nodes=2 --nodelist=n1,n2 --ntasks-per-node=4 "
        "--export=ALL,HEADRACE_NUM_REPLICAS=16,HEADRACE_JOIN_SECONDS=300 prog"
    )
    with pytest.raises(ConfigError, match="3 processes cannot be divided evenly among 2 hosts"):
        srun_command(request_of("--host a,b --num-instances 3 train"), ["prog"], {}, job=5)


def test_who_starts_the_processes() -> None:
    here, there = request_of("--host localhost train"), request_of("--host far --dry-run train")
    nodes = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}
    assert choose_driver(request_of("train"), {}) == "local"
    assert choose_driver(here, {}) == "local"
    assert choose_driver(there, {}) == "mpirun"
    assert choose_driver(there, nodes) == "srun"
    assert choose_driver(request_of("--dry-run train"), nodes) == "srun"
    assert choose_driver(here, nodes) == "local"
    with pytest.raises(ConfigError, match="cannot start processes on far"):
        choose_driver(request_of("--driver local --host far train"), {})


def test_a_missing_mpirun_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="mpirun is not installed here"):
        choose_driver(request_of("--host far train"), {})


def test_devices_of_each_process(tmp_path: Path) -> None:
    """8 GPUs, 2 processes: with 2 replicas of 2 devices each has 4; where nothing is said, half of all."""
    gpus = [str(number) for number in range(8)]

    def shares(line: str, visible: list[str]) -> list[str | None]:
        request = request_of(line)
        said = [process_variables(request, n, "h:1", visible) for n in range(request.num_processes)]
        assert [s["HEADRACE_PROCESS"] for s in said] == [str(n) for n in range(request.num_processes)]
        return [s.get("CUDA_VISIBLE_DEVICES") for s in said]

    assert shares("--num-instances 2 --num-replicas 4 --ipus-per-replica 2 train", gpus) == ["0,1,2,3", "4,5,6,7"]
    assert shares("--num-instances 2 --ipus-per-replica 1 train", gpus) == ["0", "1"]
    assert shares("--num-instances 2 train", gpus) == ["0,1,2,3", "4,5,6,7"]
    assert shares("--num-instances 2 train", []) == [None, None]
    assert shares("--num-instances 2 --ipus-per-replica 4 train", gpus[:4]) == [None, None]  # told when it plans
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-ab,"}) == ["3", "GPU-ab"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert visible_gpus({}, tmp_path / "none") == []
    for name in ("0000:1b", "0000:1c"):
        (tmp_path / name).mkdir()
    assert visible_gpus({}, tmp_path) == ["0", "1"]


def test_gpus_under_mpirun() -> None:
    """mpirun deals out none: process 1 of 2 on a host with 8 takes the second half."""
    info = ProcessInfo(
        process=3, num_processes=4, coordinator="h:1", detected_by="x", local_process=1, num_local_processes=2
    )
    assert process_gpus(info, {}, 8) == [4, 5, 6, 7]
    assert process_gpus(info, {}, 0) is None
    assert process_gpus(info, {"SLURM_GPUS_PER_TASK": "2"}, 2) is None
    assert process_gpus(replace(info, local_process=0, num_local_processes=1), {}, 8) is None
    assert process_gpus(replace(info, local_process=None), {}, 8) is None


def test_variables_for_processes_here() -> None:
    assert user_variables(request_of("--mpi-local-args='-x A=1 -x PATH -x B=x=y' train")) == {"A": "1", "B": "x=y"}


def test_cores_are_dealt_out_by_node(tmp_path: Path) -> None:
    """Two nodes; of four processes, two are on each; every core belongs to one."""
    mine = sorted(os.sched_getaffinity(0))
    for node, cores in enumerate((mine[: len(mine) // 2], mine[len(mine) // 2 :])):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(",".join(map(str, cores)) + "\n")
    shares = cores_per_process(2, tmp_path)
    assert sorted(core for share in shares for core in share) == mine
    assert shares[0] == set(mine[: len(mine) // 2])
    assert cores_per_process(len(mine) + 1, tmp_path) == [set(mine)] * (len(mine) + 1)  # too few: all share all


def test_small_words() -> None:
    assert split_evenly(7, 3) == [3, 2, 2]
    assert describe_exit(-9) == "died: signal 9 (SIGKILL)"
    assert describe_exit(-40) == "died: signal 40 (real-time)", "Python has no name for it"
    assert describe_exit(2) == "ended with exit code 2"
