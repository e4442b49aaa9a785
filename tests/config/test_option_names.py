"""Names as people spell them."""

import pytest

from headrace.config.field import Option, OptionName, find_option, option_names
from headrace.config.other_names import OTHER_NAMES
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


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_the_names_of_other_trainers_lead_to_ours(name: str):
    meant = OTHER_NAMES[name]
    if name in KNOWN:  # it has become a name here: that one counts
        return
    if meant.same:
        assert find_option(name, KNOWN, dashes="--").name == meant.option
        return
    with pytest.raises(ConfigError) as caught:
        find_option(name.replace("_", "-"), KNOWN, dashes="--")
    assert caught.value.problem == f"There is no option --{name.replace('_', '-')}."
    assert caught.value.remedy == meant.remedy("--")
    if meant.option:
        assert meant.option in all_options()
        assert f"--{meant.option.replace('_', '-')}" in caught.value.remedy
    else:
        assert len(caught.value.remedy.split()) > 4


def test_an_option_is_named_in_a_file_as_it_is_written_there():
    with pytest.raises(ConfigError, match=r"f.yml:3: there is no option drop_path.*Did you mean block_survival_prob: "):
        find_option("drop_path", KNOWN, place="f.yml:3: ")


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError) as caught:
        find_option("micro-bach-size", KNOWN, dashes="--")
    assert caught.value.problem == "There is no option --micro-bach-size."
    assert caught.value.remedy.startswith("Did you mean --micro-batch-size?")
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
