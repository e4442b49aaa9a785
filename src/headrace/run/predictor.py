"""Predict every sample of a data set's validation split: the feed and the devices of an evaluation, logits out."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from headrace.data.dataset import DataSet
from headrace.data.feed import EvalFeed, feed_options
from headrace.data.fetch import fetch
from headrace.engine.devices import replica_mesh, replicated, take
from headrace.engine.evaluate import EvalSpec
from headrace.engine.loop import put_on
from headrace.engine.predict import make_prediction
from headrace.engine.spread import hop, readable
from headrace.run.design import Design
from headrace.run.trainer import own_share

_BATCHES_PER_BLOCK = 16


def predict_all(design: Design, dataset: DataSet, devices: list[Any], weights: tuple[Any, Any]) -> np.ndarray:
    """Return the logits [N, classes] in float32 of these (params, stats), each replica with the whole network."""
    config, plan = design.config, design.plan.validation
    mesh = replica_mesh(take(devices, plan.num_replicas))
    options = feed_options(config.data, dataset.info, config.run.seed, plan.num_replicas)
    options = replace(options, share=own_share(design.plan))
    spec = EvalSpec(
        network=design.network,
        fetch=lambda resident, batch: fetch(resident, batch, options.preprocess, train=False),
        compute_dtype=design.precision.compute_dtype,
        half_partials=design.precision.half_partials,
        num_replicas=plan.num_replicas,
    )
    program = make_prediction(spec, mesh)
    params, stats = hop(weights, replicated(mesh))
    with closing(EvalFeed(dataset.validation, plan.batch_size, _BATCHES_PER_BLOCK, options, put_on(mesh))) as feed:
        parts = [readable(program(params, stats, feed.resident, block)) for block in feed]
    logits = np.concatenate([part.reshape(-1, design.network.num_classes) for part in jax.device_get(parts)])
    return logits[: len(dataset.validation)]
