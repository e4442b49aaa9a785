"""The program of a call: the device loop over the steps of a block."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.core.tree import PyTree
from headrace.engine import step_stream
from headrace.engine.devices import REPLICA
from headrace.engine.histograms import HISTOGRAMS, block_histograms
from headrace.engine.multiprocess_arrays import gather_rows, place, place_share
from headrace.engine.packing import Packing
from headrace.engine.state import State
from headrace.engine.step import GRADIENTS, PER_STEP, SCALARS, Metrics

STEPS, NUMBERS = P(None, None, REPLICA), P()
# How a block of n evaluation batches is sharded: [n, B, ...].
BATCHES = P(None, REPLICA)


def block_specs(names: Iterable[str]) -> dict[str, P]:
    """Return the partition of each array of a training block."""
    return {key: NUMBERS if key in PER_STEP else STEPS for key in names}


def put_on(mesh: Mesh, tree: PyTree, kind: str) -> PyTree:
    """Put host arrays on a mesh; kinds: `steps`, `batches`, `replicated`, and `rows`.

    `rows` are this process's part of arrays that are then replicated on every device.
    """
    if kind == "steps":
        specs = block_specs(tree)
        return {key: place_share(value, NamedSharding(mesh, specs[key])) for key, value in tree.items()}
    if kind == "batches":
        return place_share(tree, NamedSharding(mesh, BATCHES))
    whole = NamedSharding(mesh, P())
    return gather_rows(tree, whole) if kind == "rows" else place(tree, whole)


@dataclass(frozen=True)
class OnOneMesh:
    """A program on the devices of one mesh, a replica on each: which they are, and how its input gets there."""

    mesh: Mesh

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The one group of devices that communicate."""
        return (self.mesh,)

    def put(self, tree: PyTree, kind: str) -> PyTree:
        """Put a block or a resident set on the devices; `put_on` lists the kinds."""
        return put_on(self.mesh, tree, kind)


def make_call(
    step: Callable[..., tuple[State, Metrics]],
    mesh: Mesh,
    names: Iterable[str],
    packing: Packing | None = None,
    *,
    streams: bool = False,
) -> jax.stages.Wrapped:
    """Return the device loop, jitted: `call(state, resident, block, ends) -> (state, metrics[K])`; donates the state.

    It is the training program of a run without pipeline stages; those have their programs in engine/pipeline/.

    It runs the steps `ends[0]` to `ends[1]` of the block's K; the other rows of the metrics are 0. Which steps is an
    argument, so that one compilation serves all calls. On an H200 that costs nothing: ResNet-50 at batch 256
    ran at 1.007 of a scan over all K, ResNet-8 at batch 32 at 0.97 with a spread of 15 %. With `packing`, the loop's
    state is a packed one. `names` are those of the block's arrays. With `streams`, each step's sums leave at its end.
    """

    # Tracing a ResNet-50's step takes seconds; the shapes of its metrics and the loop's body share one trace.
    traced = jax.jit(step, inline=True)

    def call(state: State, resident: PyTree, block: dict[str, jax.Array], ends: jax.Array) -> tuple[State, Metrics]:
        def slices(i: jax.Array | int) -> dict[str, jax.Array]:
            return {key: lax.dynamic_index_in_dim(rows, i, keepdims=False) for key, rows in block.items()}

        def one(i: jax.Array, carry: tuple[State, Metrics]) -> tuple[State, Metrics]:
            state, metrics = traced(carry[0], resident, slices(i))
            if streams:
                step_stream.send(state["step"], metrics)
            return state, {
                key: row if key == GRADIENTS else lax.dynamic_update_index_in_dim(carry[1][key], row, i, 0)
                for key, row in joined(metrics).items()
            }

        def joined(metrics: Metrics) -> Metrics:
            # Written as one row: each by itself takes a kernel, of which a step had nine.
            row = jnp.stack([metrics[key] for key in scalars])
            return {key: value for key, value in metrics.items() if key not in scalars} | {SCALARS: row}

        state = packing.pack(state) if packing else state
        rows = traced.eval_shape(state, resident, slices(0))[1]
        scalars = [key for key, row in rows.items() if key != GRADIENTS and (row.shape, row.dtype) == ((), jnp.float32)]
        rows = jax.eval_shape(joined, rows)
        last = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rows.pop(GRADIENTS, {}))
        # Rows for all K steps, also if fewer run: the shapes of a compiled program are fixed.
        empty = jax.tree.map(lambda row: jnp.zeros((len(block["epoch"]), *row.shape), row.dtype), rows)
        state, metrics = lax.fori_loop(ends[0], ends[1], one, (state, empty | ({GRADIENTS: last} if last else {})))
        state = packing.unpack(state) if packing else state
        columns = metrics.pop(SCALARS)
        metrics |= {key: columns[:, place] for place, key in enumerate(scalars)}
        if GRADIENTS in metrics:
            grads = metrics.pop(GRADIENTS)
            grads = packing.params.unpack(grads) if packing else grads
            metrics[HISTOGRAMS] = block_histograms(state["params"], grads)
        return state, metrics

    # check_vma=False: the step sums gradients over replicas itself, once; with True JAX would do so per micro-batch.
    mapped = jax.shard_map(
        call, mesh=mesh, in_specs=(P(), P(), block_specs(names), P()), out_specs=(P(), P()), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0)
