"""Every format of an image set is whole: a row, what recognises and lists it, a dataset, its line in the documents."""

import importlib
from pathlib import Path

import pytest

from headrace.config.section_data import DATASETS, IMAGE_DATASETS
from headrace.data.sets.image_sets import detect_kind
from headrace.rows.formats import FORMATS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "headrace" / "data" / "sets" / "formats"


@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
def test_a_row_has_what_recognises_and_lists_it(row, tmp_path):
    module = importlib.import_module(row.module)
    assert callable(module.open_set)
    assert row.name in DATASETS
    assert row.name in IMAGE_DATASETS
    if row.is_detected:
        assert module.fits(tmp_path) is False
        assert module.fits(tmp_path / "missing") is False
    else:
        assert not hasattr(module, "fits")


def test_what_lists_a_format_has_a_row():
    files = {path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__"}
    assert {f"headrace.data.sets.formats.{name}" for name in files} == {row.module for row in FORMATS.values()}


def test_nothing_is_found_in_an_empty_folder(tmp_path):
    assert detect_kind(tmp_path) is None


def test_the_page_has_the_rows():
    page = (ROOT / "docs" / "howto" / "data.md").read_text()
    lines = {f"| `{row.name}` | {row.contents} | {row.classes} |" for row in FORMATS.values()}
    table = page.partition("| kind | contents of `PATH` | classes |\n|---|---|---|\n")[2].partition("\n\n")[0]
    assert set(table.splitlines()) == lines
    name = next(line for line in page.splitlines() if line.startswith("| `folder`, ")).partition(" | ")[0]
    assert set(name.strip("| `").split("`, `")) == {*FORMATS, "imagenet", "auto"}
