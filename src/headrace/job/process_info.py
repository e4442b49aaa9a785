"""The place of a process in a job: which one of how many it is, and where they meet."""

from dataclasses import dataclass

# Environment variables: those of the launcher, which may also be set by hand.
PROCESS, NUM_PROCESSES, COORDINATOR = "HEADRACE_PROCESS", "HEADRACE_NUM_PROCESSES", "HEADRACE_COORDINATOR"
LOCAL_PROCESS, NUM_LOCAL = "HEADRACE_LOCAL_PROCESS", "HEADRACE_NUM_LOCAL_PROCESSES"
NUM_REPLICAS, DEVICES_PER_REPLICA = "HEADRACE_NUM_REPLICAS", "HEADRACE_DEVICES_PER_REPLICA"
INTERRUPTED = 75  # EX_TEMPFAIL: nothing is lost, the same run can go on with `headrace resume`
SERVICE = "HEADRACE_SERVICE"  # a headless service of Kubernetes
PARENT = "HEADRACE_LAUNCHER"  # the pid of a launcher on the same host, whose end ends its processes
JOIN_SECONDS, SILENCE_SECONDS = "HEADRACE_JOIN_SECONDS", "HEADRACE_SILENCE_SECONDS"
AUTO = "auto"  # for HEADRACE_NUM_PROCESSES: JAX finds the place by itself


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which process this is. `num_processes` is 0 while only JAX can know it (Cloud TPU); `join` fills it in."""

    process: int
    num_processes: int
    coordinator: str  # host:port on the host of process 0, where all meet; "" while only JAX can know it
    found_by: str
    local_process: int | None = None  # among those of its host, where that is known
    num_local_processes: int | None = None
    num_replicas: int | None = None  # of the whole job, when the launcher says it
    devices_per_replica: int | None = None  # likewise
    replicas_per_process: bool = False  # --num-replicas counts those of one process (the legacy --distributed)
    join_seconds: float = 120.0  # how long the start may take until every process is there
    silence_seconds: float = 10.0  # a process that is not heard of for so long counts as hung

    @property
    def is_first(self) -> bool:
        """Say whether this is the process that writes logs, records and checkpoints."""
        return self.process == 0

    @property
    def is_alone(self) -> bool:
        """Say whether the job has no other process."""
        return self.num_processes == 1
