"""Processes on other hosts: the command lines of mpirun and srun, which start them. Pure functions."""

from collections.abc import Mapping, Sequence

from headrace.core.errors import ConfigError
from headrace.job.detect_launcher import address, port_of
from headrace.job.launch_request import LaunchRequest
from headrace.job.process_info import COORDINATOR, DEVICES_PER_REPLICA, JOIN_SECONDS, NUM_REPLICAS, SILENCE_SECONDS

PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DATASETS_DIR", "DATA_DIR", "XLA_FLAGS")


def job_variables(request: LaunchRequest) -> dict[str, str]:
    """Return the variables that say what the launcher knows of a job."""
    known = {
        NUM_REPLICAS: request.num_replicas,
        DEVICES_PER_REPLICA: request.devices_per_replica,
        JOIN_SECONDS: request.join_seconds,
        SILENCE_SECONDS: request.silence_seconds,
    }
    return {name: f"{value:g}" for name, value in known.items() if value is not None}


def own_variables(request: LaunchRequest) -> dict[str, str]:
    """Return the variables that `-x NAME=VALUE` among mpirun's options sets."""
    return dict(word.split("=", 1) for word in _passed(request) if "=" in word)


def _passed(request: LaunchRequest) -> list[str]:
    """Return what stands behind each -x."""
    args = request.mpi_local_args
    return [args[i + 1] for i, word in enumerate(args[:-1]) if word == "-x"]


def mpirun_command(request: LaunchRequest, command: Sequence[str], environ: Mapping[str, str], job: int) -> list[str]:
    """Return the line for mpirun (Open MPI 4 and 5); `job` is a number from which the job's port comes."""
    words = ["mpirun", *_if_new("--tag-output", request.mpi_global_args), *request.mpi_global_args]
    if request.hosts:
        slots = deal_out(request.num_processes, len(request.hosts))
        words += ["--host", ",".join(f"{host}:{n}" for host, n in zip(request.hosts, slots, strict=True))]
    words += ["-n", str(request.num_processes)]
    # Threads that decode pictures need all cores: mpirun would keep each process on one.
    bound = {"--bind-to", "-bind-to"} & {*request.mpi_local_args, *request.mpi_global_args}
    words += [] if bound else ["--bind-to", "numa" if request.numa_aware else "none"]
    words += request.mpi_local_args
    named = {
        request.mpi_local_args[i + 1].split("=")[0] for i, w in enumerate(request.mpi_local_args[:-1]) if w == "-x"
    }
    for name in PASSED_ON:
        words += ["-x", name] if environ.get(name) and name not in named else []
    for name, value in (job_variables(request) | _coordinator(request, job)).items():
        words += ["-x", f"{name}={value}"]
    return [*words, *command]


def srun_command(request: LaunchRequest, command: Sequence[str], job: int) -> list[str]:
    """Return the line for srun, inside an allocation of Slurm."""
    words = ["srun", "--label", "--kill-on-bad-exit=1", f"--ntasks={request.num_processes}"]
    if request.hosts:
        if request.num_processes % len(request.hosts):
            raise ConfigError(
                f"{request.num_processes} processes cannot be dealt out evenly to {len(request.hosts)} hosts.",
                rule="srun starts as many on each host.",
            )
        words += [f"--nodes={len(request.hosts)}", f"--nodelist={','.join(request.hosts)}"]
        words += [f"--ntasks-per-node={request.num_processes // len(request.hosts)}"]
    if request.numa_aware:
        words += ["--cpu-bind=ldoms"]
    said = own_variables(request) | job_variables(request) | (_coordinator(request, job) if request.coordinator else {})
    values = ["ALL", *(f"{name}={value}" for name, value in said.items())]
    if unclear := [value for value in values if "," in value]:
        raise ConfigError(f"srun cannot pass on {unclear[0]!r}.", rule="It takes commas to end a variable.")
    return [*words, f"--export={','.join(values)}", *command]


def deal_out(count: int, places: int) -> list[int]:
    """Return how many go to each place: as even as it can be, the first ones have more."""
    return [count // places + (place < count % places) for place in range(places)]


def _coordinator(request: LaunchRequest, job: int) -> dict[str, str]:
    """Return where the processes meet: mpirun's first process runs on the first host."""
    if request.coordinator:
        return {COORDINATOR: request.coordinator}
    return {COORDINATOR: address(request.hosts[0], port_of(job))} if request.hosts else {}


def _if_new(word: str, words: Sequence[str]) -> list[str]:
    return [] if word in words or "--output" in words else [word]
