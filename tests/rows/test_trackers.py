"""Every tracker is whole: a row, what opens it, its option, and its extra."""

import importlib
import re
from pathlib import Path

import pytest

from headrace.config.schema import Logging
from headrace.rows.trackers import TRACKERS

ROOT = Path(__file__).parents[2]
EXTRAS = (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("row", TRACKERS.values(), ids=TRACKERS)
def test_a_row_has_its_halves(row):
    assert callable(importlib.import_module(row.module).open_tracker)
    assert getattr(Logging(), row.option) is False
    assert re.search(rf"^{row.option} = \[.*{row.option}", EXTRAS, re.MULTILINE), f"no extra {row.option}"


def test_what_opens_a_tracker_has_a_row():
    folder = ROOT / "src" / "headrace" / "telemetry" / "trackers"
    files = {path.stem for path in folder.glob("*.py") if "\ndef open_tracker(" in path.read_text()}
    assert {f"headrace.telemetry.trackers.{name}" for name in files} == {row.module for row in TRACKERS.values()}
