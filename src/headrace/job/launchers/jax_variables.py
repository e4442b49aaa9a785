"""The variables that jax.distributed itself reads."""

from headrace.job.addresses import split_address
from headrace.job.launchers.row import Launcher, Unread, half_of
from headrace.job.process_info import ProcessInfo
from headrace.job.variables import Environ, coordinator_of, read_number

_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def _read(environ: Environ) -> ProcessInfo:
    """Read what jax.distributed itself reads, and what Kubeflow Trainer's JAX runtime sets."""
    host, port = split_address(environ["JAX_COORDINATOR_ADDRESS"], "JAX_COORDINATOR_ADDRESS")
    return ProcessInfo(
        process=read_number(environ, "JAX_PROCESS_ID"),
        num_processes=read_number(environ, "JAX_NUM_PROCESSES"),
        coordinator=coordinator_of(environ, host, port),
        detected_by="JAX_PROCESS_ID",
    )


JAX_VARIABLES = Launcher(
    name="JAX_PROCESS_ID",
    variables=_NAMES,
    is_present=lambda e: all(map(e.get, _NAMES)),
    read=_read,
    counts=True,
    unread=(Unread(name="JAX's variables", others=half_of(_NAMES, "JAX_NUM_PROCESSES"), remedy="Set all three"),),
)
