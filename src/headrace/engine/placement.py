"""Where a stage's part of the state is stored: its shape, and on which devices, in which memory, whole or in pieces.

Weights and statistics are on every device of the stage. What only the update touches (the optimizer's state, averaged
weights) may be in host memory, and may be cut over the replicas.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace.core.tree import PyTree
from headrace.engine.devices import REPLICA, Device
from headrace.engine.state import State

UPDATE_ONLY = ("opt", "ema")
HOST_MEMORY = "pinned_host"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the part of the state that only the update touches is stored."""

    in_host_memory: bool = False
    sharded: bool = False


ON_DEVICE = Placement()


def host_memory_of(device: Device) -> bool:
    """Say whether a device's programs can reach into host memory; accelerators that are not here name no memories."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    return HOST_MEMORY in kinds or not kinds


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
