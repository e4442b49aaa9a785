"""The manifests in examples/kubernetes: their pods are one job, and their command is one of ours.

Against the schemas that Kubeflow Trainer and JobSet publish they were checked once (docs/howto/hosts.md says which).
"""

from pathlib import Path
from typing import Any

import yaml

from headrace.cli.options import read_config_arguments, resolve_arguments
from headrace.job.detect_launcher import detect_process_info
from headrace.job.process_info import ProcessInfo

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def environ_of(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "from a secret") for each in container["env"]}


def joined(environ: dict[str, str]) -> ProcessInfo:
    info = detect_process_info(environ)
    assert info is not None
    assert info.secret == "from a secret"
    assert info.join_seconds == 900
    return info


def check_command(container: dict[str, Any]) -> None:
    """The words are those of `headrace train`, of a run that goes on after a restart."""
    assert container["command"] == ["headrace"]
    command, *words = container["args"]
    assert command == "train"
    config = resolve_arguments(read_config_arguments(words, "headrace train", description="")).config
    assert config.logging.resume == "auto"
    assert config.logging.run_name
    assert config.logging.log_dir.startswith("/shared/")


def test_the_pods_of_a_jobset_are_one_job() -> None:
    jobset = manifest("jobset")
    name, (jobs,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    job, network = jobs["template"]["spec"], jobset["spec"]["network"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    assert network["enableDNSHostnames"]
    (container,) = job["template"]["spec"]["containers"]
    for index in range(job["completions"]):
        # what Kubernetes sets in a pod of a JobSet: its index, and its name without the random part as its host's name
        pod = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{name}-{jobs['name']}-0-{index}"}
        info = joined(environ_of(container) | pod)
        assert (info.process, info.num_processes) == (index, job["completions"])
        # its service has the JobSet's name (network.subdomain is not given)
        assert info.coordinator.rpartition(":")[0] == f"{name}-{jobs['name']}-0-0.{name}"
    check_command(container)


def test_the_pods_of_a_trainjob_are_one_job() -> None:
    job = manifest("trainjob")
    trainer = job["spec"]["trainer"]
    assert job["spec"]["runtimeRef"]["name"] == "jax-distributed"
    for index in range(trainer["numNodes"]):
        # what Kubeflow Trainer's plugin for jax sets
        pod = {
            "JAX_COORDINATOR_ADDRESS": "resnet50-node-0-0.resnet50:29500",
            "JAX_NUM_PROCESSES": str(trainer["numNodes"]),
            "JAX_PROCESS_ID": str(index),
        }
        info = joined(environ_of(trainer) | pod)
        assert (info.process, info.num_processes) == (index, 4)
        assert info.coordinator == pod["JAX_COORDINATOR_ADDRESS"]
    check_command(trainer)


def test_volumes_are_mounted_where_the_command_writes() -> None:
    """The names of mounts are those of volumes, in both manifests."""
    (jobs,) = manifest("jobset")["spec"]["replicatedJobs"]
    (patch,) = manifest("trainjob")["spec"]["runtimePatches"]
    (patched,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert patched["name"] == "node"  # of the runtime jax-distributed, like its container
    for pod in (jobs["template"]["spec"]["template"]["spec"], patched["template"]["spec"]["template"]["spec"]):
        (volume,), (container,) = pod["volumes"], pod["containers"]
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/shared"}]
