"""Bytecode in the user's cache: made where Python makes none, read again, and nothing else is taken for it."""

import marshal
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.core import bytecode

SRC = Path(bytecode.__file__).parents[2]
CODE = "from headrace.core.bytecode import keep_bytecode; keep_bytecode('mine'); import mine.inner; print(mine.inner.x)"


class Place:
    """A package `mine` with one module, the user's cache, and processes that import it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source = folder, folder / "mine" / "inner.py"
        self.source.parent.mkdir()
        (self.source.parent / "__init__.py").touch()
        self.source.write_text("x = 1\n")

    def run(self, **environ: str) -> str:
        given = {"XDG_CACHE_HOME": str(self.folder / "cache"), "PYTHONPATH": f"{SRC}{os.pathsep}{self.folder}"}
        more: dict[str, Any] = {"env": os.environ | given | {"PYTHONDONTWRITEBYTECODE": "1"} | environ}
        done = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True, **more)
        return done.stdout.strip()

    @property
    def kept(self) -> Path:
        (found,) = self.folder.glob("cache/headrace/bytecode-*/*inner.py")
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def exchanged(file: Path, code: str) -> None:
    """Put other code behind the head, which nobody could tell from the right one."""
    file.write_bytes(file.read_bytes()[:16] + marshal.dumps(compile(code, "", "exec")))


def test_what_was_compiled_is_read_at_the_next_start_and_made_anew_for_another_source(place: Place) -> None:
    assert place.run() == "1"
    assert not list(place.source.parent.rglob("*.pyc"))
    assert place.kept.stat().st_mode & 0o777 == 0o600
    exchanged(place.kept, "x = 2")
    assert place.run() == "2", "it was read"
    place.source.write_text("x = 30\n")
    assert place.run() == "30"


def test_bytecode_beside_the_source_comes_first(place: Place) -> None:
    place.run()
    exchanged(place.kept, "x = 2")
    assert place.run(PYTHONDONTWRITEBYTECODE="") == "1", "Python writes it then"
    assert list(place.source.parent.rglob("*.pyc"))
    assert place.run() == "1"


@pytest.mark.parametrize("content", [b"", b"\0" * 100, None])
def test_what_is_damaged_is_made_anew(place: Place, content: bytes | None) -> None:
    place.run()
    place.kept.write_bytes(place.kept.read_bytes()[:-3] if content is None else content)
    assert place.run() == "1"
    exchanged(place.kept, "x = 2")
    assert place.run() == "2"


def test_a_folder_that_others_may_write_is_not_read(place: Place) -> None:
    place.run()
    exchanged(place.kept, "x = 2")
    place.kept.parent.chmod(0o770)
    assert place.run() == "1"


def test_without_a_cache_it_works_all_the_same(place: Place) -> None:
    (place.folder / "cache").write_text("no folder")
    assert place.run() == "1"
