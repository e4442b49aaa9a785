"""docs/planning.md: its command prints what it says, and its code runs."""

import re
import shlex
from pathlib import Path

from headrace.cli.plan import main

TEXT = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()


def test_the_command_prints_what_the_page_shows(capsys):
    shown = re.search(r"```\n\$ headrace plan (.*?[^\\])\n(.*?)```", TEXT, re.DOTALL)
    assert shown is not None
    assert main(shlex.split(shown[1].replace("\\\n", " "))) == 0
    assert capsys.readouterr().out == shown[2]


def test_the_code_runs(capsys):
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert code is not None
    exec(code[1], {})
    steps_per_call, total_bytes, *warnings = capsys.readouterr().out.split()
    assert (int(steps_per_call), warnings) == (50_000 // 64, ["()"])
    assert int(total_bytes) > 60_000 * 32 * 32 * 3
