"""docs/howto/python.md and examples/first_model.ipynb: their programs run as they stand, and print what they say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import headrace

from .test_docs_custom_models import run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "python.md").read_text()
FILES = dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL))
APART = {name: FILES.pop(name) for name in ("letters.py", "workers.py")}  # processes import files, and no text
FIRST_LINES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
# A network that a test can afford, and weights for it.
SMALLER = {"resnet50": "toy_model_bn", '"weights.pth"': '"small.safetensors", image_size=32, log_dir="runs"'}
MAKE_WEIGHTS = """
import headrace as hr
small = hr.Model("toy_model_bn", num_classes=2, image_size=32, log_dir="runs")
small.fit("photos/", epochs=1)
small.export("small.safetensors")
"""


NOTEBOOKS = ("first_model", "image_folders", "several_labels", "numbers")


def notebook(name: str) -> dict[str, str]:
    """Return the code of a notebook's cells, and all that they have printed."""
    cells = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    printed = json.dumps([cell["outputs"] for cell in code])
    return {"code": "\n".join("".join(cell["source"]) for cell in code), "printed": printed}


def short_notebook(name: str) -> str:
    """Return the code of a notebook with an epoch of four steps."""
    code, count = re.subn(r"epochs=\d+", "epochs=1, steps_per_epoch=4", notebook(name)["code"])
    assert count == 1
    return code


def make_photos(place: Path) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 4)):
        for label in ("cat", "dog"):
            (place / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 255, (40, 40, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(place / split / label / f"{number}.jpg")


def test_the_programs_and_the_notebook_run(tmp_path):
    assert list(FILES) == ["train.py", "objects.py", "arrays.py", "streams.py", "callbacks.py", "focal.py"]
    make_photos(tmp_path / "photos")
    (tmp_path / "cat.jpg").write_bytes((tmp_path / "photos" / "val" / "cat" / "0.jpg").read_bytes())
    first = FIRST_LINES
    for before, after in SMALLER.items():
        assert before in first
        first = first.replace(before, after)
    cells = short_notebook("first_model")
    # one process: they share the time to start, and programs; the notebook twice, as in one kernel
    printed = run("\n".join([MAKE_WEIGHTS, first, *FILES.values(), cells, cells]), tmp_path)
    assert (tmp_path / "model.onnx").stat().st_size > 500
    assert (tmp_path / "digits.onnx").stat().st_size > 500
    assert re.search(r"RunResult\(finished at step 20, top-1 .* % at the end, runs/cifar_resnet8-digits-", printed)
    assert re.search(r"Report\(num_samples=360, loss=\d", printed)
    assert "\n360\n" in printed
    assert "\n100\n" in printed
    assert re.search(r"^image 1: .* \d+\.\d\d %", printed, re.M)
    assert re.search(r"^total +194 ", printed, re.M)
    assert "epoch 1: loss 2." in printed
    assert "\nstopped the loss is low enough\n" in printed
    assert re.search(r"^\{'confidence': 0\.\d+\}$", printed, re.M)
    assert "(1437, 32, 32, 1) uint8 (360, 32, 32, 1)" in printed


def test_worker_processes_make_the_items_of_another_file(tmp_path):
    for name, text in APART.items():
        (tmp_path / name).write_text(text)
    environ = {**os.environ, "PYTHONPATH": str(Path(headrace.__file__).parent.parent), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "workers.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=250)
    assert "finished ('A', 'B', 'C')" in done.stdout, done.stderr


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_again_in_a_fresh_kernel(name, tmp_path):
    """In the folder where it ran before: each fit is a run of its own."""
    for _ in range(2):
        run(short_notebook(name), tmp_path)
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_was_executed_and_shows_one_progress_line(name):
    printed = notebook(name)["printed"]
    assert printed.count("run 0:00 left") == 1
    assert "<svg" in printed
    assert '"output_type": "error"' not in printed
    assert not re.search(r"/(home|root|tmp|work)/", printed)


def test_every_notebook_is_tested():
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.ipynb")) == sorted(NOTEBOOKS)


def test_the_first_lines_name_what_there_is():
    assert set(re.findall(r"hr\.(\w+)", PAGE)) <= set(headrace.__all__)
