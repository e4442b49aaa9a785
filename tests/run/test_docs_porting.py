"""docs/porting.md: its files run as they stand, before and after; quickly with fewer and narrower blocks."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace

PAGE = (Path(__file__).parents[2] / "docs" / "porting.md").read_text()
FILES = dict(re.findall(r"`(\w+\.py)[^`]*`[^\n]*:\n\n```python\n(.*?)```", PAGE, re.DOTALL))
NARROW = "BLOCKS = [(1, 8, 2), (2, 8, 1)]\n"


def write_files(place: Path, *, narrow: bool) -> None:
    """Write the page's files, and a CIFAR-10 of 64 training images."""
    for name, code in FILES.items():
        less = re.sub(r"BLOCKS = .*\n", NARROW, code).replace("EPOCHS, BATCH = 2, 64", "EPOCHS, BATCH = 1, 64")
        (place / name).write_text(less if narrow else code)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 85)
    images = np.clip(rng.normal(size=(85, 32, 32, 3)) * 40 + 20 * labels[:, None, None, None], 0, 255).astype(np.uint8)
    splits = {"train": slice(0, 64), "test": slice(64, 85)}
    arrays: dict[str, Any] = {}
    for name, part in splits.items():
        arrays |= {f"{name}_images": images[part], f"{name}_labels": labels[part]}
    np.savez(place / "cifar10.npz", **arrays)


def run(place: Path, *words: str) -> str:
    """Run a script of the page in a process of its own, where it may make its virtual devices."""
    source = str(Path(headrace.__file__).parent.parent)
    quick_keys = {"JAX_DEFAULT_PRNG_IMPL": "unsafe_rbg"}  # Flax's own init: XLA compiles JAX's usual keys for a minute
    environ = {**os.environ, "PYTHONPATH": source, "JAX_PLATFORMS": "cpu", **quick_keys}
    command = [sys.executable, "-W", "error", *words]
    done = subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_its_files():
    assert list(FILES) == ["model.py", "train_one.py", "train_pipeline.py", "infer.py", "nnx_model.py"]
    assert sum(code.count("\n") for code in FILES.values()) > 150


@pytest.mark.parametrize("narrow", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_files_run(tmp_path, narrow):
    write_files(tmp_path, narrow=narrow)
    if not narrow:
        assert re.search(r"21 images, top-1 0\.\d+", run(tmp_path, "train_one.py"))
    told = run(tmp_path, "train_pipeline.py")
    assert re.search(r"stages +4  on 4 devices of a replica", told)
    assert re.search(r"devices +8", told)
    assert re.search(r"global batch +64  8 x 2 x 4", told)
    found = re.findall(r"21 images, top-1 (0\.\d+)", told)
    validated = re.findall(r"validation  epoch \S+  top-1 (\S+) %.*\(21 images", told)
    assert len(found) == 1
    assert round(float(validated[-1]) / 100, 3) == pytest.approx(float(found[0]), abs=1e-3)
    runs = [str(path) for path in (tmp_path / "runs").iterdir()]
    labels = np.fromstring(run(tmp_path, "infer.py", *runs).strip("[] \n"), int, sep=" ")
    assert len(labels) == 10


def test_the_nnx_file_plans(tmp_path):
    write_files(tmp_path, narrow=True)
    weights = 27 * 16 + 9 * 16 * 32 + 9 * 32 * 64 + 2 * (16 + 32 + 64) + 65 * 10
    assert re.search(rf"parameters +{weights:,}\n", run(tmp_path, "nnx_model.py"))
