"""Where a stage's part of the state lives: its shape, and on which devices, in which memory, whole or in pieces.

Weights and statistics are on every device of the stage. What only the update touches (the optimizer's state, averaged
weights) may lie in host memory, and may be cut over the replicas.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace.core.tree import PyTree
from headrace.engine.devices import REPLICA
from headrace.engine.state import State

UPDATE_ONLY = ("opt", "ema")
HOST_MEMORY = "pinned_host"


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where what only the update touches lives."""

    in_host_memory: bool = False
    sharded: bool = False


ON_DEVICE = Home()


def host_memory_of(device: Any) -> bool:
    """Say whether a device's programs can reach into host memory."""
    return HOST_MEMORY in {memory.kind for memory in device.addressable_memories()}


def shardings(like: State, mesh: Mesh, home: Home, *, at_work: bool = False) -> State:
    """Return the sharding of every leaf of a state between steps, or (`at_work`) inside the update."""
    where = {key: home if key in UPDATE_ONLY else ON_DEVICE for key in like}
    return {key: home_shardings(part, mesh, where[key], at_work=at_work) for key, part in like.items()}


def home_shardings(tree: PyTree, mesh: Mesh, home: Home, *, at_work: bool = False) -> PyTree:
    """Return the sharding of every leaf of a tree that has a home, between steps or (`at_work`) inside the update."""
    memory = ("device" if at_work else HOST_MEMORY) if home.in_host_memory else None
    pieces = mesh.size if home.sharded else 1
    return jax.tree.map(lambda leaf: NamedSharding(mesh, _cut(leaf.shape, pieces), memory_kind=memory), tree)


def to_device(tree: PyTree, mesh: Mesh, home: Home) -> PyTree:
    """Bring a tree that has its home in host memory to the devices; to be called inside a program."""
    return jax.device_put(tree, home_shardings(tree, mesh, home, at_work=True)) if home.in_host_memory else tree


def make_copy(like: State, mesh: Mesh, home: Home, *, whole: bool = False) -> Callable[[State], State]:
    """Return the program that copies a part of the state where it lives, or (`whole`) whole to each of the devices."""
    where = shardings(like, mesh, home)
    # Through the out_shardings: XLA inserts the gathering.
    goal = shardings(like, mesh, replace(home, sharded=False)) if whole else where

    def copy(state: State) -> State:
        here = {key: to_device(part, mesh, home) if key in UPDATE_ONLY else part for key, part in state.items()}
        return jax.tree.map(jnp.copy, here)

    return jax.jit(copy, in_shardings=(where,), out_shardings=goal)


def _cut(shape: tuple[int, ...], num_pieces: int) -> PartitionSpec:
    """Return the partition along the longest dim that so many pieces divide; whole where there is none."""
    # Pieces must be equal, or JAX refuses the sharding. A leaf that cannot be divided (a bias of ten classes) stays
    # whole.
    sizes = {size: dim for dim, size in enumerate(shape) if size % num_pieces == 0}
    if num_pieces == 1 or not sizes:
        return PartitionSpec()
    return PartitionSpec(*(None,) * sizes[max(sizes)], REPLICA)
