"""The compilation cache's directory."""

import os
import sys
from pathlib import Path

import pytest

from tests.fork_server import run

MAKE = "import os; os.umask(0); from headrace.engine.devices import use_compilation_cache as use; print(use({}))"


@pytest.mark.skipif(os.name != "posix", reason="other systems have other permissions")
def test_nobody_else_reaches_the_programs_of_a_user_without_a_umask(tmp_path: Path) -> None:
    def made(directory: str) -> Path:
        environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        return Path(run([sys.executable, "-c", MAKE.format(directory)], env=environ, check=True).stdout.strip())

    assert made("None").stat().st_mode & 0o777 == 0o700
    assert made(repr(str(tmp_path / "shared"))).stat().st_mode & 0o777 == 0o777  # that the user asked for
