"""Processes on paper: each owns whole replicas, with all devices of their pipelines."""

from headrace.config.schema import Config
from headrace.core.errors import ConfigError
from headrace.plan.batch import BatchPlan, ValidationPlan

_RULE = "A process owns whole replicas, and every process owns as many."


def refuse_split_replicas(config: Config, batch: BatchPlan, validation: ValidationPlan, num_processes: int) -> None:
    """Refuse replicas that cannot be dealt out evenly to the processes."""
    if num_processes < 1:
        raise ConfigError(f"The number of processes is {num_processes}.", rule="There is at least one.")
    if config.run.training and batch.num_replicas % num_processes:
        raise ConfigError(
            f"{batch.num_replicas} replicas cannot be dealt out evenly to {num_processes} processes.",
            rule=_RULE,
            remedy=_remedy("--num-replicas", batch.num_replicas, num_processes),
        )
    if config.validation.validation and validation.num_replicas % num_processes:
        raise ConfigError(
            f"{validation.num_replicas} replicas of the validation cannot be dealt out evenly to {num_processes} "
            "processes.",
            rule=_RULE,
            remedy=_remedy("--validation-num-replicas", validation.num_replicas, num_processes),
        )


def _remedy(option: str, replicas: int, processes: int) -> str:
    """Name the next number of replicas that works, and the numbers of processes that would."""
    fitting = [str(count) for count in range(1, replicas + 1) if replicas % count == 0][-4:]
    more = -(-replicas // processes) * processes
    return f"Give {option} {more}, or start {' or '.join(fitting)} process{'es' * (fitting != ['1'])}."
