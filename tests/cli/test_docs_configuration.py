"""docs/reference/configuration.md: its tables are those of the schema, and its commands print what it says."""

import re
import shlex
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import main
from headrace.cli.options_text import options_markdown, params_markdown
from headrace.config.schema import all_options

PAGE = Path(headrace.__file__).parents[2] / "docs" / "reference" / "configuration.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="not run from the repository")


def test_the_tables_are_up_to_date():
    text = PAGE.read_text()
    remedy = "put the output of `headrace configs options` into docs/reference/configuration.md"
    assert options_markdown() in text, remedy
    assert params_markdown() in text, remedy
    assert f"{len(all_options())} options" in text


@pytest.mark.reference
def test_the_commands_print_what_the_page_says(tmp_path, monkeypatch, capsys):
    text = PAGE.read_text()
    for variable in ("DATASETS_DIR", "DATA_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("mine.yml").write_text(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])
    examples = re.findall(r"```\n\$ (headrace [^\n]*)\n(.*?)```", text, re.DOTALL)
    assert len(examples) >= 5
    for command, output in examples:
        main(shlex.split(command)[1:])
        captured = capsys.readouterr()
        assert captured.out + captured.err == output, command
