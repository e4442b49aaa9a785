"""Let the devices of several processes exchange a number before they work, so that the first exchange finds all ready.

Collectives connect the processes at their first use, and give up when one is late: gloo waits for 30 seconds, whatever
is set, and a process may well compile for longer than another. Later exchanges are patient.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def connect_devices(meshes: Iterable[Mesh], group_size: int = 1) -> None:
    """Sum a one over the replicas of each mesh, and over the groups of so many replicas that share batch norms."""
    for mesh in dict.fromkeys(meshes):
        (replica,) = mesh.axis_names
        sharding = NamedSharding(mesh, P(replica))
        ones = jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.ones(1, np.float32))
        groups = [list(range(i, i + group_size)) for i in range(0, mesh.size, group_size)] if group_size > 1 else None

        def count(one: jax.Array, groups: list[list[int]] | None = groups, replica: str = replica) -> jax.Array:
            total = lax.psum(one, replica)
            return total if groups is None else lax.psum(total, replica, axis_index_groups=groups)

        mapped = jax.shard_map(count, mesh=mesh, in_specs=P(replica), out_specs=P(replica), check_vma=False)
        jax.block_until_ready(jax.jit(mapped)(ones))


@contextmanager
def quiet_output() -> Iterator[None]:
    """Keep what libraries print to standard output while the block runs: gloo tells of every connection."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
