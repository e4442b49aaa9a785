"""docs/tutorials: every command that is shown runs on small data, and prints the lines shown, but for their numbers."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import headrace
from headrace.cli.main import main

DOCS = Path(headrace.__file__).parents[2] / "docs" / "tutorials"
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="not run from the repository")
# Shorter than on the page: given last, so that they win.
SHORTER = {"train": "--epochs 1 --progress plain", "resume": "--progress plain", "sweep": "--epochs 1"}


def examples(page: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a page, each with the lines that it is said to print."""
    fences = re.findall(r"^```\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    found = []
    for body in fences:
        for command, output in re.findall(r"^\$ ([^\n]*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE):
            found.append((command, output.splitlines()))
    return found


def plain(line: str) -> str:
    """Return a line without its numbers, times, sizes, file names and what follows from a narrow table."""
    line = re.sub(r"\S+\.(jpg|png)", "IMAGE", line)
    line = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "#", line)
    line = re.sub(r"[\d.,]+(e[-+]?\d+)?", "#", line)
    line = re.sub(r"# (ms|us|s|min|KiB|MiB|GiB|B|M|k|G)\b", "#", line)
    line = re.sub(r"\b(epoch|process|step)(s|es)?\b", r"\1", line)
    return re.sub(r"[ #/]+", " ", line).strip()


def make_photos(place: Path) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for label, name in enumerate(("ants", "bees")):
            (place / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 160, (40, 40, 3)) + 90 * label
                Image.fromarray(pixels.astype(np.uint8)).save(place / split / name / f"{number}.jpg")


def shortened(words: list[str]) -> list[str]:
    smaller = ["--image-size", "32"] if words[0] in ("train", "sweep") and "--image-size" in words else []
    return [*words, *shlex.split(SHORTER.get(words[0], "")), *smaller]


def test_lines_are_compared_without_their_numbers():
    assert plain("a 1.5e-06 of 12 images in 3.1 ms") == plain("a 0 of 7 images in 14.2 s")
    assert plain("photos/val/ants/1b6.jpg   ants 73.26 %") == plain("photos/x.jpg  ants 1.00 %")
    assert plain("best top-1 3 %") != plain("worst top-1 3 %")
    page = examples("first_hour")
    assert (
        "headrace runs",
        ["run       top-1  images  epochs   time  img/s  dataset  written           state", "..."],
    ) in page


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("first_hour", 9),
        ("fine_tuning", 2),
        pytest.param("photographs", 7, marks=pytest.mark.slow),
        pytest.param("many_devices", 3, marks=pytest.mark.slow),
    ],
)
def test_the_commands_of_a_page_print_what_it_shows(
    page: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_photos(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    found = examples(page)
    assert len(found) == count
    for command, shown in found:
        words = shlex.split(command)
        assert words[0] == "headrace"
        if "onnx" in words:
            pytest.importorskip("onnx")
        if words[1] == "launch":
            more = shlex.split(SHORTER["train"])
            done = subprocess.run(
                [sys.executable, "-m", "headrace", *words[1:], *more], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr[-2000:]
            printed = done.stdout + done.stderr
        else:
            assert main(shortened(words[1:])) == 0, capfd.readouterr()
            printed = "".join(capfd.readouterr())
        lines = {plain(line) for line in printed.splitlines()}
        for line in shown:
            assert line == "..." or plain(line) in lines, f"{command} does not print: {line}\n{printed}"


def test_the_program_of_the_first_hour_runs(tmp_path, monkeypatch, capfd):
    make_photos(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"^```python\n(.*?)^```$", (DOCS / "first_hour.md").read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(program.replace("image_size=64", "image_size=32"), "first_hour.py", "exec"), {})
    printed = capfd.readouterr().out
    assert re.match(r"RunResult\(finished at step \d+, top-1 \d+.\d\d % at the end, runs/python\)\n", printed)
    assert printed.count("bees") >= 8
