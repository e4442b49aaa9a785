"""The scripts under examples/ run as their first lines say, and print what these say."""

import doctest
import importlib.util
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest

from tests.fork_server import run

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def promised(path: Path) -> tuple[str, str]:
    """Return (command, expected output) of a script's docstring: its two indented blocks."""
    docstring = path.read_text().split('"""')[1]
    command, output = re.findall(r"(?:^    .*\n)+", docstring, re.MULTILINE)
    return command.strip(), textwrap.dedent(output)


def test_the_seeds_examples_are_there():
    names = {path.stem for path in EXAMPLES}
    assert {"trivial_loop", "continuous_dequeue", "training_pipeline", "concurrent_pipeline"} <= names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_it_says(path: Path):
    if path.stem.startswith("optuna") and importlib.util.find_spec("optuna") is None:
        pytest.skip("Optuna is not installed")
    command, expected = promised(path)
    assert command == f"python examples/{path.name}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"}
    done = run([sys.executable, *command.split()[1:]], cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert doctest.OutputChecker().check_output(expected, done.stdout, doctest.ELLIPSIS), done.stdout
