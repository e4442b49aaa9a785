"""Memory estimates from shapes alone: model and activations, the dataset's share, and what some options would save.

Checked against XLA's `memory_analysis()` of the compiled step. On an H200 (jax 0.11.2) activations took 0.97 to 1.14
times the estimate (ResNet-20 at batch 128, ResNet-18 at 64, ResNet-50 at 64 and 256; float32 and bfloat16), and up to
30 % more with kernels that run at the same time (`concurrent_kernels`, on small work). On the CPU
(jax 0.10.2) they took 2 times as much in float32, and 3.5 times in bfloat16, which XLA computes in float32 there.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.config.schema import Config, Learning
from headrace.core.units import format_bytes
from headrace.data.dataset import DataInfo
from headrace.data.feeding.eval_feed import DEVICE, EvalCache
from headrace.data.feeding.feed import FeedOptions
from headrace.data.sets.samples import distinct_images
from headrace.plan.steps import BatchPlan, ValidationPlan
from headrace.rows.optimizers import OPTIMIZERS

FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One use of memory: its size, and an explanation for people."""

    name: str
    num_bytes: int
    detail: str


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The estimate for one device. Without stages it applies to all devices; with stages each device has its own."""

    rows: tuple[MemoryRow, ...]

    @property
    def total_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    def bytes_of(self, name: str) -> int:
        return next(row.num_bytes for row in self.rows if row.name == name)

    def to_dict(self) -> dict[str, Any]:
        return {
            "total_bytes": self.total_bytes,
            "rows": [{"name": row.name, "bytes": row.num_bytes, "detail": row.detail} for row in self.rows],
        }


def widths(precision: str) -> tuple[int, int]:
    """Return the bytes per number in computation and in stored weights, given a precision such as '16.32'."""
    compute, weights = (int(bits) // 8 for bits in precision.split("."))
    return compute, weights


def optimizer_slots(learning: Learning) -> int:
    """Return how many float32 arrays per weight the optimizer keeps."""
    return OPTIMIZERS[learning.optimizer].slots(learning.optimizer_params) + (learning.lookahead > 0)


def estimate_memory(
    config: Config, batch: BatchPlan, num_parameters: int, kept_elements: int, data: MemoryRow
) -> MemoryPlan:
    """Return the estimate for a device with that many parameters and activations kept per image."""
    compute_bytes, _ = widths(config.numerics.precision)
    activations = MemoryRow(
        name="activations",
        num_bytes=kept_elements * compute_bytes * batch.micro_batch_size,
        detail=f"{kept_elements:,} per image, {8 * compute_bytes} bits, {batch.micro_batch_size} images",
    )
    model = model_rows(config, num_parameters, accumulated=batch.gradient_accumulation_count > 1)
    return MemoryPlan(rows=(*model, activations, data))


def bytes_per_parameter(config: Config) -> float:
    """Return the bytes per parameter on a pipeline device: weight, gradient, accumulator and optimizer state."""
    many = 1 << 20  # enough parameters that rounding up to whole bytes does not matter
    return sum(row.num_bytes for row in model_rows(config, many, accumulated=True)) / many


def model_rows(config: Config, params: int, *, accumulated: bool) -> tuple[MemoryRow, ...]:
    """Return the rows of memory proportional to the parameters: weights, gradients, optimizer state and so on."""
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
        # In every precision: they are widened before the update.
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
    """Return the row of state that only the weight update touches, which may be sharded or offloaded."""
    num_bytes, replicas = elements * FLOAT32_BYTES, config.batch.num_replicas or 1
    if config.pipeline.replicated_optimizer_state_sharding and replicas > 1:
        num_bytes, detail = -(-num_bytes // replicas), f"{detail}; over {replicas} replicas"
    if config.pipeline.optimizer_state_offloading and num_bytes:
        num_bytes, detail = 0, f"{detail}; {format_bytes(num_bytes)} in host memory"
    return MemoryRow(name=name, num_bytes=num_bytes, detail=detail)


# Memory of the dataset, kept on the devices or sent in blocks.

LABEL_BYTES = 4
LABEL_AND_INDEX_BYTES = 8  # two int32 sent with every image


@dataclass(frozen=True, kw_only=True)
class DataMemory:
    """The data row of a device that receives images, only labels, or neither."""

    images: MemoryRow
    labels: MemoryRow
    neither: MemoryRow

    def row_of(self, *, first: bool, last: bool) -> MemoryRow:
        """Return the row of a device that runs the first stage, the last one, or neither."""
        return self.images if first else self.labels if last else self.neither


@dataclass(frozen=True, kw_only=True)
class SentData:
    """A dataset sent block by block: one block in use and the prefetched ones, all within the device budget."""

    images_per_step: int  # of one device
    image_bytes: int
    num_blocks: int

    @property
    def bytes_per_step(self) -> int:
        """Return the bytes that one step takes in all blocks together."""
        return self.num_blocks * self.images_per_step * (self.image_bytes + LABEL_AND_INDEX_BYTES)

    def memory(self, steps_per_call: int) -> DataMemory:
        """Return the rows for calls of that many steps."""

        def row(image_bytes: int) -> MemoryRow:
            block = self.images_per_step * (image_bytes + LABEL_AND_INDEX_BYTES) * steps_per_call
            return MemoryRow(
                name="data",
                num_bytes=block * self.num_blocks,
                detail=f"{self.num_blocks} blocks of {steps_per_call:,} steps, {format_bytes(block)} each",
            )

        nothing = MemoryRow(name="data", num_bytes=0, detail="only the first and the last stage receive data")
        return DataMemory(images=row(self.image_bytes), labels=row(0), neither=nothing)


def sent_data(feed: FeedOptions, info: DataInfo, batch: BatchPlan) -> SentData:
    """Return what is sent to each device for a batch."""
    return SentData(
        images_per_step=batch.micro_batch_size * batch.gradient_accumulation_count,
        image_bytes=info.num_train_values * (1 if feed.eight_bit_transfer else 4),
        num_blocks=1 + feed.prefetch_depth,
    )


def resident_data(config: Config, info: DataInfo, budget: int) -> DataMemory:
    """Return the rows of a dataset kept on the devices, with the validation set where it is evaluated."""
    counts = [info.num_train, info.num_validation]
    if info.synthetic_on:
        counts = [distinct_images(count, info.image_bytes, budget) for count in counts]
    train, validation = counts[0], counts[1] * config.validation.validation
    bits = 8 * info.image_bytes // info.num_values

    def row(num_images: int, num_labels: int = 0, sent: int = 0) -> MemoryRow:
        larger = sent * (info.train_image_bytes - info.image_bytes)
        num_bytes = num_images * (info.image_bytes + LABEL_BYTES) + larger + num_labels * LABEL_BYTES
        labels = f", and {num_labels:,} labels" if num_labels else ""
        return MemoryRow(name="data", num_bytes=num_bytes, detail=f"{num_images:,} images of {bits} bits{labels}")

    # Through stages, images enter at the first one alone; otherwise every device evaluates the whole network.
    everywhere = 0 if config.validation.pipeline_validation_model else validation
    return DataMemory(
        images=row(train + validation, sent=train),
        labels=row(everywhere, train + validation - everywhere),
        neither=row(everywhere),
    )


def with_validation(
    by_device: Sequence[MemoryPlan],
    holders: Collection[int],
    cache: EvalCache,
    validation: ValidationPlan,
    prefetch_depth: int,
) -> tuple[MemoryPlan, ...]:
    """Return the estimates with the validation images that these devices of a replica hold."""
    if cache.where == DEVICE:
        num_bytes, detail = cache.num_bytes, f"{validation.num_samples:,} validation images, kept"
    else:
        num_bytes = min((1 + prefetch_depth) * cache.block_bytes, cache.num_bytes)
        detail = f"at most {1 + prefetch_depth} blocks of validation images"
    # Divided: an evaluation cuts its batches over the replicas, each of which has a resident training set as a whole.
    row = MemoryRow(name="validation data", num_bytes=-(-num_bytes // validation.num_replicas), detail=detail)
    return tuple(
        replace(plan, rows=(*plan.rows, row)) if device in holders else plan for device, plan in enumerate(by_device)
    )


# Options that trade time for memory, and what they would save on the fullest device.

# option -> its short name, and what it costs
PRICES = {
    "recomputation": ("activations", "for about one more forward pass"),
    "optimizer_state_offloading": ("optimizer state", "for transferring it both ways at every update"),
    "replicated_optimizer_state_sharding": ("shards of it", "for gathering the new weights from the replicas"),
}


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Bytes that an option would save, and what it costs."""

    option: str
    name: str
    num_bytes: int
    price: str


def find_savings(
    config: Config, num_parameters: int, memory: MemoryPlan, recomputed: Callable[[], MemoryPlan]
) -> tuple[Saving, ...]:
    """Return what each disabled option would save on a device with that many parameters and this estimate.

    `recomputed` returns its estimate with recomputation.
    """

    def state_bytes(config: Config) -> int:
        rows = model_rows(config, num_parameters, accumulated=True)
        return sum(row.num_bytes for row in rows if row.name in ("optimizer state", "average of weights"))

    found = {}
    if not config.pipeline.recomputation:
        found["recomputation"] = memory.bytes_of("activations") - recomputed().bytes_of("activations")
    for option in ("optimizer_state_offloading", "replicated_optimizer_state_sharding"):
        with_it = replace(config, pipeline=replace(config.pipeline, **{option: True}))
        found[option] = state_bytes(config) - state_bytes(with_it)
    return tuple(
        Saving(option=option, name=PRICES[option][0], num_bytes=num_bytes, price=PRICES[option][1])
        for option, num_bytes in found.items()
        if num_bytes > 0
    )
