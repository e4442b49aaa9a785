"""Names as people spell them."""

import pytest

from headrace.config.field import Option, OptionName, find_option, option_names
from headrace.config.schema import all_options
from headrace.core.errors import ConfigError

KNOWN = option_names(all_options(), ["config", "config-path"])


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("micro-batch-size", "micro_batch_size"),
        ("micro_batch_size", "micro_batch_size"),
        ("Micro-Batch_size", "micro_batch_size"),
        ("batch-size", "batch_size"),
        ("model", "model_name"),
        ("gradient-accumulation", "gradient_accumulation_count"),
        ("gradient-accumulation-d", "gradient_accumulation_dtype"),
        ("validation", "validation"),
        ("seed", "seed"),
        ("epoch", "num_epochs"),
        ("eight-bit", "eight_bit_transfer"),
        ("optimiser", "optimizer"),
        ("config_path", "config_path"),
    ],
)
def test_spellings_that_are_found(written, name):
    assert find_option(written, KNOWN) == OptionName(name=name)


def test_no_forms():
    assert find_option("no-validation", KNOWN) == OptionName(name="validation", negated=True)
    assert find_option("no-dataset-cache", KNOWN) == OptionName(name="dataset_cache", negated=True)
    assert find_option("no-stoch", KNOWN) == OptionName(name="stochastic_rounding", negated=True)
    with pytest.raises(ConfigError, match="no option"):
        find_option("no-seed", KNOWN)


def test_an_ambiguous_prefix_is_refused_with_the_candidates():
    with pytest.raises(ConfigError) as caught:
        find_option("gradient-", KNOWN, dashes="--")
    for candidate in ("--gradient-accumulation-count", "--gradient-accumulation-dtype", "--gradient-clipping"):
        assert candidate in caught.value.remedy


def test_a_name_of_keras_is_known_as_a_whole():
    assert find_option("steps-per-epoch", KNOWN).name == "weight_updates_per_epoch"
    with pytest.raises(ConfigError, match="There is no option --steps"):
        find_option("steps", KNOWN, dashes="--")


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError) as caught:
        find_option("micro-bach-size", KNOWN, dashes="--")
    assert caught.value.problem == "There is no option --micro-bach-size."
    assert caught.value.remedy == "Did you mean --micro-batch-size?"
    with pytest.raises(ConfigError, match=r"mine\.yml:7: there is no option xyzzy"):
        find_option("xyzzy", KNOWN, place="mine.yml:7: ")
    with pytest.raises(ConfigError):
        find_option("", KNOWN)


def test_no_spelling_belongs_to_two_options():
    seen: dict[str, str] = {}
    for name, option in all_options().items():
        for spelling in (name, *option.aliases):
            assert seen.setdefault(spelling, name) == name


def test_every_option_has_a_sentence_of_help():
    for option in all_options().values():
        assert isinstance(option, Option)
        assert option.help[0].isupper(), option.name
        assert option.help.endswith("."), option.name
