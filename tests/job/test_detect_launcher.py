"""The info of a process, from the variables that each way of starting it sets; and what is refused."""

import json
import zlib

import pytest

from headrace.core.errors import ConfigError
from headrace.job.addresses import expand_hosts, split_address
from headrace.job.detect_launcher import detect_process_info, refuse_unread_launcher
from headrace.job.launchers import LAUNCHERS

OURS = {"HEADRACE_PROCESS": "1", "HEADRACE_NUM_PROCESSES": "4", "HEADRACE_COORDINATOR": "node0:5000"}
# as Open MPI 4.1.4 sets them (mpirun -n 2 on one host), and with two hosts
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "420478976.0;tcp://192.0.2.2:40415;tcp6://[fd00::2]:51359",
    "PMIX_NAMESPACE": "420478977",
}
TWO_HOSTS = OPEN_MPI_4 | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
OPEN_MPI_5 = {key: value for key, value in TWO_HOSTS.items() if "orte" not in key} | {
    "PMIX_NAMESPACE": "prterun-node-7-31337@1"
}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
    "SLURM_STEP_NODELIST": "gpu[08-10]",
    "SLURM_JOB_NODELIST": "gpu[08-12]",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "3",
    "HEADRACE_NUM_PROCESSES": "8",
    "HEADRACE_SERVICE": "train",
    "HOSTNAME": "train-workers-0-3",
}
TPU = {"TPU_WORKER_HOSTNAMES": "t0,t1,t2,t3", "TPU_WORKER_ID": "2"}
# as jax.distributed reads and Kubeflow Trainer sets them; as torchrun 2.13 does; as SkyPilot documents
JAX = {"JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:6666", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.7",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_TASK_ID": "sky-2026-11-19-task",
}
# seed 001: once with the index, once without it under mpirun
WORKERS = {"cluster": {"worker": ["worker0:3636", "worker1:3636"]}, "task": {"type": "worker", "index": 1}}
TF_CONFIG = {"TF_CONFIG": json.dumps(WORKERS)}
TF_CONFIG_MPI = {"TF_CONFIG": json.dumps({**WORKERS, "task": {"type": "worker"}})} | TWO_HOSTS

PORT_4 = 61440 + (420478976 // 4096) % 4096
PORT_5 = 61440 + 31337 % 4096
PORT_TORCH = 61440 + 29500 % 4096
PORT_SKY = 61440 + zlib.crc32(b"sky-2026-11-19-task") % 4096
PORT_SLURM = 61440 + (4242 * 16 + 1) % 4096


CASES = [
    (OURS, False, (1, 4, "node0:5000", "HEADRACE_PROCESS")),
    (OPEN_MPI_4, False, (1, 2, f"127.0.0.1:{PORT_4}", "Open MPI")),
    (TWO_HOSTS, False, (1, 2, f"192.0.2.2:{PORT_4}", "Open MPI")),
    (TWO_HOSTS | {"HEADRACE_COORDINATOR": "n1:77"}, False, (1, 2, "n1:77", "Open MPI")),
    (OPEN_MPI_5, False, (1, 2, f"node-7:{PORT_5}", "Open MPI")),
    (SLURM, False, (5, 7, f"gpu08:{PORT_SLURM}", "Slurm")),
    # mpirun inside an sbatch job: the daemons are tasks of Slurm, the processes are Open MPI's
    (SLURM | OPEN_MPI_4, False, (1, 2, f"127.0.0.1:{PORT_4}", "Open MPI")),
    (KUBERNETES, False, (3, 8, "train-workers-0-0.train:61440", "Kubernetes")),
    (KUBERNETES | {"HEADRACE_COORDINATOR": "a.b:9"}, False, (3, 8, "a.b:9", "Kubernetes")),
    (TPU, False, (2, 4, "t0:8476", "TPU pod")),
    (JAX, False, (3, 4, "job-node-0-0.job:6666", "JAX_PROCESS_ID")),
    (JAX | {"HEADRACE_COORDINATOR": "a.b:9"}, False, (3, 4, "a.b:9", "JAX_PROCESS_ID")),
    # the pods of Kubeflow's runtime are those of an Indexed Job
    (JAX | {"JOB_COMPLETION_INDEX": "3"}, False, (3, 4, "job-node-0-0.job:6666", "JAX_PROCESS_ID")),
    (TORCHRUN, False, (5, 8, f"node0:{PORT_TORCH}", "torchrun")),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, False, (5, 8, f"127.0.0.1:{PORT_TORCH}", "torchrun")),
    (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}, False, (5, 8, f"node0:{PORT_TORCH + 2}", "torchrun")),
    # the agent is a task of Slurm or a node of SkyPilot, the processes are torchrun's
    (SLURM | TORCHRUN, False, (5, 8, f"node0:{PORT_TORCH}", "torchrun")),
    (SKYPILOT | TORCHRUN, False, (5, 8, f"node0:{PORT_TORCH}", "torchrun")),
    (SKYPILOT, False, (1, 2, f"10.0.0.4:{PORT_SKY}", "SkyPilot")),
    (TF_CONFIG, True, (1, 2, "worker0:3636", "TF_CONFIG")),
    (TF_CONFIG_MPI, True, (1, 2, "worker0:3636", "TF_CONFIG")),
    (TWO_HOSTS, True, (1, 2, f"192.0.2.2:{PORT_4}", "Open MPI")),
]


