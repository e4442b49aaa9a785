"""Find the place of this process in its job: a pure function of the environment.

Whoever starts the processes says it in environment variables. Each way of starting them is a row of `SOURCES`, in the
order in which they are asked.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headrace.core.errors import ConfigError
from headrace.job.process_info import (
    AUTO,
    COORDINATOR,
    DEVICES_PER_REPLICA,
    JOIN_SECONDS,
    LOCAL_PROCESS,
    NUM_LOCAL,
    NUM_PROCESSES,
    NUM_REPLICAS,
    PROCESS,
    SERVICE,
    SILENCE_SECONDS,
    Place,
)

# Addresses of hosts as schedulers write them: lists such as `node[01-03,7],gpu5`, and ports that a job agrees on.


FIRST_PORT, NUM_PORTS = 61440, 4096  # above the ports that Linux hands out by itself (32768 to 60999)


def port_of(number: int) -> int:
    """Return the port of a job from a number that all its processes know."""
    return FIRST_PORT + number % NUM_PORTS


def address(host: str, port: int) -> str:
    """Return `host:port`; an IPv6 address goes into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str, name: str) -> tuple[str, int]:
    """Return host and port of an address; `name` says in errors where it came from."""
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{name} is {text!r}.",
            rule="An address is a host, a colon and a port from 1 to 65535.",
            remedy=f"For example {name}=node0:61440.",
        )
    return host, int(port)


def expand_hosts(text: str, name: str) -> list[str]:
    """Return the hosts of a list as Slurm writes it: `a,b`, `node[01-03,7]`, `rack[1-2]n[1-4]`."""
    if text.count("[") != text.count("]") or not text.strip(", "):
        raise ConfigError(f"{name} is {text!r}: not a list of hosts.", remedy="It looks like node[01-03,07],other.")
    parts = re.split(r",(?![^\[]*\])", text)  # commas outside brackets
    return [host for part in parts if part for host in _expand(part.strip(), name)]


def _expand(part: str, name: str) -> list[str]:
    found = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if found is None:
        return [part]
    before, ranges, after = found.groups()
    numbers = [number for entry in ranges.split(",") for number in _numbers(entry, name)]
    return [f"{before}{number}{rest}" for number in numbers for rest in _expand(after, name)]


def _numbers(entry: str, name: str) -> list[str]:
    """Return the numbers of `07` or `08-11`, with the zeros in front that the first has."""
    first, _, last = entry.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(f"{name} has the range [{entry}].", rule="Ranges of hosts go up, such as [08-11].")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


LOOPBACK = "127.0.0.1"
TPU_PORT = 8476  # what JAX takes there too

Environ = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A way in which processes are started: how to see it, and how to read the place."""

    name: str
    is_present: Callable[[Environ], bool]
    read: Callable[[Environ], Place]


def find_place(environ: Environ, *, distributed: bool = False) -> Place | None:
    """Return this process's place, or None where nothing says that there are others.

    `distributed` is the option of that name: TF_CONFIG then says who the others are.
    """
    sources = (TF_CONFIG, *SOURCES) if distributed else SOURCES
    source = next((source for source in sources if source.is_present(environ)), None)
    if source is None:
        _refuse_halves(environ, distributed)
        return None
    place = source.read(environ)
    if distributed and place.num_replicas is not None:
        raise ConfigError(
            "--distributed is given under headrace launch (poprun).",
            rule="The launcher already says which processes belong together.",
            remedy="Leave --distributed out.",
        )
    if place.num_processes and not 0 <= place.process < place.num_processes:
        raise ConfigError(
            f"{source.name} says that this is process {place.process} of {place.num_processes}.",
            rule="Processes count from 0.",
        )
    _refuse_contradiction(source, place, environ)
    return replace(
        place,
        join_seconds=_seconds(environ, JOIN_SECONDS, place.join_seconds),
        silence_seconds=_seconds(environ, SILENCE_SECONDS, place.silence_seconds),
    )


def _refuse_halves(environ: Environ, distributed: bool) -> None:
    """Refuse signs of other processes where nothing says which one this is."""
    if distributed:
        raise ConfigError(
            "--distributed is given, but nothing says which processes belong together.",
            rule="It reads TF_CONFIG, or the variables of mpirun, srun or headrace launch.",
            remedy='export TF_CONFIG=\'{"cluster":{"worker":["host0:3636","host1:3636"]},'
            '"task":{"type":"worker","index":0}}\', or start with mpirun.',
        )
    if halves := [name for name in (NUM_PROCESSES, COORDINATOR) if environ.get(name)]:
        raise ConfigError(
            f"{' and '.join(halves)} says that there are other processes, but nothing says which one this is.",
            rule=f"{PROCESS}, {NUM_PROCESSES} and {COORDINATOR} say together where a process belongs.",
            remedy=f"Set {PROCESS} as well, or unset {' and '.join(halves)}.",
        )


def _refuse_contradiction(source: Source, place: Place, environ: Environ) -> None:
    """Refuse explicit places that a launcher contradicts: a variable that was exported and forgotten."""
    if source.name not in (HEADRACE.name, TF_CONFIG.name) or not place.num_processes:
        return
    for other in (OPEN_MPI, SLURM):
        if other is source or not other.is_present(environ):
            continue
        # Where they meet is known from the explicit one; the other need not be able to say it.
        said = other.read({**environ, COORDINATOR: place.coordinator})
        size, rank = said.num_processes, said.process
        if size > 1 and (rank, size) != (place.process, place.num_processes):
            raise ConfigError(
                f"{source.name} says process {place.process} of {place.num_processes}, "
                f"and {other.name} says process {rank} of {size}.",
                rule="Both speak of the same process.",
                remedy=f"Unset the variables of one of them ({source.name}: probably exported for an earlier job).",
            )


def _number(environ: Environ, name: str) -> int:
    text = environ.get(name, "")
    if not text.strip().isdecimal():
        problem = f"{name} is {text!r}, not a number." if name in environ else f"{name} is not set."
        raise ConfigError(problem, rule="A process must know which one of how many it is.")
    return int(text)


def read_seconds(name: str, text: str) -> float:
    """Return a time that a variable or an option says, or refuse it by that name."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{name} is {text!r}.", rule="It is a number of seconds above 0.")
    return seconds


