"""docs/howto/programming.md: its code runs from top to bottom and prints what the page says."""

import doctest
import re
from pathlib import Path

import headrace

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "programming.md"
BLOCK = re.compile(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", re.DOTALL)


def test_the_code_of_the_page_runs_and_prints_what_it_says(capsys):
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) >= 9
    names: dict[str, object] = {}
    for code, expected in blocks:
        here = code.replace('"jax_num_cpu_devices", 4', '"jax_num_cpu_devices", 8')  # as many as the suite has started
        exec(compile(here, str(PAGE), "exec"), names)
        printed = capsys.readouterr().out
        assert doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS), printed


def test_the_page_names_what_there_is():
    table = re.findall(r"^\| (`.*?`) \|", PAGE.read_text(), re.MULTILINE)
    named = [name for row in table for name in re.findall(r"`([\w.]+)`", row)]
    assert len(named) >= 11
    for name in named:
        value = headrace
        for part in name.split("."):
            value = getattr(value, part)