@pytest.mark.parametrize(("environ", "distributed", "expected"), CASES)
def test_each_way_of_starting(environ: dict[str, str], distributed: bool, expected: tuple) -> None:
    info = detect_process_info(environ, distributed=distributed)
    assert info is not None
    assert (info.process, info.num_processes, info.coordinator, info.detected_by) == expected
    assert info.replicas_per_process == ("TF_CONFIG" in environ)
    assert info.is_first is False


def test_each_launcher_is_tried() -> None:
    assert {expected[3] for _, _, expected in CASES} == {row.name for row in LAUNCHERS}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin"},
        TF_CONFIG,  # without --distributed it means nothing, as in the seed
        {key: value for key, value in SLURM.items() if "STEP" not in key},  # a script of sbatch, without srun
        {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "sweep-3"},  # an Indexed Job of single runs
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.0.4", "SKYPILOT_NODE_RANK": "0"},
        JAX | {"HEADRACE_NUM_PROCESSES": "1"},  # told to train alone
    ],
)
def test_a_process_alone(environ: dict[str, str]) -> None:
    assert detect_process_info(environ) is None


def test_what_only_jax_knows_is_left_open() -> None:
    info = detect_process_info({"HEADRACE_NUM_PROCESSES": "auto"})
    assert info is not None
    assert (info.num_processes, info.coordinator, info.detected_by) == (0, "", "JAX")


def test_the_launcher_says_more() -> None:
    more = {
        "HEADRACE_LOCAL_PROCESS": "1",
        "HEADRACE_NUM_LOCAL_PROCESSES": "2",
        "HEADRACE_NUM_REPLICAS": "16",
        "HEADRACE_DEVICES_PER_REPLICA": "2",
        "HEADRACE_JOIN_SECONDS": "33.5",
        "HEADRACE_SILENCE_SECONDS": "4",
    }
    info = detect_process_info(OURS | more)
    assert info is not None
    assert (info.local_process, info.num_local_processes) == (1, 2)
    assert (info.num_replicas, info.devices_per_replica) == (16, 2)
    assert (info.join_seconds, info.silence_seconds) == (33.5, 4)


def test_who_shares_the_host() -> None:
    """Slurm writes 2(x2),3 for nodes with 2, 2 and 3 tasks."""
    for node, count in ((0, 2), (1, 2), (2, 3)):
        info = detect_process_info(SLURM | {"SLURM_NODEID": str(node)})
        assert info is not None
        assert (info.local_process, info.num_local_processes) == (1, count)


