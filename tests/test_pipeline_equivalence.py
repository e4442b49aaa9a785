"""Pipelines: every cut, schedule, mapping, number of replicas and micro batches gives the weights of one device.

The normal suite runs a part of the matrix; `pytest -m slow tests/test_pipeline_equivalence.py` all of it.
"""

import itertools
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.model.norm import NormSpec
from headrace.plan.simulation import make_table

from .harness import (
    OPTIONS,
    Stages,
    assert_close,
    make_samples,
    make_stages,
    run_stages,
    small_excited,
    small_residual,
    train_steps,
)

SCHEDULES = ("Grouped", "Interleaved", "Sequential", "GPipe")
MAPPINGS = {2: ((0, 1), (0, 0)), 3: ((0, 1, 2), (0, 0, 0)), 4: ((0, 1, 2, 3), (0, 1, 1, 0), (0, 0, 0, 0))}
NETWORKS = {
    # network, and its cuts into 2, 3 and 4 stages
    "residual": (lambda: small_residual(NormSpec()), {2: (1,), 3: (1, 3), 4: (1, 2, 3)}),
    "squeeze-excite": (small_excited, {2: (1,), 3: (1, 3), 4: (1, 2, 4)}),
}
MATRIX = [
    (mapping, replicas, count, recompute)
    for stages in (2, 3, 4)
    for mapping, replicas, count, recompute in itertools.product(MAPPINGS[stages], (1, 2), (1, 3, 8), (False, True))
]
QUICK = {
    ("residual", (0, 1), 2, 3, False),
    ("residual", (0, 1, 2), 1, 8, False),
    ("residual", (0, 1, 1, 0), 1, 3, True),
    ("residual", (0, 0, 0, 0), 2, 1, False),
    ("squeeze-excite", (0, 1, 2, 3), 1, 3, False),
    ("squeeze-excite", (0, 1), 2, 3, True),
}
CASES = [
    pytest.param(network, *case, marks=[] if (network, *case) in QUICK else pytest.mark.slow)
    for network, case in itertools.product(NETWORKS, MATRIX)
]
MICRO = 2


@cache
def setting(name: str):
    network = NETWORKS[name][0]()
    return config_from(OPTIONS), network, network.input_hwc[0]


@cache
def one_device(name: str, num_micros: int):
    """The same samples on one device, in as many micro batches as all replicas have together."""
    config, network, size = setting(name)
    return train_steps(config, network, *make_samples(MICRO * num_micros, size), replicas=1, count=num_micros)


@pytest.mark.parametrize(("name", "mapping", "replicas", "count", "recompute"), CASES)
def test_a_pipeline_gives_the_weights_of_one_device(name, mapping, replicas, count, recompute):
    config, network, size = setting(name)
    samples = make_samples(MICRO * replicas * count, size)
    cut = NETWORKS[name][1][len(mapping)]
    stages = Stages(replicas=replicas, count=count, cut=cut, mapping=mapping, recompute=recompute)
    spec, dispatcher = make_stages(config, network, samples[0], stages)
    wanted, wanted_metrics = one_device(name, replicas * count)
    states = []
    for schedule in SCHEDULES:
        table = make_table(schedule, dispatcher.table.work)
        scheduled = replace(dispatcher, table=table)
        state, metrics = run_stages(spec, scheduled, *samples)
        states.append(state)
        # What is really held between the passes is what the schedule says.
        assert scheduled.peaks == table.peak_by_node()
        np.testing.assert_allclose(metrics["loss"], wanted_metrics["loss"], rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], wanted_metrics["grad_norm"], rtol=1e-5)
    for part in ("params", "stats", "opt", "ema"):
        assert_close(states[0][part], wanted[part], 1e-5)
    # Its programs are others: what they add up in another order may differ in the last bits.
    split = make_stages(config, network, samples[0], replace(stages, schedule="ZeroBubble"))[1]
    state, metrics = run_stages(spec, split, *samples)
    assert split.peaks == split.table.peak_by_node()
    np.testing.assert_allclose(metrics["grad_norm"], wanted_metrics["grad_norm"], rtol=1e-5)
    for part in ("params", "stats", "opt", "ema"):
        assert_close(state[part], wanted[part], 1e-5)
    for other in states[1:]:  # schedules agree bit for bit
        for a, b in zip(jax.tree.leaves(states[0]), jax.tree.leaves(other), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
