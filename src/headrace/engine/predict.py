"""Predictions: the logits of every sample, in order, from whole networks on the devices of a mesh."""

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from headrace.engine.evaluate import EvalSpec
from headrace.engine.loop import BATCHES
from headrace.model.context import Ctx


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
