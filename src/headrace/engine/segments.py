"""Apply a range of blocks, keeping everything for the backward pass or only the values at recompute points."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from headrace.model.context import Ctx
from headrace.model.network import Network

KEPT = "headrace_kept"  # the name of values inside a stage that recomputation keeps


def inner_points(points: tuple[int, ...], blocks: tuple[int, int]) -> tuple[int, ...]:
    """Return the recompute points inside a range of blocks."""
    return tuple(point for point in points if blocks[0] < point < blocks[1])


def apply_blocks(
    network: Network, blocks: tuple[int, int], weights: tuple[Any, Any], x: Any, ctx: Ctx, points: tuple[int, ...] = ()
) -> tuple[Any, Any, jax.Array]:
    """Return (output, batch statistics, flags); `weights` are (params, stats), `points` numbers of blocks.

    Between points nothing is kept: each segment is computed again in the backward pass, from the value that reaches it.
    If the conditions hold a probe, the flags are what it returned for each block.
    """
    edges = (blocks[0], *inner_points(points, blocks), blocks[1])
    batch_stats: dict[str, Any] = {}
    flags = []
    for segment in pairwise(edges):
        names = network.block_names[slice(*segment)]
        mine = tuple({name: tree[name] for name in names if name in tree} for tree in weights)

        def run(mine: Any, x: Any, segment: tuple[int, int] = segment) -> tuple[Any, Any, jax.Array]:
            return _apply(network, segment, mine, x, ctx)

        x, new, seen = (run if len(edges) == 2 else jax.checkpoint(run))(mine, x)
        batch_stats |= new
        flags.append(seen)
    return x, batch_stats, jnp.concatenate(flags)


def _apply(
    network: Network, segment: tuple[int, int], weights: Any, x: Any, ctx: Ctx
) -> tuple[Any, Mapping[str, Any], jax.Array]:
    # The flags are gathered here, inside what may be differentiated or computed again, and leave it as a value.
    flags: list[jax.Array] = []
    probe = ctx.probe
    if probe is not None:
        ctx = replace(ctx, probe=lambda name, y: flags.append(probe(name, y)))
    params, stats = weights
    y, batch_stats = network.apply_range(*segment, params, stats, x, ctx)
    return y, batch_stats, jnp.stack(flags) if flags else jnp.ones((0,), bool)


def all_finite(_name: str, y: Any) -> jax.Array:
    """Say whether all numbers of a block's output are finite."""
    return jnp.stack([jnp.isfinite(part).all() for part in jax.tree.leaves(y)]).all()
