"""torchrun, and what starts it."""

from headrace.job.addresses import LOOPBACK, job_port
from headrace.job.launchers.row import Launcher, Unread, half_of, sized
from headrace.job.process_info import ProcessInfo
from headrace.job.variables import Environ, coordinator_of, read_number, read_optional

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def _read(environ: Environ) -> ProcessInfo:
    size, local = read_number(environ, "WORLD_SIZE"), read_optional(environ, "LOCAL_WORLD_SIZE")
    # At MASTER_PORT torchrun's own store listens. Every process can make another number of it, and of the restart:
    # processes of the attempt before may not have left their port yet.
    port = job_port(
        (read_optional(environ, "MASTER_PORT") or 0) + (read_optional(environ, "TORCHELASTIC_RESTART_COUNT") or 0)
    )
    return ProcessInfo(
        process=read_number(environ, "RANK"),
        num_processes=size,
        coordinator=coordinator_of(environ, LOOPBACK if local == size else environ["MASTER_ADDR"].strip(), port),
        detected_by="torchrun",
        local_process=read_optional(environ, "LOCAL_RANK"),
        num_local_processes=local,
    )


TORCHRUN = Launcher(
    name="torchrun",
    variables=_NAMES,
    is_present=lambda e: all(map(e.get, _NAMES)),
    read=_read,
    counts=True,
    unread=(
        Unread(name="torchrun's variables", others=half_of(_NAMES, "WORLD_SIZE"), remedy="Set all three"),
        Unread(
            name="Kubeflow's PyTorch runtime",
            others=sized("PET_NODE_RANK", "PET_NNODES"),
            remedy="Start with torchrun --no-python headrace train ..., which reads these variables",
        ),
    ),
)
