"""`--help`, `--help-all` and `--help GROUP`: what fits a screen, what is complete, and what is left out."""

import pytest

from headrace.cli.help import HelpRequest, find_request
from headrace.cli.help_screens import SCREENS
from headrace.cli.main import main
from headrace.cli.options import read_arguments
from headrace.config.translations import known_options
from headrace.core.errors import ConfigError
from headrace.run.restored import _FIXED


@pytest.fixture
def shown(monkeypatch, capsys):
    """Return a function that runs a command on a terminal of 80 columns and returns its lines."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(line: str) -> list[str]:
        with pytest.raises(SystemExit) as stop:
            main(line.split())
        assert stop.value.code == 0
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("name", SCREENS)
def test_the_first_screen_fits(shown, name):
    lines = shown(f"{name} --help")
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80
    assert lines == shown(f"{name} -h")
    assert not any("ipu" in line.lower() for line in lines)
    assert any("headrace " in line for line in lines[2:]), "no example"


def test_train_shows_what_people_look_for(shown):
    text = "\n".join(shown("train --help"))
    for flag in ("--epochs", "--batch-size", "--lr ", "--optimizer", "--weight-decay", "--device", "--dataset-path"):
        assert f"\n  {flag}" in text


def test_all_options_have_their_help_and_default(shown):
    lines = shown("train --help-all")
    text = " ".join(" ".join(lines).split())
    for option in known_options().values():
        assert option.flag[2:] in text
        assert " ".join(option.help.split()) in text
    assert max(map(len, lines)) <= 80
    assert "--seed N" in text
    assert '[{"initial_learning_rate": 0.0001}]' in text


def test_commands_have_their_own_options(shown):
    everything = {name: shown(f"{name} --help-all") for name in ("train", "resume", "validate", "plan", "bench")}
    assert len({tuple(lines[4:]) for lines in everything.values()}) == 5
    starts = {name: {line.split()[0] for line in lines if line.strip()} for name, lines in everything.items()}
    assert "--learning-rate" in starts["train"] & starts["resume"] & starts["plan"]
    assert "--learning-rate" not in starts["validate"]
    assert "--model-name" not in starts["resume"] | starts["validate"]
    assert "--log-dir" not in starts["bench"] | starts["plan"]


def test_resume_leaves_out_what_cannot_change():
    screen = SCREENS["resume"]
    hidden = {name for name, o in known_options().items() if o.section not in screen.groups} | screen.without
    assert set(_FIXED) <= hidden


def test_a_group_and_an_option(shown, capsys):
    group = shown("train --help learning")
    assert group[0].startswith("learning: ")
    assert any("--label-smoothing" in line for line in group)
    assert not any("--dataset-path" in line for line in group)
    option = shown("train --help lr")
    assert option[0].startswith("  --learning-rate X")
    assert shown("train --help=--learning_rate") == option
    assert main(["train", "--help", "lerning"]) == 2
    assert "Did you mean learning?" in capsys.readouterr().err


def test_where_help_is_asked_for():
    assert find_request(["--seed", "1"]) is None
    assert find_request(["--", "--help"]) is None
    assert find_request(["runs/a", "-h"]) == HelpRequest()
    assert find_request(["-h", "--seed", "1"]) == HelpRequest()
    assert find_request(["--help_all"]) == HelpRequest(everything=True)


@pytest.mark.reference
def test_options_without_effect_are_named(capsys):
    read_arguments(["--learning-rate", "0.1", "--device", "cpu"], "headrace validate")
    assert capsys.readouterr().err == "note: no effect on headrace validate: --learning-rate\n"
    read_arguments(["--abs-learning-rate", "0.1"], "headrace validate")
    read_arguments(["--learning-rate", "0.1"], "headrace resume")
    assert capsys.readouterr().err == ""


def test_every_row_is_an_option_of_its_command():
    from headrace.cli.help import has_effect
    from headrace.config.field import option_names

    known = option_names(known_options())
    for screen in SCREENS.values():
        assert "reference" not in screen.rows
        for row in (row for rows in screen.rows.values() for row in rows):
            option = known_options()[known[row.split()[0].replace("-", "_")].name]
            assert has_effect(screen, option), row


def test_a_mistyped_recipe_is_guessed_without_the_list():
    with pytest.raises(ConfigError) as caught:
        main_error(["train", "--config", "cifar10_resnet2"])
    assert str(caught.value) == (
        "There is no configuration cifar10_resnet2. Did you mean cifar10_resnet20? `headrace configs` lists them."
    )


def main_error(argv: list[str]) -> None:
    from headrace.cli.options import parse

    parse(argv[1:], "headrace train")
