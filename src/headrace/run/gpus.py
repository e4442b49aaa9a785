"""Which GPUs of its host belong to a process: found out without starting CUDA."""

from collections.abc import Mapping
from pathlib import Path

from headrace.core.place import Place

# Those who start the processes and deal out the GPUs as well; each process then sees its own.
DEALT_OUT = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "HEADRACE_LAUNCHER")


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the GPUs of this host that may be used."""
    if (said := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [word.strip() for word in said.split(",") if word.strip() not in ("", "-1")]
    return [str(number) for number in range(len(list(root.iterdir())))] if root.is_dir() else []


def gpu_share(place: Place, environ: Mapping[str, str], num_visible: int) -> list[int] | None:
    """Return this process's GPUs among the visible ones, or None where all that it sees is its own.

    mpirun deals out no GPUs: all processes of a host see all of them.
    """
    local, count = place.local_process, place.num_local_processes
    if local is None or count is None or count == 1 or any(environ.get(name) for name in DEALT_OUT):
        return None
    each = num_visible // count
    return list(range(local * each, (local + 1) * each)) or None
