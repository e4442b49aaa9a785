"""The memory estimate: against hand counts, the optimizers' real state, and XLA's own figures."""

import jax
import jax.numpy as jnp
import pytest

from headrace.config.load import config_from
from headrace.core.units import parse_bytes
from headrace.data.dataset import describe_dataset
from headrace.engine.lr_curve import make_lr_curve
from headrace.engine.optimizer import make_optimizer
from headrace.model.context import Ctx
from headrace.model.zoo import build_network
from headrace.plan.memory import MemoryPlan, optimizer_slots
from headrace.plan.plan import Plan, make_plan
from headrace.plan.report import _device_rows

PARAMS = 75_290  # cifar_resnet8, 10 classes

# Kept per image by ResNet-8: input; stem conv + relu; in each of three units conv, relu, conv, relu; pool; logits.
ELEMENTS = 3072 + 2 * 32 * 32 * 16 + 4 * (32 * 32 * 16 + 16 * 16 * 32 + 8 * 8 * 64) + 64 + 10


def planned(**options) -> Plan:
    config = config_from({"dataset": "cifar10", "model_name": "cifar_resnet8", "micro_batch_size": 32} | options)
    info = describe_dataset(config.data)
    return make_plan(config, info, build_network(config.model, info.num_classes, info.image_hwc))


def memory(**options) -> MemoryPlan:
    return planned(**options).memory


def test_float32_rows_by_hand():
    plan = memory(optimizer_params={"momentum": 0.9})
    rows = {row.name: row.num_bytes for row in plan.rows}
    assert rows == {
        "weights": 4 * PARAMS,
        "gradients": 4 * PARAMS,
        "accumulators": 0,
        "optimizer state": 4 * PARAMS,
        "average of weights": 0,
        "activations": 4 * ELEMENTS * 32,
        "data": 60_000 * 3076,
    }
    assert plan.total_bytes == sum(rows.values())


@pytest.mark.parametrize(
    ("precision", "weights", "activations"), [("32.32", 4, 4), ("16.32", 4 + 2, 2), ("16.16", 2, 2)]
)
def test_precision_sets_the_width_of_weights_and_activations(precision, weights, activations):
    plan = memory(precision=precision)
    assert plan.bytes_of("weights") == weights * PARAMS
    assert plan.bytes_of("activations") == activations * ELEMENTS * 32


def test_accumulation_and_averaging_add_their_copies():
    plan = memory(gradient_accumulation_count=4, gradient_accumulation_dtype="bfloat16", ema_decay=0.99)
    assert plan.bytes_of("accumulators") == 2 * PARAMS
    assert plan.bytes_of("average of weights") == 4 * PARAMS


@pytest.mark.parametrize(
    ("optimizer", "params"),
    [
        ("sgd", {"momentum": 0}),
        ("sgd", {"momentum": 0.9}),
        ("lars", {"momentum": 0.9, "weight_decay": 0.0, "eeta": 0.001, "epsilon": 0}),
        ("rmsprop", {"momentum": 0.9, "epsilon": 1e-3, "base_decay_exponent": -14}),
        ("rmsprop", {"momentum": 0, "epsilon": 1e-3, "base_decay_exponent": -14}),
        ("adamw", {}),
    ],
)
def test_slots_are_those_the_optimizer_really_keeps(optimizer, params):
    learning = config_from({"optimizer": optimizer, "optimizer_params": params}).learning
    curve = make_lr_curve(learning, global_batch_size=1, updates_per_epoch=1, num_epochs=1)
    kept = jax.eval_shape(make_optimizer(learning, curve, 1).init, {"w": jnp.zeros((10, 10))})
    assert sum(leaf.size for leaf in jax.tree.leaves(kept) if leaf.size > 1) == 100 * optimizer_slots(learning)


def test_xla_needs_at_most_two_and_a_half_times_the_estimate_on_the_cpu():
    """On accelerators it is nearer (see memory.py); the CPU backend keeps more copies between its kernels."""
    options = {"dataset": "cifar10", "model_name": "cifar_resnet20", "optimizer_params": {"momentum": 0.9}}
    config = config_from(options | {"micro_batch_size": 16})
    network = build_network(config.model, 10, (32, 32, 3))
    estimate = make_plan(config, describe_dataset(config.data), network).memory
    params, stats = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, network.init(0)))
    images, labels = jax.ShapeDtypeStruct((16, 32, 32, 3), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.int32)

    def loss(params, stats, images, labels):
        logits, _ = network.apply(params, stats, images, Ctx(train=True))
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    def step(params, velocity, stats, images, labels):
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, jax.grad(loss)(params, stats, images, labels))
        return jax.tree.map(lambda w, v: w - 0.1 * v, params, velocity), velocity

    program = jax.jit(step, donate_argnums=(0, 1)).lower(params, params, stats, images, labels).compile()
    analysis = program.memory_analysis()
    assert analysis is not None
    measured = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    planned = estimate.total_bytes - estimate.bytes_of("data")
    assert 0.8 * planned < measured < 2.5 * planned


# Stages of very different sizes: the device with most weights is not the one with most activations.
STAGES = {"num_pipeline_stages": 3, "gradient_accumulation_count": 8, "ema_decay": 0.9, "momentum": 0.9}


@pytest.mark.parametrize("cache", ["device", "host"])
def test_savings_are_those_of_the_fullest_device(cache):
    options = STAGES | {"validation_cache": cache, "dataset_cache": "host"}
    plan, recomputed = planned(**options), planned(**options, recomputation=True)
    fullest = plan.memory_by_device.index(plan.memory)
    rows = {row.name: row.num_bytes for row in plan.memory.rows}
    again = recomputed.memory_by_device[fullest].bytes_of("activations")
    saved = {saving.option: saving.num_bytes for saving in plan.savings}
    assert saved == {
        "recomputation": rows["activations"] - again,
        "optimizer_state_offloading": rows["optimizer state"] + rows["average of weights"],
    }


def test_the_columns_of_a_device_add_up():
    plan = planned(**STAGES, validation_cache="device", dataset_cache="host")
    assert plan.pipeline is not None
    assert any(row.name == "validation data" and row.num_bytes for row in plan.memory_by_device[0].rows)
    for row in _device_rows(plan.pipeline, plan.memory_by_device):
        weights, activations, _, data, total = (parse_bytes(text.replace(" ", "")) for text in row[2:])
        assert weights + activations + data == pytest.approx(total, rel=0.02)
