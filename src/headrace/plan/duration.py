"""How long a run takes, roughly, before a step of it has run: from its plan and what was measured on such devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.model.network import Network
from headrace.plan.image_sizes import SizeSpan
from headrace.plan.plan import Plan

# The backward pass costs twice the forward pass.
PASSES = 3


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a device (of a CPU one processor) does in a second, when it trains convolutional networks."""

    flops: float  # of convolutions and products
    elements: float  # stored and read again: one kept for the backward pass counts for all that is done with it
    block_seconds: float  # of a block of the network in one pass, however small: launches of its kernels
    float32_factor: float  # how many times as long a step of 32-bit numbers takes as these figures say


# Two figures fit what was measured to about a third (docs/planning.md has the table): ResNets are bound by products,
# EfficientNets and MobileNets by memory.
SPEEDS: Mapping[str, Speed] = {
    "cpu": Speed(flops=75e9, elements=0.24e9, block_seconds=2e-4, float32_factor=1.0),
    "H200": Speed(flops=1.2e15, elements=0.21e12, block_seconds=6e-5, float32_factor=2.3),
}


@dataclass(frozen=True, kw_only=True)
class Duration:
    """The expected seconds of a step, of a validation, and of all of them."""

    step_seconds: float
    num_steps: int
    validation_seconds: float
    num_validations: int

    @property
    def seconds(self) -> float:
        """Return the whole time, without the start of the process and its compilation."""
        return self.step_seconds * self.num_steps + self.validation_seconds * self.num_validations


def speed_of(platform: str, device: str) -> Speed | None:
    """Return the speed of a device by its platform and name; None where none like it was measured."""
    if platform == "cpu":
        return SPEEDS["cpu"]
    return next((speed for name, speed in SPEEDS.items() if name != "cpu" and name in device), None)


def expected_duration(
    plan: Plan, network: Network, sizes: Sequence[SizeSpan], speed: Speed, *, precision: str, processors: int = 0
) -> Duration:
    """Return what a plan takes; of a CPU all `processors` are used, however many devices it is divided into."""
    cost, batch = network.total_cost(), plan.batch
    is_cpu = processors > 0
    # Of the replicas' devices each works on its own images; replicas on one CPU share its processors.
    images = batch.global_batch_size if is_cpu else batch.micro_batch_size * batch.gradient_accumulation_count
    scale = processors if is_cpu else plan.devices_per_replica * (1 - plan.pipeline.bubble if plan.pipeline else 1)
    if precision == "32.32":
        scale /= speed.float32_factor
    area = _mean_area(sizes, plan) / (network.input_hwc[0] * network.input_hwc[1])
    launches = speed.block_seconds * len(network.block_names)
    step = images * area * (PASSES * cost.flops / speed.flops + cost.activation_elements / speed.elements) / scale
    counted = (
        plan.validation.num_batches * plan.validation.micro_batch_size * (plan.validation.num_replicas if is_cpu else 1)
    )
    validation = counted * (cost.flops / speed.flops + cost.activation_elements / speed.elements / PASSES) / scale
    return Duration(
        step_seconds=step + launches * batch.gradient_accumulation_count,
        num_steps=plan.steps.total_steps,
        validation_seconds=validation
        + speed.block_seconds * len(network.block_names) * plan.validation.num_batches / PASSES,
        num_validations=plan.steps.num_events(plan.steps.validate_every) if plan.steps.total_steps else 1,
    )


def _mean_area(sizes: Sequence[SizeSpan], plan: Plan) -> float:
    """Return the pixels of a training image, over all steps."""
    ends = [span.first_step for span in sizes[1:]] + [max(plan.steps.total_steps, 1)]
    pixels = sum(
        (end - span.first_step) * span.image_hw[0] * span.image_hw[1] for span, end in zip(sizes, ends, strict=True)
    )
    return pixels / ends[-1]
