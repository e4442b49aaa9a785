"""The training state: one dict of arrays, which a call takes and returns and a checkpoint stores; where it is kept.

`params` (weights in their stored dtype), `stats` (running batch-norm statistics), `opt` (optimizer slots), `ema` (the
moving averages of params and stats, when on), `loss_scale`, `step`. Its key paths are the tensor names in a checkpoint.
Pipeline stages have such a dict each, with their own weights and what belongs to them.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace.config.schema import Numerics
from headrace.core.tree import PyTree, flatten_named, path_name
from headrace.engine.devices import REPLICA, Device, host_device, replicated
from headrace.engine.multiprocess_arrays import place
from headrace.engine.optimizer import Update
from headrace.engine.precision import Precision, init_loss_scale, store_weights

State = dict[str, Any]


def init_ema(values: PyTree) -> PyTree:
    """Return the average at the start: a float32 copy, not an alias, because the state is donated."""
    return jax.tree.map(lambda value: jnp.array(value, jnp.float32, copy=True), values)


def ema_decay(step: jax.Array | int, decay: float) -> jax.Array:
    """Return min(decay, (1 + step) / (10 + step)): a warm-up, so that the initial weights are soon forgotten."""
    step = jnp.asarray(step).astype(jnp.float32)
    return jnp.minimum(jnp.float32(decay), (1.0 + step) / (10.0 + step))


def next_ema(ema: PyTree, values: PyTree, step: jax.Array | int, decay: float) -> PyTree:
    """Return the average after a step whose new weights and statistics are `values`."""
    kept = ema_decay(step, decay)
    return jax.tree.map(lambda old, new: kept * old + (1.0 - kept) * new.astype(jnp.float32), ema, values)


def make_state(
    optimizer: Update,
    precision: Precision,
    numerics: Numerics,
    params: PyTree,
    stats: PyTree,
    *,
    ema: bool,
) -> State:
    """Return the state of step 0 for these initial weights (float32) and statistics."""
    state = {
        "params": store_weights(params, precision),
        "stats": stats,
        "opt": optimizer.init(params),
        "loss_scale": init_loss_scale(numerics),
        "step": jnp.zeros((), jnp.int32),
    }
    return state | ({"ema": init_ema({"params": params, "stats": stats})} if ema else {})


def state_from(
    optimizer: Update,
    precision: Precision,
    numerics: Numerics,
    weights: tuple[PyTree, PyTree],
    *,
    ema: bool,
) -> State:
    """Return the state of step 0 in host memory for given (params, stats)."""
    # One jitted program: an eager op per tensor would compile one small program per shape (4.7 s for a ResNet-20).
    make = jax.jit(partial(make_state, optimizer, precision, numerics, ema=ema))
    # By the host: a GPU would compile its own program first, and send back more than it got.
    with jax.default_device(host_device()):
        return jax.device_get(make(*weights))


def put_state(state: State, mesh: Mesh) -> State:
    """Place a state in host memory on every device of the mesh."""
    # From NumPy copies: device_put of a JAX array may alias it, and the first donation would then delete the source.
    return place(jax.tree.map(np.array, state), replicated(mesh))


@jax.jit
def snapshot(state: State) -> State:
    """Copy a state on its devices, so that it outlives the call that the original is donated to."""
    return jax.tree.map(jnp.copy, state)


def evaluated_weights(state: State) -> dict[str, tuple[PyTree, PyTree]]:
    """Return the sets of weights to validate, each as (params, stats): `raw`, and `ema` when it is kept."""
    sets = {"raw": (state["params"], state["stats"])}
    if "ema" in state:
        sets["ema"] = (state["ema"]["params"], state["ema"]["stats"])
    return sets


# Where a stage's part of the state is stored: its shape, and on which devices, in which memory, whole or in pieces.
#
# Weights and statistics are on every device of the stage. What only the update touches (the optimizer's state, averaged
# weights) may be in host memory, and may be cut over the replicas.


UPDATE_ONLY = ("opt", "ema")
HOST_MEMORY = "pinned_host"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the part of the state that only the update touches is stored."""

    in_host_memory: bool = False
    sharded: bool = False


ON_DEVICE = Placement()


def host_memory_of(device: Device) -> bool:
    """Say whether a device's programs can reach into host memory."""
    return HOST_MEMORY in {memory.kind for memory in device.addressable_memories()}


def shardings(like: State, mesh: Mesh, placement: Placement) -> State:
    """Return the sharding of every leaf of a state between steps."""
    where = {key: placement if key in UPDATE_ONLY else ON_DEVICE for key in like}
    return {key: placed_shardings(part, mesh, where[key]) for key, part in like.items()}


def placed_shardings(tree: PyTree, mesh: Mesh, placement: Placement, *, at_work: bool = False) -> PyTree:
    """Return the sharding of every leaf of a tree with a placement, between steps or (`at_work`) inside the update."""
    memory = ("device" if at_work else HOST_MEMORY) if placement.in_host_memory else None
    pieces = mesh.size if placement.sharded else 1
    return jax.tree.map(lambda leaf: NamedSharding(mesh, _cut(leaf.shape, pieces), memory_kind=memory), tree)


def to_device(tree: PyTree, mesh: Mesh, placement: Placement) -> PyTree:
    """Bring a tree that is stored in host memory to the devices; to be called inside a program."""
    if not placement.in_host_memory:
        return tree
    return jax.device_put(tree, placed_shardings(tree, mesh, placement, at_work=True))


def make_copy(like: State, mesh: Mesh, placement: Placement, *, whole: bool = False) -> Callable[[State], State]:
    """Return the program that copies a part of the state where it is or, if `whole`, all of it to each device."""
    where = shardings(like, mesh, placement)
    # Through the out_shardings: XLA inserts the gathering.
    goal = shardings(like, mesh, replace(placement, sharded=False)) if whole else where

    def copy(state: State) -> State:
        here = {key: to_device(part, mesh, placement) if key in UPDATE_ONLY else part for key, part in state.items()}
        return jax.tree.map(jnp.copy, here)

    return jax.jit(copy, in_shardings=(where,), out_shardings=goal)


def _cut(shape: tuple[int, ...], num_pieces: int) -> PartitionSpec:
    """Return the partition along the longest dim that divides into this many pieces; whole if there is none."""
    # Pieces must be equal, or JAX refuses the sharding. A leaf that cannot be divided (a bias of ten classes) stays
    # whole.
    sizes = {size: dim for dim, size in enumerate(shape) if size % num_pieces == 0}
    if num_pieces == 1 or not sizes:
        return PartitionSpec()
    return PartitionSpec(*(None,) * sizes[max(sizes)], REPLICA)


# Small weights and statistics of the state, joined while a call runs, so that one kernel updates many of them.
#
# Of the 267 weights and statistics of a ResNet-50, 213 are vectors with a value per channel. Updated one by one they
# take about 200 kernels of 1.6 us in every step (H200). Inside the device loop they are therefore kept as a few long
# vectors; the network gets slices of them, which its kernels read in place. A step of ResNet-50 is 0.6 % faster so at
# batch 256, 1.9 % at 64 images of 128 pixels, ResNet-8 at batch 32 about 3 %. A call takes and returns the ordinary
# state.
#
# The weights of convolutions are joined, too, in a vector of their own: updates and the norm of the gradient are then
# few kernels, and XLA converts slices of equal size to 16 bits at once. ResNet-50 has 655 kernels in a step instead of
# 830; with two smaller changes, 64 images of 128 pixels took 4.88 ms instead of 5.05.


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
