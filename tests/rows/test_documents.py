"""What is in a table is in the documents, and what is an option is read by something."""

import re
from pathlib import Path

import pytest

from headrace.config.schema import all_options
from headrace.rows.curves import CURVES
from headrace.rows.metrics import METRICS
from headrace.rows.optimizers import OPTIMIZERS

ROOT = Path(__file__).parents[2]
NUMERICS = (ROOT / "docs" / "explanation" / "numerics.md").read_text()
DOCUMENTS = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
# Definitions and words about options, and not what they do.
_NAMES_ONLY = ("typed_options.py", "other_names.py", "help_screens.py")
SOURCES = {
    path: path.read_text()
    for path in (ROOT / "src" / "headrace").rglob("*.py")
    if path.name not in _NAMES_ONLY and not path.name.startswith("section_")
}
SECTIONS = "\n".join(path.read_text() for path in (ROOT / "src" / "headrace" / "config").glob("section_*.py"))


@pytest.mark.parametrize("name", [*(name for name in OPTIMIZERS if name != "given"), *CURVES])
def test_a_formula_is_in_the_documents(name):
    assert re.search(rf"`{name}`", NUMERICS), f"docs/explanation/numerics.md has no formula of `{name}`"


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_in_the_documents(name):
    assert re.search(rf"\b{name}\b", DOCUMENTS), f"no document says what {name} is"


@pytest.mark.parametrize("name", all_options())
def test_an_option_is_read_by_something(name):
    """One that nothing reads would be ignored in silence."""
    read = rf"\.{name}\b|[\"']{name}[\"']"
    properties = rf"self\.{name}\b|config\.\w+\.{name}\b"
    assert any(re.search(read, text) for text in SOURCES.values()) or re.search(properties, SECTIONS), name
