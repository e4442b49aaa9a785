"""Batch arithmetic: micro batch x replicas x gradient accumulation = global batch, for training and for validation."""

from dataclasses import dataclass, replace
from typing import Any

from headrace.config.schema import Batch
from headrace.core.errors import ConfigError
from headrace.plan.steps import divisors


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


_BATCH_RULE = "batch size = micro batch x replicas x accumulation, in whole numbers."


def make_batch_plan(wanted: Batch) -> BatchPlan:
    """Derive micro batch and accumulation from the batch of a step, or that batch from them.

    With `batch_size`, replicas and accumulation divide it and the rest is the micro batch; with `global_batch_size`,
    accumulation follows from the micro batch, rounded; with neither, the batch is what the others come to.
    """
    replicas, count, micro = wanted.num_replicas or 1, wanted.gradient_accumulation_count, wanted.micro_batch_size
    if wanted.batch_size is not None:
        return _from_batch(wanted, wanted.batch_size)
    if wanted.global_batch_size is not None:
        return _from_global(micro or max(1, wanted.global_batch_size // replicas), replicas, wanted.global_batch_size)
    return BatchPlan(micro_batch_size=micro or 1, num_replicas=replicas, gradient_accumulation_count=count or 1)


def _from_batch(wanted: Batch, size: int) -> BatchPlan:
    replicas, most = wanted.num_replicas or 1, wanted.micro_batch_size or size
    count = wanted.gradient_accumulation_count
    parts = replicas * (count or 1)
    if size % parts:
        near = sorted({max(parts, size // parts * parts), -(-size // parts) * parts})
        accumulated = f" and accumulation {count}" if count else ""
        raise ConfigError(
            f"--batch-size {size:,} does not divide by {replicas} replicas{accumulated}.",
            rule=_BATCH_RULE,
            remedy=f"Use --batch-size {' or '.join(map(str, near))}, or another --num-replicas.",
        )
    each = size // replicas  # images of one replica in a step
    micro = each // count if count else max(d for d in divisors(each) if d <= most)
    plan = BatchPlan(micro_batch_size=micro, num_replicas=replicas, gradient_accumulation_count=each // micro)
    if wanted.micro_batch_size is None or micro == min(most, each):
        return plan
    # Down to half of the requested micro batch a warning is enough; less is refused, such as the 1 that a prime number
    # of images leaves.
    if count or 2 * micro < most:
        given = f"--micro-batch-size {most}" + (f" and --gradient-accumulation-count {count}" if count else "")
        near = max(1, round(each / most)) * most * replicas
        raise ConfigError(
            f"--batch-size {size:,} does not go with {given} on {replicas} replica{'s' * (replicas != 1)}.",
            rule=_BATCH_RULE,
            remedy=f"Use --batch-size {near}, or leave {given.split()[0]} out.",
        )
    text = f"--micro-batch-size {most} does not divide the {each:,} images of a replica and step: it is {micro}."
    return replace(plan, warnings=(text,))


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
    replicas = batch.num_replicas * devices_per_replica // wide if num_replicas is None else num_replicas
    wanted = batch.micro_batch_size if micro_batch_size is None else micro_batch_size
    return ValidationPlan(
        # Not more than all images at once: the rest of a batch would be padding, which takes as long.
        micro_batch_size=max(1, min(wanted, -(-num_samples // replicas))),
        num_replicas=replicas,
        num_samples=num_samples,
        devices_per_replica=wide,
    )
