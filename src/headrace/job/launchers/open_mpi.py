"""Open MPI's mpirun."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.core.errors import ConfigError
from headrace.job.addresses import LOOPBACK, job_port
from headrace.job.launch_variables import (
    FORWARDED_VARIABLES,
    JOB_VARIABLES,
    coordinator_variable,
    job_variables,
    passed_variables,
    split_evenly,
)
from headrace.job.launchers.row import Driver, Launcher
from headrace.job.process_info import ProcessInfo
from headrace.job.variables import (
    COORDINATOR,
    DEVICES_PER_REPLICA,
    NUM_REPLICAS,
    Environ,
    coordinator_of,
    read_number,
    read_optional,
)

if TYPE_CHECKING:
    from headrace.job.launch_request import LaunchRequest


def _read(environ: Environ) -> ProcessInfo:
    size, local = read_number(environ, "OMPI_COMM_WORLD_SIZE"), read_optional(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    host, number = _mpirun_host_and_job(environ)
    # On one host loopback needs no name, works without a network, and nobody else can connect.
    if local == size:
        host = LOOPBACK  # all on one host
    if not host and not environ.get(COORDINATOR):
        raise ConfigError(
            "This version of Open MPI does not say where process 0 runs, and there are several hosts.",
            remedy=f"mpirun -x {COORDINATOR}=HOST:61440 ..., where HOST is the first host.",
        )
    return ProcessInfo(
        process=read_number(environ, "OMPI_COMM_WORLD_RANK"),
        num_processes=size,
        coordinator=coordinator_of(environ, host, job_port(number)),
        detected_by="Open MPI",
        # Made by mpirun (Open MPI 4) for each job and passed to its processes only.
        secret=environ.get("OMPI_MCA_orte_precondition_transports", ""),
        local_process=read_optional(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        num_local_processes=local,
        num_replicas=read_optional(environ, NUM_REPLICAS),
        devices_per_replica=read_optional(environ, DEVICES_PER_REPLICA),
    )


def _mpirun_host_and_job(environ: Environ) -> tuple[str, int]:
    """Return the host that mpirun runs on, and a number that identifies the job.

    Open MPI 4 sets `420478976.0;tcp://10.0.0.1,10.1.0.1:40415`, whose job number is a multiple of 4096; Open MPI 5 sets
    the job's namespace, `prterun-HOST-PID@1`.
    """
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if found := re.match(r"(\d+)\.\d+;tcp6?://\[?([^,\];]+?)(?:[,\]]|:\d+(?:;|$))", uri):
        return found.group(2), int(found.group(1)) // 4096
    if found := re.match(r"(?:prterun|prte)-(.+)-(\d+)@\d+", environ.get("PMIX_NAMESPACE", "")):
        return found.group(1), int(found.group(2))
    return "", 0


def mpirun_command(request: "LaunchRequest", command: Sequence[str], environ: Environ, job: int) -> list[str]:
    """Return the command line of mpirun (Open MPI 4 and 5); the job's port is derived from the number `job`."""
    # Lines prefixed with the process number, as for local processes.
    words = ["mpirun", *_unless_given("--tag-output", request.mpi_global_args), *request.mpi_global_args]
    if request.hosts:
        slots = split_evenly(request.num_processes, len(request.hosts))
        words += ["--host", ",".join(f"{host}:{n}" for host, n in zip(request.hosts, slots, strict=True))]
    words += ["-n", str(request.num_processes)]
    # Image decoding needs threads on all cores: by default mpirun binds each process to one core.
    bound = {"--bind-to", "-bind-to"} & {*request.mpi_local_args, *request.mpi_global_args}
    words += [] if bound else ["--bind-to", "numa" if request.numa_aware else "none"]
    words += request.mpi_local_args
    named = {word.split("=")[0] for word in passed_variables(request)}
    for name in (*FORWARDED_VARIABLES, *JOB_VARIABLES):
        words += ["-x", name] if environ.get(name) and name not in named else []
    for name, value in (job_variables(request) | coordinator_variable(request, job)).items():
        words += ["-x", f"{name}={value}"]
    return [*words, *command]


def _unless_given(word: str, words: Sequence[str]) -> list[str]:
    return [] if word in words or "--output" in words else [word]


OPEN_MPI = Launcher(
    name="Open MPI",
    variables=("OMPI_COMM_WORLD_RANK",),
    is_present=lambda e: "OMPI_COMM_WORLD_RANK" in e,
    read=_read,
    counts=True,
    driver=Driver(program="mpirun", command=mpirun_command),
)
