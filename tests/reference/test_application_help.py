"""`train.py --help`: the names, meanings and defaults of the application that the command line is written for."""

import re
from typing import Any

import pytest

from headrace.cli.main import run_script
from headrace.config.field import find_option, option_names
from headrace.config.translations import known_options
from headrace.rows.values import format_value
from headrace_reference.applications import detect_application
from tests.reference.test_tables_defaults import ELSEWHERE, ROWS


@pytest.fixture
def shown(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")

    def run(script: str, line: str) -> str:
        with pytest.raises(SystemExit):
            run_script(script, line.split())
        return capsys.readouterr().out

    return run


def defaults_of(text: str) -> dict[str, str]:
    """Return {option without dashes: the last brackets of its text} of a help."""
    found = {}
    for part in re.split(r"\n  --", text)[1:]:
        name = re.match(r"(?:\[no-\])?([\w-]+)", part)
        values = re.findall(r"\[([^\]]*(?:\{.*?\})?[^\]]*)\]\s*(?:\n\n|$)", part + "\n\n")
        if name and values:
            found.setdefault(name[1].replace("-", "_"), " ".join(values[-1].split()))
    return found


SCRIPTS_OF = {"000": "", "001": "--dataset imagenet --model resnet"}


@pytest.mark.parametrize("document", SCRIPTS_OF)
def test_the_defaults_are_those_that_the_document_states(document: str, shown: Any) -> None:
    printed = defaults_of(shown("train", f"{SCRIPTS_OF[document]} --help"))
    count = 0
    for stated, row in ROWS:
        name = find_option(row["option"], option_names(known_options())).name
        if stated != document or "given" in row or name in ELSEWHERE or name in ("model_name", "dataset"):
            continue
        value = tuple(row["value"]) if isinstance(row["value"], list) else row["value"]
        value = "stepped" if value == "drops" else value  # its own name for these
        if document == "001" and name == "micro_batch_size":
            name = "batch_size"
        assert printed[name] in (format_value(value), str(value)), name
        count += 1
    assert count > 12


def test_the_network_decides_about_defaults_and_application(shown):
    assert "toy_model on cifar10, 1 epoch, micro batches of 1, precision 16.16" in " ".join(
        shown("train", "-h").split()
    )
    text = shown("train", "--model efficientnet --help")
    assert text.startswith("usage: headrace train --application tf1 [options]")
    assert "efficientnet_b0, 350 epochs, micro batches of 4" in " ".join(text.split())
    printed, second = defaults_of(text), defaults_of(shown("train", "--help"))
    assert (printed["label_smoothing"], printed["stable_norm"], printed["rmsprop_base_decay_exp"]) == (
        "0.1",
        "on",
        "-14",
    )
    assert (second["weight_decay"], printed["weight_decay"]) == ("1", "1e-05")
    assert (second["stochastic_rounding"], printed["stochastic_rounding"]) == ("off", "on")
    assert "shards" in printed
    assert "shards" not in second


def test_a_family_is_a_network_of_the_first_application_alone():
    assert [detect_application(["--model", name]) for name in ("resnet", "cifar_resnet8")] == ["tf1", "tf2"]
    assert detect_application(["--model-name=efficientnet"]) == "tf1"


def test_our_own_help_has_our_defaults(capsys, monkeypatch):
    from headrace.cli.main import main

    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    text = capsys.readouterr().out
    assert "embedded" not in text
    assert defaults_of(text)["weight_decay"] == "0"
