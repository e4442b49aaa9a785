"""Which process of a job this is, and which attempt."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.job.variables import BATCH_REPLICAS, NUM_REPLICAS, RESTART, SILENCE_LIMIT, read_optional


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
    replicas = read_optional(environ, BATCH_REPLICAS)
    return Restart(number=int(found[1]), most=int(found[2]), reason=found[3], batch_replicas=replicas)
