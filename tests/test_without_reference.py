"""Without the package headrace_reference Headrace plans and trains, and says of its options what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config import translations
from headrace.core.errors import ConfigError

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "headrace"
# As sitecustomize.py, in every process that is started: Python does not find the package.
ABSENT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "headrace_reference" else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""
TINY = "--dataset generated --num-samples 32 --image-size 8 --num-classes 4 --model cifar_resnet8 --batch-size 8"


@pytest.fixture
def python(tmp_path):
    """Run Python without the package; return its exit code, and all that it printed."""
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}

    def run(*words: str, cwd: Path = tmp_path) -> tuple[int, str]:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=250)
        return done.returncode, done.stdout + done.stderr

    return run


def test_no_file_of_headrace_names_it():
    assert not [str(path) for path in SOURCE.rglob("*.py") if "headrace_reference" in path.read_text()]


def test_it_is_installed_as_a_translation():
    assert set(translations.translation().sections) == {"reference"}


def test_plan_and_train(python):
    words = [*TINY.split(), "--epochs", "1"]
    code, printed = python("-m", "headrace", "plan", *words)
    assert code == 0, printed
    assert "cifar_resnet8" in printed
    code, printed = python("-m", "headrace", "train", *words, "--progress", "none", "--output", "runs/r")
    assert code == 0, printed
    assert "directory   runs/r" in printed


def test_its_options_recipes_and_scripts_are_refused(python):
    needed = "Options of another application need the package that translates them"
    code, printed = python("-m", "headrace", "plan", "--abs-learning-rate", "1")
    assert code == 2
    assert "There is no option --abs-learning-rate." in printed
    assert needed in printed
    code, printed = python("-m", "headrace", "configs", "--reference")
    assert code == 2
    assert needed in printed
    code, printed = python("-c", "from headrace.__main__ import run_script; raise SystemExit(run_script('train'))")
    assert code == 2
    assert "There is no script train here." in printed


def test_the_tests_of_options_pass(python):
    chosen = ["tests/config/test_recipes.py", "tests/config/test_config_load.py", "tests/cli/test_listings_configs.py"]
    words = ["-p", "no:xdist", "-p", "no:cacheprovider", *chosen]
    code, printed = python("-m", "pytest", *words, cwd=ROOT)
    assert code == 0, printed
    assert " passed" in printed
    assert " skipped" in printed


def test_several_translations_are_refused(monkeypatch):
    class Entry:
        def __init__(self, value):
            self.value = value

    found = [Entry("one:A"), Entry("two:B"), Entry("one:A")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)
    translations.use(None)
    with pytest.raises(ConfigError, match="Several packages translate options: one:A, two:B"):
        translations.translation()
    monkeypatch.undo()
    assert translations.translation().sections
