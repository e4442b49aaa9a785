"""Places for a cut: block names, layers inside blocks, and the names of the reference's two dialects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config.load import config_from
from headrace.core.errors import ConfigError
from headrace.core.tree import flatten_named
from headrace.model.context import Ctx, Draws
from headrace.plan.partition import block_costs, splits_by_name

from ..harness import OPTIONS, Stages, train_pipelined, train_steps
from .build import network, small_squeeze_excite

# The splits of the commands in the reference's documents, and the block or layer that each begins a stage with.
COMMANDS = [
    ("resnet50", ["b1/2/relu", "b2/3/relu", "b3/3/relu"], ["conv2_block3_out", "conv3_block4_out", "conv4_block4_out"]),
    ("resnet50", ["b1/2/relu", "b2/3/relu", "b3/5/relu"], ["conv2_block3_out", "conv3_block4_out", "conv4_block6_out"]),
    ("resnet50", ["stage1/unit3/relu", "stage3/unit1"], ["conv2_block3_out", "conv4_block1"]),
    ("resnet50", ["b3/0/relu"], ["conv4_block1_out"]),
    ("resnet50", ["conv2_block2_out", "conv3_block1_out", "conv4_block2_out"], None),
    ("resnet50", ["conv2_block1_2_conv", "conv3_block1_add"], ["conv2_block1/2_conv", "conv3_block1/add"]),
    ("resnet50", ["pool1_pool", "conv4_block1_1_conv"], ["pool1", "conv4_block1/1_conv"]),
    ("resnet50", ["layer3/0", "layer4/0/conv2"], ["conv4_block1", "conv5_block1/2_conv"]),
    ("resnext101", ["b3/3/relu"], ["conv4_block4_out"]),
    ("cifar_resnet8", [f"conv{i}_block1_post_addition_relu" for i in (2, 3, 4)], None),
    ("cifar_resnet20", ["b2/0/relu", "stage3/unit1/relu"], [f"conv{i}_block1_post_addition_relu" for i in (3, 4)]),
    ("cifar_resnet8", ["conv3_block1_layer2_conv"], ["conv3_block1/layer2_conv"]),
    ("efficientnet_b0", ["block2b", "block4a", "block6a"], None),
    ("cifar_fastnet", ["group1_2", "group2_1_1_pool", "group3_1"], ["group1_2", "group2_1/1_pool", "group3_1"]),
    ("efficientnet_b0", ["block2a/SE", "block4a", "block5c"], ["block2a/se", "block4a", "block5c"]),
    ("efficientnet_b0", ["block2a/b", "block2a/c", "Top"], ["block2a/dwconv", "block2a/project_conv", "top"]),
    ("efficientnet_b1", ["block2a/c", "block4a", "block5c"], ["block2a/project_conv", "block4a", "block5c"]),
    ("efficientnet_b4", ["block2c", "block4c", "block6a"], None),
    ("efficientnet_b0", ["blocks/3/0/conv_pw", "blocks/5/1"], ["block4a", "block6b"]),
]


@pytest.mark.parametrize(("name", "splits", "starts"), COMMANDS)
def test_splits_of_the_references_commands_are_real_cuts(name, splits, starts):
    fine = network(name).refined(splits)
    cut = splits_by_name(fine, splits)
    assert [fine.block_names[i] for i in cut] == (starts or splits)


def test_every_tensorflow1_name_of_efficientnet_b0():
    points = network("efficientnet_b0").split_points()
    names = ["block0", "block1a/b", "block1a/SE", "block1a/c", "Top"]
    for block in ("block2a", "block3a", "block4a", "block5a", "block6a", "block7a"):
        names += [block, f"{block}/b", f"{block}/SE", f"{block}/c"]
    names += ["block2b", "block3b", "block4b", "block4c", "block5b", "block5c", "block6b", "block6c", "block6d"]
    assert set(names) <= set(points)
    order = [points[name] for name in ("block2a", "block2a/b", "block2a/SE", "block2a/c", "block2b")]
    assert order == sorted(set(order))


def test_every_keras_name_of_a_resnet50_unit_in_its_order():
    points = network("resnet50").split_points()
    names = [f"conv3_block1_{layer}" for layer in ("0_conv", "0_bn", "1_conv", "1_bn", "1_relu", "2_conv", "2_bn",
             "2_relu", "3_conv", "3_bn", "add", "out")]  # fmt: skip
    places = [points[name] for name in names]
    assert places == sorted(set(places))
    assert points["conv3_block1_0_conv"] == points["conv3_block1"] == points["b2/0"]


@pytest.mark.parametrize(
    ("splits", "told"),
    [
        (["b1/2/relu", "conv2_block3_out"], "b1/2/relu and conv2_block3_out are one"),
        (["b4/2/relu", "b1/2/relu"], "b1/2/relu comes before b4/2/relu"),
        (["b0"], "b0 is the first block"),
        (["b1/3/relu"], "no block 'b1/3/relu'"),
    ],
)
def test_wrong_names_in_a_dialect_are_refused(splits, told):
    with pytest.raises(ConfigError, match=told):
        splits_by_name(network("resnet50"), splits)


def test_without_squeeze_excite_there_is_no_cut_before_it():
    plain = network("efficientnet_b0", se=False)
    with pytest.raises(ConfigError, match="no block 'block2a/SE'"):
        splits_by_name(plain.refined(["block2a/SE"]), ["block2a/SE"])


@pytest.mark.parametrize(
    ("build", "splits"),
    [
        (small_squeeze_excite, ["block1a/se", "block2a/dwconv", "block2b/add"]),
        (lambda: network("cifar_resnet8", image=(8, 8, 3)), ["conv3_block1_layer2_conv", "conv1_relu"]),
        (lambda: network("resnet14", image=(32, 32, 3), num_classes=10), ["conv2_block1_1_conv", "conv4_block1_3_bn"]),
    ],
)
def test_a_divided_network_is_the_same_network(build, splits):
    whole = build()
    fine = whole.refined(splits)
    assert len(fine.blocks) > len(whole.blocks)
    assert fine.total_cost() == whole.total_cost()
    (params, stats), (fine_params, fine_stats) = whole.init(3), fine.init(3)
    for mine, wanted in ((fine_params, params), (fine_stats, stats)):
        flat, flat_wanted = flatten_named(mine), flatten_named(wanted)
        assert set(flat) == set(flat_wanted)
        assert all((flat[name] == leaf).all() for name, leaf in flat_wanted.items())
    x = np.random.default_rng(0).normal(size=(4, *whole.input_hwc)).astype(np.float32)
    ctx = Ctx(train=True, draws=Draws(seed=1, step=2, samples=jnp.arange(4, dtype=jnp.uint32)))
    wanted = jax.jit(lambda p, s, x: whole.apply(p, s, x, ctx)[0])(params, stats, x)
    found = jax.jit(lambda p, s, x: fine.apply(p, s, x, ctx)[0])(fine_params, fine_stats, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_two_values_cross_a_cut_inside_a_unit():
    fine = network("cifar_resnet8").refined(["conv3_block1/layer2_conv"])
    costs = {cost.name: cost.input_bytes for cost in block_costs(fine, micro_batch_size=2, bytes_per_number=4)}
    assert costs["conv3_block1/layer2_conv"] == 2 * 4 * (2 * 16 * 16 * 32)
    assert costs["conv3_block1_post_addition_relu"] == 2 * 4 * (16 * 16 * 32)


@pytest.mark.slow
def test_a_pipeline_cut_inside_blocks_learns_what_one_device_learns():
    config = config_from(OPTIONS)
    rng = np.random.default_rng(1)
    images = rng.normal(size=(3, 16, 8, 8, 3)).astype(np.float32)
    labels = rng.integers(0, 10, (3, 16)).astype(np.int32)
    whole = small_squeeze_excite()
    wanted, _ = train_steps(config, whole, images, labels, replicas=1, count=4)
    splits = ["block1a/se", "block2b/dwconv"]
    fine = whole.refined(splits)
    found, _ = train_pipelined(
        config,
        fine,
        (images, labels),
        Stages(count=4, cut=splits_by_name(fine, splits), mapping=(0, 1, 2)),
    )
    flat = flatten_named(found["params"])
    for name, leaf in flatten_named(wanted["params"]).items():
        np.testing.assert_allclose(flat[name], leaf, rtol=1e-4, atol=2e-5 * (np.abs(leaf).max() + 1e-3), err_msg=name)
