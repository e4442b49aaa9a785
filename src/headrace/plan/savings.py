"""Options that trade time for memory, and what they would save on the fullest device."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.config.schema import Config
from headrace.plan.memory import MemoryPlan, model_rows

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
