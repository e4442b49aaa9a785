"""Detect which process of a job this is: a pure function of the environment.

Whatever launched the processes sets environment variables. Each launcher is a row of `LAUNCHERS`, in order of
precedence.
"""

import re
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from headrace.core.errors import ConfigError
from headrace.core.json_text import parse_json

# Environment variables that `headrace launch` sets for its processes. They may also be set by hand.
PROCESS, NUM_PROCESSES, COORDINATOR = "HEADRACE_PROCESS", "HEADRACE_NUM_PROCESSES", "HEADRACE_COORDINATOR"
LOCAL_PROCESS, NUM_LOCAL = "HEADRACE_LOCAL_PROCESS", "HEADRACE_NUM_LOCAL_PROCESSES"
NUM_REPLICAS, DEVICES_PER_REPLICA = "HEADRACE_NUM_REPLICAS", "HEADRACE_DEVICES_PER_REPLICA"
SERVICE = "HEADRACE_SERVICE"  # a headless Kubernetes service
LAUNCHER_PID = "HEADRACE_LAUNCHER"  # pid of a launcher on the same host: its processes end when it ends
JOIN_SECONDS, SILENCE_SECONDS = "HEADRACE_JOIN_SECONDS", "HEADRACE_SILENCE_SECONDS"
HANG_SECONDS = "HEADRACE_HANG_SECONDS"  # a run without progress for this long ends; not set: it may take any time
SECRET = "HEADRACE_SECRET"  # random text that only the processes of the job know
RESTART = "HEADRACE_RESTART"  # NUMBER/MOST:REASON, under a launcher that starts a job again after a loss
BATCH_REPLICAS = "HEADRACE_BATCH_REPLICAS"  # replicas for which the batch was chosen, if there are fewer now
_TOGETHER = f"{PROCESS}, {NUM_PROCESSES} and {COORDINATOR} are needed together."
AUTO = "auto"  # a value of HEADRACE_NUM_PROCESSES: let JAX detect the process
SILENCE_LIMIT = 10.0  # seconds without a heartbeat after which a process counts as hung, unless set otherwise


class Member:
    """A process by its number among those of its job."""

    process: int
    num_processes: int

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes logs, records and checkpoints."""
        return self.process == 0

    @property
    def is_alone(self) -> bool:
        """Whether the job has no other process."""
        return self.num_processes == 1


@dataclass(frozen=True, kw_only=True)
class ProcessInfo(Member):
    """Identity of this process. `num_processes` is 0 while only JAX can know it (Cloud TPU); `join` fills it in."""

    process: int
    num_processes: int
    coordinator: str  # host:port on the host of process 0, where all rendezvous; "" while only JAX can know it
    detected_by: str
    local_process: int | None = None  # index among the processes of its host, if known
    num_local_processes: int | None = None
    num_replicas: int | None = None  # of the whole job, if the launcher sets it
    devices_per_replica: int | None = None  # likewise
    replicas_per_process: bool = False  # --num-replicas counts those of one process (the legacy --distributed)
    join_seconds: float = 120.0  # time limit for all processes to join
    secret: str = field(default="", repr=False)  # proves to the others that a process belongs to the job
    silence_seconds: float = SILENCE_LIMIT


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Which attempt of a launcher this is: `number` 0 is the first; what ended the one before, and its replicas."""

    number: int
    most: int
    reason: str
    batch_replicas: int | None

    @property
    def note(self) -> str:
        """Return a line for the records."""
        return f"restart {self.number} of {self.most} by the launcher: {self.reason}"

    def whole_environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment as it would be if no process had been given up."""
        return {**environ, NUM_REPLICAS: str(self.batch_replicas)} if self.batch_replicas else dict(environ)


def detect_restart(environ: Mapping[str, str]) -> Restart | None:
    """Return which attempt this is, None where nothing would start the job again."""
    # DOTALL: the reason is a message, which may have several lines.
    found = re.fullmatch(r"(\d+)/(\d+):(.*)", environ.get(RESTART, ""), re.DOTALL)
    if found is None:
        return None
    replicas = _optional(environ, BATCH_REPLICAS)
    return Restart(number=int(found[1]), most=int(found[2]), reason=found[3], batch_replicas=replicas)


FIRST_PORT, NUM_PORTS = 61440, 4096  # above the ephemeral ports of Linux (32768 to 60999)
LOOPBACK = "127.0.0.1"
TPU_PORT = 8476  # JAX's default on TPU pods

Environ = Mapping[str, str]


def job_port(number: int) -> int:
    """Return a port for a job, derived from a number that all its processes know."""
    return FIRST_PORT + number % NUM_PORTS


def free_port(host: str = "") -> int:
    """Return a port that nobody uses now, on one address of this host or on all."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return probe.getsockname()[1]


