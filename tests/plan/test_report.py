"""The plan as people see it: the text, and the command that prints it."""

import json

import pytest

from headrace.cli.plan import main
from headrace.core.errors import ConfigError
from headrace.plan.report import PlanLine, Section, format_sections

RUN = ["--dataset", "cifar10", "--micro-batch-size", "8", "--gradient-accumulation-count", "8", "--num-epochs", "6"]


def line_of(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.startswith(f"  {name} "))


def test_columns_are_aligned():
    text = format_sections(
        [Section("a", (PlanLine("x", "1", "one"), PlanLine("longer", "1,000"))), Section("b", (PlanLine("y", "20"),))]
    )
    assert text.splitlines() == ["a", "  x           1  one", "  longer  1,000", "b", "  y          20"]


def test_the_command_prints_the_arithmetic(capsys):
    assert main([*RUN, "--logs-per-epoch", "10", "--lr-schedule-params", '{"initial_learning_rate": 0.001}']) == 0
    text = capsys.readouterr().out
    assert line_of(text, "global batch")[2] == "64"
    assert line_of(text, "steps per epoch")[3] == "781"
    assert line_of(text, "dropped per epoch")[3] == "16"
    assert line_of(text, "total steps")[2] == "4,686"
    assert line_of(text, "calls")[1:8] == ["60", "or", "more,", "of", "at", "most", "79"]
    assert line_of(text, "log")[1:] == ["60", "x", "about", "every", "78.1", "steps"]
    assert line_of(text, "checkpoint")[1:9] == ["6", "x", "every", "781", "steps,", "or", "after", "3"]
    assert line_of(text, "batches")[1:6] == ["1,250", "of", "8", "x", "1,"]
    assert "warning" not in text


def test_the_command_says_what_is_off_and_what_comes_at_the_end(capsys):
    assert main([*RUN, "--ckpts-per-epoch", "1"]) == 0
    assert line_of(capsys.readouterr().out, "checkpoint")[1:] == ["6", "x", "every", "781", "steps"]
    assert main([*RUN, "--checkpoints", "False", "--validations-per-epoch", "0"]) == 0
    text = capsys.readouterr().out
    assert line_of(text, "checkpoint") == ["checkpoint", "off"]
    assert line_of(text, "validation") == ["validation", "1", "x", "at", "the", "end"]


def test_a_run_that_only_validates_is_drawn(capsys):
    assert main([*RUN, "--training", "False"]) == 0
    text = capsys.readouterr().out
    assert "the run does not train" in text
    assert "learning rate" not in text


def test_json_holds_the_same_numbers(capsys):
    learning = [
        "--lr-schedule",
        "const",
        "--lr-schedule-params",
        '{"initial_learning_rate": 0.001}',
        "--lr-warmup-params",
        "none",
    ]
    assert main([*RUN, *learning, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["model"] == "cifar_resnet8"
    assert record["steps"]["total_steps"] == 4686
    assert record["learning_rate"] == {str(step): pytest.approx(0.064) for step in (0, 1171, 2342, 3513, 4685)}


@pytest.mark.reference
def test_the_command_refuses_what_the_run_would_refuse():
    with pytest.raises(ConfigError, match="5 epochs"):
        main([*RUN, "--num-epochs", "5", "--logs-per-epoch", "0.5", "--application", "tf2"])
