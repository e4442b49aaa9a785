"""Every format of an export is whole: a row, what makes and checks it, its line in the documents."""

import importlib
from dataclasses import fields
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.rows import exports
from headrace.rows.exports import EXPORTS, TORCH_NAMES, format_of
from headrace.run.exports.values import ExportOptions
from headrace.weights.convert import _NOT_TORCH
from headrace.weights.name_tables import SCHEMES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "headrace" / "run" / "exports"


@pytest.mark.parametrize("row", EXPORTS.values(), ids=EXPORTS)
def test_a_row_has_what_makes_and_checks_it(row):
    module = importlib.import_module(row.module)
    assert callable(module.make)
    assert callable(module.check)
    assert row.takes <= {field.name for field in fields(ExportOptions)}


def test_what_makes_a_format_has_a_row():
    files = {path.stem for path in FOLDER.glob("*.py") if "\ndef make(" in path.read_text()}
    assert {f"headrace.run.exports.{name}" for name in files} == {row.module for row in EXPORTS.values()}


def test_the_page_has_the_rows():
    page = (ROOT / "docs" / "howto" / "weights.md").read_text()
    table = [f"| `{row.name}` | {row.says} | {row.loaded_with} |" for row in EXPORTS.values()]
    assert "\n".join(("| format | contents | to load it |", "|---|---|---|", *table)) in page, "\n".join(table)


def test_the_names_are_those_of_the_schemes():
    assert set(TORCH_NAMES) == {scheme.name for scheme in SCHEMES} - set(_NOT_TORCH)


def test_a_suffix_stands_for_one_format():
    suffixes = [suffix for row in EXPORTS.values() for suffix in row.suffixes]
    assert len(set(suffixes)) == len(suffixes)
    assert format_of(Path("a.pth")) == "torch-names"
    assert format_of(Path("a.b.safetensors")) == "safetensors"
    assert format_of(Path("a.torch.safetensors")) == "torch-names"
    with pytest.raises(ConfigError, match=r"a\.pdf is not known"):
        format_of(Path("a.pdf"))


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    find = exports.importlib.util.find_spec
    monkeypatch.setattr(exports.importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name))
    with pytest.raises(ConfigError, match=r"onnxruntime, which is not installed.*headrace\[onnx\]"):
        EXPORTS["onnx"].refuse_missing()
    EXPORTS["stablehlo"].refuse_missing()
    assert "onnx = [" in (ROOT / "pyproject.toml").read_text()
