"""Every launcher is whole: a file with its row, a place in the order, its variables in the documents."""

from pathlib import Path

import pytest

from headrace.job.launchers import DRIVERS, LAUNCHERS
from headrace.job.launchers.unread import UNREAD

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "headrace" / "job" / "launchers"
PAGE = (ROOT / "docs" / "howto" / "hosts.md").read_text()


def test_each_file_is_a_row():
    rows = {path.stem for path in FOLDER.glob("*.py") if " = Launcher(" in path.read_text()}
    assert len(rows) == len(LAUNCHERS), "a row is missing in the tuple of job/launchers/__init__.py"
    assert rows == {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "row", "unread"}


@pytest.mark.parametrize("row", LAUNCHERS, ids=lambda row: row.name)
def test_the_page_says_what_it_is_read_from(row):
    table = PAGE.partition("| started by | read from | tried |")[2].partition("\n\n")[0]
    cells = [line.split(" | ")[1] for line in table.splitlines() if line.startswith("| ")]
    assert any(all(f"`{name}`" in cell for name in row.variables) for cell in cells), row.variables
    assert not row.is_present({})


def test_what_is_not_read_is_not_found_in_an_empty_environment():
    every = (*UNREAD, *(unread for row in LAUNCHERS for unread in row.unread))
    assert not any(unread.others({}) for unread in every)
    assert all(unread.remedy for unread in every)


def test_the_page_names_each_driver():
    assert all(name in PAGE for name in DRIVERS)
