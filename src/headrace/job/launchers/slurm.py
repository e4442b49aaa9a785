"""Slurm's srun."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.core.errors import ConfigError
from headrace.job.addresses import LOOPBACK, expand_hosts, job_port
from headrace.job.launch_variables import coordinator_variable, job_variables, user_variables
from headrace.job.launchers.row import Driver, Launcher
from headrace.job.process_info import ProcessInfo
from headrace.job.variables import (
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
    # The step's own number first: SLURM_NTASKS may be that of the whole allocation.
    size = read_number(environ, "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS")
    name = next((n for n in ("SLURM_STEP_NODELIST", "SLURM_NODELIST") if environ.get(n)), "SLURM_JOB_NODELIST")
    hosts = expand_hosts(environ.get(name, ""), name)
    job, step = read_number(environ, "SLURM_JOB_ID"), read_optional(environ, "SLURM_STEP_ID") or 0
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    return ProcessInfo(
        process=read_number(environ, "SLURM_PROCID"),
        num_processes=size,
        # With the step: the steps of one Slurm job may run side by side on the same hosts.
        coordinator=coordinator_of(environ, LOOPBACK if len(hosts) == 1 else hosts[0], job_port(job * 16 + step)),
        detected_by="Slurm",
        local_process=read_optional(environ, "SLURM_LOCALID"),
        num_local_processes=_tasks_here(tasks, read_optional(environ, "SLURM_NODEID")),
        num_replicas=read_optional(environ, NUM_REPLICAS),
        devices_per_replica=read_optional(environ, DEVICES_PER_REPLICA),
    )


def _tasks_here(text: str, node: int | None) -> int | None:
    """Return the number of tasks on a node, from `4(x2),3`: two nodes with 4 tasks and one with 3."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node is not None and node < len(counts) else None


def srun_command(request: "LaunchRequest", command: Sequence[str], environ: Environ, job: int) -> list[str]:
    """Return the command line of srun, inside a Slurm allocation."""
    del environ  # srun passes on all of it
    if request.min_processes is not None:
        raise ConfigError("--min-processes cannot be used with srun.", rule="Slurm itself replaces lost nodes.")
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
        user_variables(request)
        | job_variables(request)
        | (coordinator_variable(request, job) if request.coordinator else {})
    )
    # ALL first: with names alone, srun would pass on nothing else.
    values = ["ALL", *(f"{name}={value}" for name, value in variables.items())]
    if ambiguous := [value for value in values if "," in value]:
        raise ConfigError(f"srun cannot pass on {ambiguous[0]!r}.", rule="A comma ends a variable in its --export.")
    return [*words, f"--export={','.join(values)}", *command]


SLURM = Launcher(
    name="Slurm",
    variables=("SLURM_PROCID", "SLURM_STEP_ID"),
    # An sbatch script has SLURM_PROCID=0 and SLURM_NTASKS too, but it is one process: only srun creates steps.
    is_present=lambda e: "SLURM_PROCID" in e and "SLURM_STEP_ID" in e,
    read=_read,
    counts=True,
    driver=Driver(program="srun", command=srun_command),
)
