"""How much memory one device needs for training, from shapes alone: an estimate, row by row.

Checked against XLA's own `memory_analysis()` of the compiled step. On an H200 (jax 0.11.2) the activations came to 0.97
to 1.14 times the row here: ResNet-20 at batch 128, ResNet-18 at 64, ResNet-50 at 64 and 256, float32 and bfloat16. On
the CPU (jax 0.10.2) it was 2 times in float32, and 3.5 in bfloat16, which XLA computes in float32 there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.config.schema import Config, Learning
from headrace.core.units import format_bytes
from headrace.data.dataset import DataInfo
from headrace.data.feeding.blocks import FeedOptions
from headrace.data.sets.source import distinct_images
from headrace.plan.batch import BatchPlan

FLOAT32_BYTES = 4

# Slots of an optimizer: float32 arrays of the weights' shapes.
OPTIMIZER_SLOTS: Mapping[str, Callable[[Mapping[str, Any]], int]] = {
    "sgd": lambda params: 1 if params.get("momentum") else 0,
    "momentum": lambda params: 1,
    "lars": lambda params: 1,
    "rmsprop": lambda params: 2 if params.get("momentum") else 1,
    "adamw": lambda params: 2,
}


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One use of memory: its size, and what it is made of in words."""

    name: str
    num_bytes: int
    detail: str


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The estimate for one device. Without stages it holds for all devices, with them there is one per device."""

    rows: tuple[MemoryRow, ...]

    @property
    def total_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    def bytes_of(self, name: str) -> int:
        """Return the bytes of one row."""
        return next(row.num_bytes for row in self.rows if row.name == name)

    def to_dict(self) -> dict[str, Any]:
        return {
            "total_bytes": self.total_bytes,
            "rows": [{"name": row.name, "bytes": row.num_bytes, "detail": row.detail} for row in self.rows],
        }


def widths(precision: str) -> tuple[int, int]:
    """Return the bytes of one number in the computation and in the stored weights, of '16.32' and its like."""
    compute, weights = (int(bits) // 8 for bits in precision.split("."))
    return compute, weights


def optimizer_slots(learning: Learning) -> int:
    """Return how many float32 copies of the weights' shapes the optimizer keeps."""
    return OPTIMIZER_SLOTS[learning.optimizer](learning.optimizer_params)


def estimate_memory(
    config: Config,
    *,
    num_parameters: int,
    kept_elements: int,
    micro_batch_size: int,
    gradient_accumulation_count: int,
    data: MemoryRow,
) -> MemoryPlan:
    """Add up what training takes on a device with so many parameters and numbers kept per image."""
    rows = (
        *model_rows(config, num_parameters, accumulated=gradient_accumulation_count > 1),
        _activations(config, kept_elements, micro_batch_size),
        data,
    )
    return MemoryPlan(rows=rows)


def bytes_per_parameter(config: Config) -> float:
    """Return what a parameter takes on a device of a pipeline, with all that comes along with it."""
    many = 1 << 20  # so that a share of a byte is not rounded up
    return sum(row.num_bytes for row in model_rows(config, many, accumulated=True)) / many


def model_rows(config: Config, params: int, *, accumulated: bool) -> tuple[MemoryRow, ...]:
    """Return what so many parameters take: weights, gradients, accumulators, optimizer state, average."""
    compute_bytes, weight_bytes = widths(config.numerics.precision)
    copy_bytes = compute_bytes if compute_bytes != weight_bytes else 0
    slots = optimizer_slots(config.learning)
    accumulator_bits = {"float32": 32}.get(config.batch.gradient_accumulation_dtype, 16)
    ema = config.learning.ema_decay > 0
    detail = f"{params:,} parameters of {8 * weight_bytes} bits"
    if copy_bytes:
        detail += f", and a copy of {8 * copy_bytes} bits to compute with"
    return (
        MemoryRow(name="weights", num_bytes=params * (weight_bytes + copy_bytes), detail=detail),
        MemoryRow(name="gradients", num_bytes=params * FLOAT32_BYTES, detail="one per parameter, 32 bits"),
        MemoryRow(
            name="accumulators",
            num_bytes=params * accumulator_bits // 8 if accumulated else 0,
            detail=f"one per parameter, {accumulator_bits} bits" if accumulated else "no accumulation",
        ),
        _update_only(
            config, "optimizer state", slots * params, f"{config.learning.optimizer}: {slots} of 32 bits per parameter"
        ),
        _update_only(config, "average of weights", params * ema, "one per parameter, 32 bits" if ema else "off"),
    )


