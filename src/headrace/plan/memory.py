"""How much memory one device needs for training, from shapes alone: an estimate, row by row.

Checked against XLA's own `memory_analysis()` of the compiled step. On an H200 (jax 0.11.2) the activations came to 0.97
to 1.14 times the row here: ResNet-20 at batch 128, ResNet-18 at 64, ResNet-50 at 64 and 256, float32 and bfloat16. On
the CPU (jax 0.10.2) it was 2 times in float32, and 3.5 in bfloat16, which XLA computes in float32 there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.schema import Config, Learning
from headrace.core.units import format_bytes

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
