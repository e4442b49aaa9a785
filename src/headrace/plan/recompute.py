"""Where recomputation starts anew: the blocks whose inputs are kept, and what that leaves of the activations."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from headrace.core.errors import ConfigError
from headrace.model.network import Network


def recompute_points(network: Network, patterns: Sequence[str], num_stages: int) -> tuple[int, ...]:
    """Return the numbers of the blocks whose inputs are kept.

    They are those whose names match a pattern. Without patterns, stages keep their inputs alone, and a network that is
    one stage keeps the inputs of all blocks that have weights.
    """
    names = network.block_names
    if not patterns:
        weighty = [number for number, cost in enumerate(network.costs().values()) if cost.product_elements]
        return tuple(number for number in weighty if number) if num_stages == 1 else ()
    found: set[int] = set()
    for pattern in patterns:
        matching = [number for number, name in enumerate(names) if _compiled(pattern).search(name)]
        if not matching:
            raise ConfigError(
                f"--recomputation-points: {pattern!r} matches no block of {network.name}.",
                rule="A regular expression names blocks whose inputs are kept.",
                remedy=f"Blocks: {', '.join(names)}.",
            )
        found |= set(matching)
    return tuple(sorted(found - {0}))


def segments(points: Sequence[int], first: int, end: int) -> tuple[tuple[int, int], ...]:
    """Return the (first, end) blocks of each segment that a range of blocks is cut into."""
    return tuple(pairwise((first, *(point for point in points if first < point < end), end)))


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"--recomputation-points: {pattern!r} is no regular expression: {error}.",
            remedy="Write a dot as \\. and a plus as \\+ where they stand for themselves.",
        ) from error


def kept_elements(network: Network, points: Sequence[int] | None) -> int:
    """Return the numbers per image that training keeps of a network that is one stage.

    Without recomputation (None) these are all activations; with it the values at the points and, at its peak, the
    activations of the segment that is computed again.
    """
    costs, shapes = list(network.costs().values()), network.shapes()
    image = math.prod(network.input_hwc)
    if points is None:
        return image + sum(cost.activation_elements for cost in costs)
    parts = segments(points, 0, len(costs))
    at_points = sum(math.prod(shapes[start]) for start, _ in parts[1:])
    return image + at_points + max(sum(cost.activation_elements for cost in costs[i:j]) for i, j in parts)
