"""Every shipped recipe makes a program that a second start finds: its step is a value."""

from dataclasses import replace

import pytest

from headrace.config.load import named_blocks, resolve
from headrace.core.errors import ConfigError
from headrace.engine.kept_programs import key
from headrace.engine.step import without_values_of
from headrace.run.design import design_run, open_data
from headrace.run.training import step_spec

SMALL = {"dataset": "generated", "num_samples": 16384, "num_classes": 10}


def step_key(name, **options):
    size = 32 if "cifar" in name or "mk2" in name else 64
    design = design_run(resolve(SMALL | {"image_size": size} | options, name, environ={}).config)
    spec = step_spec(design, design.plan.feed, open_data(design))
    return key(without_values_of({"seed": 0, "rate": 0}, replace(spec, packing=None)))


def test_a_recipe_has_one_key_for_all_seeds_and_rates():
    first = step_key("cifar10_fast")
    assert step_key("cifar10_fast", seed=7, num_epochs=3) == first
    assert step_key("cifar10_fast", label_smoothing=0.3) != first


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(named_blocks(None)))
def test_every_recipe_has_a_key(name):
    try:
        assert step_key(name) == step_key(name)
    except ConfigError as error:
        pytest.skip(f"needs files of images: {error.problem}")
