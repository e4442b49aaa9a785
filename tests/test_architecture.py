"""docs/explanation/architecture.md and CONTRIBUTING.md describe the code of today: what they name exists."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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


PATHS = TEXT.partition("## Four paths through the code")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def files_that_ran(tmp_path_factory):
    """Return the files with a function that ran while photographs were trained on and the run was resumed."""
    folder = tmp_path_factory.mktemp("walk")
    for number in range(24):
        place = folder / "photos" / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (150, 170, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.jpg")
    options = f"--config-path {folder}/own.yml --config own --dataset-path {folder}/photos --log-dir {folder} --lr 0.01"
    (folder / "own.yml").write_text("own: {model: toy_model_bn, image_size: 128, precision: '32.32'}")
    options += " --run-name r --batch-size 8 --epochs 2 --train-crop torchvision --keep-best 1 --ckpts-per-epoch 1"
    options += " --progress none --mixup-alpha 0.2 --cpu-kernels off"
    again = f"{folder}/r --epochs 3 --progress none"
    words = ["train", *options.split(), "--", "resume", *again.split()]
    script = Path(__file__).with_name("walk.py")
    done = subprocess.run(
        [sys.executable, script, folder / "files.json", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "files.json").read_text())


@pytest.mark.parametrize("path", re.findall(r"^\*\*(.*?)\*\*", PATHS, re.MULTILINE))
def test_what_a_path_names_runs(path, files_that_ran):
    text = PATHS.partition(f"**{path}**")[2].partition("\n**")[0]
    for folder, name in named_files(text):
        found = [file for file in files_that_ran if Path(file).match(name) and (not folder or folder in file)]
        found = found or [file for file in files_that_ran if Path(file).match(name)]
        assert found, f"docs/explanation/architecture.md leads {path} through {folder}/{name}, which did not run"


def test_the_test_can_fail():
    assert named_files("`data/feeding/feed.py` asks `order.py`") == [
        ("data/feeding", "feed.py"),
        ("data/feeding", "order.py"),
    ]
    assert not is_there("data/feeding", "blocks.py")
