"""TensorFlow's TF_CONFIG. Other programs may have left it in the environment: it counts where it is asked for."""

from headrace.core.errors import ConfigError
from headrace.core.json_text import parse_json
from headrace.job.addresses import format_address, split_address
from headrace.job.launchers.row import Launcher, Unread
from headrace.job.process_info import ProcessInfo
from headrace.job.variables import Environ, read_number


def _read(environ: Environ) -> ProcessInfo:
    example = '{"cluster":{"worker":["host0:3636","host1:3636"]},"task":{"type":"worker","index":0}}'
    try:
        found = parse_json(environ["TF_CONFIG"])
        cluster, task = found["cluster"], found.get("task", {})
        chiefs, workers = list(cluster.get("chief", [])), list(cluster["worker"])
        kind, index = task.get("type", "worker"), task.get("index")
        addresses = [format_address(*split_address(text, "A worker of TF_CONFIG")) for text in (*chiefs, *workers)]
        first = {"chief": 0, "worker": len(chiefs)}[kind]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"TF_CONFIG cannot be read ({error!r}).", remedy=f"An example: {example}.") from error
    if index is None and "OMPI_COMM_WORLD_RANK" not in environ:
        raise ConfigError("TF_CONFIG has no task index.", remedy=f"Start with mpirun, or add the index: {example}.")
    process = read_number(environ, "OMPI_COMM_WORLD_RANK") if index is None else first + int(index)
    return ProcessInfo(
        process=process,
        num_processes=len(addresses),
        coordinator=addresses[0],
        detected_by="TF_CONFIG",
        replicas_per_process=True,
    )


def _workers(environ: Environ) -> str:
    try:
        cluster = parse_json(environ["TF_CONFIG"])["cluster"]
        number = sum(len(cluster.get(kind, ())) for kind in ("chief", "worker"))
    except (KeyError, ValueError, TypeError, AttributeError):
        return ""
    return f"TF_CONFIG with {number} workers" if number > 1 else ""


TF_CONFIG = Launcher(
    name="TF_CONFIG",
    variables=("TF_CONFIG",),
    is_present=lambda e: bool(e.get("TF_CONFIG")),
    read=_read,
    asked_for=True,
    by_hand=True,
    unread=(Unread(name="TF_CONFIG", others=_workers, remedy="Give --distributed"),),
)
