"""Readers and limits: what counts as which value, and what is refused."""

import math
import shlex
from pathlib import Path

import numpy as np
import pytest

from headrace.config.field import COMMAND_LINE, Origin
from headrace.config.schema import all_options
from headrace.core.errors import ConfigError
from headrace.rows import values
from headrace.rows.optimizers import OPTIMIZERS


@pytest.mark.parametrize("word", ["True", "true", "on", "ON", "yes", "1", True, 1])
def test_words_for_true(word):
    assert values.read_bool(word) is True


@pytest.mark.parametrize("word", ["False", "off", "no", "0", False, 0])
def test_words_for_false(word):
    assert values.read_bool(word) is False


@pytest.mark.parametrize(
    ("read", "raw"),
    [
        (values.read_bool, "maybe"),
        (values.read_bool, 2),
        (values.read_bool, None),
        (values.read_int, "1.5"),
        (values.read_int, True),
        (values.read_int, [1]),
        (values.read_int, "x"),
        (values.read_float, "nan"),
        (values.read_float, math.inf),
        (values.read_float, True),
        (values.read_float, {}),
        (values.read_fraction, "1/0"),
        (values.read_fraction, "1/2/3"),
        (values.read_text, ["a"]),
        (values.read_text, True),
        (values.read_mapping, "[1]"),
        (values.read_mapping, "{'a': 1}"),
        (values.read_mapping, {"a": math.nan}),
        (values.read_bytes_text, "2 lots"),
        (values.read_loss_scale, "dynamite"),
    ],
)
def test_values_that_are_none(read, raw):
    with pytest.raises((ValueError, TypeError)):
        read(raw)


@pytest.mark.parametrize(
    ("read", "raw", "value"),
    [
        (values.read_int, "32", 32),
        (values.read_int, "1e6", 1000000),
        (values.read_int, str(2**70), 2**70),
        (values.read_float, "1e-4", 0.0001),
        (values.read_fraction, "1/3", 1 / 3),
        (values.read_fraction, "0.3333333333333333333", 1 / 3),
        (values.read_fraction, 0.3333333, 1 / 3),
        (values.read_fraction, 0.333, 0.333),
        (values.read_fraction, "2/3", 2 / 3),
        (values.read_fraction, "10", 10.0),
        (values.read_text, 16.16, "16.16"),
        (values.read_words, ["a", "b"], ("a", "b")),
        (values.read_words, "a", ("a",)),
        (values.read_mapping, '{"momentum": 0.9}', {"momentum": 0.9}),
        (values.read_loss_scale, "Dynamic", "dynamic"),
        (values.read_loss_scale, "128", 128.0),
    ],
)
def test_values_that_are_read(read, raw, value):
    got = read(raw)
    assert got == value
    assert type(got) is type(value)


def test_every_default_is_a_value_of_its_option():
    for option in all_options().values():
        assert option.read(option.default) == option.default, option.name


def test_choices_are_found_whatever_their_case_and_dashes():
    options = all_options()
    assert options["dataset"].read("CIFAR-10") == "cifar10"
    assert options["dataset"].read("fashion-mnist") == "fashion_mnist"
    assert options["train_augmentation"].read("flip_crop") == "flip-crop"


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("num_epochs", np.int64(7), 7),
        ("learning_rate", np.float32(0.5), 0.5),
        ("learning_rate", np.array(0.25), 0.25),
        ("class_weights", np.array([1.0, 2.0], np.float32), (1.0, 2.0)),
        ("class_weights", [np.float32(1.0), 2], (1.0, 2.0)),
        ("validation", np.bool_(False), False),
        ("dataset_path", Path("photos"), "photos"),
    ],
)
def test_numbers_of_numpy_and_paths_are_values(name: str, written: object, value: object):
    found = all_options()[name].read(written)
    assert found == value
    assert type(found) is type(value)


