"""A pod of TPUs."""

from headrace.job.launchers.row import Launcher
from headrace.job.process_info import ProcessInfo
from headrace.job.variables import Environ, coordinator_of, read_number

_PORT = 8476  # JAX's default on TPU pods


def _read(environ: Environ) -> ProcessInfo:
    hosts = environ["TPU_WORKER_HOSTNAMES"].split(",")
    return ProcessInfo(
        process=read_number(environ, "TPU_WORKER_ID"),
        num_processes=len(hosts),
        coordinator=coordinator_of(environ, hosts[0].strip(), _PORT),
        detected_by="TPU pod",
        local_process=0,
        num_local_processes=1,
    )


TPU = Launcher(
    name="TPU pod",
    variables=("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"),
    is_present=lambda e: "," in e.get("TPU_WORKER_HOSTNAMES", ""),
    read=_read,
)
