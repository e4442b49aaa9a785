"""docs/explanation/architecture.md and CONTRIBUTING.md describe the code of today: what they name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "headrace"
TEXT = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
FOR_CONTRIBUTORS = (ROOT / "CONTRIBUTING.md").read_text()


def named_files(text: str) -> list[tuple[str, str]]:
    """Return (folder, name) of the files in a text; a bare name is near the folder that was named last."""
    found, folder = [], ""
    for name in re.findall(r"`([\w*/]+\.py)`", text):
        folder = name.rpartition("/")[0] if "/" in name else folder
        found.append((folder, name.rpartition("/")[2]))
    return found


def is_there(folder: str, name: str) -> bool:
    if (ROOT / name).is_file() or any((ROOT / folder).glob(name)):
        return True
    folder = folder.removeprefix("headrace").lstrip("/")
    return any((SRC / folder).rglob(name)) or any((SRC / folder).parent.rglob(name))


@pytest.mark.parametrize(("folder", "name"), sorted({*named_files(TEXT), *named_files(FOR_CONTRIBUTORS)}))
def test_a_named_file_exists(folder, name):
    assert is_there(folder, name), f"docs/explanation/architecture.md or CONTRIBUTING.md names {folder}/{name}"


def test_every_room_is_drawn():
    drawing = TEXT.split("```")[1]
    rooms = {path.name for path in SRC.iterdir() if path.is_dir() and path.name != "__pycache__"}
    missing = [room for room in sorted(rooms) if not re.search(rf"\b{room}\b", drawing)]
    assert not missing, f"docs/explanation/architecture.md does not draw {missing}"


def test_the_test_can_fail():
    assert named_files("`data/feeding/feed.py` asks `order.py`") == [
        ("data/feeding", "feed.py"),
        ("data/feeding", "order.py"),
    ]
    assert not is_there("data/feeding", "blocks.py")
