"""Small weights and statistics of the state, joined while a call runs, so that one kernel updates many of them.

Of the 267 weights and statistics of a ResNet-50, 213 are vectors with a value per channel. Updated one by one they
take about 200 kernels of 1.6 us in every step (H200). Inside the device loop they are therefore kept as a few long
vectors; the network gets slices of them, which its kernels read in place. A step of ResNet-50 is 0.6 % faster so at
batch 256, 1.9 % at 64 images of 128 pixels, ResNet-8 at batch 32 about 3 %. A call takes and returns the ordinary
state.

The weights of convolutions are joined, too, in a vector of their own: updates and the norm of the gradient are then
few kernels, and XLA converts slices of equal size to 16 bits at once. ResNet-50 has 655 kernels in a step instead of
830; with two smaller changes, 64 images of 128 pixels took 4.88 ms instead of 5.05.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from headrace.core.tree import PyTree, flatten_named, path_name
from headrace.engine.state import State

# Elements of the largest weight that is joined: its gradient is written and read once more, as float32, and the kernel
# that joins gradients takes three times as long as its bytes. 64 images of 128 pixels take ResNet-50 4.75 instead of
# 4.80 ms, in another call 4.85 instead of 4.90, than with 4 Mi, which joins all of its convolutions (H200).
LARGEST_JOINED = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which leaves of a tree are joined; everything else stays as it is."""

    like: PyTree  # shapes
    groups: tuple[tuple[str, ...], ...]  # names of leaves, each group under the name of its first

    def pack(self, tree: PyTree) -> dict[str, Any]:
        """Return {name: leaf} with each group as one long vector."""
        leaves = flatten_named(tree)
        # Rules by name (decay, rates, frozen statistics) may go by the first name: `kind` is the same for all of a
        # group.
        packed = {group[0]: jnp.concatenate([_flat(leaves.pop(name)) for name in group]) for group in self.groups}
        return leaves | packed

    def unpack(self, packed: dict[str, Any]) -> PyTree:
        leaves = dict(packed)
        shapes = {name: leaf.shape for name, leaf in flatten_named(self.like).items()}
        for group in self.groups:
            whole, first = leaves[group[0]], 0
            for name in group:
                size = math.prod(shapes[name])
                # Static slices, which the network's kernels read in place.
                leaves[name] = _shaped(jax.lax.slice(whole, (first,), (first + size,)), shapes[name])
                first += size
        return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path_name(path)], self.like)


def _flat(leaf: jax.Array) -> jax.Array:
    return (jnp.moveaxis(leaf, 3, 0) if _outputs_first(leaf.shape) else leaf).reshape(-1)


def _shaped(flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if not _outputs_first(shape):
        return flat.reshape(shape)
    return jnp.moveaxis(flat.reshape(shape[3], *shape[:3]), 0, 3)


def _outputs_first(shape: tuple[int, ...]) -> bool:
    """Say whether weights HWIO are joined as OHWI: cuDNN's order, so that its gradient is not transposed."""
    return len(shape) == 4 and shape[2] > 1  # not depthwise ones, whose gradient may be our own kernel's


def make_layout(tree: PyTree, kind: Callable[[str], Hashable]) -> Layout:
    """Return the layout that joins the float32 leaves of one kind, by their names."""
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    groups: dict[Hashable, list[str]] = {}
    for name, leaf in flatten_named(like).items():
        # Vectors by themselves: XLA's kernels have less than a hundred operands.
        if leaf.size <= LARGEST_JOINED and leaf.dtype == jnp.float32:
            groups.setdefault((kind(name), leaf.ndim > 1), []).append(name)
    return Layout(like=like, groups=tuple(tuple(names) for names in groups.values() if len(names) > 1))


def make_packing(state: State, update_kind: Callable[[str], Hashable], is_moved: Callable[[str], bool]) -> "Packing":
    """Return the packing of a state; `update_kind` and `is_moved` say which weights and statistics change alike."""
    return Packing(params=make_layout(state["params"], update_kind), stats=make_layout(state["stats"], is_moved))


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The layouts of weights (and of everything shaped as they are) and of running statistics."""

    params: Layout
    stats: Layout

    def pack(self, state: State) -> State:
        """Return a state with its small leaves joined."""
        return self._convert(state, lambda layout, tree: layout.pack(tree), self.params.like)

    def unpack(self, state: State) -> State:
        like = jax.eval_shape(self.params.pack, self.params.like)
        return self._convert(state, lambda layout, tree: layout.unpack(tree), like)

    def _convert(self, state: State, convert: Callable[[Layout, PyTree], PyTree], like: PyTree) -> State:
        shape = jax.tree.structure(like)
        changed = {"params": convert(self.params, state["params"]), "stats": convert(self.stats, state["stats"])}
        # Slots are trees shaped as the weights, in whatever containers the optimizer keeps them.
        is_slot = lambda tree: jax.tree.structure(tree) == shape  # noqa: E731
        slots = lambda tree: convert(self.params, tree) if is_slot(tree) else tree  # noqa: E731
        changed["opt"] = jax.tree.map(slots, state["opt"], is_leaf=is_slot)
        if "ema" in state:
            ema = state["ema"]
            changed["ema"] = {"params": convert(self.params, ema["params"]), "stats": convert(self.stats, ema["stats"])}
        return state | changed
