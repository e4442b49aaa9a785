"""The section of the schema about the compiler and the memory of devices; most of its options come from the IPU."""

from dataclasses import dataclass

from headrace.config.field import option
from headrace.config.values import FLOATS, at_least

TARGETS = ("cycles", "memory", "balanced")


def _proportions(values: tuple[float, ...]) -> str:
    """Limit to more than 0 and at most 100."""
    return "" if all(0 < value <= 100 for value in values) else "must be more than 0 and at most 100"


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """What the compiler is told. Options without effect on a device are named when a run starts."""

    half_partials: bool = option(
        False,
        "Let matrix products give 16-bit sums, as convolutions do; off means 32-bit sums, rounded when they are used.",
        aliases=("enable_half_partials",),
    )
    internal_exchange_optimization_target: str | None = option(
        None,
        "What the compiler should save: cycles (time), memory, or both in balance.",
        aliases=("internal_exchange_optimisation_target",),
        choices=TARGETS,
    )
    max_cross_replica_buffer_size: int | None = option(
        None, "Most bytes of gradients that one sum over the replicas joins; 0 joins none.", check=at_least(0)
    )
    max_reduce_many_buffer_size: int | None = option(
        None, "Most bytes that one scattering or gathering over the replicas joins; 0 joins none.", check=at_least(0)
    )
    available_memory_proportion: tuple[float, ...] = option(
        (),
        "Percent of a device's memory (in dialect tf1 its fraction) for the work space of convolutions and matrix "
        "products; one value, or two for each stage.",
        kind=FLOATS,
        check=_proportions,
    )
    gather_conv_output: bool = option(False, "Join small sums over replicas of distributed batch norm.")
    conv_dithering: bool = option(
        False, "Spread convolutions over the IPU's tiles.", aliases=("enable_conv_dithering",)
    )
    min_remote_tensor_size: int | None = option(
        None, "Fewest bytes of a tensor kept in the IPU's remote memory.", check=at_least(0)
    )
    scheduling_algorithm: str | None = option(None, "Order of operations on the IPU.")
    num_io_tiles: int | None = option(None, "Tiles of the IPU kept for input and output.", check=at_least(0))
    on_demand: bool | None = option(None, "Attach to devices when they are needed.")
    nanoo: bool | None = option(
        None,
        "Not a number where a 16-bit number overflows; off means the greatest one.",
    )
