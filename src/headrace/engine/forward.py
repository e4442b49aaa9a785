"""Exact evaluation: every sample counted once, padded samples masked, sums and a confusion matrix out."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from headrace.engine.devices import REPLICA
from headrace.engine.objective import classification_sums
from headrace.engine.step import BATCHES, Fetch, FetchLabels, no_labels
from headrace.model.context import Ctx
from headrace.model.network import Network

Sums = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class EvalSpec:
    """Everything an evaluation needs that is not an array."""

    network: Network
    fetch: Fetch
    compute_dtype: Any
    num_replicas: int
    half_partials: bool = False
    fetch_labels: FetchLabels = no_labels  # the labels alone, for the last stage of a pipeline


def batch_sums(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Sums:
    """Return the sums of one batch: loss, top-1, top-5, count, and which class was taken for which."""
    num_classes = logits.shape[-1]
    confusion = jnp.zeros((num_classes, num_classes), jnp.int32)
    confusion = confusion.at[labels, jnp.argmax(logits, -1)].add(mask.astype(jnp.int32))
    return classification_sums(logits, labels, mask, 0.0) | {"confusion": confusion}


def make_evaluation(spec: EvalSpec, mesh: Mesh) -> Any:
    """Return the jitted program `evaluate(params, stats, resident, block) -> sums over the block's n batches`."""
    ctx = Ctx(train=False, compute_dtype=spec.compute_dtype, half_partials=spec.half_partials)

    def one_batch(params: Any, stats: Any, resident: Any, batch: dict[str, jax.Array]) -> Sums:
        images, labels = spec.fetch(resident, batch)
        logits, _ = spec.network.apply(params, stats, images, ctx)
        return batch_sums(logits, labels, batch["mask"])

    def evaluate(params: Any, stats: Any, resident: Any, block: dict[str, jax.Array]) -> Sums:
        first = jax.tree.map(lambda a: a[0], block)
        shapes = jax.eval_shape(lambda batch: one_batch(params, stats, resident, batch), first)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)

        def add(total: Sums, batch: dict[str, jax.Array]) -> tuple[Sums, None]:
            return jax.tree.map(jnp.add, total, one_batch(params, stats, resident, batch)), None

        total, _ = lax.scan(add, zeros, block)
        return lax.psum(total, REPLICA) if spec.num_replicas > 1 else total

    mapped = jax.shard_map(evaluate, mesh=mesh, in_specs=(P(), P(), P(), BATCHES), out_specs=P(), check_vma=False)
    return jax.jit(mapped)


def total_sums(parts: list[Sums]) -> dict[str, Any]:
    """Wait for the blocks' sums and add them, in float64 and int64."""
    host = jax.device_get(parts)
    return {
        key: sum(part[key].astype(np.int64 if part[key].dtype.kind == "i" else np.float64) for part in host)
        for key in host[0]
    }


# Predictions: the logits of every sample, in order, from whole networks on the devices of a mesh.


def stored_for_inference(params: Any, compute_dtype: Any) -> Any:
    """Return the weights with those of convolutions and matrices in the dtype they are used in; the values are equal.

    Layers would round them at each use. Scales and shifts of norms are used in float32, and stay.
    """
    return jax.tree.map(lambda w: np.asarray(w).astype(compute_dtype) if w.ndim > 1 else w, params)


def make_prediction(spec: EvalSpec, mesh: Mesh) -> Any:
    """Return the jitted program `predict(params, stats, resident, block) -> logits [n, B, classes]` of n batches."""
    ctx = Ctx(train=False, compute_dtype=spec.compute_dtype, half_partials=spec.half_partials)

    def predict(params: Any, stats: Any, resident: Any, block: dict[str, jax.Array]) -> jax.Array:
        def one_batch(batch: dict[str, jax.Array]) -> jax.Array:
            images, _ = spec.fetch(resident, batch)
            return spec.network.apply(params, stats, images, ctx)[0]

        return lax.map(one_batch, block)

    mapped = jax.shard_map(predict, mesh=mesh, in_specs=(P(), P(), P(), BATCHES), out_specs=BATCHES, check_vma=False)
    return jax.jit(mapped)
