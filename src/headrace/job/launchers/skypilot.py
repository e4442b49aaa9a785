"""The nodes of SkyPilot, one process each. Whatever a task starts on them (torchrun, mpirun) comes first."""

import zlib

from headrace.job.addresses import job_port
from headrace.job.launchers.row import Launcher
from headrace.job.process_info import ProcessInfo
from headrace.job.variables import Environ, coordinator_of, read_number


def _read(environ: Environ) -> ProcessInfo:
    hosts = environ["SKYPILOT_NODE_IPS"].split()
    return ProcessInfo(
        process=read_number(environ, "SKYPILOT_NODE_RANK"),
        num_processes=len(hosts),
        coordinator=coordinator_of(
            environ, hosts[0], job_port(zlib.crc32(environ.get("SKYPILOT_TASK_ID", "").encode()))
        ),
        detected_by="SkyPilot",
        local_process=0,
        num_local_processes=1,
    )


SKYPILOT = Launcher(
    name="SkyPilot",
    variables=("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"),
    is_present=lambda e: bool(e.get("SKYPILOT_NODE_RANK")) and len(e.get("SKYPILOT_NODE_IPS", "").split()) > 1,
    read=_read,
)
