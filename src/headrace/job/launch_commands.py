"""Command lines of mpirun and srun, which start processes on other hosts. Pure functions."""

from collections.abc import Mapping, Sequence

from headrace.core.errors import ConfigError
from headrace.job.detect_launcher import (
    BATCH_REPLICAS,
    COORDINATOR,
    DEVICES_PER_REPLICA,
    HANG_SECONDS,
    JOIN_SECONDS,
    NUM_REPLICAS,
    RESTART,
    SECRET,
    SILENCE_SECONDS,
    format_address,
    job_port,
)
from headrace.job.launch_request import LaunchRequest

# mpirun starts processes on other hosts without the caller's environment, but for what -x names.
FORWARDED_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DATASETS_DIR", "DATA_DIR", "XLA_FLAGS")
JOB_VARIABLES = (SECRET, RESTART, BATCH_REPLICAS)  # set by the launcher in the environment of mpirun

_HANG_SECONDS = 1800.0  # if nothing else is said and the job would be started again


def job_variables(request: LaunchRequest) -> dict[str, str]:
    """Return the variables for what the launcher knows about a job."""
    known = {
        NUM_REPLICAS: request.num_replicas,
        DEVICES_PER_REPLICA: request.devices_per_replica,
        JOIN_SECONDS: request.join_seconds,
        SILENCE_SECONDS: request.silence_seconds,
        HANG_SECONDS: request.hang_seconds or (_HANG_SECONDS if request.max_restarts else None),
    }
    return {name: f"{value:g}" for name, value in known.items() if value is not None}


def user_variables(request: LaunchRequest) -> dict[str, str]:
    """Return the variables that `-x NAME=VALUE` among mpirun's options sets."""
    return dict(word.split("=", 1) for word in _passed(request) if "=" in word)


def _passed(request: LaunchRequest) -> list[str]:
    """Return the argument of each -x."""
    args = request.mpi_local_args
    return [args[i + 1] for i, word in enumerate(args[:-1]) if word == "-x"]


def mpirun_command(request: LaunchRequest, command: Sequence[str], environ: Mapping[str, str], job: int) -> list[str]:
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
    named = {word.split("=")[0] for word in _passed(request)}
    for name in (*FORWARDED_VARIABLES, *JOB_VARIABLES):
        words += ["-x", name] if environ.get(name) and name not in named else []
    for name, value in (job_variables(request) | _coordinator(request, job)).items():
        words += ["-x", f"{name}={value}"]
    return [*words, *command]


def srun_command(request: LaunchRequest, command: Sequence[str], job: int) -> list[str]:
    """Return the command line of srun, inside a Slurm allocation."""
    # The processes notice losses themselves. Slurm would also kill those that are about to exit with 75.
    words = ["srun", "--label", "--kill-on-bad-exit=0", f"--ntasks={request.num_processes}"]
    if request.hosts:
        if request.num_processes % len(request.hosts):
            raise ConfigError(
                f"{request.num_processes} processes cannot be divided evenly among {len(request.hosts)} hosts.",
                rule="srun starts the same number on each host.",
            )
        words += [f"--nodes={len(request.hosts)}", f"--nodelist={','.join(request.hosts)}"]
        words += [f"--ntasks-per-node={request.num_processes // len(request.hosts)}"]
    if request.numa_aware:
        words += ["--cpu-bind=ldoms"]
    variables = (
        user_variables(request) | job_variables(request) | (_coordinator(request, job) if request.coordinator else {})
    )
    # ALL first: with names alone, srun would pass on nothing else.
    values = ["ALL", *(f"{name}={value}" for name, value in variables.items())]
    if ambiguous := [value for value in values if "," in value]:
        raise ConfigError(f"srun cannot pass on {ambiguous[0]!r}.", rule="A comma ends a variable in its --export.")
    return [*words, f"--export={','.join(values)}", *command]


def split_evenly(count: int, hosts: int) -> list[int]:
    """Return how many processes each host gets: as even as possible, the first hosts have more."""
    return [count // hosts + (host < count % hosts) for host in range(hosts)]


def _coordinator(request: LaunchRequest, job: int) -> dict[str, str]:
    """Return the coordinator's address: process 0 runs on mpirun's first host."""
    if request.coordinator:
        return {COORDINATOR: request.coordinator}
    return {COORDINATOR: format_address(request.hosts[0], job_port(job))} if request.hosts else {}


def _unless_given(word: str, words: Sequence[str]) -> list[str]:
    return [] if word in words or "--output" in words else [word]
