"""The networks by name: parameter counts, costs, names and shapes as the reference has them."""

from typing import Any

import jax
import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.core.tree import flatten_named
from headrace.model import Ctx, model_names
from headrace.model.composites import Residual
from headrace.model.families import model_row

from .build import network

PARAMETERS = {
    "toy_model": 242,  # 3*3*3*4+4, 4*8+8, 8*10+10
    "toy_model_bn": 266,  # and 2*4, 2*8
    "cifar_resnet8": 75_290,
    "cifar_resnet20": 269_722,
    "cifar_resnet32": 464_154,
    "cifar_resnet44": 658_586,
    "cifar_resnet56": 853_018,
    "resnet18": 11_693_736,
    "resnet34": 21_801_896,
    "resnet50": 25_557_032,
}


def test_every_network_is_counted():
    assert set(model_names()) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts(name):
    assert network(name).total_cost().params == PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name in PARAMETERS if PARAMETERS[name] < 1e6])
def test_what_is_initialised_is_what_was_counted(name):
    built = network(name)
    params, _ = built.init(0)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == PARAMETERS[name]
    per_block = {block: sum(leaf.size for leaf in jax.tree.leaves(tree)) for block, tree in params.items()}
    assert per_block == {block: cost.params for block, cost in built.costs().items() if cost.params}


def test_flops_of_resnet50_and_resnet18():
    # 4.089 G multiply-adds is the figure usually given for ResNet-50; torchvision's ResNet-18 has 1,814,073,344 and no
    # projection in the first group, which adds 56*56*64*64.
    assert network("resnet50").total_cost().flops == pytest.approx(2 * 4.089e9, rel=1e-3)
    assert network("resnet18").total_cost().flops == 2 * (1_814_073_344 + 56 * 56 * 64 * 64)


def test_flops_and_activations_of_a_block_by_hand():
    cost = network("cifar_resnet8").costs()["conv3_block1"]
    assert cost.flops == 2 * 16 * 16 * 9 * (16 * 32 + 32 * 32)
    assert cost.activation_elements == 16 * 16 * 32 * 3  # two convolutions and the relu between
    assert cost.params == 9 * 16 * 32 + 9 * 32 * 32 + 4 * 32


def test_block_names_are_the_split_points_of_the_reference():
    names = network("resnet50").block_names
    assert names[:4] == ("conv1", "pool1", "conv2_block1", "conv2_block1_out")
    assert names[-2:] == ("avg_pool", "predictions")
    assert {"conv2_block2_out", "conv3_block1_out", "conv4_block2_out", "conv5_block3_out"} <= set(names)
    cifar = network("cifar_resnet20").block_names
    assert cifar[1:3] == ("conv2_block1", "conv2_block1_post_addition_relu")
    assert len(cifar) == 1 + 2 * 9 + 2


def test_layer_names_after_their_block_are_the_references():
    params, stats = network("resnet50", image=(32, 32, 3), num_classes=4).init(0)
    assert set(params["conv2_block1"]) == {f"{i}_{kind}" for i in range(4) for kind in ("conv", "bn")}
    assert set(params["conv2_block2"]) == {f"{i}_{kind}" for i in (1, 2, 3) for kind in ("conv", "bn")}
    assert "conv1/conv/kernel" in flatten_named(params)
    assert "predictions/kernel" in flatten_named(params)
    assert set(stats["conv1"]["bn"]) == {"mean", "variance"}
    params, _ = network("cifar_resnet8").init(0)
    assert set(params["conv3_block1"]) == {"layer1_conv_ds", "layer1_bn", "layer2_conv", "layer2_bn"}
    assert set(params["conv2_block1"]) == {"layer1_conv", "layer1_bn", "layer2_conv", "layer2_bn"}


def test_projections_strides_and_zero_gammas():
    built = dict(network("resnet50").blocks)
    for group in (2, 3, 4, 5):
        first, second = built[f"conv{group}_block1"], built[f"conv{group}_block2"]
        assert isinstance(first, Residual)
        assert isinstance(second, Residual)
        body: dict[str, Any] = dict(first.body.layers)
        projection: dict[str, Any] = dict(first.shortcut.layers)
        second_body: dict[str, Any] = dict(second.body.layers)
        stride = 1 if group == 2 else 2
        assert (body["1_conv"].stride, body["2_conv"].stride, projection["0_conv"].stride) == (1, stride, stride)
        assert (body["3_bn"].gamma, second_body["3_bn"].gamma) == (1.0, 0.0)
        assert second.shortcut.layers == ()
    basic = dict(network("resnet18").blocks)["conv2_block1"]
    assert isinstance(basic, Residual)
    assert [name for name, _ in basic.shortcut.layers] == ["0_conv", "0_bn"]
    params, _ = network("resnet18", image=(32, 32, 3)).init(0)
    gammas = [leaf for name, leaf in flatten_named(params).items() if name.endswith("gamma")]
    assert all((leaf == 1).all() for leaf in gammas)


def test_shapes_through_resnet50():
    built = network("resnet50")
    shapes = dict(zip(built.block_names, built.shapes()[1:], strict=True))
    assert shapes["conv1"] == (112, 112, 64)
    assert shapes["pool1"] == (56, 56, 64)
    assert [shapes[f"conv{i}_block3"] for i in (2, 3, 4, 5)] == [
        (56, 56, 256), (28, 28, 512), (14, 14, 1024), (7, 7, 2048),
    ]  # fmt: skip
    assert shapes["avg_pool"] == (2048,)


def test_group_norm_renames_its_layers_and_has_no_statistics():
    built = network(norm_layer={"name": "group_norm", "num_groups": 4})
    params, stats = built.init(0)
    assert "layer1_gn" in params["conv2_block1"]
    assert stats == {}
    assert built.total_cost().params == 75_290


def test_no_norm():
    built = network(norm_layer={"name": "none"})
    params, stats = built.init(0)
    assert stats == {}
    assert not [name for name in flatten_named(params) if "gamma" in name or "beta" in name]
    assert built.total_cost().params == 75_290 - 2 * (16 + 2 * (16 + 32 + 64))


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no model named 'resnet500'.*Did you mean resnet50\?"):
        model_row("resnet500")


def test_images_too_small_for_the_toy_model():
    with pytest.raises(ConfigError, match=r"toy_model with 20x20x3 images fails at block max_pool_1.*finds only 3x3"):
        network("toy_model", image=(20, 20, 3))
    assert network("toy_model", image=(27, 27, 1)).shapes()[-1] == (10,)


def test_any_image_shape_and_class_count():
    built = network("cifar_resnet8", num_classes=7, image=(11, 18, 1))
    params, stats = built.init(0)
    images = np.ones((2, 11, 18, 1), np.float32)
    logits, _ = jax.jit(lambda p, s, x: built.apply(p, s, x, Ctx(train=False)))(params, stats, images)
    assert logits.shape == (2, 7)
