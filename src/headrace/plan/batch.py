"""Batch arithmetic: micro batch x replicas x gradient accumulation = global batch, for training and for validation."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The samples of one step: `gradient_accumulation_count` rounds of one micro batch per replica."""

    micro_batch_size: int
    num_replicas: int
    gradient_accumulation_count: int
    warnings: tuple[str, ...] = ()

    @property
    def micro_batches_per_step(self) -> int:
        return self.gradient_accumulation_count * self.num_replicas

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.micro_batches_per_step

    def micro_batches_per_epoch(self, num_samples: int) -> int:
        """Return the number of micro batches in the whole steps of one epoch."""
        return num_samples // self.global_batch_size * self.micro_batches_per_step

    def to_dict(self) -> dict[str, Any]:
        return {
            "micro_batch_size": self.micro_batch_size,
            "num_replicas": self.num_replicas,
            "gradient_accumulation_count": self.gradient_accumulation_count,
            "global_batch_size": self.global_batch_size,
        }


@dataclass(frozen=True, kw_only=True)
class ValidationPlan:
    """How the validation set is divided. The last batch is padded and masked, so every sample counts once."""

    micro_batch_size: int
    num_replicas: int
    num_samples: int
    devices_per_replica: int = 1  # more than 1 where validation runs through pipeline stages

    @property
    def num_devices(self) -> int:
        return self.num_replicas * self.devices_per_replica

    @property
    def batch_size(self) -> int:
        return self.micro_batch_size * self.num_replicas

    @property
    def num_batches(self) -> int:
        return -(-self.num_samples // self.batch_size)

    @property
    def padding(self) -> int:
        return self.num_batches * self.batch_size - self.num_samples

    def first_batches(self, num_batches: int) -> "ValidationPlan":
        """Return the plan of a trial on the first batches only."""
        return replace(self, num_samples=min(self.num_samples, num_batches * self.batch_size))

    def to_dict(self) -> dict[str, Any]:
        return {
            "micro_batch_size": self.micro_batch_size,
            "num_replicas": self.num_replicas,
            "num_devices": self.num_devices,
            "batch_size": self.batch_size,
            "num_samples": self.num_samples,
            "num_batches": self.num_batches,
            "padding": self.padding,
        }


def make_batch_plan(
    *,
    micro_batch_size: int,
    num_replicas: int,
    gradient_accumulation_count: int | None,
    global_batch_size: int | None,
) -> BatchPlan:
    """Derive the plan from the accumulation count or the global batch size (with neither, accumulate once)."""
    assert micro_batch_size > 0, micro_batch_size
    assert num_replicas > 0, num_replicas
    assert gradient_accumulation_count is None or global_batch_size is None, (
        "give one of the two: the other follows from it"
    )
    if global_batch_size is None:
        count = 1 if gradient_accumulation_count is None else gradient_accumulation_count
        assert count > 0, count
        return BatchPlan(
            micro_batch_size=micro_batch_size, num_replicas=num_replicas, gradient_accumulation_count=count
        )
    assert global_batch_size > 0, global_batch_size
    return _from_global(micro_batch_size, num_replicas, global_batch_size)


def _from_global(micro_batch_size: int, num_replicas: int, global_batch_size: int) -> BatchPlan:
    per_round = micro_batch_size * num_replicas
    count = max(1, round(global_batch_size / per_round))
    warnings = ()
    if count * per_round != global_batch_size:
        warnings = (
            f"--global-batch-size {global_batch_size} is not a multiple of micro batch x replicas "
            f"({micro_batch_size} x {num_replicas} = {per_round}): gradients are accumulated {count} times, "
            f"so the global batch is {count * per_round}.",
        )
    return BatchPlan(
        micro_batch_size=micro_batch_size,
        num_replicas=num_replicas,
        gradient_accumulation_count=count,
        warnings=warnings,
    )


def make_validation_plan(
    batch: BatchPlan,
    *,
    micro_batch_size: int | None,
    num_replicas: int | None,
    num_samples: int,
    devices_per_replica: int = 1,
    pipelined: bool = False,
) -> ValidationPlan:
    """Divide the validation set into batches; sizes that are not given are those of training.

    Each device evaluates the whole network or, if `pipelined`, a replica spans as many devices as in training.
    """
    wide = devices_per_replica if pipelined else 1
    return ValidationPlan(
        micro_batch_size=batch.micro_batch_size if micro_batch_size is None else micro_batch_size,
        num_replicas=batch.num_replicas * devices_per_replica // wide if num_replicas is None else num_replicas,
        num_samples=num_samples,
        devices_per_replica=wide,
    )