def format_address(host: str, port: int) -> str:
    """Return `host:port`; an IPv6 address is put into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str, name: str) -> tuple[str, int]:
    """Return host and port of an address; errors call it `name`."""
    # From the right: an IPv6 address has colons of its own.
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
    """Return the hosts of a list in Slurm's notation: `a,b`, `node[01-03,7]`, `rack[1-2]n[1-4]`."""
    if text.count("[") != text.count("]") or not text.strip(", "):
        raise ConfigError(f"{name} is {text!r}: not a list of hosts.", remedy="An example: node[01-03,07],other.")
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
    """Return the numbers of `07` or `08-11`, zero-padded like the first one."""
    first, _, last = entry.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(f"{name} has the range [{entry}].", rule="A range of hosts is ascending, such as [08-11].")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Something that starts processes: how to recognize it, and how to read its variables."""

    name: str
    is_present: Callable[[Environ], bool]
    read: Callable[[Environ], ProcessInfo]


def detect_process_info(environ: Environ, *, distributed: bool = False) -> ProcessInfo | None:
    """Return which process this is, or None if nothing in the environment describes a job.

    With `distributed`, the option of that name, TF_CONFIG is read too and takes precedence.
    """
    if says_alone(environ):
        return None
    # Other programs may have left TF_CONFIG in the environment, so that it counts only where it is asked for.
    launchers = (TF_CONFIG, *LAUNCHERS) if distributed else LAUNCHERS
    launcher = next((launcher for launcher in launchers if launcher.is_present(environ)), None)
    if launcher is None:
        _check_not_incomplete(environ, distributed)
        return None
    info = launcher.read(environ)
    if distributed and info.num_replicas is not None:
        raise ConfigError(
            "--distributed is given under headrace launch.",
            rule="The launcher already defines which processes belong together.",
            remedy="Remove --distributed.",
        )
    # 0 processes: only JAX knows their number, later.
    if info.num_processes and not 0 <= info.process < info.num_processes:
        raise ConfigError(
            f"{launcher.name} says that this is process {info.process} of {info.num_processes}.",
            rule="Processes are numbered from 0.",
        )
    _check_no_contradiction(launcher, info, environ)
    return replace(
        info,
        join_seconds=_seconds(environ, JOIN_SECONDS, info.join_seconds),
        silence_seconds=_seconds(environ, SILENCE_SECONDS, info.silence_seconds),
        secret=environ.get(SECRET) or info.secret,
    )


def says_alone(environ: Environ) -> bool:
    """Say whether the environment tells this process to run alone, whatever started it beside others."""
    return environ.get(NUM_PROCESSES) == "1" and not environ.get(PROCESS)


def _check_not_incomplete(environ: Environ, distributed: bool) -> None:
    """Raise ConfigError if there are other processes but nothing tells which one this is."""
    if distributed:
        raise ConfigError(
            "--distributed is given, but nothing defines which processes belong together.",
            rule="It reads TF_CONFIG, or the variables of mpirun, srun or headrace launch.",
            remedy='export TF_CONFIG=\'{"cluster":{"worker":["host0:3636","host1:3636"]},'
            '"task":{"type":"worker","index":0}}\', or start with mpirun.',
        )
    if incomplete := [name for name in (NUM_PROCESSES, COORDINATOR) if environ.get(name)]:
        raise ConfigError(
            f"{' and '.join(incomplete)} is set, so there are other processes, but nothing tells which one this is.",
            rule=_TOGETHER,
            remedy=f"Set {PROCESS} as well, or unset {' and '.join(incomplete)}.",
        )


def _check_no_contradiction(launcher: Launcher, info: ProcessInfo, environ: Environ) -> None:
    """Raise ConfigError if a launcher contradicts explicit variables, such as some exported for an earlier job."""
    if launcher.name not in (HEADRACE.name, TF_CONFIG.name) or not info.num_processes:
        return
    for other in (JAX_VARIABLES, OPEN_MPI, TORCHRUN, SLURM):
        if other is launcher or not other.is_present(environ):
            continue
        # The explicit variables have the coordinator's address; the other launcher need not know it.
        found = other.read({**environ, COORDINATOR: info.coordinator})
        size, rank = found.num_processes, found.process
        if size > 1 and (rank, size) != (info.process, info.num_processes):
            raise ConfigError(
                f"{launcher.name} says process {info.process} of {info.num_processes}, "
                f"and {other.name} says process {rank} of {size}.",
                rule="Both describe the same process.",
                remedy=f"Unset the variables of one of them ({launcher.name}: probably exported for an earlier job).",
            )


def _number(environ: Environ, name: str) -> int:
    text = environ.get(name, "")
    if not text.strip().isdecimal():
        problem = f"{name} is {text!r}, not a number." if name in environ else f"{name} is not set."
        raise ConfigError(problem, rule="A process needs its number and the number of processes.")
    return int(text)


def read_seconds(name: str, text: str) -> float:
    """Return a number of seconds from the text of a variable or option; ConfigError if it is not one."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{name} is {text!r}.", rule="It is a number of seconds greater than 0.")
    return seconds


