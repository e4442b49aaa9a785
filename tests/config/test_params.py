"""Keys inside mappings: defaults, required ones, unknown ones."""

import pytest

from headrace.config.load import config_from
from headrace.config.params import TABLES, complete, complete_lr, known_keys
from headrace.config.schema import Learning, all_options
from headrace.core.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "name", "given", "result"),
    [
        ("optimizer", "sgd", {"momentum": 0}, {"momentum": 0.0, "nesterov": False}),
        ("optimizer", "adamw", {}, {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}),
        (
            "optimizer",
            "rmsprop",
            {"momentum": 0.9, "epsilon": 1e-3, "base_decay_exponent": -14},
            {"momentum": 0.9, "epsilon": 1e-3, "initial_accumulator": 0.0, "base_decay_exponent": -14.0},
        ),
        (
            "optimizer",
            "rmsprop",
            {"momentum": 0.9, "epsilon": 1e-3, "decay": 0.95, "initial_accumulator": 1},
            {"momentum": 0.9, "epsilon": 1e-3, "initial_accumulator": 1.0, "decay": 0.95},
        ),
        (
            "optimizer",
            "lars",
            {"eeta": "1e-3", "momentum": 0.9, "epsilon": 0, "weight_decay": 2.5e-6},
            {"momentum": 0.9, "weight_decay": 2.5e-6, "eeta": 0.001, "epsilon": 0.0},
        ),
        ("lr_schedule", "const", {"initial_learning_rate": 0.1}, {"initial_learning_rate": 0.1}),
        (
            "lr_schedule",
            "stepped",
            {"boundaries": [1, 2], "values": [3, 2, 1]},
            {"boundaries": [1, 2], "values": [3, 2, 1]},
        ),
        (
            "lr_schedule",
            "exponential",
            {"initial_learning_rate": 0.1},
            {"initial_learning_rate": 0.1, "decay_rate": 0.97, "epochs_per_drop": 2.4},
        ),
        (
            "lr_warmup",
            None,
            {"warmup_mode": "mask", "warmup_epochs": 5},
            {"warmup_mode": "mask", "warmup_epochs": 5.0, "from_zero": False},
        ),
        (
            "loss_scaling",
            "dynamic",
            {"growth_interval": 100},
            {
                "initial": 32768.0,
                "growth_interval": 100,
                "growth_factor": 2.0,
                "backoff_factor": 0.5,
                "max": 16777216.0,
            },
        ),
        ("norm_layer", None, {"name": "group_norm", "num_groups": 8}, {"name": "group_norm", "num_groups": 8}),
        ("norm_layer", None, {"name": "batch_norm"}, {"name": "batch_norm", "momentum": None}),
        ("norm_layer", None, {"name": "group_norm"}, {"name": "group_norm"}),
    ],
)
def test_complete(kind, name, given, result):
    assert complete(kind, name, given) == result


