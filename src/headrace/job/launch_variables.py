"""What the launcher says to the processes that it starts, as variables."""

from typing import TYPE_CHECKING

from headrace.job.addresses import format_address, job_port
from headrace.job.variables import (
    BATCH_REPLICAS,
    COORDINATOR,
    DEVICES_PER_REPLICA,
    HANG_SECONDS,
    JOIN_SECONDS,
    NUM_REPLICAS,
    RESTART,
    SECRET,
    SILENCE_SECONDS,
)

if TYPE_CHECKING:
    from headrace.job.launch_request import LaunchRequest

# mpirun starts processes on other hosts without the caller's environment, but for what -x names.
FORWARDED_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DATASETS_DIR", "DATA_DIR", "XLA_FLAGS")
JOB_VARIABLES = (SECRET, RESTART, BATCH_REPLICAS)  # set by the launcher in the environment of mpirun

_HANG_SECONDS = 1800.0  # if nothing else is said and the job would be started again


def job_variables(request: "LaunchRequest") -> dict[str, str]:
    """Return the variables for what the launcher knows about a job."""
    known = {
        NUM_REPLICAS: request.num_replicas,
        DEVICES_PER_REPLICA: request.devices_per_replica,
        JOIN_SECONDS: request.join_seconds,
        SILENCE_SECONDS: request.silence_seconds,
        HANG_SECONDS: request.hang_seconds or (_HANG_SECONDS if request.max_restarts else None),
    }
    return {name: f"{value:g}" for name, value in known.items() if value is not None}


def user_variables(request: "LaunchRequest") -> dict[str, str]:
    """Return the variables that `-x NAME=VALUE` among mpirun's options sets."""
    return dict(word.split("=", 1) for word in passed_variables(request) if "=" in word)


def passed_variables(request: "LaunchRequest") -> list[str]:
    """Return the argument of each -x."""
    args = request.mpi_local_args
    return [args[i + 1] for i, word in enumerate(args[:-1]) if word == "-x"]


def split_evenly(count: int, hosts: int) -> list[int]:
    """Return how many processes each host gets: as even as possible, the first hosts have more."""
    return [count // hosts + (host < count % hosts) for host in range(hosts)]


def coordinator_variable(request: "LaunchRequest", job: int) -> dict[str, str]:
    """Return the coordinator's address: process 0 runs on mpirun's first host."""
    if request.coordinator:
        return {COORDINATOR: request.coordinator}
    return {COORDINATOR: format_address(request.hosts[0], job_port(job))} if request.hosts else {}
