"""docs/explanation/reliability.md names tests: each of them exists, and the files that it links to as well."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "explanation" / "reliability.md").read_text()


def test_every_test_that_is_named_exists() -> None:
    file = ""
    named = re.findall(r"`(tests/[\w/]+\.py)?(?:::(test_\w+))?`", TEXT)
    assert sum(bool(name) for _, name in named) > 25
    for path, name in named:
        file = path or file
        if path or name:
            assert (ROOT / file).is_file(), file
            assert not name or f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_every_finding_of_the_review_has_a_row() -> None:
    rows = re.findall(r"^\| (\d+)\. ", TEXT, re.MULTILINE)
    assert sorted(set(map(int, rows))) == list(range(1, 12))


def test_every_result_that_is_linked_exists() -> None:
    links = re.findall(r"\]\((\.\./\.\./benchmarks/[^)]+)\)", TEXT)
    assert links
    assert all((ROOT / "docs" / "explanation" / link).is_file() for link in links), links
