"""Pipelines: every schedule, mapping and number of stages gives the gradients and weights of one device."""

import itertools
from functools import partial

import jax
import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.engine.dispatch import make_dispatcher
from headrace.engine.lr_curve import make_lr_curve
from headrace.engine.objective import training_loss
from headrace.engine.optimizer import make_optimizer
from headrace.engine.precision import make_precision
from headrace.engine.residuals import without_arguments
from headrace.engine.stage import StageSpec
from headrace.engine.state import init_state
from headrace.engine.step import StepSpec
from headrace.model.context import Ctx
from headrace.model.families import build_network
from headrace.model.norm import NormSpec
from headrace.plan.partition import stage_ranges
from headrace.plan.place import make_table
from headrace.plan.schedule import Work

from ..test_equivalence import OPTIONS, assert_close, small_residual, train_steps


def train_pipelined(config, network, samples, *, replicas, count, cut, mapping, schedule, recompute=False):
    """Run the same steps as `train_steps` through stage programs; return (state, metrics) on the host."""
    images, labels = samples
    learning, numerics = config.learning, config.numerics
    curve = make_lr_curve(learning, global_batch_size=images.shape[1], updates_per_epoch=10, num_epochs=1)
    optimizer = make_optimizer(learning, curve, images.shape[1])
    precision = make_precision(numerics, config.batch)
    spec = StepSpec(
        network=network,
        optimizer=optimizer,
        lr_curve=curve,
        precision=precision,
        numerics=numerics,
        fetch=lambda _resident, micro: (micro["images"], micro["index"]),
        num_replicas=replicas,
        gradient_accumulation_count=count,
        seed=0,
        objective=partial(training_loss, label_smoothing=learning.label_smoothing),
        stable_norm=False,
        bn_momentum=0.9,
        ema_decay=learning.ema_decay,
    )
    stages = [
        StageSpec(step=spec, blocks=blocks, fetch_labels=lambda _resident, micro: micro["labels"], recompute=recompute)
        for blocks in stage_ranges(cut, len(network.blocks))
    ]
    table = make_table(schedule, Work(num_micros=count, device_mapping=tuple(mapping)))
    num_devices = 1 + max(mapping)
    devices = np.array(jax.devices()[: replicas * num_devices]).reshape(replicas, num_devices)
    dispatcher = make_dispatcher(stages, devices, table)
    state = init_state(network, optimizer, precision, numerics, seed=0, ema=learning.ema_decay > 0)

    def arrange(array):
        return array.reshape(len(array), count, -1, *array.shape[2:])

    index = arrange(np.arange(labels.size, dtype=np.int32).reshape(labels.shape))
    block = {"images": arrange(images), "labels": arrange(labels), "index": index}
    block = dispatcher.put(block | {"epoch": np.zeros(len(images), np.uint32)}, "steps")
    return jax.device_get(dispatcher(dispatcher.place(state), None, block))


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(1)
    images = rng.normal(size=(3, 16, 16, 16, 3)).astype(np.float32)
    return images, rng.integers(0, 10, (3, 16)).astype(np.int32)


@pytest.fixture(scope="module")
def reference(samples):
    config = config_from(OPTIONS)
    network = small_residual(NormSpec())
    wanted = {count: train_steps(config, network, *samples, replicas=1, count=count) for count in (1, 4)}
    return config, network, wanted


