"""The section of the schema that cuts the network into pipeline stages."""

# ruff: noqa: RUF009 (option() makes a dataclass field, with a fresh copy of a mapping each time)

from dataclasses import dataclass
from typing import Any

from headrace.config.field import option
from headrace.config.values import BYTES, NUMBERS, at_least

SCHEDULES = ("Grouped", "Interleaved", "Sequential")


def stages_of_splits(splits: tuple[str, ...]) -> int:
    """Return how many stages the words of pipeline_splits ask for."""
    return 1 + (int(splits[0]) if _is_number(splits) else len(splits))


def _is_number(splits: tuple[str, ...]) -> bool:
    return len(splits) == 1 and splits[0].isdecimal()


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The stages of the network, and in which order and where they run."""

    pipeline_splits: tuple[str, ...] = option(
        (), "Blocks that start a new pipeline stage; or one number: so many cuts, chosen to balance the stages."
    )
    num_pipeline_stages: int = option(
        1, "Pipeline stages, cut so that they are balanced; given instead of pipeline_splits.", check=at_least(1)
    )
    device_mapping: tuple[int, ...] = option(
        (), "Device of each stage, such as 0 1 1 0; unset means one device per stage.", kind=NUMBERS
    )
    pipeline_schedule: str = option(
        "Interleaved", "Order in which the stages take the micro batches of a step.", choices=SCHEDULES
    )
    recomputation: bool = option(
        False,
        "Keep only what arrives at a stage for the backward pass, and compute the rest again.",
        aliases=("enable_recomputation", "enable_recompute", "xla_recompute"),
    )
    recomputation_points: tuple[str, ...] = option(
        (),
        "Regular expressions of blocks whose inputs recomputation keeps beside those of the stages.",
    )
    optimizer_state_offloading: bool = option(
        False,
        "Keep the optimizer's state (and averaged weights) in host memory, and stream it in for each update.",
        aliases=("offload_weight_update_variables", "variable_offloading"),
    )
    replicated_optimizer_state_sharding: bool = option(
        False,
        "Cut the optimizer's state (and averaged weights) over the replicas; each updates its part.",
        aliases=("rts",),
    )
    measure_splits: bool = option(
        False, "Time every block on the device first, and cut the stages by these times instead of by shapes."
    )
    block_seconds: dict[str, Any] = option(
        {}, "Seconds that each block takes, in place of its shapes' cost; --measure-splits fills it in."
    )
    device_memory: str | None = option(
        None, "Memory of a device, such as 16GiB, that stages cut automatically must fit.", kind=BYTES
    )
    trace_schedule: bool = option(
        False, "Measure one step's schedule as it really runs, and draw it beside the planned one in the run directory."
    )
    strict_pipeline: bool = option(
        False, "Refuse numbers of micro batches that the schedule would not take on the hardware it was made for."
    )

    @property
    def num_stages(self) -> int:
        """How many stages there are, by whichever option says so."""
        return max(self.num_pipeline_stages, stages_of_splits(self.pipeline_splits))

    @property
    def has_stages(self) -> bool:
        """Whether the plan has stages: there are several, or the optimizer's state lives elsewhere."""
        return self.num_stages > 1 or self.state_elsewhere

    @property
    def one_program(self) -> bool:
        """Whether a call is one device program: all stages are on one device, and so is the optimizer's state."""
        several = self.num_stages > 1 and (not self.device_mapping or max(self.device_mapping) > 0)
        return not several and not self.state_elsewhere

    @property
    def state_elsewhere(self) -> bool:
        """Whether the optimizer's state lives elsewhere than whole on every device."""
        return self.optimizer_state_offloading or self.replicated_optimizer_state_sharding

    @property
    def cut(self) -> tuple[str, ...] | int:
        """The names of the blocks that start stages 1, 2 ..., or the number of stages to make."""
        named = bool(self.pipeline_splits) and not _is_number(self.pipeline_splits)
        return self.pipeline_splits if named else self.num_stages
