"""docs/howto/porting.md and its scripts in examples/porting: one story, before and after; with narrow blocks."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import headrace
from tests import fork_server

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "porting"
PAGE = (ROOT / "docs" / "howto" / "porting.md").read_text()
NARROW = {
    "linen": "[(1, 8, 2), (2, 8, 1)]",
    "nnx": "[(1, 16, 8, 2), (2, 8, 80, 1)]",
    "equinox": "[(1, 16, 8, 2), (2, 8, 80, 1)]",
}
TINY = ("--train", "64", "--test", "21", "--epochs", "1", "--data-dir", "cifar")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The scripts, with two narrow blocks instead of four, and a CIFAR-10 with few images that are not black."""
    folder = tmp_path_factory.mktemp("porting")
    for path in SCRIPTS.glob("*.py"):
        text, kind = path.read_text(), path.stem.removesuffix("_model")
        (folder / path.name).write_text(re.sub(r"BLOCKS = .*", f"BLOCKS = {NARROW.get(kind)}", text))
    batches = folder / "cifar" / "cifar-10-batches-bin"
    batches.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = rng.integers(0, 10, (64, 1))
        pixels = np.clip(rng.normal(size=(64, 3072)) * 40 + 20 * labels, 0, 255)
        np.concatenate([labels, pixels], 1).astype(np.uint8).tofile(batches / f"{name}.bin")
        os.truncate(batches / f"{name}.bin", 10_000 * 3073)  # the rest are zeros, and take no space
    return folder


def run(place: Path, *words: str) -> str:
    """Run a script in a process of its own, where it may make its virtual devices."""
    environ = {**os.environ, "PYTHONPATH": str(Path(headrace.__file__).parent.parent), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", *words]
    done = fork_server.run(command, cwd=place, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_code_of_the_page_is_that_of_the_scripts():
    scripts = "\n".join(path.read_text() for path in SCRIPTS.glob("*.py"))
    shown = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(shown) >= 6
    for code in shown:
        assert code in scripts, code
    for name in re.findall(r"`(\w+\.py)", PAGE):
        assert (SCRIPTS / name).is_file()


def test_the_story_runs(place):
    """Steps 3 and 4: in stages x replicas, then the weights of that run, in stages and on one device."""
    printed = run(place, "train.py", "--stages", "4", "--replicas", "2", *TINY)
    assert re.search(r"stages +4  on 4 devices of a replica", printed)
    assert re.search(r"devices +8", printed)
    assert re.search(r"global batch +64  8 x 2 x 4", printed)
    found = re.findall(r"21 images, top-1 (0\.\d+)", printed)
    validated = re.findall(r"validation  epoch \S+  top-1 (\S+) %.*\(21 images", printed)
    assert round(float(validated[-1]) / 100, 3) == pytest.approx(float(found[-1]), abs=1e-3)
    (directory,) = (place / "runs").iterdir()
    assert printed.splitlines()[-1].endswith(f"infer.py --model linen runs/{directory.name}")
    inferred = run(place, "infer.py", str(directory), *TINY)
    assert inferred.splitlines()[0] == f"through 4 stages: 21 images, top-1 {found[-1]}"
    assert inferred.splitlines()[1] == f"on one device: top-1 {found[-1]}"


@pytest.mark.slow
@pytest.mark.parametrize("words", [("train_flax.py",), ("train.py",), ("train.py", "--model", "nnx", "--stages", "2")])
def test_the_other_scripts_run(place, words):
    assert re.search(r"21 images, top-1 0\.\d+", run(place, *words, *TINY))


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox"])
def test_the_three_networks_have_the_same_weights(kind, monkeypatch):
    """All but the group norms of the Equinox network, which have a scale and a shift per channel like batch norms."""
    pytest.importorskip("flax" if kind != "equinox" else "equinox")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = __import__(f"{kind}_model")
    network = headrace.custom_network(module.blocks(10), input_shape=(32, 32, 3), num_classes=10)
    total = 27 * 16 + 2 * 16
    for expansion, before, after in ((1, 16, 16), (4, 16, 24), (4, 24, 40), (4, 40, 80)):
        inside = expansion * before
        total += (before * inside + 2 * inside) * (expansion > 1)
        total += 9 * inside + 2 * inside + inside * after + 2 * after
        total += inside * (before // 4) + before // 4 + (before // 4) * inside + inside
    total += 80 * 160 + 2 * 160 + 160 * 10 + 10
    assert network.total_cost().params == total
