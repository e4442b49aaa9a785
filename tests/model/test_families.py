"""The networks by name: parameter counts, costs, names and shapes as the reference has them."""

from typing import Any

import jax
import numpy as np
import pytest

from headrace.config.networks import find_variant
from headrace.core.errors import ConfigError
from headrace.core.tree import flatten_named
from headrace.model.composite import Concat, Residual
from headrace.model.context import Ctx
from headrace.model.gates import DropPath
from headrace.model.network import weights_like
from headrace.model.zoo import model_names

from .build import network


def bottleneck_cifar(n: int, groups: int = 1, inner: int = 0, stem: int = 16) -> int:
    """Count a bottleneck CIFAR network by hand: 9n+2 layers, `inner` channels in its first 3x3 convolution."""
    total, inputs = 27 * stem + 2 * stem, stem
    for group in range(3):
        mid, outputs = (inner or stem) << group, 4 * stem << group
        for unit in range(n):
            total += inputs * mid + 9 * mid * mid // groups + mid * outputs + 4 * mid + 2 * outputs
            total += inputs * outputs + 2 * outputs if unit == 0 else 0
            inputs = outputs
    return total + inputs * 10 + 10


PARAMETERS = {
    "toy_model": 242,  # 3*3*3*4+4, 4*8+8, 8*10+10
    "toy_model_bn": 266,  # and 2*4, 2*8
    "cifar_resnet8": 75_290,
    "cifar_resnet14": 172_506,
    "cifar_resnet20": 269_722,
    "cifar_resnet32": 464_154,
    "cifar_resnet44": 658_586,
    "cifar_resnet56": 853_018,
    "cifar_resnet110": 1_727_962,
    **{f"cifar_resnet{9 * n + 2}{'b' if n == 6 else ''}": bottleneck_cifar(n) for n in (1, 3, 4, 5, 6, 7)},
    **{f"cifar_resnext{9 * n + 2}": bottleneck_cifar(n, 32, 128) for n in (1, 3, 4, 5, 6, 7)},
    "resnet10": 5_423_016,
    "resnet14": 10_064_936,
    "resnet18": 11_693_736,
    "resnet26": 15_995_176,
    "resnet34": 21_801_896,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    # sixteen units of the second group more: 1x1, 3x3 and 1x1 convolutions, two numbers for each channel of their norms
    "resnet200": 60_192_808 + 16 * (512 * 128 + 9 * 128 * 128 + 128 * 512 + 2 * (128 + 128 + 512)),
    "resnext14": 9_411_880,
    "resnext26": 15_389_480,
    "resnext50": 25_028_904,
    "resnext101": 44_177_704,
    "resnext152": 59_951_400,
    "efficientnet_cifar": 1_077_932,
    "efficientnet_b0": 5_288_548,
    "efficientnet_b1": 7_794_184,
    "efficientnet_b2": 9_109_994,
    "efficientnet_b3": 12_233_232,
    "efficientnet_b4": 19_341_616,
    "efficientnet_b5": 30_389_784,
    "efficientnet_b6": 43_040_704,
    "efficientnet_b7": 66_347_960,
    "mobilenet_v2": 3_504_872,
    "mobilenet_v3_small": 2_542_856 + 256 * (576 + 1 + 1000),  # torchvision's, with 256 more hidden features
    "mobilenet_v3_large": 5_483_032,
    "squeezenet": 1_248_424,
    "cifar_fastnet_large": 13 * 24
    + 9 * (24 * 128 + 2 * 128 * 128 + 128 * 384 + 2 * 384 * 384 + 384 * 512 + 2 * 512 * 512)
    + 2 * 3 * (128 + 384 + 512)
    + 513 * 10,
    "cifar_fastnet": 13 * 24 + 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256) + 2 * (2 * 64 + 4 * 256) + 257 * 10,
}
# of torchvision or timm
PARAMETERS |= {
    "convnext_tiny": 28_589_128,
    "convnext_small": 50_223_688,
    "convnext_base": 88_591_464,
    "convnext_large": 197_767_336,
    "efficientnet_v2_s": 21_458_488,
    "efficientnet_v2_m": 54_139_356,
    "efficientnet_v2_l": 118_515_272,
    "efficientnet_v2_b0": 7_139_704,
    "efficientnet_v2_b1": 8_141_052,
    "efficientnet_v2_b2": 10_096_086,
    "efficientnet_v2_b3": 14_358_406,
    "efficientnet_lite0": 4_652_008,
    "efficientnet_lite1": 5_416_680,
    "efficientnet_lite2": 6_092_072,
    "efficientnet_lite3": 8_197_096,
    "efficientnet_lite4": 13_006_568,
    "resnet18d": 11_708_744,
    "resnet26d": 16_014_408,
    "resnet34d": 21_816_904,
    "resnet50d": 25_576_264,
    "resnet101d": 44_568_392,
    "resnet152d": 60_212_040,
    "seresnet18": 11_779_624,
    "seresnet34": 21_960_416,
    "seresnet50": 28_088_024,
    "seresnet101": 49_326_872,
    "seresnet152": 66_821_848,
    "seresnext50": 27_559_896,
    "seresnext101": 48_955_416,
    "densenet121": 7_978_856,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "vgg11_bn": 132_868_840,
    "vgg13_bn": 133_053_736,
    "vgg16_bn": 138_365_992,
    "vgg19_bn": 143_678_248,
    "regnet_x_200mf": 2_684_792,
    "regnet_x_400mf": 5_157_512,
    "regnet_x_600mf": 6_196_040,
    "regnet_x_800mf": 7_259_656,
    "regnet_x_1_6gf": 9_190_136,
    "regnet_x_3_2gf": 15_296_552,
    "regnet_x_4gf": 22_118_248,
    "regnet_x_6_4gf": 26_209_256,
    "regnet_x_8gf": 39_572_648,
    "regnet_x_12gf": 46_106_056,
    "regnet_x_16gf": 54_278_536,
    "regnet_x_32gf": 107_811_560,
    "regnet_y_200mf": 3_162_996,
    "regnet_y_400mf": 4_344_144,
    "regnet_y_600mf": 6_055_160,
    "regnet_y_800mf": 6_263_168,
    "regnet_y_1_6gf": 11_202_430,
    "regnet_y_3_2gf": 19_436_338,
    "regnet_y_4gf": 20_646_656,
    "regnet_y_6_4gf": 30_583_252,
    "regnet_y_8gf": 39_180_068,
    "regnet_y_12gf": 51_822_544,
    "regnet_y_16gf": 83_590_140,
    "regnet_y_32gf": 145_046_770,
}
# group dim 16 and expansion 4; B6's first block has 56 channels, which 16 does not divide: 4 groups of 14, where the
# reference's figure (39,825,464) counts 18 channels for each of 3 groups
GROUPED = {"cifar": 1_683_420, "b0": 5_913_796, "b1": 8_332_120, "b2": 9_504_122, "b3": 12_590_896, "b4": 19_328_168,
           "b5": 28_715_320, "b6": 39_825_464 - 9 * 4 * 56, "b7": 59_210_264}  # fmt: skip


