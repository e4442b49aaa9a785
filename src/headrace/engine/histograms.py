"""Histograms of weights and gradients by block, counted on the devices.

A bin is a range of float32 numbers that share sign, exponent and the first two bits of their fraction: four bins for
each factor of two, from 2**-40 to 2**20, and one around zero. Finding a number's bin is then a shift of its bits, exact
at every edge, and all histograms of a run have the same edges.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.core.tree import PyTree

HISTOGRAMS = "histograms"  # among the metrics of a call: those after its last step
_SHIFT = 21  # of the 23 bits of a fraction, two are kept
_FIRST, _END = (int(np.float32(2.0**power).view(np.int32)) >> _SHIFT for power in (-40, 20))
_SIDE = _END - _FIRST  # bins of each sign
NUM_BINS = 2 * _SIDE + 1

# Counts [NUM_BINS], and the least, greatest, total and squares (their sum) of the numbers that are counted.
Histogram = Mapping[str, Any]


def bin_edges() -> np.ndarray:
    """Return the edges of the bins, one more than there are bins. Larger numbers than the last are in the last bin."""
    sizes = (np.arange(_FIRST, _END + 1, dtype=np.int32) << _SHIFT).view(np.float32).astype(np.float64)
    return np.concatenate([-sizes[::-1], sizes])


def filled_bins(found: Histogram) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts and edges of a histogram's bins from the first to the last that has a count."""
    filled = np.flatnonzero(found["counts"])
    first, last = filled[0], filled[-1]
    return found["counts"][first : last + 1], bin_edges()[first : last + 2]


def block_histograms(params: Mapping[str, PyTree], grads: Mapping[str, PyTree]) -> dict[str, Histogram]:
    """Return a histogram of each block's weights and one of its gradients, as `weights/block`, `gradients/block`."""
    trees = {"weights": params, "gradients": grads}
    return {
        f"{kind}/{name}": _histogram(jnp.concatenate([leaf.astype(jnp.float32).ravel() for leaf in leaves]))
        for kind, tree in trees.items()
        for name, block in tree.items()
        if (leaves := jax.tree.leaves(block))
    }


def _histogram(values: jax.Array) -> Histogram:
    finite = jnp.isfinite(values)
    bits = jax.lax.bitcast_convert_type(jnp.abs(values), jnp.int32) >> _SHIFT
    size = jnp.clip(bits, _FIRST - 1, _END - 1) - (_FIRST - 1)  # 0 is the bin around zero
    place = jnp.where(finite, _SIDE + jnp.where(values < 0, -size, size), NUM_BINS)  # beyond the last: not counted
    known = jnp.where(finite, values, 0)
    return {
        "counts": jnp.zeros(NUM_BINS, jnp.int32).at[place].add(1, mode="drop"),
        "least": jnp.where(finite, values, jnp.inf).min(),
        "greatest": jnp.where(finite, values, -jnp.inf).max(),
        "total": known.sum(),
        "squares": jnp.square(known).sum(),
    }
