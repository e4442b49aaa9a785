"""docs/seed_options.md: its tables are those of the code, and its commands print what it says."""

import re
import shlex
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import main
from headrace.config.describe import options_markdown
from headrace.config.field import find, spellings
from headrace.reference.entrance import REFERENCE, known_options
from tests.seeds.option_tables import ELSEWHERE, FIRST, SECOND, defaults_markdown, seed_options_markdown

PAGE = Path(headrace.__file__).parents[2] / "docs" / "seed_options.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="not run from the repository")


def test_the_tables_are_up_to_date():
    text = PAGE.read_text()
    assert seed_options_markdown() in text, "put seed_options_markdown() of tests/seeds/option_tables.py into the page"
    assert defaults_markdown() in text, "put defaults_markdown() of tests/seeds/option_tables.py into the page"
    assert options_markdown(REFERENCE.sections) in text, "put the table of `headrace configs options` into the page"


@pytest.mark.parametrize("name", sorted({*FIRST, *SECOND}))
def test_every_name_of_the_reference_is_an_option(name):
    if name not in ELSEWHERE:
        assert find(name, spellings(known_options())).name in known_options()


def test_the_commands_print_what_the_page_says(tmp_path, monkeypatch, capsys):
    for variable in ("DATASETS_DIR", "DATA_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```\n\$ (headrace [^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 3
    for command, output in examples:
        main(shlex.split(command)[1:])
        captured = capsys.readouterr()
        assert captured.out + captured.err == output, command
