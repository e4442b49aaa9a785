"""`headrace launch`, or the same variables set by hand."""

from headrace.core.errors import ConfigError
from headrace.job.launchers.row import Launcher
from headrace.job.process_info import ProcessInfo
from headrace.job.variables import (
    AUTO,
    COORDINATOR,
    DEVICES_PER_REPLICA,
    LOCAL_PROCESS,
    NUM_LOCAL,
    NUM_PROCESSES,
    NUM_REPLICAS,
    PROCESS,
    TOGETHER,
    Environ,
    coordinator_of,
    read_number,
    read_optional,
)


def _read(environ: Environ) -> ProcessInfo:
    if environ.get(NUM_PROCESSES) == AUTO:
        return ProcessInfo(process=0, num_processes=0, coordinator="", detected_by="JAX")
    missing = [name for name in (PROCESS, NUM_PROCESSES, COORDINATOR) if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"{PROCESS}={environ[PROCESS]} is set, but not {' and '.join(missing)}.",
            rule=TOGETHER,
            remedy="Set all of them, or none and start with mpirun, srun or headrace launch.",
        )
    return ProcessInfo(
        process=read_number(environ, PROCESS),
        num_processes=read_number(environ, NUM_PROCESSES),
        coordinator=coordinator_of(environ, "", 0),
        detected_by="HEADRACE_PROCESS",
        local_process=read_optional(environ, LOCAL_PROCESS),
        num_local_processes=read_optional(environ, NUM_LOCAL),
        num_replicas=read_optional(environ, NUM_REPLICAS),
        devices_per_replica=read_optional(environ, DEVICES_PER_REPLICA),
    )


HEADRACE = Launcher(
    name="HEADRACE_PROCESS",
    variables=(PROCESS,),
    is_present=lambda e: bool(e.get(PROCESS)) or e.get(NUM_PROCESSES) == AUTO,
    read=_read,
    by_hand=True,
)