def test_every_network_is_counted():
    assert set(model_names()) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts(name):
    assert network(name).total_cost().params == PARAMETERS[name]


@pytest.mark.parametrize("size", GROUPED)
def test_parameter_counts_of_grouped_efficientnets(size):
    assert network(f"efficientnet_{size}", group_dim=16, expand_ratio=4).total_cost().params == GROUPED[size]


def test_parameter_counts_by_option():
    assert network("resnext14", image=(224, 224, 4)).total_cost().params == 9_415_016
    assert network("efficientnet_b0", image=(224, 224, 4)).total_cost().params == 5_288_836
    assert network("efficientnet_b1", image=(240, 240, 4)).total_cost().params == 7_794_472
    assert network("cifar_resnext29", widenet=True).total_cost().params == bottleneck_cifar(3, 32, 128, stem=64)
    count = network("cifar_resnext29", convolution_groups=8, group_dim=16, widenet=True).total_cost().params
    assert count == bottleneck_cifar(3, 8, 128, stem=64)
    # torchvision's definitions
    for name, count in (("resnet18", 11_689_512), ("resnet34", 21_797_672), ("mobilenet_v3_small", 2_542_856)):
        assert network(name, model_dialect="torchvision").total_cost().params == count
    for name, count in (("regnet_x_400mf", 5_495_976), ("regnet_y_800mf", 6_432_512), ("regnet_y_8gf", 39_381_472)):
        assert network(name, model_dialect="torchvision").total_cost().params == count
    assert network("squeezenet", use_bypass=True).total_cost().params == 1_248_424
    # 1,024 channels on top instead of 1,280
    less = 256 * (320 + 2 + 1000)
    assert network("efficientnet_b0", top_width=1024).total_cost().params == 5_288_548 - less
    assert network("mobilenet_v2", top_width=1024).total_cost().params == 3_504_872 - less