def _optional(environ: Environ, name: str) -> int | None:
    return _number(environ, name) if environ.get(name) else None


def _seconds(environ: Environ, name: str, default: float) -> float:
    text = environ.get(name)
    return read_seconds(name, text) if text else default


def _coordinator(environ: Environ, host: str, port: int) -> str:
    """Return the coordinator's address from its variable, or else this host and port."""
    if not environ.get(COORDINATOR):
        return format_address(host, port)
    return format_address(*split_address(environ[COORDINATOR], COORDINATOR))


def _read_headrace(environ: Environ) -> ProcessInfo:
    if environ.get(NUM_PROCESSES) == AUTO:
        return ProcessInfo(process=0, num_processes=0, coordinator="", detected_by="JAX")
    missing = [name for name in (PROCESS, NUM_PROCESSES, COORDINATOR) if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"{PROCESS}={environ[PROCESS]} is set, but not {' and '.join(missing)}.",
            rule=_TOGETHER,
            remedy="Set all of them, or none and start with mpirun, srun or headrace launch.",
        )
    return ProcessInfo(
        process=_number(environ, PROCESS),
        num_processes=_number(environ, NUM_PROCESSES),
        coordinator=_coordinator(environ, "", 0),
        detected_by="HEADRACE_PROCESS",
        local_process=_optional(environ, LOCAL_PROCESS),
        num_local_processes=_optional(environ, NUM_LOCAL),
        num_replicas=_optional(environ, NUM_REPLICAS),
        devices_per_replica=_optional(environ, DEVICES_PER_REPLICA),
    )


