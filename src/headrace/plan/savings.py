"""What the options that trade time for memory would save on the fullest device, where they are off."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.config.schema import Config
from headrace.plan.memory import MemoryPlan, model_rows

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
