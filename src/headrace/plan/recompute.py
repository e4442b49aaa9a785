"""Recomputation points: the blocks whose inputs are kept, and how many activations that leaves in memory."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from headrace.core.errors import ConfigError
from headrace.model.network import Network


def recompute_points(network: Network, patterns: Sequence[str], num_stages: int) -> tuple[int, ...]:
    """Return the indices of the blocks whose inputs are kept.

    These are the blocks whose names match a pattern. Without patterns, pipeline stages keep only their inputs, and a
    network that is a single stage keeps the inputs of all blocks with convolutions or dense layers.
    """
    names = network.block_names
    if not patterns:
        costly = [number for number, cost in enumerate(network.costs().values()) if cost.product_elements]
        return tuple(number for number in costly if number) if num_stages == 1 else ()
    found: set[int] = set()
    for pattern in patterns:
        matching = [number for number, name in enumerate(names) if re.search(pattern, name)]
        if not matching:
            raise ConfigError(
                f"--recomputation-points: {pattern!r} matches no block of {network.name}.",
                rule="Each regular expression selects blocks whose inputs are kept.",
                remedy=f"Blocks: {', '.join(names)}.",
            )
        found |= set(matching)
    return tuple(sorted(found - {0}))


def segments(points: Sequence[int], first: int, end: int) -> tuple[tuple[int, int], ...]:
    """Return the (first, end) blocks of the segments into which the points divide a range of blocks."""
    return tuple(pairwise((first, *(point for point in points if first < point < end), end)))


def kept_elements(network: Network, points: Sequence[int] | None) -> int:
    """Return how many activation elements per image training keeps, for a network that is a single stage.

    Without recomputation (None) these are all activations; with it, the values at the points and the activations of the
    largest segment, which is recomputed as a whole.
    """
    costs, shapes = list(network.costs().values()), network.shapes()
    image = math.prod(network.input_hwc)
    if points is None:
        return image + sum(cost.activation_elements for cost in costs)
    parts = segments(points, 0, len(costs))
    at_points = sum(math.prod(shapes[start]) for start, _ in parts[1:])
    return image + at_points + max(sum(cost.activation_elements for cost in costs[i:j]) for i, j in parts)
