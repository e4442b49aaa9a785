"""The shipped recipes: each resolves without a remark, says its command and result, and holds the promised values."""

import shlex

import pytest

from headrace.cli.options import parse
from headrace.config.load import resolve
from headrace.config.shipped import RECIPES, listed, shipped_blocks
from headrace.config.yaml_file import read_blocks

BLOCKS = shipped_blocks()


@pytest.mark.parametrize("name", [block.name for block in listed(BLOCKS)])
def test_recipe(name):
    block = BLOCKS[name]
    assert block.description.endswith(".")
    assert block.result
    words = shlex.split(block.command)
    assert words[0] == "headrace"
    resolved, _ = parse(words[2:], " ".join(words[:2]))
    assert resolved.name == name
    assert resolved.warnings == ()
    assert resolved.notes == ()


def test_names_are_unique_over_the_files():
    names = [block.name for path in RECIPES.glob("*.yml") for block in listed(read_blocks(path))]
    assert len(names) == len(set(names)) == len(listed(BLOCKS))


def test_the_default_needs_no_download_and_learns_in_the_usual_way():
    config = resolve({}, environ={}).config
    assert (config.data.dataset, config.model.model_name) == ("digits", "cifar_resnet8")
    assert config.validation.validation


@pytest.mark.parametrize(
    ("name", "model", "dataset"),
    [
        ("cifar10_resnet20", "cifar_resnet20", "cifar10"),
        ("cifar10_resnet56", "cifar_resnet56", "cifar10"),
        ("cifar100_resnet56", "cifar_resnet56", "cifar100"),
    ],
)
def test_cifar(name, model, dataset):
    config = resolve({}, name, environ={}).config
    assert (config.model.model_name, config.data.dataset) == (model, dataset)
    assert config.data.train_augmentation == "flip-crop"
    assert (config.numerics.precision, config.numerics.half_type) == ("16.32", "bfloat16")


def test_the_reference_recipes_have_the_reference_values():
    quick = resolve({}, "resnet8_test", environ={}).config
    assert (quick.model.model_name, quick.data.dataset) == ("cifar_resnet8", "cifar10")
    assert (quick.batch.micro_batch_size, quick.batch.num_epochs, quick.batch.gradient_accumulation_count) == (8, 1, 1)
    assert (quick.data.eight_bit_transfer, quick.validation.validation) == (False, False)
    lars = resolve({}, "resnet8_test_lars", environ={}).config
    assert lars.learning.optimizer_params == {"eeta": 0.001, "momentum": 0.9, "epsilon": 0, "weight_decay": 2.5e-6}
    assert lars.learning.lr_schedule_params == {"initial_learning_rate": 0.000125}
    assert (lars.learning.l2_regularization, lars.batch.num_epochs) == (1e-5, 50)
    assert (lars.numerics.precision, lars.data.accelerator_side_preprocess, lars.validation.validation) == (
        "32.32",
        False,
        True,
    )
