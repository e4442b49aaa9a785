"""Apply a range of blocks, keeping everything for the backward pass or only the values at recompute points."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from headrace.core.tree import PyTree
from headrace.model.context import Ctx
from headrace.model.network import Network
from headrace.plan.recompute import segments

KEPT = "headrace_kept"  # the name of values inside a stage that recomputation keeps


def apply_blocks(
    network: Network,
    blocks: tuple[int, int],
    weights: tuple[PyTree, PyTree],
    x: PyTree,
    ctx: Ctx,
    points: tuple[int, ...] = (),
) -> tuple[PyTree, PyTree, jax.Array]:
    """Return (output, batch statistics, flags); `weights` are (params, stats), `points` numbers of blocks.

    Between points nothing is kept: each segment is computed again in the backward pass, from the value that reaches it.
    If the conditions hold a probe, the flags are what it returned for each block.
    """
    parts = segments(points, *blocks)
    batch_stats: dict[str, Any] = {}
    flags = []
    for segment in parts:
        names = network.block_names[slice(*segment)]
        mine = weights_of(names, weights)

        def run(mine: PyTree, x: PyTree, segment: tuple[int, int] = segment) -> tuple[PyTree, PyTree, jax.Array]:
            return _apply(network, segment, mine, x, ctx)

        # Without a point inside the range nothing is wrapped: what the backward pass keeps is then the caller's
        # decision (everything, or the policy of a pipeline node).
        x, new, seen = (run if len(parts) == 1 else jax.checkpoint(run))(mine, x)
        batch_stats |= new
        flags.append(seen)
    return x, batch_stats, jnp.concatenate(flags)


def weights_of(names: Iterable[str], weights: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    """Return the parts of (params, stats) that belong to these blocks; a block without weights has none."""
    params, stats = ({name: tree[name] for name in names if name in tree} for tree in weights)
    return params, stats


def _apply(
    network: Network, segment: tuple[int, int], weights: PyTree, x: PyTree, ctx: Ctx
) -> tuple[PyTree, Mapping[str, PyTree], jax.Array]:
    # The flags are gathered here, inside what may be differentiated or computed again, and leave it as a value.
    flags: list[jax.Array] = []
    probe = ctx.probe
    if probe is not None:
        ctx = replace(ctx, probe=lambda name, y: flags.append(probe(name, y)))
    params, stats = weights
    y, batch_stats = network.apply_range(*segment, params, stats, x, ctx)
    return y, batch_stats, jnp.stack(flags) if flags else jnp.ones((0,), bool)
