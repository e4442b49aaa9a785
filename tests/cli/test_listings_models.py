"""`headrace models`: the table of networks and one network block by block."""

import pytest

from headrace.cli.models import models as main
from headrace.core.errors import ConfigError


def lines(capsys, *argv):
    assert main(list(argv)) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_the_list_has_parameters_flops_and_image_size(capsys):
    found = lines(capsys)
    assert "multiply-add" in found[0]
    assert "2 FLOPs" in " ".join(found[0])
    assert ["cifar_resnet8", "75,290", "24.48", "M", "32x32x3", "10"] in found
    assert ["resnet50", "25,557,032", "8.178", "G", "224x224x3", "1,000"] in found
    assert lines(capsys, "list") == found


def test_the_list_for_a_data_set_and_for_small_images(capsys):
    assert ["cifar_resnet8", "75,002", "18.29", "M", "28x28x1", "10"] in lines(capsys, "--dataset", "mnist")
    found = lines(capsys, "--image-size", "20")
    assert not [line for line in found if line[0] == "toy_model" and line[1] == "242"]
    assert "toy_model with 20x20x3 images fails at block max_pool_1" in "\n".join(" ".join(line) for line in found)


def test_a_network_block_by_block(capsys):
    found = lines(capsys, "show", "cifar_resnet8", "--num-classes", "100", "--image-size", "16")
    assert found[0] == ["cifar_resnet8:", "16x16x3", "images,", "100", "classes"]
    assert ["conv2_block1", "16x16x16", "4,672", "2.359", "M"] in [line[:5] for line in found]
    assert ["conv3_block1_post_addition_relu", "8x8x32", "0", "0", "b2/0/relu", "stage2/unit1/relu"] in found
    assert ["fc_layer", "100", "6,500", "12.8", "k"] in [line[:5] for line in found]
    assert ["total", "81,140"] in [line[:2] for line in found]


def test_families_sizes_and_options_name_networks(capsys):
    assert lines(capsys, "show", "resnet", "--model-size", "50") == lines(capsys, "show", "ResNet-50")
    assert ["total", "19,328,168"] in [
        line[:2]
        for line in lines(capsys, "show", "efficientnet", "--model-size", "4", "--group-dim", "16", "--expand-ratio=4")
    ]


def test_split_points_inside_blocks_and_in_other_dialects(capsys):
    text = "\n".join(" ".join(line) for line in lines(capsys, "show", "efficientnet_b0"))
    assert "\nblock2a 112x112x24" not in text
    assert "block2a 56x56x24 6,004" in text
    assert "expand_bn expand_activation dwconv bn activation se project_conv project_bn" in text
    assert "block2a/SE" in text
    assert "conv2_block1, conv3_block1" in "\n".join(" ".join(line) for line in lines(capsys, "show", "resnet50"))


def test_a_table_in_a_pipe_is_never_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    out = lines(capsys, "show", "cifar_resnet56")
    assert "conv4_block9_post_addition_relu" in [line[0] for line in out if line]


def test_another_norm(capsys):
    found = lines(capsys, "show", "cifar_resnet8", "--norm-layer", '{"name": "none"}')
    assert ["conv1", "32x32x16", "432", "884.7", "k"] in [line[:5] for line in found]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["show", "resnet5"], r"no model named 'resnet5'.*Did you mean resnet50"),
        (["show"], "required: NAME"),
        (["show", "toy_model", "--image-size", "0"], "must be 1 or more"),
        (["show", "resnet50", "--norm-layer", "batch_norm"], "is not KEY=VALUE"),
        (["--shade"], "no option --shade"),
        (["--num-epochs", "3"], "does not change a network"),
        (["show", "resnet", "--model-size", "51"], "resnet has no size '51'"),
        (["show", "resnet50", "--group-dim", "4"], "does not concern model_name resnet50"),
        (["show", "toy_model", "--image-size", "9"], "fails at block"),
    ],
)
def test_wrong_words(argv, words):
    with pytest.raises(ConfigError, match=words):
        main(argv)


def test_help(capsys):
    assert main(["show", "--help"]) == 0
    assert "headrace models show NAME" in capsys.readouterr().out


def test_networks_with_a_text_in_their_name(capsys):
    assert main(["regnet-y-4"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert names == ["regnet_y_400mf", "regnet_y_4gf"]
    with pytest.raises(ConfigError, match=r"No network has 'vit' in its name.*there are no transformers"):
        main(["vit"])
