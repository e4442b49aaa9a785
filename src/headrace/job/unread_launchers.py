"""Refuse to train alone where the environment says that there are other processes, but not how to join them.

Each process would train a model of its own and end with success. Only commands that join a job ask: reading options, or
a prediction for each process, needs no others.
"""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.core.errors import ConfigError
from headrace.core.json_text import parse_json
from headrace.job.detect_launcher import (
    COORDINATOR,
    JAX_NAMES,
    NUM_PROCESSES,
    PROCESS,
    SERVICE,
    TORCH_NAMES,
    Environ,
    says_alone,
)


@dataclass(frozen=True, kw_only=True)
class UnreadLauncher:
    """Something that starts processes and does not say all that joining them needs.

    `others` returns what the environment says of other processes, or an empty text.
    """

    name: str
    others: Callable[[Environ], str]
    remedy: str


def _sized(rank: str, size: str) -> Callable[[Environ], str]:
    """Return the text of a launcher that numbers its processes by these two variables."""

    def others(environ: Environ) -> str:
        count = environ.get(size, "").strip()
        if not count.isdecimal() or int(count) < 2:
            return ""
        return f"{rank}={environ[rank]}, {size}={count}" if environ.get(rank) else f"{size}={count}"

    return others


def _half(names: tuple[str, ...], size: str) -> Callable[[Environ], str]:
    """Return the text of a launcher of whose variables some are there: those of one process alone do not count."""

    def others(environ: Environ) -> str:
        here = [name for name in names if environ.get(name)]
        if not here or environ.get(size, "").strip() == "1":
            return ""
        missing = [name for name in names if name not in here]
        return f"{', '.join(f'{name}={environ[name]}' for name in here)}, without {' and '.join(missing)}"

    return others


def _tf_config(environ: Environ) -> str:
    try:
        cluster = parse_json(environ["TF_CONFIG"])["cluster"]
        number = sum(len(cluster.get(kind, ())) for kind in ("chief", "worker"))
    except (KeyError, ValueError, TypeError, AttributeError):
        return ""
    return f"TF_CONFIG with {number} workers" if number > 1 else ""


def _sagemaker(environ: Environ) -> str:
    try:
        number = len(parse_json(environ["SM_HOSTS"]))
    except (KeyError, ValueError, TypeError):
        return ""
    return f"SM_HOSTS with {number} hosts" if number > 1 else ""


def _indexed_job(environ: Environ) -> str:
    index = environ.get("JOB_COMPLETION_INDEX")
    return f"JOB_COMPLETION_INDEX={index}, without {NUM_PROCESSES}" if index and NUM_PROCESSES not in environ else ""


BY_HAND = f"Set {PROCESS}, {NUM_PROCESSES} and {COORDINATOR}=HOST_OF_PROCESS_0:61440 for each process"
UNREAD_LAUNCHERS = (
    UnreadLauncher(name="JAX's variables", others=_half(JAX_NAMES, "JAX_NUM_PROCESSES"), remedy="Set all three"),
    UnreadLauncher(name="torchrun's variables", others=_half(TORCH_NAMES, "WORLD_SIZE"), remedy="Set all three"),
    UnreadLauncher(
        name="Kubeflow's PyTorch runtime",
        others=_sized("PET_NODE_RANK", "PET_NNODES"),
        remedy="Start with torchrun --no-python headrace train ..., which reads these variables",
    ),
    UnreadLauncher(name="TF_CONFIG", others=_tf_config, remedy="Give --distributed"),
    UnreadLauncher(
        name="a Kubernetes Indexed Job",
        others=_indexed_job,
        remedy=f"Set {NUM_PROCESSES} to the number of pods and {SERVICE} to their headless service",
    ),
    UnreadLauncher(name="MPICH or Intel MPI", others=_sized("PMI_RANK", "PMI_SIZE"), remedy=BY_HAND),
    UnreadLauncher(name="MVAPICH", others=_sized("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"), remedy=BY_HAND),
    UnreadLauncher(name="jsrun", others=_sized("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"), remedy=BY_HAND),
    UnreadLauncher(name="Flux", others=_sized("FLUX_TASK_RANK", "FLUX_JOB_SIZE"), remedy=BY_HAND),
    UnreadLauncher(name="Horovod", others=_sized("HOROVOD_RANK", "HOROVOD_SIZE"), remedy=BY_HAND),
    UnreadLauncher(name="Volcano", others=_sized("VC_TASK_INDEX", "VC_WORKER_NUM"), remedy=BY_HAND),
    UnreadLauncher(name="SageMaker", others=_sagemaker, remedy=BY_HAND),
)


def refuse_unread_launcher(environ: Environ) -> None:
    """Raise ConfigError if this process, which joins no job, seems to be one of several."""
    if says_alone(environ):
        return
    for launcher in UNREAD_LAUNCHERS:
        if said := launcher.others(environ):
            raise ConfigError(
                f"This process seems to be one of several, started by {launcher.name} ({said}), but cannot join them.",
                rule="Processes that do not know of each other would each train a model of their own.",
                remedy=f"{launcher.remedy}. If it is to train alone: {NUM_PROCESSES}=1.",
            )