def _update_only(config: Config, name: str, elements: int, detail: str) -> MemoryRow:
    """Return the row of a part of the state that only the update touches, wherever it lives."""
    num_bytes, replicas = elements * FLOAT32_BYTES, config.batch.num_replicas
    if config.pipeline.replicated_optimizer_state_sharding and replicas > 1:
        num_bytes, detail = -(-num_bytes // replicas), f"{detail}; over {replicas} replicas"
    if config.pipeline.optimizer_state_offloading and num_bytes:
        num_bytes, detail = 0, f"{detail}; {format_bytes(num_bytes)} in host memory"
    return MemoryRow(name=name, num_bytes=num_bytes, detail=detail)


def _activations(config: Config, elements: int, micro_batch_size: int) -> MemoryRow:
    compute_bytes, _ = widths(config.numerics.precision)
    return MemoryRow(
        name="activations",
        num_bytes=elements * compute_bytes * micro_batch_size,
        detail=f"{elements:,} per image, {8 * compute_bytes} bits, {micro_batch_size} images",
    )


# What the data set takes of a device's memory, resident or sent in blocks, by the part that the device has.


LABEL_BYTES = 4
LABEL_AND_INDEX_BYTES = 8  # int32 each, beside the pixels of an image that is sent


@dataclass(frozen=True, kw_only=True)
class DataMemory:
    """The data row of a device that takes images, of one that takes labels alone, and of one between the two."""

    images: MemoryRow
    labels: MemoryRow
    neither: MemoryRow

    def row_of(self, *, first: bool, last: bool) -> MemoryRow:
        """Return the row of a device that has the first stage, the last one, or neither of them."""
        return self.images if first else self.labels if last else self.neither


@dataclass(frozen=True, kw_only=True)
class SentData:
    """A set that is sent block by block: one block in use, others ahead, all within the data set's device budget."""

    images_per_step: int  # of one device
    image_bytes: int
    num_blocks: int

    @property
    def bytes_per_step(self) -> int:
        """Return what a step takes in all blocks together."""
        return self.num_blocks * self.images_per_step * (self.image_bytes + LABEL_AND_INDEX_BYTES)

    def memory(self, steps_per_call: int) -> DataMemory:
        """Return the rows for calls of so many steps."""

        def row(image_bytes: int) -> MemoryRow:
            block = self.images_per_step * (image_bytes + LABEL_AND_INDEX_BYTES) * steps_per_call
            return MemoryRow(
                name="data",
                num_bytes=block * self.num_blocks,
                detail=f"{self.num_blocks} blocks of {steps_per_call:,} steps, {format_bytes(block)} each",
            )

        return DataMemory(images=row(self.image_bytes), labels=row(0), neither=no_data())


def sent_data(feed: FeedOptions, info: DataInfo, batch: BatchPlan) -> SentData:
    """Return how a set is sent to the devices of a batch."""
    return SentData(
        images_per_step=batch.micro_batch_size * batch.gradient_accumulation_count,
        image_bytes=info.num_train_values * (1 if feed.eight_bit_transfer else 4),
        num_blocks=1 + feed.prefetch_depth,
    )


def resident_data(config: Config, info: DataInfo, budget: int) -> DataMemory:
    """Return the rows of a set that is kept on the devices as it is; each validates and so has that part."""
    counts = [info.num_train, info.num_validation]
    if info.made_up:
        counts = [distinct_images(count, info.image_bytes, budget) for count in counts]
    train, validation = counts[0], counts[1] * config.validation.validation
    bits = 8 * info.image_bytes // info.num_values

    def row(num_images: int, num_labels: int = 0, sent: int = 0) -> MemoryRow:
        larger = sent * (info.train_image_bytes - info.image_bytes)
        num_bytes = num_images * (info.image_bytes + LABEL_BYTES) + larger + num_labels * LABEL_BYTES
        labels = f", and {num_labels:,} labels" if num_labels else ""
        return MemoryRow(name="data", num_bytes=num_bytes, detail=f"{num_images:,} images of {bits} bits{labels}")

    return DataMemory(
        images=row(train + validation, sent=train), labels=row(validation, train), neither=row(validation)
    )


def no_data() -> MemoryRow:
    """Return the row of a device that the set does not reach."""
    return MemoryRow(name="data", num_bytes=0, detail="goes to the first and the last stage alone")


# What the options that trade time for memory would save on the fullest device, where they are off.


# option -> its short name, and what it costs
PRICES = {
    "recomputation": ("activations", "for about one more forward pass"),
    "optimizer_state_offloading": ("optimizer state", "for sending it in and out at every update"),
    "replicated_optimizer_state_sharding": ("parts of it", "for collecting the new weights from the replicas"),
}


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Bytes that an option would save, and what it costs."""

    option: str
    name: str
    num_bytes: int
    price: str


def find_savings(
    config: Config,
    num_parameters: int,
    memory: Sequence[MemoryPlan],
    recomputed: Callable[[], Sequence[MemoryPlan]],
) -> tuple[Saving, ...]:
    """Return what each option that is off would save; `recomputed` makes the estimate with recomputation on.

    `num_parameters` are those of the fullest device.
    """

    def state_bytes(config: Config) -> int:
        rows = model_rows(config, num_parameters, accumulated=True)
        return sum(row.num_bytes for row in rows if row.name in ("optimizer state", "average of weights"))

    def fullest(plans: Sequence[MemoryPlan]) -> int:
        return max(plan.total_bytes for plan in plans)

    found = {}
    if not config.pipeline.recomputation:
        found["recomputation"] = fullest(memory) - fullest(recomputed())
    for option in ("optimizer_state_offloading", "replicated_optimizer_state_sharding"):
        with_it = replace(config, pipeline=replace(config.pipeline, **{option: True}))
        found[option] = state_bytes(config) - state_bytes(with_it)
    return tuple(
        Saving(option=option, name=PRICES[option][0], num_bytes=num_bytes, price=PRICES[option][1])
        for option, num_bytes in found.items()
        if num_bytes > 0
    )
