"""The shipped recipes: each resolves without a remark, says its command and result, and holds the promised values."""

import shlex

import pytest

from headrace.cli.options import parse
from headrace.config.load import named_blocks, resolve
from headrace.config.translations import translation
from headrace.config.yaml_blocks import RECIPES, listed, read_blocks

BLOCKS = named_blocks(None)


@pytest.mark.parametrize("name", [block.name for block in listed(BLOCKS)])
def test_recipe(name):
    block = BLOCKS[name]
    assert block.description.endswith(".")
    assert block.result
    words = shlex.split(block.command)
    assert words[0] == "headrace"
    resolved, _ = parse(words[2:], " ".join(words[:2]))
    assert resolved.name == name
    expected = "float16 without loss scaling"  # what some of the reference's have
    assert [text for text in resolved.warnings if not text.startswith(expected)] == []
    if not block.file.startswith("reference"):
        assert resolved.notes == ()
    # the reference's own values may be without effect here; that is said, and nothing else
    assert all(
        "no effect" in note or note.startswith("without effect: ") or "changes nothing" in note
        for note in resolved.notes
    ), resolved.notes


def test_names_are_unique_over_the_files():
    names = [
        block.name
        for directory in (RECIPES, *translation().recipes)
        for path in directory.glob("*.yml")
        for block in listed(read_blocks(path))
    ]
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


def test_today():
    one, eight, cpu = (
        resolve({}, name, environ={}).config
        for name in ("imagenet_resnet50_one_gpu", "imagenet_resnet50_eight_gpus", "cifar10_resnet8_cpu")
    )
    assert (one.batch.num_replicas, one.batch.global_batch_size) == (1, 1024)
    assert (eight.batch.num_replicas, eight.batch.global_batch_size) == (8, 2048)
    for config in (one, eight):
        assert (config.model.model_name, config.data.dataset) == ("resnet50", "imagenet")
        assert (config.numerics.precision, config.numerics.half_type) == ("16.32", "bfloat16")
        # 0.1 for a batch of 256, grown with the batch: the usual rule
        assert config.learning.lr_schedule_params["initial_learning_rate"] * 256 == pytest.approx(0.1)
    assert (cpu.run.platform, cpu.numerics.precision, cpu.data.dataset) == ("cpu", "32.32", "cifar10")


def test_old_names_of_recipes_stay_accepted() -> None:
    assert resolve({}, "pictures").config == resolve({}, "images").config