def _optional(environ: Environ, name: str) -> int | None:
    return _number(environ, name) if environ.get(name) else None


def _seconds(environ: Environ, name: str, default: float) -> float:
    text = environ.get(name)
    return read_seconds(name, text) if text else default


def _meeting_point(environ: Environ, host: str, port: int) -> str:
    """Return the coordinator that is set, or else this host and port."""
    if not environ.get(COORDINATOR):
        return address(host, port)
    return address(*split_address(environ[COORDINATOR], COORDINATOR))


# Each reader below takes the variables of one way to start processes.


def _read_headrace(environ: Environ) -> Place:
    if environ.get(NUM_PROCESSES) == AUTO:
        return Place(process=0, num_processes=0, coordinator="", found_by="JAX")
    missing = [name for name in (PROCESS, NUM_PROCESSES, COORDINATOR) if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"{PROCESS}={environ[PROCESS]} is set, but {' and '.join(missing)} not.",
            rule=f"{PROCESS}, {NUM_PROCESSES} and {COORDINATOR} say together where a process belongs.",
            remedy="Set them all, or none and let mpirun, srun or headrace launch say it.",
        )
    return Place(
        process=_number(environ, PROCESS),
        num_processes=_number(environ, NUM_PROCESSES),
        coordinator=_meeting_point(environ, "", 0),
        found_by="HEADRACE_PROCESS",
        local_process=_optional(environ, LOCAL_PROCESS),
        num_local_processes=_optional(environ, NUM_LOCAL),
        num_replicas=_optional(environ, NUM_REPLICAS),
        devices_per_replica=_optional(environ, DEVICES_PER_REPLICA),
    )


