"""Cut a network into stages, where the user says or so that the slowest is fastest.

A cut is a tuple of block indices: the first blocks of stages 1, 2 ... Stage 0 always starts at block 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from headrace.core.errors import ConfigError, nearest
from headrace.core.units import format_bytes
from headrace.model.network import Network, num_elements

Cut = tuple[int, ...]
StageValue = Callable[[int, int, int], float]  # (stage, first block, end block) -> its value

# How many forward FLOPs take as long as one byte of stored activations, in training. On an H200, convolutions reach
# about 500 TFLOP/s and memory about 4 TB/s; forward and backward passes do 3 times the forward FLOPs and move a
# stored byte about 6 times. This predicts 8,900 images/s for ResNet-50 (measured: 7,400). Only the ratio matters.
FLOPS_PER_BYTE = 250
MUCH_WORSE = 1.10  # a cut is warned about when its slowest device takes this many times that of the best cut

RULE = "Each name of --pipeline-splits starts a new stage."


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """The cost of one block per micro batch. All blocks use the same unit of time: FLOPs, or seconds if measured."""

    name: str
    time: float
    num_parameters: int = 0
    stored_bytes: int = 0  # outputs of convolutions and dense layers, stored for the backward pass
    input_bytes: int = 0  # the block's input, which would be transferred if a stage began here


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The memory of a device, and what determines how much of it a stage needs."""

    device_bytes: float
    bytes_per_parameter: float  # weight, gradient, accumulator and optimizer state together
    stored_micros: tuple[int, ...]  # of each stage: Table.peak_by_stage()


def block_costs(network: Network, micro_batch_size: int, bytes_per_number: int) -> tuple[BlockCost, ...]:
    """Return the costs of all blocks, estimated from their shapes."""
    costs = []
    # Not strict: the last shape is that of the network's output.
    for (name, cost), shape in zip(network.costs().items(), network.shapes(), strict=False):
        stored = cost.product_elements * bytes_per_number * micro_batch_size
        # FLOPs alone predict badly: a stem of 8 MFLOP took 0.86 ms where a block of 75 MFLOP took 1.47.
        moved = cost.activation_elements * bytes_per_number * micro_batch_size
        costs.append(
            BlockCost(
                name=name,
                time=float(cost.flops * micro_batch_size + FLOPS_PER_BYTE * moved),
                num_parameters=cost.params,
                stored_bytes=stored,
                input_bytes=num_elements(shape) * bytes_per_number * micro_batch_size,
            )
        )
    return tuple(costs)


def measured(costs: Sequence[BlockCost], seconds: Mapping[str, float]) -> tuple[BlockCost, ...]:
    """Return the costs with measured times in place of estimated ones."""
    names = [cost.name for cost in costs]
    wrong = [name for name in seconds if name not in names] + [name for name in names if name not in seconds]
    if wrong or not all(seconds[name] > 0 for name in names):
        raise ConfigError(
            f"block_seconds does not fit the network: {wrong[0] if wrong else min(seconds, key=lambda n: seconds[n])}.",
            rule=f"It needs a time above 0 for each of the {len(names)} blocks.",
            remedy="Omit it: --measure-splits measures the times.",
        )
    return tuple(replace(cost, time=seconds[cost.name]) for cost in costs)


def splits_by_name(network: Network, names: Sequence[str]) -> Cut:
    """Return the cut at the named split points.

    Unknown, repeated and out-of-order names and the first block raise ConfigError. A split point inside a block
    requires a network that was `refined` there.
    """
    points = network.split_points()
    for name in names:
        if name not in points:
            guess = nearest(name, points)
            raise _refusal(f"{network.name} has no block {name!r}.", network, f"Did you mean {guess}?" if guess else "")
        assert points[name][1] == 0, f"{name} is inside a block: use network.refined(...) first"
        if points[name] == (0, 0):
            raise _refusal(f"{name} is the first block of {network.name}, where stage 0 starts anyway.", network)
        same = [other for other in names if points.get(other) == points[name]]
        if len(same) > 1:
            twice = f"{name} is named {len(same)} times." if len(set(same)) == 1 else f"{' and '.join(same)} are one."
            raise _refusal(twice, network)
    cut = tuple(points[name][0] for name in names)
    if list(cut) != sorted(cut):
        in_order = " ".join(network.block_names[i] for i in sorted(cut))
        early = next(name for name, i, j in zip(names[1:], cut, cut[1:], strict=False) if j < i)
        raise _refusal(f"{early} comes before {names[names.index(early) - 1]}.", network, f"In order: {in_order}.")
    return cut


