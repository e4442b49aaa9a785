"""The options as types: the file follows from the rows, its words are taken, and pyright sees what is misspelt."""

import importlib.util
import inspect
import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from headrace.config.field import option_names
from headrace.config.schema import all_options
from headrace.config.typed_options import FitOptions, ModelOptions, Options
from headrace.run.model import Model

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "typed_options.py"
CLASSES = (Options, ModelOptions, FitOptions)
USER = """
import headrace as hr

model = hr.Model("resnet18", num_clases=2)
model = hr.Model("resnet18", num_classes=2, optimizer="adamm")
model.fit("photos", epohcs=3)
model.fit("photos", learning_rate="fast")
model.fit("photos", progress="none", epochs=3, lr=0.1, steps_per_epoch=10, mixup_alpha=0.2, loss="bce")
hr.Model(weights="timm/resnet50.a1_in1k", class_weights="balanced", time_budget="10m", num_replicas="auto")
"""


@pytest.mark.skipif(not TOOL.is_file(), reason="not run from the repository")
@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
def test_the_file_is_what_the_rows_make_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("typed_options_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(tool)
    remedy = "The options have changed: python tools/typed_options.py writes the file."
    assert tool.formatted(tool.file_text()) == tool.FILE.read_text(), remedy


def test_every_option_has_a_type_and_takes_every_word_of_it() -> None:
    types = {name: hint for each in CLASSES for name, hint in typing.get_type_hints(each).items()}
    known = option_names(all_options())
    assert {known.get(name, known["weight_updates_per_epoch"]).name for name in types} == set(all_options()) - {
        "training",
        "compile_only",
        "weights",
    }
    tried = 0
    for name, hint in types.items():
        option = all_options()[known[name].name if name in known else "weight_updates_per_epoch"]
        parts = typing.get_args(hint) if typing.get_origin(hint) is not typing.Literal else (hint,)
        for part in parts or (hint,):
            for word in typing.get_args(part) if typing.get_origin(part) is typing.Literal else ():
                option.read(word)
                tried += 1
        assert (type(None) in parts) == option.optional, name
    assert tried > 150


def test_arguments_of_their_own_are_no_options() -> None:
    """A name that is both would be an error wherever the method is called."""
    for method, options in (
        (Model.__init__, ModelOptions),
        (Model.fit, FitOptions),
        (Model.evaluate, Options),
        (Model.find_learning_rate, FitOptions),
        (Model.load, Options),
    ):
        assert not set(inspect.signature(method).parameters) & set(typing.get_type_hints(options)) - {"options"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_pyright_shows_what_is_misspelt(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    settings = {"include": ["user.py"], "extraPaths": [str(ROOT / "src")]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    call = [sys.executable, "-m", "pyright", "-p", str(tmp_path), "--outputjson", "--pythonpath", sys.executable]
    found = json.loads(subprocess.run(call, capture_output=True, text=True, check=False).stdout)
    errors = {each["range"]["start"]["line"] + 1: each["message"] for each in found["generalDiagnostics"]}
    wanted = {number for number, line in enumerate(USER.splitlines(), 1) if "clases" in line or "adamm" in line}
    wanted |= {number for number, line in enumerate(USER.splitlines(), 1) if "epohcs" in line or '"fast"' in line}
    assert set(errors) == wanted, errors
    assert any("num_clases" in text for text in errors.values())
