"""Rules across options: each refused combination, each warning, each note, and neighbours that are fine."""

import pytest

from headrace.config.load import config_from, resolve
from headrace.core.errors import ConfigError

REFUSED = [
    (
        {"eight_bit_transfer": True, "accelerator_side_preprocess": False},
        ["only raw pixels", "eight_bit_transfer on (code)"],
    ),
    ({"fused_preprocessing": True, "accelerator_side_preprocess": False}, ["fused_preprocessing on (code)"]),
    (
        {"normalise_input": True, "normalization": "zero-one"},
        ["normalise_input on (code)", "normalization zero-one"],
    ),
    ({"gradient_accumulation_count": 2, "global_batch_size": 8}, ["Both are given", "Leave one of them out."]),
    ({"num_classes": 3}, ["num_classes 3 (code) is given for the dataset digits"]),
    ({"image_size": 64, "dataset": "cifar10"}, ["image_size 64"]),
    ({"num_channels": 4, "dataset": "mnist"}, ["num_channels 4"]),
    ({"num_samples": 64, "dataset": "cifar100"}, ["num_samples 64"]),
    ({"training": False, "validation": False}, ["Nothing is left to do"]),
    ({"norm_layer": {"name": "group_norm", "num_groups": 2, "channels_per_group": 2}}, ["num_groups"]),
    ({"lr_warmup_params": {"warmup_mode": "jump", "warmup_epochs": 1}}, ["'jump'", "shift, mask"]),
    ({"loss_scaling_params": {"initail": 3}}, ["Did you mean initial?"]),
    ({"recomputation_points": ["out$"]}, ["recomputation_points out$ (code) without recomputation"]),
    ({"average_decays": [0.9], "clean_dir": True}, ["average_decays 0.9 (code) with clean_dir on (code)"]),
    ({"average_last_epochs": [2], "checkpoints": False}, ["average_last_epochs 2 (code) with checkpoints off"]),
    ({"measure_splits": True}, ["measure_splits on (code) without pipeline stages"]),
    ({"measure_splits": True, "pipeline_splits": ["a"]}, ["measure_splits on (code) with pipeline_splits a"]),
    ({"pipeline_validation_model": True}, ["pipeline_validation_model on (code) without pipeline stages"]),
    (
        {"pipeline_validation_model": True, "validation_flip": True, "pipeline_splits": ["conv2_block1"]},
        ["validation_flip on (code) with pipeline_validation_model on"],
    ),
    ({"device_mapping": [0, 0]}, ["device_mapping 0 0 (code) without pipeline stages"]),
    ({"pipeline_splits": ["a", "b"], "num_pipeline_stages": 2}, ["makes 3 stages, but num_pipeline_stages 2"]),
    ({"pipeline_splits": 4, "num_pipeline_stages": 4}, ["pipeline_splits 4 (code) makes 5 stages"]),
]


@pytest.mark.parametrize(("options", "told"), REFUSED)
def test_combinations_that_cannot_work(options, told):
    with pytest.raises(ConfigError) as caught:
        config_from(options)
    assert caught.value.rule
    for part in told:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"eight_bit_transfer": False, "accelerator_side_preprocess": False},
        {"normalise_input": True, "normalization": "per-channel"},
        {"normalise_input": False, "normalization": "centred"},
        {"logs_per_epoch": 0.5, "num_epochs": 5},
        {"logs_per_epoch": 1e-320, "validations_per_epoch": "1/1.5", "ckpts_per_epoch": 0.3, "num_epochs": 7},
        {"logs_per_epoch": "0.3333333333333333333", "num_epochs": 6},
        {"logs_per_epoch": "2/3", "num_epochs": 3},
        {"logs_per_epoch": 10, "num_epochs": 7},
        {"logs_per_epoch": 0, "num_epochs": 7},
        {"validations_per_epoch": 0, "num_epochs": 5},
        {"validations_per_epoch": 0.1, "num_epochs": 100},
        {"dataset": "synthetic", "num_classes": 3, "image_size": 64, "num_channels": 1, "num_samples": 100},
        {"training": False},
        {"norm_layer": {"name": "group_norm", "channels_per_group": 4}},
        {"norm_layer": {"name": "none"}},
        {"pipeline_splits": ["a", "b"], "num_pipeline_stages": 3, "device_mapping": [0, 0, 0], "recomputation": True},
        {"pipeline_splits": ["a", "b"], "num_pipeline_stages": 1},  # as a printed configuration has it
        {"pipeline_schedule": "Grouped"},
        {"recomputation": True},
        {"fp_exceptions": True, "pipeline_splits": ["a"]},
        {"measure_splits": True, "num_pipeline_stages": 2},
        {"optimizer_state_offloading": True, "replicated_optimizer_state_sharding": True, "num_replicas": 2},
    ],
)
def test_combinations_that_work(options):
    config_from(options)


def test_float16_without_loss_scaling_is_warned_of():
    (warning,) = resolve({"precision": "16.16", "half_type": "float16"}, "none", environ={}).warnings
    assert "--loss-scaling dynamic" in warning
    for fine in (
        {"precision": "16.16", "half_type": "float16", "loss_scaling": 128},
        {"precision": "16.16", "half_type": "float16", "loss_scaling": "dynamic"},
        {"precision": "16.16"},
        {"precision": "32.32"},
    ):
        assert resolve(fine, "none", environ={}).warnings == ()


def test_a_warm_up_as_long_as_the_run_is_warned_of():
    (warning,) = resolve({"num-epochs": 1, "warmup-epochs": 1}, "default", environ={}).warnings
    assert "warm-up is not over" in warning
    assert resolve({"warmup-epochs": 2}, "default", environ={}).warnings == (), "the number of epochs is still open"


def test_a_target_without_validation_is_warned_of():
    (warning,) = resolve({"target-accuracy": 0.9, "no-validation": True}, "none", environ={}).warnings
    assert "target_accuracy" in warning


@pytest.mark.parametrize(
    "options",
    [
        {"stochastic_rounding": "on"},
        {"stochastic_rounding": "on", "precision": "16.32"},
        {"half_type": "bfloat16", "precision": "32.32"},
        {"loss_scaling_params": '{"initial": 4}', "loss_scaling": 4},
        {"strict_pipeline": "on"},
    ],
)
def test_options_without_effect_are_noted(options):
    resolved = resolve(options, "none", environ={})
    assert resolved.warnings == ()
    (note,) = resolved.notes
    assert next(iter(options)) in note


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stochastic_rounding": "on", "precision": "16.16"},
        {"stochastic_rounding": "off"},
        {"loss_scaling": "dynamic"},
    ],
)
def test_nothing_is_noted_of_options_with_effect(options):
    assert resolve(options, "none", environ={}).notes == ()
