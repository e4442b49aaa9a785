"""Run a tiny all-reduce between the devices of all processes before anything is compiled.

Collectives connect the processes at their first use and give up if one is late: gloo waits 30 seconds, whatever is
set, and one process may well compile for longer than that after another. Later collectives have no such limit.
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


def warm_collectives(meshes: Iterable[Mesh], batch_norm_group_size: int = 1) -> None:
    """All-reduce over the replicas of each mesh, and over the groups of replicas that share batch norm statistics."""
    size = batch_norm_group_size
    for mesh in dict.fromkeys(meshes):
        (replica,) = mesh.axis_names
        sharding = NamedSharding(mesh, P(replica))
        ones = jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.ones(1, np.float32))
        groups = [list(range(i, i + size)) for i in range(0, mesh.size, size)] if size > 1 else None

        def count(one: jax.Array, groups: list[list[int]] | None = groups, replica: str = replica) -> jax.Array:
            total = lax.psum(one, replica)
            return total if groups is None else lax.psum(total, replica, axis_index_groups=groups)

        mapped = jax.shard_map(count, mesh=mesh, in_specs=P(replica), out_specs=P(replica), check_vma=False)
        jax.block_until_ready(jax.jit(mapped)(ones))


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Discard what libraries print to standard output inside the block: gloo reports every connection."""
    sys.stdout.flush()
    # The descriptor itself is redirected, because C++ does not write through sys.stdout.
    saved, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(null)
