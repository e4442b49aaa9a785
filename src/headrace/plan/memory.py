"""Memory estimates from shapes alone: model and activations, the dataset's share, and what some options would save.

Checked against XLA's `memory_analysis()` of the compiled step. On an H200 (jax 0.11.2) activations took 0.97 to 1.14
times the estimate (ResNet-20 at batch 128, ResNet-18 at 64, ResNet-50 at 64 and 256; float32 and bfloat16), and up to
30 % more with kernels that run at the same time (`concurrent_kernels`, on small work). On the CPU
(jax 0.10.2) they took 2 times as much in float32, and 3.5 times in bfloat16, which XLA computes in float32 there.
"""

from dataclasses import dataclass
from typing import Any

from headrace.config.schema import Config, Learning
from headrace.core.units import format_bytes
from headrace.plan.batch import BatchPlan
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
