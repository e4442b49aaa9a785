"""docs/howto/weights.md: its options exist, and its commands run one after the other."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.cli.main import main
from headrace.config.field import option_names
from headrace.config.schema import all_options
from headrace.core.tensor_file import write_safetensors
from headrace.data.sets.digits import read_digits
from headrace.weights.torch_file import write_torch_file
from tests.core.file_server import serving
from tests.weights.hub_server import Hub
from tests.weights.test_convert_load import torch_resnet

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "weights.md"
COMMANDS = [shlex.split(line[2:]) for line in PAGE.read_text().splitlines() if line.startswith("$ headrace")]
OWN = {"config", "last", "top-k", "out", "format", "weights", "names", "platforms", "input", "mode", "decay", "output"}
OWN |= {"private", "license", "use", "with-preprocessing", "dtype", "check-images", "flip", "no-flip", "features"}


def test_every_option_on_the_page_exists():
    known = {name.replace("_", "-") for name in option_names(all_options(), ())} | OWN
    named = set(re.findall(r"--([a-z][a-z0-9-]+)", PAGE.read_text()))
    assert not named - known


@pytest.mark.slow
def test_the_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    drawn = torch_resnet((2, 2, 2, 2), (64, 128, 256, 512), 1, 1000)
    arrays = {name: array * np.float32(0.03) if array.ndim == 4 else array for name, array in drawn.items()}
    Path("resnet18.pth").write_bytes(write_torch_file(arrays))
    Path("images").mkdir()
    for number, image in enumerate(read_digits()["validation"].images[:3]):
        Image.fromarray(np.asarray(image)[:, :, 0]).save(f"images/{number}.png")
    Path("images/torn.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut off")
    for name in ("ant", "bee"):
        Path("photos", name).mkdir(parents=True)
        for number in range(10):
            pixels = np.random.default_rng(number).integers(0, 256, (40, 50, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(f"photos/{name}/{number}.png")
    assert len(COMMANDS) == 19
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    with serving(Hub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repositories["timm/resnet18.a1_in1k/model.safetensors"] = write_safetensors(arrays, {})
        for words in COMMANDS:
            more = ["--progress", "plain"] if words[1] == "train" else []
            code = 2 if "wrong" in words else 1 if "images" in words else 0  # one of the images is torn
            assert main([*words[1:], *more]) == code, words
    printed = capsys.readouterr().out
    for line in (
        "  loaded     100 tensors    11,186,112 numbers",
        "  loaded     102 tensors    11,699,112 numbers",
        "resnet18, 1,000 classes: class 0, ...",
        "mean 3: the mean of step_00000088, step_00000132",
        "timm/resnet18.a1_in1k                       resnet18     224",
    ):
        assert line in PAGE.read_text()
        assert line in printed
