"""Hostile options and YAML files: `headrace plan` accepts them or says what is wrong."""

import os

import pytest

from tests.fuzz.command_line import BASE, START, findings, outcome

CASES = int(os.environ.get("HEADRACE_FUZZ_COMMANDS", "200"))


def test_good_ones_are_accepted(tmp_path):
    (tmp_path / "a.yml").write_text(BASE)
    assert outcome([*START]) == "accepted"
    assert outcome(["--config-path", str(tmp_path / "a.yml"), "--config", "a"]) == "accepted"


@pytest.mark.parametrize("value", ['{"name": [1]}', '{"name": {}}', '{"name": 1}', "[1]", '{"": null}'])
def test_a_norm_that_is_no_name_is_refused(value):
    assert outcome([*START, "--norm-layer", value]) == "error"


def test_hostile_options_are_errors_or_accepted(tmp_path):
    counts, found = findings(0, CASES, tmp_path)
    assert not found
    assert counts["error"] > counts["accepted"] > 0
