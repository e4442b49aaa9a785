"""The environment variables of a job, which `headrace launch` sets or a user, and how such variables are read."""

from collections.abc import Mapping

from headrace.core.errors import ConfigError
from headrace.job.addresses import format_address, split_address

# Environment variables that `headrace launch` sets for its processes.
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
TOGETHER = f"{PROCESS}, {NUM_PROCESSES} and {COORDINATOR} are needed together."
AUTO = "auto"  # a value of HEADRACE_NUM_PROCESSES: let JAX detect the process
SILENCE_LIMIT = 10.0  # seconds without a heartbeat after which a process counts as hung, unless set otherwise

Environ = Mapping[str, str]


def says_alone(environ: Environ) -> bool:
    """Say whether the environment tells this process to run alone, whatever started it beside others."""
    return environ.get(NUM_PROCESSES) == "1" and not environ.get(PROCESS)


def read_number(environ: Environ, name: str) -> int:
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


def read_optional(environ: Environ, name: str) -> int | None:
    return read_number(environ, name) if environ.get(name) else None


def seconds_of(environ: Environ, name: str, default: float) -> float:
    text = environ.get(name)
    return read_seconds(name, text) if text else default


def coordinator_of(environ: Environ, host: str, port: int) -> str:
    """Return the coordinator's address from its variable, or else this host and port."""
    if not environ.get(COORDINATOR):
        return format_address(host, port)
    return format_address(*split_address(environ[COORDINATOR], COORDINATOR))
