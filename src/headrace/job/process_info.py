"""Which process of a job this is, how many there are, and where they rendezvous."""

from dataclasses import dataclass

# Environment variables that `headrace launch` sets for its processes. They may also be set by hand.
PROCESS, NUM_PROCESSES, COORDINATOR = "HEADRACE_PROCESS", "HEADRACE_NUM_PROCESSES", "HEADRACE_COORDINATOR"
LOCAL_PROCESS, NUM_LOCAL = "HEADRACE_LOCAL_PROCESS", "HEADRACE_NUM_LOCAL_PROCESSES"
NUM_REPLICAS, DEVICES_PER_REPLICA = "HEADRACE_NUM_REPLICAS", "HEADRACE_DEVICES_PER_REPLICA"
SERVICE = "HEADRACE_SERVICE"  # a headless Kubernetes service
LAUNCHER_PID = "HEADRACE_LAUNCHER"  # pid of a launcher on the same host: its processes end when it ends
JOIN_SECONDS, SILENCE_SECONDS = "HEADRACE_JOIN_SECONDS", "HEADRACE_SILENCE_SECONDS"
AUTO = "auto"  # a value of HEADRACE_NUM_PROCESSES: let JAX detect the process


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
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
    silence_seconds: float = 10.0  # a process that sends no heartbeat for this long counts as hung

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes logs, records and checkpoints."""
        return self.process == 0

    @property
    def is_alone(self) -> bool:
        """Whether the job has no other process."""
        return self.num_processes == 1
