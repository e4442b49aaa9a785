"""A network's name: family and size, spellings, what it means for other options, and what it refuses."""

import pytest

from headrace.config.load import config_from, override, resolve
from headrace.config.schema import all_options
from headrace.config.section_model import norm_choice
from headrace.core.errors import ConfigError
from headrace.rows.networks import OPTION_FAMILIES


def test_options_of_families_are_options():
    assert all(all_options()[option].section == "model" for option in OPTION_FAMILIES)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"model": "resnet", "model_size": 50}, "resnet50"),
        ({"model_name": "ResNet-50"}, "resnet50"),
        ({"model": "resnet50", "model_size": "50"}, "resnet50"),
        ({"model": "efficientnet", "model_size": "B4"}, "efficientnet_b4"),
        ({"model": "efficientnet", "model_size": 4}, "efficientnet_b4"),
        ({"model": "efficientnet-b0"}, "efficientnet_b0"),
        ({"model": "efficientnet", "model_size": "cifar"}, "efficientnet_cifar"),
        ({"model": "mobilenet"}, "mobilenet_v2"),
        ({"model": "mobilenet-v3-small"}, "mobilenet_v3_small"),
        ({"model": "mobilenet", "model_size": "v3-large"}, "mobilenet_v3_large"),
        ({"model": "squeezenet"}, "squeezenet"),
        ({"model": "toy_model", "model_size": "bn"}, "toy_model_bn"),
        ({"model": "ConvNeXt", "model_size": "T"}, "convnext_tiny"),
        ({"model": "EfficientNetV2-S"}, "efficientnet_v2_s"),
        ({"model": "efficientnet", "model_size": "v2-b0"}, "efficientnet_v2_b0"),
        ({"model": "regnet_x_1_6gf"}, "regnet_x_1_6gf"),
        ({"model": "regnet_x_16gf"}, "regnet_x_16gf"),
        ({"model": "regnet", "model_size": "x-1.6gf"}, "regnet_x_1_6gf"),
        ({"model": "regnety_160"}, "regnet_y_16gf"),
        ({"model": "resnet", "model_size": "50d"}, "resnet50d"),
        ({"model": "vgg", "model_size": 16}, "vgg16_bn"),
        ({"model": "cifar_resnet", "model_size": "56b"}, "cifar_resnet56b"),
        # both ImageNet and CIFAR have a 14: the images decide
        ({"model": "resnet", "model_size": 14, "dataset": "cifar10"}, "cifar_resnet14"),
        ({"model": "resnet", "model_size": 14, "dataset": "synthetic"}, "resnet14"),
        ({"model": "resnet", "model_size": 14, "dataset": "synthetic", "image_size": 32}, "cifar_resnet14"),
        ({"model": "resnet", "model_size": 20, "dataset": "synthetic"}, "cifar_resnet20"),
        ({"model": "resnet", "model_size": 18, "dataset": "cifar10"}, "resnet18"),
        # the reference's sizes where none is named
        ({"model": "resnet", "dataset": "synthetic"}, "resnet18"),
        ({"model": "resnet", "dataset": "cifar10"}, "cifar_resnet20"),
        ({"model": "resnext", "dataset": "synthetic"}, "resnext14"),
        ({"model": "efficientnet", "dataset": "synthetic"}, "efficientnet_b0"),
    ],
)
def test_names(given, name):
    assert config_from(given).model.model_name == name


def test_a_size_alone_changes_the_size_of_the_family_that_a_recipe_names():
    resolved = resolve({"model_size": "50", "dataset": "synthetic"})
    assert resolved.config.model.model_name == "resnet50"
    again = override(resolved, {"num_epochs": 3})
    assert again.config.model.model_name == "resnet50"
    alone = resolve({"model_size": "20"}, "none", environ={})
    assert override(alone, {"num_epochs": 3}).config.model.model_name == "cifar_resnet20", "also over a default"


