"""The command line as words: which are options, which values they take, and what is left."""

import pytest

from headrace.config.command_line import build_parser, take_options
from headrace.config.load import resolve
from headrace.core.errors import ConfigError


def take(*argv: str) -> tuple[dict, list[str]]:
    parser = build_parser("headrace test", lambda parser: parser.add_argument("--json-path"))
    return take_options(argv, parser)


def test_an_argument_of_the_command_hides_an_option_of_that_name():
    parser = build_parser("headrace test", lambda parser: parser.add_argument("--output"))
    assert take_options(["--output", "x", "--seed", "1"], parser) == ({"seed": "1"}, ["--output", "x"])


@pytest.mark.parametrize(
    ("argv", "taken"),
    [
        (["--micro-batch-size", "8"], {"micro_batch_size": "8"}),
        (["--micro_batch_size=8"], {"micro_batch_size": "8"}),
        (["--epochs", "8", "--num-epochs", "9"], {"num_epochs": "9"}),
        (["--gradient-accumulation", "8"], {"gradient_accumulation_count": "8"}),
        (["--weight-updates-per-epoch", "-1"], {"weight_updates_per_epoch": "-1"}),
        (["--validation"], {"validation": True}),
        (["--validation", "False"], {"validation": "False"}),
        (["--validation=off"], {"validation": "off"}),
        (["--no-validation"], {"no_validation": True}),
        (["--no-validation", "False"], {"no_validation": "False"}),
        (["--no-validation", "--validation"], {"validation": True}),
        (["--validation", "--no-validation"], {"no_validation": True}),
        (["--no-dataset-cache"], {"no_dataset_cache": True}),
        (["--dataset-cache", "device"], {"dataset_cache": "device"}),
        (
            ["--weight-decay-exclude", "gamma", "beta", "--seed", "1"],
            {"weight_decay_exclude": ["gamma", "beta"], "seed": "1"},
        ),
        (["--weight-decay-exclude"], {"weight_decay_exclude": []}),
        (["--optimizer-params", '{"momentum": 0.9}'], {"optimizer_params": '{"momentum": 0.9}'}),
    ],
)
def test_options_that_are_taken(argv, taken):
    assert take(*argv) == (taken, [])


def test_what_is_left_goes_to_the_command():
    taken, left = take("runs/a", "--json_path", "x", "--shuffle", "runs/b", "-v", "--seed", "3", "--", "--seed", "4")
    assert taken == {"shuffle": True, "seed": "3"}
    assert left == ["runs/a", "--json-path", "x", "runs/b", "-v", "--", "--seed", "4"]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--micro-bach-size", "8"], "Did you mean --micro-batch-size?"),
        (["--gradient"], "--gradient-accumulation-count, --gradient-accumulation-dtype, --gradient-clipping"),
        (["--seed"], "--seed has no value"),
        (["--seed", "--shuffle"], "--seed has no value"),
    ],
)
def test_words_that_are_wrong(argv, told):
    with pytest.raises(ConfigError) as caught:
        take(*argv)
    assert told in str(caught.value)


def test_the_words_become_values():
    taken, _ = take(
        "--no-validation",
        "--weight-decay-exclude",
        "a",
        "b",
        "--optimizer-params",
        '{"momentum": 0.5}',
        "--no-dataset-c",
    )
    config = resolve(taken, environ={}).config
    assert config.validation.validation is False
    assert config.learning.weight_decay_exclude == ("a", "b")
    assert config.learning.optimizer_params == {"momentum": 0.5}
    assert config.data.dataset_cache == "none"


def test_the_parser_refuses_in_our_words():
    with pytest.raises(ConfigError, match="Unrecognized arguments"):
        build_parser("headrace test").parse_args(["a"])