def _read_open_mpi(environ: Environ) -> Place:
    size, local = _number(environ, "OMPI_COMM_WORLD_SIZE"), _optional(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    host, number = _head_of_open_mpi(environ)
    if local == size:
        host = LOOPBACK  # all on one host
    if not host and not environ.get(COORDINATOR):
        raise ConfigError(
            "This Open MPI does not say where its first process runs, and there are several hosts.",
            remedy=f"mpirun -x {COORDINATOR}=HOST:61440 ..., HOST being the first of the hosts.",
        )
    return Place(
        process=_number(environ, "OMPI_COMM_WORLD_RANK"),
        num_processes=size,
        coordinator=_meeting_point(environ, host, port_of(number)),
        found_by="Open MPI",
        local_process=_optional(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        num_local_processes=local,
        num_replicas=_optional(environ, NUM_REPLICAS),
        devices_per_replica=_optional(environ, DEVICES_PER_REPLICA),
    )


def _head_of_open_mpi(environ: Environ) -> tuple[str, int]:
    """Return the host that mpirun runs on, and a number of the job.

    Open MPI 4 has `420478976.0;tcp://10.0.0.1,10.1.0.1:40415`, the job's number being a multiple of 4096; Open MPI 5
    has the name of the job's namespace, `prterun-HOST-PID@1`.
    """
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if found := re.match(r"(\d+)\.\d+;tcp6?://\[?([^,\];]+?)(?:[,\]]|:\d+(?:;|$))", uri):
        return found.group(2), int(found.group(1)) // 4096
    if found := re.match(r"(?:prterun|prte)-(.+)-(\d+)@\d+", environ.get("PMIX_NAMESPACE", "")):
        return found.group(1), int(found.group(2))
    return "", 0


def _read_slurm(environ: Environ) -> Place:
    size = _number(environ, "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS")
    name = next((n for n in ("SLURM_STEP_NODELIST", "SLURM_NODELIST") if environ.get(n)), "SLURM_JOB_NODELIST")
    hosts = expand_hosts(environ.get(name, ""), name)
    job, step = _number(environ, "SLURM_JOB_ID"), _optional(environ, "SLURM_STEP_ID") or 0
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    return Place(
        process=_number(environ, "SLURM_PROCID"),
        num_processes=size,
        coordinator=_meeting_point(environ, LOOPBACK if len(hosts) == 1 else hosts[0], port_of(job * 16 + step)),
        found_by="Slurm",
        local_process=_optional(environ, "SLURM_LOCALID"),
        num_local_processes=_tasks_here(tasks, _optional(environ, "SLURM_NODEID")),
        num_replicas=_optional(environ, NUM_REPLICAS),
        devices_per_replica=_optional(environ, DEVICES_PER_REPLICA),
    )


def _tasks_here(text: str, node: int | None) -> int | None:
    """Return how many tasks run on a node, from `4(x2),3`: two nodes with 4 and one with 3."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node is not None and node < len(counts) else None


def _read_kubernetes(environ: Environ) -> Place:
    index, host = _number(environ, "JOB_COMPLETION_INDEX"), environ.get("HOSTNAME", "")
    stem = host.removesuffix(f"-{index}")
    if not environ.get(COORDINATOR) and (not environ.get(SERVICE) or stem == host):
        raise ConfigError(
            f"JOB_COMPLETION_INDEX and {NUM_PROCESSES} are set, but nothing says where the processes meet.",
            rule=f"{SERVICE} is the headless service of the pods (a JobSet's has its name); pods are NAME-0, ...",
            remedy=f"Set {SERVICE}, or {COORDINATOR}=POD.SERVICE:61440.",
        )
    return Place(
        process=index,
        num_processes=_number(environ, NUM_PROCESSES),
        coordinator=_meeting_point(environ, f"{stem}-0.{environ.get(SERVICE, '')}", port_of(0)),
        found_by="Kubernetes",
        local_process=0,
        num_local_processes=1,
    )


def _read_tpu(environ: Environ) -> Place:
    hosts = environ["TPU_WORKER_HOSTNAMES"].split(",")
    return Place(
        process=_number(environ, "TPU_WORKER_ID"),
        num_processes=len(hosts),
        coordinator=_meeting_point(environ, hosts[0].strip(), TPU_PORT),
        found_by="TPU pod",
        local_process=0,
        num_local_processes=1,
    )


def _read_tf_config(environ: Environ) -> Place:
    example = '{"cluster":{"worker":["host0:3636","host1:3636"]},"task":{"type":"worker","index":0}}'
    try:
        found = json.loads(environ["TF_CONFIG"])
        cluster, task = found["cluster"], found.get("task", {})
        chiefs, workers = list(cluster.get("chief", [])), list(cluster["worker"])
        kind, index = task.get("type", "worker"), task.get("index")
        addresses = [address(*split_address(text, "TF_CONFIG's worker")) for text in (*chiefs, *workers)]
        first = {"chief": 0, "worker": len(chiefs)}[kind]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"TF_CONFIG cannot be read ({error!r}).", remedy=f"It looks like {example}.") from error
    if index is None and "OMPI_COMM_WORLD_RANK" not in environ:
        raise ConfigError("TF_CONFIG has no index of the task.", remedy=f"Use mpirun, or add it: {example}.")
    process = _number(environ, "OMPI_COMM_WORLD_RANK") if index is None else first + int(index)
    return Place(
        process=process,
        num_processes=len(addresses),
        coordinator=addresses[0],
        found_by="TF_CONFIG",
        replicas_per_process=True,
    )


HEADRACE = Source(
    name="HEADRACE_PROCESS",
    is_present=lambda e: bool(e.get(PROCESS)) or e.get(NUM_PROCESSES) == AUTO,
    read=_read_headrace,
)
OPEN_MPI = Source(name="Open MPI", is_present=lambda e: "OMPI_COMM_WORLD_RANK" in e, read=_read_open_mpi)
# A script of sbatch has SLURM_PROCID=0 and SLURM_NTASKS too, but it is one process: only srun makes steps.
SLURM = Source(name="Slurm", is_present=lambda e: "SLURM_PROCID" in e and "SLURM_STEP_ID" in e, read=_read_slurm)
# An Indexed Job may also be many single runs; the number of processes says that they are one.
KUBERNETES = Source(
    name="Kubernetes", is_present=lambda e: "JOB_COMPLETION_INDEX" in e and NUM_PROCESSES in e, read=_read_kubernetes
)
TPU = Source(name="TPU pod", is_present=lambda e: "," in e.get("TPU_WORKER_HOSTNAMES", ""), read=_read_tpu)
TF_CONFIG = Source(name="TF_CONFIG", is_present=lambda e: bool(e.get("TF_CONFIG")), read=_read_tf_config)
SOURCES = (HEADRACE, OPEN_MPI, SLURM, KUBERNETES, TPU)
