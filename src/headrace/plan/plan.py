"""The plan of a run: made on paper from configuration, data set and network; printed, stored with the run, followed."""

from dataclasses import dataclass
from typing import Any

from headrace.config.schema import Config
from headrace.config.sections import MADE_UP_DATASETS
from headrace.core.units import parse_bytes
from headrace.data.blocks import FeedOptions, feed_options
from headrace.data.cache import CacheChoice
from headrace.data.dataset import DataInfo
from headrace.data.made_up import distinct_images
from headrace.model.network import Network
from headrace.plan.batch import BatchPlan, ValidationPlan, make_batch_plan, make_validation_plan
from headrace.plan.memory import MemoryPlan, MemoryRow, estimate_memory, resident_data, streamed_data
from headrace.plan.steps import Events, StepPlan, make_epoch_plan, make_step_plan, no_steps

LABEL_AND_INDEX_BYTES = 8  # int32 each, beside the pixels of an image that is sent


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All numbers of a run. Every other room reads them here and derives none again."""

    batch: BatchPlan
    steps: StepPlan
    validation: ValidationPlan
    memory: MemoryPlan
    cache: CacheChoice
    num_parameters: int
    flops_per_image: int

    @property
    def num_devices(self) -> int:
        """Return how many devices the run needs."""
        return max(self.batch.num_replicas, self.validation.num_replicas)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what the user should hear: where the plan is not what was asked for."""
        return self.batch.warnings + self.steps.warnings

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for the run record and `headrace plan --json`."""
        return {
            "num_devices": self.num_devices,
            "num_parameters": self.num_parameters,
            "flops_per_image": self.flops_per_image,
            "dataset_cache": self.cache._asdict(),
            "batch": self.batch.to_dict(),
            "steps": self.steps.to_dict(),
            "validation": self.validation.to_dict(),
            "memory": self.memory.to_dict(),
            "warnings": list(self.warnings),
        }


def make_plan(config: Config, info: DataInfo, network: Network) -> Plan:
    """Derive every number of the run; what cannot work is refused here, before a device is touched."""
    batch = make_batch_plan(
        micro_batch_size=config.batch.micro_batch_size,
        num_replicas=config.batch.num_replicas,
        gradient_accumulation_count=config.batch.gradient_accumulation_count,
        global_batch_size=config.batch.global_batch_size,
    )
    feed = feed_options(config.data, info, config.run.seed, batch.num_replicas)
    sent = _Sent.of(feed, info, batch) if feed.cache.where == "host" else None
    budget = parse_bytes(config.data.dataset_device_budget)
    steps = _steps(config, info, batch, budget // sent.bytes_per_step if sent else None)
    memory = estimate_memory(
        config,
        network.costs().values(),
        network.input_hwc,
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation_count=batch.gradient_accumulation_count,
        data=sent.memory(steps.steps_per_call) if sent else _resident(config, info, budget),
    )
    cost = network.total_cost()
    return Plan(
        batch=batch,
        steps=steps,
        validation=make_validation_plan(
            batch,
            micro_batch_size=config.validation.validation_micro_batch_size,
            num_replicas=config.validation.validation_num_replicas,
            num_samples=info.num_validation,
        ),
        memory=memory,
        cache=feed.cache,
        num_parameters=cost.params,
        flops_per_image=cost.flops,
    )


def _steps(config: Config, info: DataInfo, batch: BatchPlan, max_steps_per_call: int | None) -> StepPlan:
    wanted = config.batch
    if not config.run.training:
        return no_steps(info.num_train, batch.global_batch_size, wanted.num_epochs)
    epoch = make_epoch_plan(
        num_samples=info.num_train,
        global_batch_size=batch.global_batch_size,
        weight_updates_per_epoch=wanted.weight_updates_per_epoch,
    )
    follows = min(wanted.logs_per_epoch, 1.0)

    def events_of(on: bool, per_epoch: float | None) -> float | None:
        return (follows if per_epoch is None else per_epoch) if on else None

    events = Events(
        logs=wanted.logs_per_epoch,
        checkpoints=events_of(config.checkpoint.checkpoints, wanted.ckpts_per_epoch),
        validations=events_of(config.validation.validation, wanted.validations_per_epoch),
    )
    return make_step_plan(epoch, wanted.num_epochs, events, max_steps_per_call)


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A set that is sent block by block: one block in use, others ahead, all within the data set's device budget."""

    step_bytes: int  # of one block, on one device
    num_blocks: int

    @staticmethod
    def of(feed: FeedOptions, info: DataInfo, batch: BatchPlan) -> "_Sent":
        image_bytes = info.image_bytes * (1 if feed.eight_bit_transfer else 4)
        return _Sent(
            step_bytes=batch.micro_batch_size
            * batch.gradient_accumulation_count
            * (image_bytes + LABEL_AND_INDEX_BYTES),
            num_blocks=1 + feed.prefetch_depth,
        )

    @property
    def bytes_per_step(self) -> int:
        return self.num_blocks * self.step_bytes

    def memory(self, steps_per_call: int) -> MemoryRow:
        return streamed_data(self.step_bytes, steps_per_call, self.num_blocks)


def _resident(config: Config, info: DataInfo, budget: int) -> MemoryRow:
    counts = [info.num_train] + [info.num_validation] * config.validation.validation
    if info.name in MADE_UP_DATASETS:
        counts = [distinct_images(count, info.image_bytes, budget) for count in counts]
    return resident_data(sum(counts), info.image_bytes)