def test_image_sizes():
    sizes = [network(f"efficientnet_b{i}").input_hwc[0] for i in range(8)]
    assert sizes == [224, 240, 260, 300, 380, 456, 528, 600]
    assert [network(f"efficientnet_v2_{size}").input_hwc[0] for size in ("s", "m", "l", "b3")] == [384, 480, 480, 300]


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
    params, stats = weights_like(network("resnet50", image=(32, 32, 3), num_classes=4))
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
        find_variant("resnet500")


def test_images_too_small_for_the_toy_model():
    with pytest.raises(ConfigError, match=r"toy_model with 20x20x3 images fails at block max_pool_1.*gets only 3x3"):
        network("toy_model", image=(20, 20, 3))
    assert network("toy_model", image=(27, 27, 1)).shapes()[-1] == (10,)


def test_any_image_shape_and_class_count():
    built = network("cifar_resnet8", num_classes=7, image=(11, 18, 1))
    params, stats = built.init(0)
    images = np.ones((2, 11, 18, 1), np.float32)
    logits, _ = jax.jit(lambda p, s, x: built.apply(p, s, x, Ctx(train=False)))(params, stats, images)
    assert logits.shape == (2, 7)


def test_stochastic_depth_grows_from_the_first_unit_to_the_last() -> None:
    """As in timm: the first unit is always kept, the last with the given probability, evenly in between."""

    def survivals(name: str, **options: Any) -> list[float]:
        blocks = [block for _, block in network(name, 10, (32, 32, 3), **options).blocks]
        layers = [layer for block in blocks if isinstance(block, Residual) for _, layer in block.body.layers]
        return [round(layer.survival, 6) for layer in layers if isinstance(layer, DropPath)]

    assert survivals("cifar_resnet8", block_survival_prob=0.9) == [0.95, 0.9]
    assert len(survivals("resnet50", block_survival_prob=0.95)) == 15
    assert survivals("resnet18", block_survival_prob=0.3)[-1] == 0.3
    assert survivals("cifar_resnet8") == []


def _beside(layer: Any, hwc: tuple[int, ...]) -> int:
    """Return the FLOPs of all but the largest of the branches of a layer: what another device could compute."""
    if isinstance(layer, Residual):
        return min(layer.body.cost(hwc).flops, layer.shortcut.cost(hwc).flops) + _beside(layer.body, hwc)
    if isinstance(layer, Concat):
        flops = [each.cost(hwc).flops for _, each in layer.layers]
        return sum(flops) - max(flops)
    total = 0
    for _, each in getattr(layer, "layers", ()):
        total += _beside(each, hwc)
        hwc = each.shape(hwc)
    return total


@pytest.mark.parametrize(
    ("name", "side", "share"),
    [("resnet50", 224, 0.088), ("cifar_resnet11", 32, 0.254), ("squeezenet", 224, 0.060), ("vgg16_bn", 224, 0.0)],
)
def test_the_share_of_a_network_that_is_computed_beside_the_rest(name: str, side: int, share: float):
    """docs/documents/002.md says why a run has no option for concurrent stages: these are the shares it quotes."""
    made = network(name, num_classes=1000, image=(side, side, 3))
    beside = sum(_beside(block, hwc) for (_, block), hwc in zip(made.blocks, made.shapes(), strict=False))
    assert beside / sum(cost.flops for cost in made.costs().values()) == pytest.approx(share, abs=6e-4)
