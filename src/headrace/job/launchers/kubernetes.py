"""An Indexed Job of Kubernetes."""

from headrace.core.errors import ConfigError
from headrace.job.addresses import job_port
from headrace.job.launchers.row import Launcher, Unread
from headrace.job.process_info import ProcessInfo
from headrace.job.variables import COORDINATOR, NUM_PROCESSES, SERVICE, Environ, coordinator_of, read_number


def _read(environ: Environ) -> ProcessInfo:
    index, host = read_number(environ, "JOB_COMPLETION_INDEX"), environ.get("HOSTNAME", "")
    stem = host.removesuffix(f"-{index}")
    if not environ.get(COORDINATOR) and (not environ.get(SERVICE) or stem == host):
        raise ConfigError(
            f"JOB_COMPLETION_INDEX and {NUM_PROCESSES} are set, but the address of process 0 is not known.",
            rule=f"{SERVICE} is the headless service of the pods (of a JobSet: its name); pods are NAME-0, ...",
            remedy=f"Set {SERVICE}, or {COORDINATOR}=POD.SERVICE:61440.",
        )
    return ProcessInfo(
        process=index,
        num_processes=read_number(environ, NUM_PROCESSES),
        coordinator=coordinator_of(environ, f"{stem}-0.{environ.get(SERVICE, '')}", job_port(0)),
        detected_by="Kubernetes",
        local_process=0,
        num_local_processes=1,
    )


def _without_number(environ: Environ) -> str:
    index = environ.get("JOB_COMPLETION_INDEX")
    return f"JOB_COMPLETION_INDEX={index}, without {NUM_PROCESSES}" if index and NUM_PROCESSES not in environ else ""


KUBERNETES = Launcher(
    name="Kubernetes",
    variables=("JOB_COMPLETION_INDEX", NUM_PROCESSES, SERVICE),
    # An Indexed Job may also be many independent runs; only the number of processes makes it one job.
    is_present=lambda e: "JOB_COMPLETION_INDEX" in e and NUM_PROCESSES in e,
    read=_read,
    unread=(
        Unread(
            name="a Kubernetes Indexed Job",
            others=_without_number,
            remedy=f"Set {NUM_PROCESSES} to the number of pods and {SERVICE} to their headless service",
        ),
    ),
)
