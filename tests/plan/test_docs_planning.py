"""docs/explanation/planning.md: its command prints what it says, and its code runs."""

import re
import shlex
from pathlib import Path

import pytest

from headrace.cli.plan import main

TEXT = (Path(__file__).parents[2] / "docs" / "explanation" / "planning.md").read_text()


EXAMPLES = re.findall(r"```\n\$ headrace plan (.*?[^\\])\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.reference
@pytest.mark.parametrize(("command", "shown"), EXAMPLES)
def test_the_command_prints_what_the_page_shows(command, shown, capsys):
    assert main(shlex.split(command.replace("\\\n", " "))) == 0
    # Where the page leaves something out it has a line of three dots.
    parts = [re.escape(part) for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE)]
    assert re.fullmatch("(?:.*\n)*".join(parts), capsys.readouterr().out)


def test_there_is_an_example_with_stages_and_one_without():
    assert ["--pipeline-splits" in command for command, _ in EXAMPLES] == [False, False, True]


def test_the_code_runs(capsys):
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert code is not None
    exec(code[1], {})
    steps_per_call, total_bytes, *warnings = capsys.readouterr().out.split()
    assert (int(steps_per_call), warnings) == (50_000 // 64, ["()"])
    assert int(total_bytes) > 60_000 * 32 * 32 * 3