def _read_open_mpi(environ: Environ) -> ProcessInfo:
    size, local = _number(environ, "OMPI_COMM_WORLD_SIZE"), _optional(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    host, number = _mpirun_host_and_job(environ)
    # On one host loopback needs no name, works without a network, and nobody else can connect.
    if local == size:
        host = LOOPBACK  # all on one host
    if not host and not environ.get(COORDINATOR):
        raise ConfigError(
            "This version of Open MPI does not say where process 0 runs, and there are several hosts.",
            remedy=f"mpirun -x {COORDINATOR}=HOST:61440 ..., where HOST is the first host.",
        )
    return ProcessInfo(
        process=_number(environ, "OMPI_COMM_WORLD_RANK"),
        num_processes=size,
        coordinator=_coordinator(environ, host, job_port(number)),
        detected_by="Open MPI",
        # Made by mpirun (Open MPI 4) for each job and passed to its processes only.
        secret=environ.get("OMPI_MCA_orte_precondition_transports", ""),
        local_process=_optional(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        num_local_processes=local,
        num_replicas=_optional(environ, NUM_REPLICAS),
        devices_per_replica=_optional(environ, DEVICES_PER_REPLICA),
    )


def _read_jax(environ: Environ) -> ProcessInfo:
    """Read what jax.distributed itself reads, and what Kubeflow Trainer's JAX runtime sets."""
    host, port = split_address(environ["JAX_COORDINATOR_ADDRESS"], "JAX_COORDINATOR_ADDRESS")
    return ProcessInfo(
        process=_number(environ, "JAX_PROCESS_ID"),
        num_processes=_number(environ, "JAX_NUM_PROCESSES"),
        coordinator=_coordinator(environ, host, port),
        detected_by="JAX_PROCESS_ID",
    )


def _read_torchrun(environ: Environ) -> ProcessInfo:
    size, local = _number(environ, "WORLD_SIZE"), _optional(environ, "LOCAL_WORLD_SIZE")
    # At MASTER_PORT torchrun's own store listens. Every process can make another number of it, and of the restart:
    # processes of the attempt before may not have left their port yet.
    port = job_port((_optional(environ, "MASTER_PORT") or 0) + (_optional(environ, "TORCHELASTIC_RESTART_COUNT") or 0))
    return ProcessInfo(
        process=_number(environ, "RANK"),
        num_processes=size,
        coordinator=_coordinator(environ, LOOPBACK if local == size else environ["MASTER_ADDR"].strip(), port),
        detected_by="torchrun",
        local_process=_optional(environ, "LOCAL_RANK"),
        num_local_processes=local,
    )


def _read_skypilot(environ: Environ) -> ProcessInfo:
    hosts = environ["SKYPILOT_NODE_IPS"].split()
    return ProcessInfo(
        process=_number(environ, "SKYPILOT_NODE_RANK"),
        num_processes=len(hosts),
        coordinator=_coordinator(environ, hosts[0], job_port(zlib.crc32(environ.get("SKYPILOT_TASK_ID", "").encode()))),
        detected_by="SkyPilot",
        local_process=0,
        num_local_processes=1,
    )


def _mpirun_host_and_job(environ: Environ) -> tuple[str, int]:
    """Return the host that mpirun runs on, and a number that identifies the job.

    Open MPI 4 sets `420478976.0;tcp://10.0.0.1,10.1.0.1:40415`, whose job number is a multiple of 4096; Open MPI 5 sets
    the job's namespace, `prterun-HOST-PID@1`.
    """
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if found := re.match(r"(\d+)\.\d+;tcp6?://\[?([^,\];]+?)(?:[,\]]|:\d+(?:;|$))", uri):
        return found.group(2), int(found.group(1)) // 4096
    if found := re.match(r"(?:prterun|prte)-(.+)-(\d+)@\d+", environ.get("PMIX_NAMESPACE", "")):
        return found.group(1), int(found.group(2))
    return "", 0


def _read_slurm(environ: Environ) -> ProcessInfo:
    # The step's own number first: SLURM_NTASKS may be that of the whole allocation.
    size = _number(environ, "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS")
    name = next((n for n in ("SLURM_STEP_NODELIST", "SLURM_NODELIST") if environ.get(n)), "SLURM_JOB_NODELIST")
    hosts = expand_hosts(environ.get(name, ""), name)
    job, step = _number(environ, "SLURM_JOB_ID"), _optional(environ, "SLURM_STEP_ID") or 0
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    return ProcessInfo(
        process=_number(environ, "SLURM_PROCID"),
        num_processes=size,
        # With the step: the steps of one Slurm job may run side by side on the same hosts.
        coordinator=_coordinator(environ, LOOPBACK if len(hosts) == 1 else hosts[0], job_port(job * 16 + step)),
        detected_by="Slurm",
        local_process=_optional(environ, "SLURM_LOCALID"),
        num_local_processes=_tasks_here(tasks, _optional(environ, "SLURM_NODEID")),
        num_replicas=_optional(environ, NUM_REPLICAS),
        devices_per_replica=_optional(environ, DEVICES_PER_REPLICA),
    )


def _tasks_here(text: str, node: int | None) -> int | None:
    """Return the number of tasks on a node, from `4(x2),3`: two nodes with 4 tasks and one with 3."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node is not None and node < len(counts) else None


def _read_kubernetes(environ: Environ) -> ProcessInfo:
    index, host = _number(environ, "JOB_COMPLETION_INDEX"), environ.get("HOSTNAME", "")
    stem = host.removesuffix(f"-{index}")
    if not environ.get(COORDINATOR) and (not environ.get(SERVICE) or stem == host):
        raise ConfigError(
            f"JOB_COMPLETION_INDEX and {NUM_PROCESSES} are set, but the address of process 0 is not known.",
            rule=f"{SERVICE} is the headless service of the pods (of a JobSet: its name); pods are NAME-0, ...",
            remedy=f"Set {SERVICE}, or {COORDINATOR}=POD.SERVICE:61440.",
        )
    return ProcessInfo(
        process=index,
        num_processes=_number(environ, NUM_PROCESSES),
        coordinator=_coordinator(environ, f"{stem}-0.{environ.get(SERVICE, '')}", job_port(0)),
        detected_by="Kubernetes",
        local_process=0,
        num_local_processes=1,
    )


def _read_tpu(environ: Environ) -> ProcessInfo:
    hosts = environ["TPU_WORKER_HOSTNAMES"].split(",")
    return ProcessInfo(
        process=_number(environ, "TPU_WORKER_ID"),
        num_processes=len(hosts),
        coordinator=_coordinator(environ, hosts[0].strip(), TPU_PORT),
        detected_by="TPU pod",
        local_process=0,
        num_local_processes=1,
    )


def _read_tf_config(environ: Environ) -> ProcessInfo:
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
    process = _number(environ, "OMPI_COMM_WORLD_RANK") if index is None else first + int(index)
    return ProcessInfo(
        process=process,
        num_processes=len(addresses),
        coordinator=addresses[0],
        detected_by="TF_CONFIG",
        replicas_per_process=True,
    )


HEADRACE = Launcher(
    name="HEADRACE_PROCESS",
    is_present=lambda e: bool(e.get(PROCESS)) or e.get(NUM_PROCESSES) == AUTO,
    read=_read_headrace,
)
JAX_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
JAX_VARIABLES = Launcher(name="JAX_PROCESS_ID", is_present=lambda e: all(map(e.get, JAX_NAMES)), read=_read_jax)
TORCH_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
TORCHRUN = Launcher(name="torchrun", is_present=lambda e: all(map(e.get, TORCH_NAMES)), read=_read_torchrun)
OPEN_MPI = Launcher(name="Open MPI", is_present=lambda e: "OMPI_COMM_WORLD_RANK" in e, read=_read_open_mpi)
# An sbatch script has SLURM_PROCID=0 and SLURM_NTASKS too, but it is one process: only srun creates steps.
SLURM = Launcher(name="Slurm", is_present=lambda e: "SLURM_PROCID" in e and "SLURM_STEP_ID" in e, read=_read_slurm)
# An Indexed Job may also be many independent runs; only the number of processes makes it one job.
KUBERNETES = Launcher(
    name="Kubernetes", is_present=lambda e: "JOB_COMPLETION_INDEX" in e and NUM_PROCESSES in e, read=_read_kubernetes
)
TPU = Launcher(name="TPU pod", is_present=lambda e: "," in e.get("TPU_WORKER_HOSTNAMES", ""), read=_read_tpu)
TF_CONFIG = Launcher(name="TF_CONFIG", is_present=lambda e: bool(e.get("TF_CONFIG")), read=_read_tf_config)
# Its nodes, one process each. Whatever a task starts on them (torchrun, mpirun) comes first.
SKYPILOT = Launcher(
    name="SkyPilot",
    is_present=lambda e: bool(e.get("SKYPILOT_NODE_RANK")) and len(e.get("SKYPILOT_NODE_IPS", "").split()) > 1,
    read=_read_skypilot,
)
LAUNCHERS = (HEADRACE, JAX_VARIABLES, OPEN_MPI, TORCHRUN, SLURM, KUBERNETES, TPU, SKYPILOT)