def _refusal(problem: str, network: Network, hint: str = "") -> ConfigError:
    possible = f"Possible splits of {network.name}: {', '.join(network.block_names[1:])}."
    return ConfigError(f"--pipeline-splits: {problem}", rule=RULE, remedy=f"{hint} {possible}".strip())


@dataclass(frozen=True, kw_only=True)
class SplitFilter:
    """Parts of names: an automatic cut is made where a name has one of `include` (if any) and none of `exclude`."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def allowed(self, network: Network) -> frozenset[int] | None:
        """Return the blocks that may start a stage, or None for all of them; any name of a block counts."""
        if not self.include and not self.exclude:
            return None
        names: dict[int, list[str]] = {}
        for name, (block, layer) in network.split_points().items():
            if block and not layer:
                names.setdefault(block, []).append(name)
        wanted, unwanted = (
            {block for block, all_names in names.items() if any(part in name for part in parts for name in all_names)}
            for parts in (self.include or ("",), self.exclude)
        )
        return frozenset(wanted - unwanted)

    def check(self, network: Network, num_stages: int) -> None:
        """Refuse a filter that leaves too few places for the cuts."""
        allowed = self.allowed(network)
        if allowed is None or len(allowed) >= num_stages - 1:
            return
        given = [f"--split-{kind}-filter {' '.join(parts)}" for kind, parts in vars(self).items() if parts]
        raise ConfigError(
            f"{' and '.join(given)}: {len(allowed)} of {network.name}'s blocks may start a stage.",
            rule=f"{num_stages} stages need {num_stages - 1}. A filter is a part of a block's name.",
            remedy=f"Blocks: {', '.join(network.block_names[1:])}.",
        )


EVERYWHERE = SplitFilter()


def best_splits(
    costs: Sequence[BlockCost],
    num_stages: int,
    limits: Limits | None = None,
    device_mapping: Sequence[int] | None = None,
    allowed: frozenset[int] | None = None,
) -> Cut:
    """Return the cut whose slowest stage is fastest; among equals, the one that transfers the fewest bytes.

    A stage's time and memory count as often as there are stages on its device, so that a device with two stages gets
    two of half the size. Only `allowed` blocks start stages, if they are given. An impossible number of stages or
    memory limit raises ConfigError.
    """
    num_blocks = len(costs)
    if not 1 <= num_stages <= num_blocks:
        raise ConfigError(
            f"The network cannot be cut into {num_stages} stages.",
            rule=f"Every stage needs at least one of the {num_blocks} blocks.",
            remedy=f"Use 1 to {num_blocks} stages.",
        )
    shares = _shares(num_stages, device_mapping)
    time, memory = _time(costs, shares), _memory(costs, shares, limits)

    def may_start(first: int) -> bool:
        return not first or allowed is None or first in allowed

    fits_in = math.inf if limits is None else limits.device_bytes
    # Two searches: the first finds the time that no cut can beat, the second the fewest bytes among the cuts that reach
    # it.
    slowest, _ = _search(
        num_blocks, num_stages, lambda *s: time(*s) if may_start(s[1]) and memory(*s) <= fits_in else math.inf, max
    )
    if slowest == math.inf:
        least, _ = _search(num_blocks, num_stages, lambda *s: memory(*s) if may_start(s[1]) else math.inf, max)
        raise ConfigError(
            f"No cut into {num_stages} stages fits devices of {format_bytes(fits_in)}.",
            rule=f"The most economical cut needs {format_bytes(least)} per device for weights and activations"
            + (", counting the stages of one device as equal." if max(shares) > 1 else "."),
            remedy="Use more devices, a smaller micro batch, recomputation, or a schedule that stores less.",
        )

    def crossing(stage: int, first: int, end: int) -> float:
        good = may_start(first) and time(stage, first, end) <= slowest and memory(stage, first, end) <= fits_in
        return (costs[first].input_bytes if first else 0) if good else math.inf

    return _search(num_blocks, num_stages, crossing, lambda a, b: a + b)[1]


def slowest_device(
    costs: Sequence[BlockCost], cut: Cut, device_mapping: Sequence[int] | None = None
) -> tuple[int, float]:
    """Return the device with the most work per micro batch, and its time."""
    ranges = stage_ranges(cut, len(costs))
    times: dict[int, float] = {}
    for device, (first, end) in zip(device_mapping or range(len(ranges)), ranges, strict=True):
        times[device] = times.get(device, 0.0) + sum(cost.time for cost in costs[first:end])
    device = max(times, key=lambda device: times[device])
    return device, times[device]


def stage_ranges(cut: Cut, num_blocks: int) -> tuple[tuple[int, int], ...]:
    """Return the (first, end) blocks of each stage."""
    return tuple(zip((0, *cut), (*cut, num_blocks), strict=True))


def compare(costs: Sequence[BlockCost], cut: Cut, best: Cut, device_mapping: Sequence[int] | None = None) -> str | None:
    """Return a warning if the slowest device of `cut` has much more work than that of `best`, else None."""
    device, time = slowest_device(costs, cut, device_mapping)
    _, best_time = slowest_device(costs, best, device_mapping)
    if time <= MUCH_WORSE * best_time:
        return None
    ranges = stage_ranges(cut, len(costs))
    devices = list(device_mapping or range(len(ranges)))
    mine = [
        f"{costs[first].name} to {costs[end - 1].name}"
        for owner, (first, end) in zip(devices, ranges, strict=True)
        if owner == device
    ]
    names = " ".join(costs[block].name for block in best)
    return (
        f"Device {device} ({', '.join(mine)}) has the most work: a step takes about {time / best_time - 1:.0%} longer "
        f"than with --pipeline-splits {names}"
    )


def _shares(num_stages: int, device_mapping: Sequence[int] | None) -> list[int]:
    """Return, for each stage, the number of stages on its device."""
    mapping = range(num_stages) if device_mapping is None else device_mapping
    return [list(mapping).count(device) for device in mapping]


def _time(costs: Sequence[BlockCost], shares: Sequence[int]) -> StageValue:
    # Prefix sums: the search asks for every range of blocks many times.
    total = [0.0, *accumulate(cost.time for cost in costs)]
    return lambda stage, first, end: shares[stage] * (total[end] - total[first])


def _memory(costs: Sequence[BlockCost], shares: Sequence[int], limits: Limits | None) -> StageValue:
    if limits is None:
        return lambda stage, first, end: 0
    parameters = [0, *accumulate(cost.num_parameters for cost in costs)]
    stored = [0, *accumulate(cost.stored_bytes for cost in costs)]

    def memory(stage: int, first: int, end: int) -> float:
        weights = (parameters[end] - parameters[first]) * limits.bytes_per_parameter
        micro = stored[end] - stored[first] + costs[first].input_bytes
        return shares[stage] * (weights + micro * limits.stored_micros[stage])

    return memory


def _search(
    num_blocks: int, num_stages: int, value: StageValue, join: Callable[[float, float], float]
) -> tuple[float, Cut]:
    """Return the smallest joined value over all cuts, and the first cut that has it, by dynamic programming.

    `best[end]` holds, for the stages so far, the smallest value over all cuts of the blocks before `end`.
    """
    best: dict[int, tuple[float, Cut]] = {end: (value(0, 0, end), ()) for end in range(1, num_blocks + 1)}
    for stage in range(1, num_stages):
        best = {
            # Tuples: of equal values the earliest cut wins, so that the result does not depend on the order of the
            # search.
            end: min(
                (join(best[first][0], value(stage, first, end)), (*best[first][1], first))
                for first in range(stage, end)
            )
            for end in range(stage + 1, num_blocks + 1)
        }
    return best[num_blocks]