def test_a_refusal_says_where_what_and_the_help_sentence():
    option = all_options()["optimizer"]
    with pytest.raises(ConfigError) as caught:
        option.read("rmspop", Origin(kind="file", where="mine.yml:3"))
    assert caught.value.problem == "mine.yml:3: optimizer is 'rmspop': not one of the choices."
    assert caught.value.rule == f"optimizer: {option.help}"
    assert caught.value.remedy == f"Did you mean rmsprop? Possible: {', '.join(OPTIMIZERS)}."


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("micro_batch_size", 0),
        ("num_replicas", -1),
        ("num_epochs", 0),
        ("gradient_accumulation_count", 0),
        ("global_batch_size", 0),
        ("weight_updates_per_epoch", 0),
        ("weight_updates_per_epoch", -2),
        ("logs_per_epoch", -1),
        ("ckpts_per_epoch", "-1/2"),
        ("label_smoothing", 1),
        ("label_smoothing", -0.1),
        ("ema_decay", 1.0),
        ("prefetch_depth", 0),
        ("prefetch_depth", 256),
        ("weight_decay_exclude", ["ok", "(unclosed"]),
        ("dataset_device_budget", "2 lots"),
        ("loss_scaling", -1),
        ("seed", -2),
        ("seed", 2**32),
        ("seed", None),
        ("target_accuracy", 75.9),
        ("bn_momentum", 1.5),
        ("optimizer_params", "{momentum: 1}"),
        ("max_ckpts_to_keep", 0),
        ("lr_schedule", "square"),
    ],
)
def test_limits_of_single_options(name, bad):
    with pytest.raises(ConfigError) as caught:
        all_options()[name].read(bad)
    assert name in caught.value.problem
    assert all_options()[name].help in caught.value.rule


def test_a_malformed_precision_is_told_from_an_unsupported_one():
    precision = all_options()["precision"]
    with pytest.raises(ConfigError, match="not a precision"):
        precision.read("foo")
    with pytest.raises(ConfigError, match=r"well formed, but only 16\.16, 16\.32, 32\.32"):
        precision.read("32.16")


def test_unset_is_for_options_that_can_be():
    options = all_options()
    assert options["global_batch_size"].read("none") is None
    assert options["lr_warmup_params"].read("null") is None
    assert options["compilation_cache_dir"].read("none") == "none"  # a word of its own: no cache
    assert options["compilation_cache_dir"].read(None) is None


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("momentum=0.9,nesterov=true", {"momentum": 0.9, "nesterov": True}),
        ("boundaries=2:4, values=0.1:0.01:0.001", {"boundaries": [2, 4], "values": [0.1, 0.01, 0.001]}),
        ("name=group_norm,num_groups=8", {"name": "group_norm", "num_groups": 8}),
        ("^(?=conv1)=0.1,backbone=1e-2", {"^(?=conv1)": 0.1, "backbone": 0.01}),
        ('{"momentum": 0.9}', {"momentum": 0.9}),
    ],
)
def test_mappings_are_written_as_pairs_or_json(written, value):
    assert values.MAPPING.read(written) == value


@pytest.mark.parametrize("written", ["momentum", "momentum=", "=0.9", "a=1,a=2", "a=1,,b=2", "[1]", ""])
def test_what_is_no_mapping_is_refused(written):
    with pytest.raises(ValueError):  # noqa: PT011 (any text)
        values.MAPPING.read(written)


def test_a_path_given_as_a_name_is_told_its_option(tmp_path):
    dataset = all_options()["dataset"]
    for raw in (str(tmp_path), "photos/", "no such place/x"):
        with pytest.raises(ConfigError) as caught:
            dataset.read(raw, COMMAND_LINE)
        assert shlex.split(caught.value.remedy.rstrip("."))[-2:] == ["--dataset-path", raw]
    with pytest.raises(ConfigError) as caught:
        dataset.read("cifar1")
    assert "cifar10" in caught.value.remedy
    assert "dataset_path" not in caught.value.remedy
