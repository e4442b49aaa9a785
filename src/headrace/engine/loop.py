"""The device loop: K steps as one program over the replica mesh. The one place where a training program is jitted."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.engine.devices import REPLICA
from headrace.engine.spread import gather_rows, place, place_share
from headrace.engine.state import State
from headrace.engine.step import Metrics

CallProgram = Callable[[State, Any, dict[str, jax.Array]], tuple[State, Metrics]]

# How a block of K steps lies on the mesh: [K, G, B, ...] with B cut over the replicas; one epoch number per step.
STEPS, EPOCHS = P(None, None, REPLICA), P()
# How a block of n evaluation batches lies: [n, B, ...].
BATCHES = P(None, REPLICA)


def block_specs(block: dict[str, Any]) -> dict[str, P]:
    """Return the partition of each array of a training block."""
    return {key: EPOCHS if key == "epoch" else STEPS for key in block}


def put_on(mesh: Mesh) -> Callable[[Any, str], Any]:
    """Return `put(host arrays, kind)` for the feeds; kinds: `steps`, `batches`, `replicated`, and `rows`.

    `rows` are this process's part of arrays that become whole on every device.
    """

    def put(tree: Any, kind: str) -> Any:
        if kind == "steps":
            specs = block_specs(tree)
            return {key: place_share(value, NamedSharding(mesh, specs[key])) for key, value in tree.items()}
        if kind == "batches":
            return place_share(tree, NamedSharding(mesh, BATCHES))
        whole = NamedSharding(mesh, P())
        return gather_rows(tree, whole) if kind == "rows" else place(tree, whole)

    return put


def make_call(step: Callable[..., Any], mesh: Mesh, block: dict[str, Any]) -> Any:
    """Return the jitted program `call(state, resident, block) -> (state, metrics[K])`; the state is donated."""

    def call(state: State, resident: Any, block: dict[str, jax.Array]) -> tuple[State, Metrics]:
        return lax.scan(lambda carry, slices: step(carry, resident, slices), state, block)

    # check_vma=False: we sum gradients over replicas, once per step; with True JAX would do so per micro-batch.
    mapped = jax.shard_map(
        call, mesh=mesh, in_specs=(P(), P(), block_specs(block)), out_specs=(P(), P()), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0)