@pytest.mark.parametrize(
    ("kind", "name", "given", "told"),
    [
        ("optimizer", "sgd", {}, ["lacks momentum", "found no keys", "sgd takes: momentum, nesterov (optional)"]),
        ("optimizer", "lars", {"momentum": 0.9}, ["lacks weight_decay, eeta, epsilon", "found momentum"]),
        ("optimizer", "sgd", {"momentum": 0.9, "nestrov": True}, ["'nestrov'", "Did you mean nesterov?"]),
        (
            "optimizer",
            "rmsprop",
            {"momentum": 0, "epsilon": 1e-3},
            ["none of base_decay_exponent, decay", "exactly one"],
        ),
        (
            "optimizer",
            "rmsprop",
            {"momentum": 0, "epsilon": 1e-3, "decay": 0.9, "base_decay_exponent": -3},
            ["both base_decay_exponent and decay"],
        ),
        (
            "optimizer",
            "rmsprop",
            {"momentum": 0, "epsilon": 1e-3, "decay": 0.9, "initial_accumulator": -1},
            ["initial_accumulator is -1", "0 or more"],
        ),
        ("optimizer", "sgd", {"momentum": 1}, ["momentum is 1", "less than 1"]),
        ("optimizer", "sgd", {"momentum": "high"}, ["momentum is 'high'", "not a number"]),
        ("optimizer", "sgd", {"momentum": None}, ["momentum is None"]),
        ("lr_schedule", "cosine", {}, ["none of initial_learning_rate, absolute_learning_rate"]),
        (
            "lr_schedule",
            "stepped",
            {"boundaries": [1, 2], "values": [1, 2]},
            ["2 values for 2 boundaries", "Give 3 values"],
        ),
        ("lr_schedule", "stepped", {"boundaries": [2, 1], "values": [1, 2, 3]}, ["boundaries must rise"]),
        ("lr_schedule", "stepped", {"boundaries": "x", "values": [1, 2]}, ["not a list of numbers"]),
        ("lr_schedule", "polynomial", {"initial_learning_rate": 1}, ["lacks end_learning_rate_ratio, power"]),
        ("lr_schedule", "cosine", {"initial_learning_rate": 1, "epochs_to_total_decay": 0}, ["must be more than 0"]),
        ("lr_schedule", "square", {}, ["'square'"]),
        ("lr_warmup", None, {"warmup_epochs": 5}, ["no warmup_mode", "shift, mask"]),
        ("lr_warmup", None, {"warmup_mode": "shfit", "warmup_epochs": 5}, ["Did you mean shift?"]),
        ("lr_warmup", None, {"warmup_mode": "shift"}, ["lacks warmup_epochs"]),
        ("norm_layer", None, {"name": "group_norm", "num_groups": 2, "channels_per_group": 4}, ["both num_groups and"]),
        ("norm_layer", None, {"name": "group_norm", "num_groups": 0}, ["must be 1 or more"]),
        ("norm_layer", None, {"name": "batch_nrm"}, ["Did you mean batch_norm?"]),
        ("norm_layer", None, {}, ["no name"]),
        ("loss_scaling", "dynamic", {"backoff_factor": 2}, ["between 0 and 1"]),
    ],
)
def test_wrong_keys_are_refused_with_found_and_expected(kind, name, given, told):
    with pytest.raises(ConfigError) as caught:
        complete(kind, name, given)
    for part in told:
        assert part in str(caught.value)


def test_there_is_a_row_for_every_choice():
    for option, kind in (("optimizer", "optimizer"), ("lr_schedule", "lr_schedule")):
        assert set(all_options()[option].choices) == set(TABLES[kind].rows)
    assert known_keys("optimizer", "sgd") == ("momentum", "nesterov")
    assert known_keys("optimizer", "unheard") == ()


@pytest.mark.parametrize(
    ("warmup", "given", "num_epochs", "decay_epochs"),
    [
        (None, {}, 20, 20),
        ({"warmup_mode": "shift", "warmup_epochs": 5}, {}, 20, 15),
        ({"warmup_mode": "mask", "warmup_epochs": 5}, {}, 20, 20),
        ({"warmup_mode": "shift", "warmup_epochs": 5}, {"epochs_to_total_decay": 12}, 20, 12),
        ({"warmup_mode": "shift", "warmup_epochs": 5}, {}, 3, 3),
    ],
)
def test_a_curve_decays_over_what_the_warm_up_leaves(warmup, given, num_epochs, decay_epochs):
    params = {"initial_learning_rate": 0.1, **given}
    learning = Learning(lr_schedule="cosine", lr_schedule_params=params, lr_warmup_params=warmup)
    curve, _ = complete_lr(learning, num_epochs)
    assert curve == {"initial_learning_rate": 0.1, "epochs_to_total_decay": decay_epochs}


def test_the_configuration_keeps_what_was_given():
    config = config_from({"optimizer": "adamw", "optimizer_params": {"beta1": 0.8}})
    assert config.learning.optimizer_params == {"beta1": 0.8}