CASES = [
    # replicas, accumulation, cut, mapping, schedule, recompute
    (1, 4, (1,), [0, 1], "Grouped", False),
    (1, 4, (1, 3), [0, 1, 2], "Interleaved", False),
    (2, 2, (1,), [0, 1], "Interleaved", True),
    pytest.param(2, 4, (2,), [0, 0], "Sequential", False, marks=pytest.mark.slow),
    (1, 4, (1, 2, 3), [0, 1, 1, 0], "Grouped", True),
    pytest.param(1, 8, (1, 2, 4), [0, 1, 2, 3], "Interleaved", False, marks=pytest.mark.slow),
    (1, 1, (1, 2, 3), [0, 0, 0, 0], "Sequential", True),
    pytest.param(1, 4, (1, 3), [0, 1, 2], "GPipe", False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("replicas", "count", "cut", "mapping", "schedule", "recompute"), CASES)
def test_a_pipeline_gives_the_weights_of_one_device(
    samples, reference, replicas, count, cut, mapping, schedule, recompute
):
    config, network, wanted = reference
    plan = {"replicas": replicas, "count": count, "cut": cut, "mapping": mapping, "schedule": schedule}
    state, metrics = train_pipelined(config, network, samples, **plan, recompute=recompute)
    groups = replicas * count
    if groups not in wanted:
        wanted[groups] = train_steps(config, network, *samples, replicas=1, count=groups)
    one_device, its_metrics = wanted[groups]
    for part in ("params", "stats", "opt", "ema"):
        assert_close(state[part], one_device[part], 2e-5)
    for key in ("loss", "grad_norm", "learning_rate", "top1", "count"):
        np.testing.assert_allclose(metrics[key], its_metrics[key], rtol=2e-5, err_msg=key)
    assert int(state["step"]) == 3


def test_schedules_agree_bit_for_bit(samples, reference):
    config, network, _ = reference
    plan = {"replicas": 1, "count": 4, "cut": (1, 3), "mapping": [0, 1, 2]}
    states = [
        train_pipelined(config, network, samples, **plan, schedule=schedule)[0]
        for schedule in ("Grouped", "Interleaved", "Sequential")
    ]
    for first, second in itertools.pairwise(states):
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow
def test_sixteen_bit_weights_dynamic_scaling_and_skipped_steps_are_the_same(samples):
    """Rounding is addressed by tensor and step, a skipped step is skipped on every stage."""
    scaling = {"initial": 2.0**24, "growth_interval": 1000, "max": 2.0**24}
    options = {"precision": "16.16", "half_type": "float16", "loss_scaling": "dynamic", "loss_scaling_params": scaling}
    config = config_from(OPTIONS | options)
    network = small_residual(NormSpec())
    one, its_metrics = train_steps(config, network, *samples, replicas=1, count=2)
    plan = {"replicas": 1, "count": 2, "cut": (1, 3), "mapping": [0, 1, 2], "schedule": "Interleaved"}
    state, metrics = train_pipelined(config, network, samples, **plan)
    np.testing.assert_array_equal(metrics["skipped"], its_metrics["skipped"])
    assert metrics["skipped"].sum() > 0
    np.testing.assert_array_equal(metrics["loss_scale"], its_metrics["loss_scale"])
    for part in ("params", "stats", "opt"):
        assert_close(
            jax.tree.map(lambda a: np.asarray(a, np.float32), state[part]),
            jax.tree.map(lambda a: np.asarray(a, np.float32), one[part]),
            5e-3,
        )


def test_a_stage_keeps_its_convolution_outputs_alone():
    """Without recomputation, forward hands on to backward what convolutions put out, and nothing between them."""
    stage = small_residual(NormSpec())
    params, stats = stage.init(0)
    x = np.zeros((4, 8, 8, 8), np.float32)

    def unit(params, x):
        return stage.apply_range(1, 3, params, stats, x, Ctx(train=True))

    kept = jax.checkpoint(unit, policy=jax.checkpoint_policies.dots_saveable)
    _, vjp, _ = jax.vjp(kept, {"unit": params["unit"]}, x, has_aux=True)
    saved = [leaf.shape for leaf in jax.tree.leaves(without_arguments(vjp)) if np.ndim(leaf) == 4]
    assert saved == [(4, 8, 8, 8)], "the one convolution of the unit"


@pytest.mark.slow
def test_a_real_resnet_in_four_stages_on_eight_devices(samples):
    config = config_from(OPTIONS)
    network = build_network(config.model, 10, (16, 16, 3))
    one, _ = train_steps(config, network, *samples, replicas=1, count=4)
    plan = {"replicas": 1, "count": 4, "cut": (1, 3, 5), "mapping": [0, 1, 2, 3], "schedule": "Interleaved"}
    state, _ = train_pipelined(config, network, samples, **plan)
    for part in ("params", "stats", "opt"):
        assert_close(state[part], one[part], 5e-5)
