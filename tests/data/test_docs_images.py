"""docs/tutorials/photographs.md: its script makes the images, and its `headrace data` commands print what it says."""

import re
import shlex
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import main

PAGE = Path(headrace.__file__).parents[2] / "docs" / "tutorials" / "photographs.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="not run from the repository")


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    exec(compile(next(body for kind, body in fences if kind == "python"), "make_images.py", "exec"), {})
    shown = "".join(body for _, body in fences if body.startswith("$ "))
    examples = re.findall(r"\$ (headrace [^\n]*)\n((?:[^$].*\n)*)", shown)
    assert len(examples) == 3
    for command, output in examples:
        assert main(shlex.split(command)[1:]) == 0
        assert capsys.readouterr().out == output, command