@pytest.mark.parametrize(
    ("environ", "distributed", "words"),
    [
        ({"HEADRACE_PROCESS": "1"}, False, "but not HEADRACE_NUM_PROCESSES and HEADRACE_COORDINATOR"),
        ({"HEADRACE_NUM_PROCESSES": "2"}, False, "HEADRACE_NUM_PROCESSES is set, so there are other processes"),
        ({"HEADRACE_COORDINATOR": "a:1"}, False, "HEADRACE_COORDINATOR is set, so there are other processes"),
        (OURS | {"HEADRACE_PROCESS": "one"}, False, "HEADRACE_PROCESS is 'one', not a number"),
        (OURS | {"HEADRACE_PROCESS": "4"}, False, "process 4 of 4"),
        (OURS | {"HEADRACE_COORDINATOR": "node0"}, False, "a host, a colon and a port"),
        (OURS | {"HEADRACE_COORDINATOR": "node0:99999"}, False, "from 1 to 65535"),
        (OURS | {"HEADRACE_JOIN_SECONDS": "soon"}, False, "HEADRACE_JOIN_SECONDS is 'soon'"),
        (OURS | OPEN_MPI_4, False, "process 1 of 4, and Open MPI says process 1 of 2"),
        (OURS | SLURM, False, "process 1 of 4, and Slurm says process 5 of 7"),
        (OURS | JAX, False, "process 1 of 4, and JAX_PROCESS_ID says process 3 of 4"),
        (OURS | TORCHRUN, False, "process 1 of 4, and torchrun says process 5 of 8"),
        (JAX | {"JAX_PROCESS_ID": "4"}, False, "process 4 of 4"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "node0"}, False, "a host, a colon and a port"),
        (TORCHRUN | {"RANK": "first"}, False, "RANK is 'first', not a number"),
        ({**TWO_HOSTS, "OMPI_MCA_orte_hnp_uri": ""}, False, "does not say where process 0 runs"),
        (OPEN_MPI_4 | {"OMPI_COMM_WORLD_SIZE": ""}, False, "OMPI_COMM_WORLD_SIZE is '', not a number"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[08-"}, False, "SLURM_STEP_NODELIST is 'gpu[08-'"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[9-8]"}, False, "range [9-8]"),
        (KUBERNETES | {"HEADRACE_SERVICE": ""}, False, "the address of process 0 is not known"),
        (KUBERNETES | {"HOSTNAME": "other"}, False, "the address of process 0 is not known"),
        ({}, True, "nothing defines which processes belong together"),
        (OURS | {"HEADRACE_NUM_REPLICAS": "4"}, True, "--distributed is given under headrace launch"),
        ({"TF_CONFIG": "{"}, True, "TF_CONFIG cannot be read"),
        ({"TF_CONFIG": '{"cluster": {}}'}, True, "TF_CONFIG cannot be read"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a"]}}'}, True, "A worker of TF_CONFIG is 'a'"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, True, "no task index"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}'}, True, "cannot be read"),
        (TF_CONFIG | {**TWO_HOSTS, "OMPI_COMM_WORLD_RANK": "0"}, True, "Open MPI says process 0 of 2"),
    ],
)
def test_halves_and_contradictions_are_refused(environ: dict[str, str], distributed: bool, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect_process_info(environ, distributed=distributed)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_COORDINATOR_ADDRESS=a:1, without JAX_NUM_PROCESSES"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1, WORLD_SIZE=2, without MASTER_ADDR"),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "2"}, "torchrun --no-python headrace train"),
        (TF_CONFIG, "TF_CONFIG with 2 workers"),
        (
            {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "sweep-3"},
            "JOB_COMPLETION_INDEX=3, without HEADRACE_NUM_PROCESSES",
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "MPICH or Intel MPI (PMI_RANK=1, PMI_SIZE=4)"),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, "MVAPICH"),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"}, "jsrun"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, "Flux"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "Horovod"),
        ({"VC_TASK_INDEX": "0", "VC_WORKER_NUM": "2"}, "Volcano"),
        ({"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-1"}, "SM_HOSTS with 2 hosts"),
    ],
)
def test_one_of_several_that_cannot_join_does_not_train_alone(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unread_launcher(environ)
    assert words in str(caught.value)
    assert "HEADRACE_NUM_PROCESSES=1" in str(caught.value)
    refuse_unread_launcher(environ | {"HEADRACE_NUM_PROCESSES": "1"})  # as the remedy says


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'},
        {"TF_CONFIG": "{"},
        {"SM_HOSTS": '["algo-1"]'},
        {"JAX_NUM_PROCESSES": "1"},
    ],
)
def test_one_process_is_not_refused(environ: dict[str, str]) -> None:
    refuse_unread_launcher(environ)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b.c", ["a", "b.c"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-11],m", ["n08", "n09", "n10", "n11", "m"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text, "X") == hosts


def test_addresses_of_six() -> None:
    assert split_address("[fd00::2]:80", "X") == ("fd00::2", 80)
    info = detect_process_info(
        TWO_HOSTS | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::b9b:ac5d,2620:10d::2]:43370"}
    )
    assert info is not None
    assert info.coordinator == "[fe80::b9b:ac5d]:61441"
