"""Where a stage's part of the state lives: its shape, and on which devices, in which memory, whole or in pieces.

Weights and statistics are on every device of the stage. What only the update touches (the optimizer's state, averaged
weights) may lie in host memory, and may be cut over the replicas.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
    memory = ("device" if at_work else HOST_MEMORY) if home.in_host_memory else None

    def place(key: str, leaf: Any) -> NamedSharding:
        if key not in UPDATE_ONLY:
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, _cut(leaf.shape, mesh.size if home.sharded else 1), memory_kind=memory)

    return {key: jax.tree.map(lambda leaf, key=key: place(key, leaf), part) for key, part in like.items()}


def to_device(state: State, like: State, mesh: Mesh, home: Home) -> State:
    """Bring what lives in host memory to the devices; to be called inside a program."""
    if not home.in_host_memory:
        return state
    wanted = shardings(like, mesh, home, at_work=True)
    return state | {key: jax.device_put(state[key], wanted[key]) for key in UPDATE_ONLY if key in state}


def make_copy(like: State, mesh: Mesh, home: Home, *, whole: bool = False) -> Any:
    """Return the program that copies a part of the state where it lives, or (`whole`) whole to each of the devices."""
    where = shardings(like, mesh, home)
    goal = shardings(like, mesh, replace(home, sharded=False)) if whole else where

    def copy(state: State) -> State:
        return jax.tree.map(jnp.copy, to_device(state, like, mesh, home))

    return jax.jit(copy, in_shardings=(where,), out_shardings=goal)


def _cut(shape: tuple[int, ...], num_pieces: int) -> PartitionSpec:
    """Return the partition along the longest dim that so many pieces divide; whole where there is none."""
    sizes = {size: dim for dim, size in enumerate(shape) if size % num_pieces == 0}
    if num_pieces == 1 or not sizes:
        return PartitionSpec()
    return PartitionSpec(*(None,) * sizes[max(sizes)], REPLICA)