def test_networks_bring_their_image_size():
    def size(**given):
        return config_from(given).data.image_size

    assert size(model="efficientnet", model_size="B4", dataset="synthetic") == 380
    assert size(model="efficientnet", model_size="B4", dataset="synthetic", image_size=224) == 224
    assert size(model="cifar_resnet8", dataset="generated") == 32
    assert size(model="efficientnet", model_size="B4", dataset="cifar10") is None
    resolved = resolve({"model": "efficientnet_b1", "dataset": "synthetic"})
    assert override(resolved, {"model": "efficientnet_b2"}).config.data.image_size == 260


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": "resnet", "model_size": 51}, "resnet has no size '51'.*sizes 8, 14, 20"),
        ({"model": "resnet50", "model_size": 101}, "name different networks.*--model resnet --model-size 101"),
        ({"model": "resnet50", "group_dim": 16}, "group_dim 16.*does not concern model_name resnet50.*efficientnet"),
        ({"model": "resnet50", "se": False}, "se off.*does not concern"),
        ({"model": "resnext50", "expand_ratio": 4}, "expand_ratio is for efficientnet"),
        ({"model": "efficientnet_b0", "use_bypass": True}, "use_bypass is for squeezenet"),
        ({"model": "efficientnet_b0", "shortcut": "pad-end"}, "shortcut is for resnet"),
        ({"model": "toy_model", "model_dialect": "timm"}, "does not concern model_name toy_model"),
        ({"model": "squeezenet", "group_norm": True}, "no norm layers"),
        ({"model": "toy_model", "norm_layer": {"name": "none"}}, "no norm layers"),
        ({"model": "convnext", "stable_norm": True}, "no norm layers"),
        ({"model": "convnext", "dbn_replica_group_size": 2, "num_replicas": 2}, "Only batch norm has statistics"),
        ({"batch_norm": True, "groups": 4}, "Two norms are asked for"),
        ({"group_norm": True, "norm_layer": {"name": "none"}}, "Two norms are asked for"),
        ({"batch_norm": True, "norm_layer": {"name": "none"}}, "Two norms are asked for"),
        ({"group_order": "strided"}, "group_order strided.*without group norm"),
        ({"proxy_norm": True}, "proxy_norm on.*with batch_norm"),
        ({"proxy_epsilon": 0.1}, "without proxy norm"),
        ({"groups": 2, "dbn_replica_group_size": 2, "num_replicas": 2}, "Only batch norm has statistics"),
        ({"norm_layer": {"name": "batch_norm", "momentum": 0.9}, "bn_momentum": 0.8}, "momentum 0.9, bn_momentum"),
        ({"bn_momentum": 0.8, "bn_momentum_start": 0.9}, "bn_momentum_start 0.9.*is above bn_momentum 0.8"),
        ({"groups": 2, "bn_momentum_start": 0.5}, "bn_momentum_start 0.5.*with group_norm"),
        ({"block_survival_prob": 0.0, "model": "efficientnet_b0"}, "more than 0"),
    ],
)
def test_refusals(given, told):
    with pytest.raises(ConfigError, match=told):
        config_from(given)


def test_who_says_how_much_of_the_statistics_is_kept_says_it_of_all_steps():
    def momentums(**given):
        model = resolve(given, environ={}).config.model
        return model.bn_momentum, model.bn_momentum_start

    assert momentums() == (0.9, 0.5), "the demo"
    assert momentums(bn_momentum=1) == (1, None)
    assert momentums(groups=2) == (0.9, 0.5), "without an effect"
    assert momentums(bn_momentum=0.8, bn_momentum_start=0.2) == (0.8, 0.2)


def test_short_ways_to_say_a_norm():
    def norm(**given):
        return norm_choice(config_from(given).model)

    assert norm()["name"] == norm(batch_norm=True)["name"] == "batch_norm"
    assert norm(groups=2) == {"name": "group_norm", "num_groups": 2}
    assert norm(group_norm=True, model="resnet50")["num_groups"] == 32
    assert norm(group_norm=True, model="cifar_resnet8")["num_groups"] == 16
    assert norm(group_norm=True, model="efficientnet_b0")["num_groups"] == 4
    assert config_from({"norm_layer": {"name": "custom_batch_norm", "momentum": 0.9}}).model.bn_momentum == 0.9


def test_a_stronger_layer_lets_go_of_what_does_not_fit_its_network(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text("mine:\n  model_name: efficientnet_b0\n  group_dim: 16\n  groups: 4\n")
    resolved = resolve({"model": "resnet50"}, "mine", str(path))
    assert resolved.config.model.group_dim is None
    assert any("group_dim 16" in note for note in resolved.notes)
    assert resolved.config.model.norm_layer == {"name": "group_norm", "num_groups": 4}
